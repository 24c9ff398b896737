"""The stored bytes of a source tar, front to back: a local file, or an object at a URL.

A remote file is never stored on this machine. It is read in ranges of a few megabytes, several at a time. A
range that fails is requested again; the ranges before it, and the state of the decompressor, are kept.
"""

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from sa1b.errors import SourceError
from sa1b.sources.link_list import Link
from sa1b.storage.errors import DeniedError, MissingError, ReplacedError, StorageError
from sa1b.storage.reader import Reader, pieces_of


class StoredFile(Protocol):
    """The bytes of a file in their order.

    Attributes:
        label: path or URL, for messages.
        size: bytes.
    """

    label: str
    size: int

    def read(self, length: int) -> bytes:
        """The next bytes, at most `length`; empty at the end of the file."""
        ...

    def check_unchanged(self) -> None:
        """Raise SourceError if the file has changed since it was opened."""
        ...

    def close(self) -> None:
        """Release the file."""
        ...


class LocalFile:
    """A file of a local or network file system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.label = os.fspath(path)
        self._file: BinaryIO = path.open("rb", buffering=0)
        self._stat = os.fstat(self._file.fileno())
        self.size = self._stat.st_size

    def read(self, length: int) -> bytes:
        """See StoredFile.read."""
        try:
            return self._file.read(length)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.label) from error

    def check_unchanged(self) -> None:
        """Compare inode, size, mtime and ctime with those at opening.

        An overwrite in place is detected even if the time of modification was restored, because that sets the
        ctime. Not detected: a change within one tick of the clock of the file system before the
        file was opened (4 ms on ext4), changes on file systems without a ctime (FAT, exFAT) or with cached
        attributes (NFS, until the cache expires), and writes through a memory map that was already dirty.
        """
        try:
            found = [os.fstat(self._file.fileno()), self.path.stat()]
        except FileNotFoundError:
            raise SourceError(f"{self.label}: removed while it was read; restore it and run again") from None
        if any(_identity(stat) != _identity(self._stat) for stat in found):
            raise SourceError(f"{self.label}: changed while it was read; run the same command again")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RemoteFile:
    """An object at a URL.

    Args:
        link: the URL and how to read it.

    Raises:
        SourceError: the link has expired, or the object does not exist.
        StorageError: the server cannot be reached, or does not serve ranges.
    """

    def __init__(self, link: Link) -> None:
        self.link, self.label = link, link.label
        root, self._name = link.split()
        self._reader = Reader(root, attempts_in_flight=link.connections, options=link.reader_options)
        with self._naming():
            self.size = self._reader.size(self._name)
        self._pieces = self._reader.read_ranges(pieces_of(self._name, self.size), prefetch=link.connections)
        self._piece = memoryview(b"")
        self._received = 0
        self._began = time.monotonic()

    def read(self, length: int) -> bytes:
        """See StoredFile.read. Waits if the rate of the link's limit is exceeded."""
        if not self._piece:
            with self._naming():
                self._piece = memoryview(next(self._pieces, b""))
            self._received += len(self._piece)
            if self.link.max_rate is not None:
                allowed = self._began + self._received / self.link.max_rate
                time.sleep(max(0.0, allowed - time.monotonic()))
        data, self._piece = bytes(self._piece[:length]), self._piece[length:]
        return data

    def check_unchanged(self) -> None:
        """Compare the size with that at opening; every range has been compared with the first one's ETag."""
        with self._naming():
            size = self._reader.size(self._name)
        if size != self.size:
            raise SourceError(f"{self.label}: changed while it was read; run the same command again")

    def close(self) -> None:
        """Cancel pending requests and close the connections."""
        self._reader.close()

    def _naming(self) -> AbstractContextManager[None]:
        return naming_link(self.link)


def open_stored(origin: Path | Link) -> StoredFile:
    """Open a local or remote file for one pass."""
    return RemoteFile(origin) if isinstance(origin, Link) else LocalFile(origin)


@contextmanager
def naming_link(link: Link) -> Iterator[None]:
    """Turn the errors of a link that no longer works into errors that say how to get a new one."""
    try:
        yield
    except (DeniedError, MissingError) as error:
        raise SourceError(f"{link.label}: {link.problem(error)}") from None
    except ReplacedError:
        raise SourceError(f"{link.label}: changed while it was read; run the same command again") from None
    except StorageError as error:
        raise type(error)(f"{link.label}: {link.without_query(str(error))}", url=link.label) from None


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
