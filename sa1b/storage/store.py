"""A dataset directory as a store of named objects. Every change of the directory uses these operations.

    store = Store(Path("shards"))
    store.put("tasks/sa_000020.json", data)          atomic, on the disk when the call returns
    store.put_if_absent("tasks/sa_000020.claim", b)  True for exactly one of many callers

Names are relative, with "/" between folders. The store is a folder of a local or network file system. No
operation relies on `flock`, which is local to one machine on NFS.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from sa1b.storage.atomic import flush, naming_final, write_whole
from sa1b.storage.processes import this_process


class Store:
    """The objects below a folder.

    Args:
        root: the folder; the first `put` creates it.

    Raises:
        OSError: the disk is full or fails, or permission is missing. Every method may raise it, with the
        path.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str) -> Path:
        """The path of an object."""
        return self.root / name

    def exists(self, name: str) -> bool:
        """Whether the object exists."""
        return self.path(name).exists()

    def read(self, name: str) -> bytes:
        """The bytes of a small object. Raises FileNotFoundError if the object does not exist."""
        return self.path(name).read_bytes()

    def names(self, folder: str, ending: str = "") -> list[str]:
        """Sorted names of the objects directly in a folder, without the folder and without hidden objects."""
        try:
            found = [path.name for path in self.path(folder).iterdir()]
        except FileNotFoundError:
            return []
        return sorted(name for name in found if name.endswith(ending) and not name.startswith("."))

    def put(self, name: str, data: bytes) -> None:
        """Write a small object atomically: a reader sees the old content or the new content."""
        final = self.path(name)
        write_whole(final, data, temporary_path(final))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write a small object unless it exists; True if this call wrote it.

        Exactly one of several concurrent callers writes the object. The object appears with its content,
        because it is created as a link to a complete file. Links are atomic on NFS too.
        """
        final = self.path(name)
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_path(final)
        try:
            with naming_final(final), temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # otherwise a power failure could leave an empty object
            try:
                os.link(temporary, final)
            except FileExistsError:
                return False
            return True
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def commit(self, staged: Iterable[Path], folder: str = "") -> None:
        """Move complete, flushed files to a folder of the store, and flush the folder once.

        Each file replaces a file of the same name.
        """
        final = self.path(folder)
        final.mkdir(parents=True, exist_ok=True)
        for path in staged:
            with naming_final(final / path.name):
                path.replace(final / path.name)
        flush(final)

    def commit_folder(self, staged: Path, name: str) -> None:
        """Move a complete, flushed folder to its name; an existing folder of this name is removed first."""
        final = self.path(name)
        shutil.rmtree(final, ignore_errors=True)
        final.parent.mkdir(parents=True, exist_ok=True)
        staged.replace(final)
        flush(final.parent)

    def remove(self, *names: str) -> None:
        """Remove the objects that exist, and flush their folders once."""
        folders: dict[Path, None] = {}
        for name in names:
            path = self.path(name)
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                folders[path.parent] = None
        for folder in folders:
            flush(folder)

    def remove_folder(self, name: str) -> None:
        """Remove a folder, and its parent folder if it is empty then; flush the remaining folder."""
        shutil.rmtree(self.path(name))
        parent = self.path(name).parent
        if parent != self.root:
            with contextlib.suppress(OSError):
                parent.rmdir()
                parent = parent.parent
        flush(parent)

    def now(self, folder: str = "") -> float:
        """The file system's time in seconds, for comparison with modification times."""
        probe = temporary_path(self.path(folder) / "clock")
        try:
            probe.touch()
            return probe.stat().st_mtime
        finally:
            with contextlib.suppress(FileNotFoundError):
                probe.unlink()


def temporary_path(final: Path) -> Path:
    """A hidden path in the folder of `final` that no other process uses; it contains the process's name."""
    return final.with_name(f".{final.name}.{this_process()}-{secrets.token_hex(4)}.partial")
