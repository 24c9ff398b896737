"""A dataset directory as a store of named objects. Every change of the directory uses these operations.

    store = open_store("shards")
    store.put("tasks/sa_000020.json", data)          atomic and durable when the call returns
    store.put_if_absent("tasks/sa_000020.claim", b)  True for exactly one of many callers

Names are relative, with "/" between folders. The store is a folder of a local or network file system, or a
bucket; sa1b.storage.open opens it. No operation in a folder relies on `flock`, which is local to one machine
on NFS.
"""

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from sa1b.errors import UsageError
from sa1b.storage.atomic import commit, flush, naming_final, temporary_path, write_whole
from sa1b.storage.objects import Upload
from sa1b.storage.reader import Reader

X = TypeVar("X")
Y = TypeVar("Y")


class Store(ABC):
    """The objects of a dataset directory.

    Every method may raise OSError, with the path or URL: the disk or the store fails, is full, or denies
    access. The errors of a bucket are those of sa1b.storage.errors.
    """

    root: str  # path or URL of the directory, without a "/" at the end
    is_local: bool  # the directory is a folder, so that `url(name)` is a path
    scratch: Path  # local folder for files that are committed later; on a folder, the folder itself

    def __str__(self) -> str:
        return self.root

    @property
    @abstractmethod
    def reader(self) -> Reader:
        """Verified reads of ranges of the objects."""

    def url(self, name: str) -> str:
        """The path or URL of an object."""
        return f"{self.root}/{name}"

    def map(self, function: Callable[[X], Y], items: Iterable[X]) -> Iterator[Y]:
        """function(item) for each item, in order; for a bucket, several at a time."""
        return map(function, items)

    def listed_size(self) -> Callable[[str], int | None]:
        """A function like `size`, for many objects of the root; its first call lists a bucket, once."""
        return self.size

    @abstractmethod
    def create(self, flag: str) -> None:
        """Create the folder if it is missing; buckets need none. UsageError: a file has this path."""

    @abstractmethod
    def check_scratch(self, sizes: Sequence[int], workers: int) -> None:
        """UsageError if the scratch folder of a bucket has no space for the largest shards of `workers`
        processes: each process stores the files of one shard at a time. `sizes`: bytes of each shard.
        """

    @property
    def identity(self) -> str:
        """The URL, or the path without symbolic links: the same text for the same directory."""
        return self.root

    def contains(self, url: str) -> bool:
        """Whether a path or URL is the directory or below it."""
        return url == self.root or url.startswith(f"{self.root}/")

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of an object; None if it does not exist."""

    def exists(self, name: str) -> bool:
        return self.size(name) is not None

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The bytes of a small object. Raises FileNotFoundError if the object does not exist."""

    @abstractmethod
    def names(self, folder: str, ending: str = "") -> list[str]:
        """Sorted names of the objects directly in a folder, without the folder and without hidden objects."""

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Name without the folder -> bytes, for the objects of `names`."""
        sizes = {name: self.size(f"{folder}/{name}" if folder else name) for name in self.names(folder)}
        return {name: size for name, size in sizes.items() if size is not None}

    @abstractmethod
    def folders(self, folder: str) -> list[str]:
        """Sorted names of the folders directly in a folder, without the folder and without hidden ones."""

    @abstractmethod
    def version(self, name: str) -> str | None:
        """A text that changes when an object is replaced; None if the object does not exist."""

    @abstractmethod
    def is_folder(self, name: str) -> bool:
        """Whether there is a folder of this name; in a bucket, a folder has at least one object."""

    @abstractmethod
    def files(self, *names: str) -> contextlib.AbstractContextManager[list[Path]]:
        """Local files with the bytes of objects, for reading within the context.

        These are the files of a folder, and temporary copies of the objects of a bucket. If an object does
        not exist, its path has no file.
        """

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a small object atomically: a reader sees the old content or the new content."""

    @abstractmethod
    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write a small object with its content unless it exists; True for exactly one of the callers."""

    @abstractmethod
    def replace_if(self, name: str, data: bytes, matches: Callable[[bytes], bool]) -> bool:
        """Replace an object if its content matches; True for exactly one of several callers."""

    @abstractmethod
    def commit(
        self, staged: Iterable[Path], folder: str = "", progress: Callable[[int], None] | None = None
    ) -> None:
        """Move complete, flushed files to a folder of the store.

        Each file replaces an object of the same name. All objects are durable when the call returns. During
        an upload to a bucket, `progress` is called with the number of bytes whenever some are stored.
        """

    @abstractmethod
    def commit_file(self, staged: Path, name: str, progress: Callable[[int], None] | None = None) -> None:
        """Move a complete, flushed file to a name; otherwise like `commit`."""

    @abstractmethod
    def commit_folder(self, staged: Path, name: str, is_own: Callable[[str], bool]) -> None:
        """Move the files of a complete, flushed folder to a folder, after `remove_folder` of that one."""

    @abstractmethod
    def remove(self, *names: str) -> None:
        """Remove the objects that exist."""

    @abstractmethod
    def remove_folder(self, name: str, is_own: Callable[[str], bool]) -> None:
        """Remove the files of a folder whose names are the package's, then it and its parents if empty."""

    @abstractmethod
    def age(self, name: str) -> float | None:
        """Seconds since the last write by the store's clock; below 0: the time is in the future; None: no
        object.
        """

    @abstractmethod
    def renew(self, name: str, data: bytes) -> bool:
        """Set an object's time to now. In a bucket, only if its content is `data`; return whether it was
        set.
        """

    @abstractmethod
    def remove_if(self, name: str, matches: Callable[[bytes], bool]) -> bool:
        """Remove an object if its content matches; True for exactly one of several callers."""

    def remove_temporary(self, has_ended: Callable[[str, float], bool]) -> int:
        """Remove the temporary objects for which `has_ended(name, age in seconds)` is true; return their
        number.
        """
        return 0

    def uploads(self) -> list[Upload]:
        """Uploads to a bucket that were started and not finished, by processes that run or have ended."""
        return []

    def abort_uploads(self, matches: Callable[[str], bool]) -> int:
        """Remove unfinished uploads of matching objects, whose claim the caller holds; return their
        number.
        """
        return 0


Root = Store | Path | str  # of a dataset directory: an open store, a path or a URL


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
            names = [path.name for path in self.path(folder).iterdir()]
        except FileNotFoundError:
            return []
        return sorted(name for name in names if name.endswith(ending) and not name.startswith("."))

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
            flush(final.parent)
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
        with naming_final(final := self.path(name)):
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
        flush(staged)
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
