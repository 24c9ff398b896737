"""A dataset directory in a folder of a local or network file system.

No operation relies on `flock`, which is local to one machine on NFS.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from sa1b.errors import UsageError
from sa1b.storage.atomic import commit, flush, naming_final, temporary_path, write_whole
from sa1b.storage.reader import Reader
from sa1b.storage.store import Store


class FolderStore(Store):
    """The objects below a folder; the first `put` creates it."""

    is_local = True

    def __init__(self, root: Path) -> None:
        self.folder = self.scratch = root
        self.root = os.fspath(root)

    @property
    def identity(self) -> str:
        return os.fspath(self.folder.resolve())

    @property
    def reader(self) -> Reader:
        return Reader(self.folder)  # a new one, because a reader keeps files open that may be replaced

    def create(self, flag: str) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"{flag} {self.root}: is a file; pass a folder")
        self.folder.mkdir(parents=True, exist_ok=True)

    def check_scratch(self, sizes: Sequence[int], workers: int) -> None:
        """A folder needs no copies of its objects."""

    def path(self, name: str) -> Path:
        """The path of an object."""
        return self.folder / name

    def url(self, name: str) -> str:
        return os.fspath(self.path(name))

    def size(self, name: str) -> int | None:
        try:
            return self.path(name).stat().st_size
        except FileNotFoundError:
            return None

    def folders(self, folder: str) -> list[str]:
        return [name for name in self.names(folder) if (self.path(folder) / name).is_dir()]

    def version(self, name: str) -> str | None:
        try:
            stat = self.path(name).stat()
        except FileNotFoundError:
            return None
        return f"{stat.st_size}-{stat.st_mtime_ns}"

    def is_folder(self, name: str) -> bool:
        return self.path(name).is_dir()

    @contextlib.contextmanager
    def files(self, *names: str) -> Iterator[list[Path]]:
        yield [self.path(name) for name in names]

    def age(self, name: str) -> float | None:
        try:
            written = self.path(name).stat().st_mtime
        except FileNotFoundError:
            return None
        return self.now(str(Path(name).parent)) - written

    def renew(self, name: str, data: bytes) -> bool:
        try:
            os.utime(self.path(name))
        except FileNotFoundError:
            return False
        return True

    def remove_if(self, name: str, matches: Callable[[bytes], bool]) -> bool:
        # The file is renamed first, so that only one of two processes that both found it can remove it.
        path = self.path(name)
        taken = temporary_path(path)
        try:
            path.rename(taken)
        except FileNotFoundError:
            return False
        try:
            if matches(taken.read_bytes()):
                return True
            with contextlib.suppress(FileExistsError):  # put back an object that was replaced meanwhile
                os.link(taken, path)
            return False
        finally:
            taken.unlink()

    def read(self, name: str) -> bytes:
        return self.path(name).read_bytes()

    def names(self, folder: str, ending: str = "") -> list[str]:
        try:
            found = [path.name for path in self.path(folder).iterdir()]
        except FileNotFoundError:
            return []
        return sorted(name for name in found if name.endswith(ending) and not name.startswith("."))

    def put(self, name: str, data: bytes) -> None:
        final = self.path(name)
        write_whole(final, data, temporary_path(final))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        # The object appears with its content, because it is created as a link to a complete file. Links are
        # atomic on NFS too.
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

    def replace_if(self, name: str, data: bytes, matches: Callable[[bytes], bool]) -> bool:
        return self.remove_if(name, matches) and self.put_if_absent(name, data)

    def commit(
        self, staged: Iterable[Path], folder: str = "", progress: Callable[[int], None] | None = None
    ) -> None:
        final = self.path(folder)
        final.mkdir(parents=True, exist_ok=True)
        for path in staged:
            with naming_final(final / path.name):
                path.replace(final / path.name)
        flush(final)

    def commit_file(self, staged: Path, name: str, progress: Callable[[int], None] | None = None) -> None:
        final = self.path(name)
        with naming_final(final):
            commit(staged, final)

    def commit_folder(self, staged: Path, name: str, is_own: Callable[[str], bool]) -> None:
        final = self.path(name)
        if final.is_dir():
            self.remove_folder(name, is_own)
        if final.exists():  # with files of others
            self.commit(sorted(staged.iterdir()), name)
            staged.rmdir()
            return
        final.parent.mkdir(parents=True, exist_ok=True)
        staged.replace(final)
        flush(final.parent)

    def remove(self, *names: str) -> None:
        folders: dict[Path, None] = {}
        for name in names:
            path = self.path(name)
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                folders[path.parent] = None
        for folder in folders:
            flush(folder)

    def remove_folder(self, name: str, is_own: Callable[[str], bool]) -> None:
        folder = self.path(name)
        self.remove(*(f"{name}/{path.name}" for path in folder.iterdir() if is_own(path.name)))
        with contextlib.suppress(OSError):  # files of others are left
            while folder != self.folder:
                folder.rmdir()
                folder = folder.parent
        flush(folder)

    def now(self, folder: str = "") -> float:
        """The file system's time in seconds, for comparison with modification times."""
        probe = temporary_path(self.path(folder) / "clock")
        try:
            probe.touch()
            return probe.stat().st_mtime
        finally:
            with contextlib.suppress(FileNotFoundError):
                probe.unlink()
