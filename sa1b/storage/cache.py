"""Verified copies of large objects, and a cache of them: one download per machine, shared by its processes.

    FOLDER/<sha256>/samples.bin

A copy is stored under its digest, so that it is never outdated. The whole copy is hashed before it is
returned (0.3 s for the 400 MB of all of SA-1B), so that damage is detected. One process downloads under a
lock, which the operating system releases when the process ends; the other processes wait. No copy is evicted.
A table takes 36 bytes per sample, and its folder may be removed at any time.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from sa1b.arguments import BadValue
from sa1b.errors import LockedError
from sa1b.storage.atomic import commit, lock, naming_path
from sa1b.storage.errors import DamageError, StorageError
from sa1b.storage.reader import PIECE, Reader, pieces_of

_PARTIAL = ".partial"


def default_folder() -> Path:
    """The default cache: $XDG_CACHE_HOME/sa1b, else sa1b-<user id> in the temporary folder."""
    # Not the home folder, which machines often share: a memory-mapped copy must be local to be fast.
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home) / "sa1b" if home else Path(tempfile.gettempdir()) / f"sa1b-{os.getuid()}"


def cache_folder() -> Path:
    """The default cache, created if it is missing; StorageError if the folder belongs to another user."""
    cache = default_folder()
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    if cache.stat().st_uid != os.getuid():  # the temporary folder is open to everyone
        raise StorageError(f"{cache}: belongs to another user; set XDG_CACHE_HOME to another folder")
    return cache


def fetch_once(reader: Reader, name: str, digest: str, cache: Path | None = None) -> Path:
    """A local file with the bytes of an object. If the reader's root is local, the file itself, unverified.

    Any number of processes may call this at the same time; one of them downloads into `cache`, by default
    default_folder(). `digest` is the object's sha256, in hexadecimal; DamageError if it has another. OSError
    names the file of the cache that cannot be written.
    """
    if reader.is_local:
        return Path(reader.url(name))
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise BadValue(f"{digest!r} is not a sha256 in hexadecimal")
    if cache is None:
        cache = cache_folder()
    folder = cache / digest
    final = folder / Path(name).name
    if _digest(final) == digest:
        return final
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder, wait=True):
        if _digest(final) != digest:  # no other process has downloaded it meanwhile
            _sweep(cache)
            _fetch(reader, name, digest, folder, final)
    return final


def _fetch(reader: Reader, name: str, digest: str, folder: Path, final: Path) -> None:
    """Download, verify and commit, under the lock of the folder."""
    partial = folder / _PARTIAL
    final.unlink(missing_ok=True)  # damaged
    try:
        with naming_path(partial), partial.open("w+b") as file:
            fetch(reader, name, digest, file)
            file.flush()
            os.fsync(file.fileno())
        commit(partial, final)
    finally:
        partial.unlink(missing_ok=True)


def _digest(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def _sweep(cache: Path) -> None:
    """Remove the partial files of other downloads that were killed."""
    for partial in cache.glob(f"{'[0-9a-f]' * 64}/{_PARTIAL}"):
        with contextlib.suppress(LockedError, OSError), lock(partial.parent):
            partial.unlink()


_PREFETCH = 8  # pieces in memory: 64 MiB


def digest(
    reader: Reader, name: str, progress: Callable[[int], object] | None = None, file: BinaryIO | None = None
) -> str:
    """sha256 of an object in hexadecimal, from one read; `file` receives a copy. Memory: 64 MiB.

    `progress` is called with the number of bytes after each piece; its exception ends the read. Raises as
    read_range.
    """
    sha256 = hashlib.sha256()
    for data in reader.read_ranges(pieces_of(name, reader.size(name)), prefetch=_PREFETCH):
        if file is not None:
            file.write(data)
        sha256.update(data)
        if progress is not None:
            progress(len(data))
    return sha256.hexdigest()


def fetch(
    reader: Reader, name: str, expected: str, file: BinaryIO, progress: Callable[[int], object] | None = None
) -> None:
    """Copy an object to an empty file, open for reading too, and verify its sha256. Memory: 64 MiB.

    `progress` is called with the number of bytes after each piece; its exception ends the copy. DamageError:
    the object has another digest. Else raises as `Reader.read_range`.
    """
    found = digest(reader, name, progress, file)
    size = file.tell()
    if found != expected:
        # The damage is in the store or in transit: accept a piece once two reads of it agree.
        sha256 = hashlib.sha256()
        for start in range(0, size, PIECE):
            file.seek(start)
            data = file.read(PIECE)
            data = reader.read_agreed(name, start, len(data), data)
            file.seek(start)
            file.write(data)
            sha256.update(data)
        found = sha256.hexdigest()
    if found != expected:
        raise DamageError(
            f"{reader.url(name)}: sha256 {found}, {expected} expected; restore the file "
            "from a copy, or open the dataset again if it was replaced",
            url=reader.url(name),
            length=size,
            expected=expected,
            found=found,
        )
