"""Files that appear whole or not at all: written to a temporary path, flushed to the disk, then renamed."""

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sa1b.errors import LockedError


def flush(path: Path) -> None:
    """Have the operating system write a file's bytes, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(temporary: Path, final: Path) -> None:
    """Give a flushed file or folder its final name, on the same file system; a file there is replaced."""
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary.replace(final)
    flush(final.parent)


@contextlib.contextmanager
def naming_path(path: Path) -> Iterator[None]:
    """Let errors of the operating system name `path` where they name nothing: failed writes and flushes."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


@contextlib.contextmanager
def naming_final(path: Path) -> Iterator[None]:
    """Let errors of the operating system name the final path, not the temporary one beside it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def write_whole(path: Path, data: bytes, temporary: Path | None = None) -> None:
    """Write a small file so that a reader sees the old content or the new, never a part.

    Args:
        temporary: a path beside it that no other process takes; without it, one process writes at a time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary or path.with_name(f".{path.name}.partial")
    try:
        with naming_final(path):
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            commit(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def append_line(path: Path, line: str) -> None:
    """Append a line to a file in one write; see `append`."""
    append(path, line.encode() + b"\n")


def append(path: Path, data: bytes) -> None:
    """Append bytes to a file in one write, which does not mix with those of other processes.

    Raises:
        OSError: they were not written, or only a part of them; the error names the path.
    """
    with naming_path(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if os.write(descriptor, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """A document as it stands in a file: the same content gives the same bytes, which digests count on."""
    return (json.dumps(document, indent=1) + "\n").encode()


@contextlib.contextmanager
def lock(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on a folder; it ends with the process, however that ends.

    Args:
        wait: until it is free, however long that takes.

    Raises:
        LockedError: another process holds it, and `wait` is False.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise LockedError(f"{folder}: in use by another process; wait for it or stop it") from None
        yield
    finally:
        os.close(descriptor)
