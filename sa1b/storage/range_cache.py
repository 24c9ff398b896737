"""A bounded cache of large objects on a local disk, filled by the ranges that are read.

    FOLDER/s3-bucket-sa1b-1f2e3d4c/sa1b-000020-0003.tar-5969817d0da441c5.sparse

Which objects are cached is a formula of their names, their sizes and the limit: objects are taken in the
order of a hash of their names, up to the first one that exceeds the limit. Nothing is evicted: every epoch
reads all objects in random order, so that a fixed tenth of them gives a tenth of hits, and the ranges that
were used last give fewer. So there is no index and no lock, and all processes that share a folder agree.

An object is a sparse file of its size. Its name contains the digest of the object, so that a replaced object
is another file. A range that is missing is read from the store and written at its own offset. A range that is
present is read from the file, and its crc32c decides: a hole, a write that a crash cut short and damage of
the disk have a wrong crc32c, and the range is read from the store and written again. There is nothing to
repair.
"""

import errno
import hashlib
import os
import re
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Protocol

from sa1b.arguments import BadValue
from sa1b.hashing import Purpose, random_word
from sa1b.storage.local import LocalRead, OpenFile, OpenFiles
from sa1b.storage.remote import generation
from sa1b.storage.retry import Crc, Part, parts_of, wrong_parts

_BLOCK = 4096  # bytes: what files take on disk is a multiple of it
_ENDING = ".sparse"
_OWN = re.compile(r".+-[0-9a-f]{16}\.sparse")
_PROBE = 1 << 20  # bytes of the file that tells whether the disk has sparse files
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True, slots=True)
class StoredObject:
    name: str  # relative to the root
    size: int  # bytes
    digest: str  # sha256 in hexadecimal


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Ranges that one process read through the cache."""

    hits: int = 0  # from the cache
    misses: int = 0  # of cached objects, from the store
    outside: int = 0  # of objects that the limit leaves out, from the store


class Origin(Protocol):
    """The reader of the ranges that the cache lacks."""

    def submit(self, name: str, start: int, length: int, crc: Crc) -> "Future[bytes] | LocalRead": ...


@dataclass(slots=True)
class _Process:
    """What a process has of a cache. A forked child creates its own."""

    files: OpenFiles = field(default_factory=OpenFiles)
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_filling: bool = True


@dataclass(frozen=True, slots=True)
class CachedRead:
    """A pending read of a range of a cached object."""

    cache: "RangeCache"
    file: OpenFile  # of the object
    origin: Origin  # where a miss is read
    name: str
    start: int
    length: int
    crc: Crc
    begun: "Future[bytes] | LocalRead | None"  # the read from the store, if the range was missing

    def result(self) -> bytes:
        """The bytes. Raises the errors of `Reader.read_range`."""
        begun = self.begun
        if begun is None:
            data = self._cached()
            if data is not None:
                self.cache.count("hits")
                return data
            begun = self.origin.submit(self.name, self.start, self.length, self.crc)
        data = begun.result()
        self.cache.count("misses")
        self.cache.write(self.file, data, self.start)
        return data

    def cancel(self) -> bool:
        return self.begun is None or self.begun.cancel()

    def _cached(self) -> bytes | None:
        try:
            data = self.file.read(self.start, self.length)
        except OSError:  # the disk is damaged: the store has the bytes
            return None
        parts = parts_of(self.crc, self.length)
        if len(data) != self.length or next(wrong_parts(data, parts), None) is not None:
            return None
        return data


class RangeCache:
    """The cached objects of one root, in a folder that exists. It can be pickled, forked and shared by
    threads. `is_filling`: misses are written.
    """

    def __init__(self, folder: Path, objects: Iterable[StoredObject], *, is_filling: bool = True) -> None:
        self.folder = os.fspath(folder)
        self._objects = {
            stored.name: (stored.size, f"{self.folder}/{file_name(stored)}") for stored in objects
        }
        self._is_filling = is_filling
        self._processes: dict[int, _Process] = {}

    def __repr__(self) -> str:
        size = sum(size for size, _ in self._objects.values())
        return f"RangeCache({self.folder!r}: {len(self._objects):,} objects, {size:,} bytes)"

    def submit(
        self, origin: Origin, name: str, start: int, length: int, crc: Crc
    ) -> "CachedRead | Future[bytes] | LocalRead":
        """Start to read a range from the cache, or else the origin; one without crc is not cached."""
        parts = parts_of(crc, length)
        if not parts:
            return origin.submit(name, start, length, crc)
        size, path = self._objects.get(name, (0, ""))
        if start + length > size:
            self.count("outside")
            return origin.submit(name, start, length, crc)
        file = self._file(path, size)
        if file is None:
            self.count("misses")
            return origin.submit(name, start, length, crc)
        present = _is_present(file, start, parts)
        if present and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.descriptor, start, length, os.POSIX_FADV_WILLNEED)
        begun = None if present else origin.submit(name, start, length, crc)
        return CachedRead(self, file, origin, name=name, start=start, length=length, crc=crc, begun=begun)

    def write(self, file: OpenFile, data: bytes, start: int) -> None:
        """Write a range at its own offset; after an error of the disk nothing more is written."""
        if not self._process().is_filling:
            return
        try:
            rest = memoryview(data)
            while rest:
                written = os.pwrite(file.descriptor, rest, start)
                rest, start = rest[written:], start + written
        except OSError as error:
            self._stop_filling(error)

    def count(self, name: str) -> None:
        """Add a read to a counter of CacheCounts."""
        process = self._process()
        with process.lock:
            process.counts[name] += 1

    def counts(self) -> CacheCounts:
        """The reads of this process so far."""
        process = self._process()
        with process.lock:
            return CacheCounts(**process.counts)

    def close(self) -> None:
        """Close the files of this process; the next read opens them again."""
        self._process().files.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_processes": {}}

    def _process(self) -> _Process:
        process = self._processes.get(generation())
        return process or self._processes.setdefault(generation(), _Process(is_filling=self._is_filling))

    def _file(self, path: str, size: int) -> OpenFile | None:
        process = self._process()
        file = process.files.find(path)
        if file is not None:
            return file
        if process.is_filling:
            try:
                file = process.files.open(path, os.O_RDWR | os.O_CREAT)
                if os.fstat(file.descriptor).st_size != size:
                    os.ftruncate(file.descriptor, size)
                return file
            except OSError as error:
                self._stop_filling(error)
        try:
            return process.files.open(path)
        except OSError:
            return None

    def _stop_filling(self, error: OSError) -> None:
        process = self._process()
        with process.lock:
            is_first, process.is_filling = process.is_filling, False
        if is_first:
            print(
                f"sa1b: cache {self.folder}: cannot be written ({error.strerror}); what it lacks is read "
                f"from the store. {_advice(error)}",
                file=sys.stderr,
            )


def choose(objects: Iterable[StoredObject], limit: int) -> list[StoredObject]:
    """The objects that a cache of `limit` bytes holds, in the order of a hash of their names."""
    # A larger limit holds the same objects and more. Sizes are rounded up to blocks of 4096 bytes.
    chosen = []
    for stored in sorted(
        objects, key=lambda stored: (random_word(0, Purpose.CACHE, *stored.name.encode()), stored.name)
    ):
        limit -= -(-stored.size // _BLOCK) * _BLOCK
        if limit < 0:
            break
        chosen.append(stored)
    return chosen


def open_cache(
    cache: str | os.PathLike[str], limit: int, root: str, objects: Iterable[StoredObject]
) -> RangeCache | None:
    """The cache of a root in a new or old subfolder of `cache`; None after a warning if it cannot be used.

    Files of this root that the formula leaves out are removed: those of replaced objects, and those that a
    larger limit included. Other files are not touched.

    `cache` is a folder on a local disk, shared by any number of roots and processes; ValueError if it is a
    URL or a file, or is on the disk of the root. `limit`: bytes that the files of this root may take.
    """
    text = os.fspath(cache)
    if "://" not in text:
        text = str(Path(text).expanduser())
    if "://" in text:
        raise BadValue(f"cache={text!r} must be a folder on a local disk, not a URL")
    if "://" not in root and _device(root) == _device(text):
        raise BadValue(
            f"cache={text!r} is on the same disk as the dataset directory {root}; omit it, or pass a folder "
            "on a faster disk"
        )
    every = [stored for stored in objects if PurePath(stored.name).name == stored.name]
    chosen = choose(every, limit)
    if not chosen:
        least = max((stored.size for stored in every), default=0)
        _warn(text, f"cache_bytes={limit:,} is less than a shard; pass at least {least + _BLOCK:,}")
        return None
    folder = Path(text).absolute() / _folder_name(root)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_sparse = _is_sparse(folder)
    except (FileExistsError, NotADirectoryError):
        raise BadValue(f"cache={text!r} is a file, or is below one; pass a folder") from None
    except OSError as error:
        reason = f"cannot be written ({error.strerror}). {_advice(error)}"
        if not folder.is_dir():
            _warn(text, reason)
            return None
        warnings.warn(f"cache {text}: {reason}; the data in it are used, nothing is added", stacklevel=2)
        return RangeCache(folder, chosen, is_filling=False)
    if not is_sparse:
        _warn(text, "the disk has no sparse files; pass a folder on another disk, such as ext4 or xfs")
        return None
    _remove_others(folder, {file_name(stored) for stored in chosen})
    return RangeCache(folder, chosen)


def file_name(stored: StoredObject) -> str:
    """Name of the file of an object, with its digest."""
    return f"{stored.name}-{stored.digest[:16]}{_ENDING}"


def _folder_name(root: str) -> str:
    """Name of the subfolder of a root: readable, and different for every root."""
    text = root if "://" in root else str(Path(root).absolute())
    readable = re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[-64:]
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _remove_others(folder: Path, names: set[str]) -> None:
    for path in folder.iterdir():
        if path.name not in names and _OWN.fullmatch(path.name):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                warnings.warn(f"{path}: cannot be removed ({error.strerror}); remove it", stacklevel=3)


def _is_present(file: OpenFile, start: int, parts: tuple[Part, ...]) -> bool:
    """Whether the file has data in the middle of every part, so that the range was probably written."""
    # One system call of 0.4 us for each part. The first hole after `start` would be exact, but is found by
    # passing over all extents up to it, and the ends of a range share blocks with its neighbours.
    try:
        for part in parts:
            middle = start + part.start + part.length // 2
            if os.lseek(file.descriptor, middle, os.SEEK_DATA) != middle:
                return False
    except OSError:  # no data up to the end of the file
        return False
    return True


def _is_sparse(folder: Path) -> bool:
    """Whether files of a folder have holes that take no space and can be found."""
    with tempfile.TemporaryFile(dir=folder) as file:
        descriptor, middle = file.fileno(), _PROBE // 2
        os.ftruncate(descriptor, _PROBE)
        os.pwrite(descriptor, bytes(_BLOCK), middle)
        try:
            has_holes = os.lseek(descriptor, 0, os.SEEK_DATA) == middle
        except OSError:
            return False
        return has_holes and os.fstat(descriptor).st_blocks * 512 < _PROBE


def _device(path: str) -> int:
    existing = Path(path).absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    return existing.stat().st_dev


def _advice(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free space on this disk, or use a smaller cache_bytes"
    if error.errno in _READ_ONLY:
        return "Change the permissions of the folder, or use another one"
    return "Check the disk, or use another folder"


def _warn(cache: str, reason: str) -> None:
    warnings.warn(f"cache {cache}: {reason}; the cache is not used", stacklevel=3)
