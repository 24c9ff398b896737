"""A cache of large objects of a URL, downloaded once per machine and shared by its processes.

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
from collections.abc import Iterator
from pathlib import Path

from sa1b.errors import LockedError
from sa1b.storage.atomic import commit, lock
from sa1b.storage.errors import StorageError
from sa1b.storage.fetch import fetch
from sa1b.storage.reader import Reader

_PARTIAL = ".partial"


def default_folder() -> Path:
    """The default cache: $XDG_CACHE_HOME/sa1b, else sa1b-<user id> in the temporary folder.

    Not the home folder, which machines often share: a memory-mapped copy must be local to be fast.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home) / "sa1b" if home else Path(tempfile.gettempdir()) / f"sa1b-{os.getuid()}"


def cache_folder() -> Path:
    """The default cache, created if it is missing.

    Raises:
        StorageError: the folder belongs to another user.
        OSError: the folder cannot be created.
    """
    cache = default_folder()
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    if cache.stat().st_uid != os.getuid():  # the temporary folder is open to everyone
        raise StorageError(f"{cache}: belongs to another user; set XDG_CACHE_HOME to another folder")
    return cache


def fetch_once(reader: Reader, name: str, digest: str, cache: Path | None = None) -> Path:
    """A local file with the bytes of an object. If the reader's root is local, the file itself, unverified.

    Any number of processes may call this at the same time; one of them downloads.

    Args:
        reader: reads the object.
        name: name of the object, relative to the reader's root.
        digest: sha256 of the object, in hexadecimal.
        cache: folder for copies; by default default_folder().

    Raises:
        DamageError: the object has another digest.
        OSError: the cache cannot be written; the message names the file.
        StorageError: as `Reader.read_range`.
    """
    if reader.is_local:
        return Path(reader.url(name))
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ValueError(f"{digest!r} is not a sha256 in hexadecimal")
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
        with _naming(partial), partial.open("w+b") as file:
            fetch(reader, name, digest, file)
            file.flush()
            os.fsync(file.fileno())
        commit(partial, final)
    finally:
        partial.unlink(missing_ok=True)


def _digest(path: Path) -> str | None:
    """sha256 of a file in hexadecimal, None if there is no file."""
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


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file's name to an error of the disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
