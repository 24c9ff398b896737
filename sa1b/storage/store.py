"""A dataset directory as named objects: every change of it goes through these operations.

    store = Store(Path("shards"))
    store.put("tasks/sa_000020.json", data)          whole or not at all, on the disk when the call returns
    store.put_if_absent("tasks/sa_000020.claim", b)  True for exactly one of many callers

Names are relative, with "/" between folders. This is the store of a local folder or a network file system; no
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
        root: the folder; made by the first `put`.

    Raises:
        OSError: from every method, naming the path: the disk is full or fails, or permission is missing.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str) -> Path:
        """Where an object lies."""
        return self.root / name

    def exists(self, name: str) -> bool:
        """Whether there is such an object."""
        return self.path(name).exists()

    def read(self, name: str) -> bytes:
        """The bytes of a small object. Raises FileNotFoundError where there is none."""
        return self.path(name).read_bytes()

    def names(self, folder: str, ending: str = "") -> list[str]:
        """Names of the objects right in a folder, without the folder, sorted; hidden ones are left out."""
        try:
            found = [path.name for path in self.path(folder).iterdir()]
        except FileNotFoundError:
            return []
        return sorted(name for name in found if name.endswith(ending) and not name.startswith("."))

    def put(self, name: str, data: bytes) -> None:
        """Write a small object: a reader sees the old content or the new one, never a part."""
        final = self.path(name)
        write_whole(final, data, temporary_path(final))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write a small object that is not there yet; False if it is. Of several callers exactly one wins.

        The object appears with its content: it is a link to a complete file. NFS makes links atomically.
        """
        final = self.path(name)
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_path(final)
        try:
            with naming_final(final), temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # or a loss of power could leave the name without the content
            try:
                os.link(temporary, final)
            except FileExistsError:
                return False
            return True
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def commit(self, staged: Iterable[Path], folder: str = "") -> None:
        """Give files, complete and flushed, their names in a folder of the store; then flush the folder.

        Each replaces a file of the same name. One flush makes all of them durable.
        """
        final = self.path(folder)
        final.mkdir(parents=True, exist_ok=True)
        for path in staged:
            with naming_final(final / path.name):
                path.replace(final / path.name)
        flush(final)

    def commit_folder(self, staged: Path, name: str) -> None:
        """Give a folder, complete and flushed, its name; what had it is removed first."""
        final = self.path(name)
        shutil.rmtree(final, ignore_errors=True)
        final.parent.mkdir(parents=True, exist_ok=True)
        staged.replace(final)
        flush(final.parent)

    def remove(self, *names: str) -> None:
        """Remove objects, those that are there, and flush their folders once."""
        folders: dict[Path, None] = {}
        for name in names:
            path = self.path(name)
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                folders[path.parent] = None
        for folder in folders:
            flush(folder)

    def remove_folder(self, name: str) -> None:
        """Remove a folder, and the one it is in if that is empty then; flush what is left."""
        shutil.rmtree(self.path(name))
        parent = self.path(name).parent
        if parent != self.root:
            with contextlib.suppress(OSError):
                parent.rmdir()
                parent = parent.parent
        flush(parent)

    def now(self, folder: str = "") -> float:
        """The file system's time in seconds: the clock that modification times are compared with."""
        probe = temporary_path(self.path(folder) / "clock")
        try:
            probe.touch()
            return probe.stat().st_mtime
        finally:
            with contextlib.suppress(FileNotFoundError):
                probe.unlink()


def temporary_path(final: Path) -> Path:
    """A hidden path beside `final` that no other process takes; it tells whose it is once that has ended."""
    return final.with_name(f".{final.name}.{this_process()}-{secrets.token_hex(4)}.partial")
