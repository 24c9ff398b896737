"""Atomic writes: a file is written to a temporary path, flushed to the disk, then renamed."""

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
    """Flush the bytes of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(temporary: Path, final: Path) -> None:
    """Rename a flushed file or folder to its final path on the same file system, and replace a file there."""
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary.replace(final)
    flush(final.parent)


@contextlib.contextmanager
def naming_path(path: Path) -> Iterator[None]:
    """Add `path` to errors of the operating system without a path, such as failed writes and flushes."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


@contextlib.contextmanager
def naming_final(path: Path) -> Iterator[None]:
    """Replace the temporary path in errors of the operating system by the final path."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def write_whole(path: Path, data: bytes, temporary: Path | None = None) -> None:
    """Write a small file atomically: a reader sees the old content or the new content.

    Args:
        path: path of the file.
        data: content of the file.
        temporary: a path in the same folder that no other process uses. By default a fixed path: then only
            one process may write the file at a time.
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
    """Append bytes to a file in one write, which is not interleaved with writes of other processes.

    Raises:
        OSError: the bytes were not written, or only some of them; the error names the path.
    """
    with naming_path(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if os.write(descriptor, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """The bytes of a JSON file. The same document gives the same bytes, so that digests are reproducible."""
    return (json.dumps(document, indent=1) + "\n").encode()


@contextlib.contextmanager
def lock(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on a folder. The operating system releases it when the process ends.

    Args:
        folder: the folder.
        wait: wait without limit until the lock is free.

    Raises:
        LockedError: another process holds the lock, and `wait` is False.
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
