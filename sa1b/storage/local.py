"""Ranges of files on this machine's disks, mounted ones included, by `pread`.

An error of the disk is retried like one of a network, see cause.cause_of_local; a file that ends too early
is damage at once. After a wrong crc32c the file is opened anew and its cached pages are dropped, so that the
second read comes from the disk.
"""

import contextlib
import errno
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from sa1b.storage.checksum import Crc
from sa1b.storage.classify import cause_of_local
from sa1b.storage.counters import Tally
from sa1b.storage.retry import Effort, Patience

_LONGEST = 2**63 - 1  # bytes of a file; a damaged table may name a place beyond
OPEN_FILES = 256  # a quarter of the usual limit of a process


class _File:
    """An open descriptor; closed when the last reader lets go of it, not when it leaves the table."""

    __slots__ = ("descriptor",)

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        descriptor = getattr(self, "descriptor", None)  # none where opening failed
        if descriptor is not None:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Ahead:
    """A range that the disk was told of. The system reads ahead by itself: no threads are needed."""

    origin: "LocalOrigin"
    name: str
    start: int
    length: int
    crc: Crc

    def result(self) -> bytes:
        return self.origin.read(self.name, self.start, self.length, self.crc)

    def cancel(self) -> bool:
        return True


class LocalOrigin:
    """Reads files below a folder, for one process.

    Args:
        root: the folder.
        patience: times.
        tally: where reads are counted.
    """

    def __init__(self, root: Path, patience: Patience, tally: Tally) -> None:
        self.tally = tally
        self._root = os.fspath(root)
        self._patience = patience
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _File] = OrderedDict()

    def read(self, name: str, start: int, length: int, crc: Crc) -> bytes:
        """See Reader.read_range."""
        path = f"{self._root}/{name}"
        effort = Effort(path, start, length, crc, self._patience, self.tally)
        fresh = False
        while True:
            effort.begin()
            try:
                data = self._pread(path, start, length, fresh=fresh)
            except OSError as error:
                fault = cause_of_local(error)
                if fault is None:
                    raise
                effort.failed(fault)
            else:
                if effort.accept(data):
                    return data
                if fresh and len(data) < length:
                    effort.sized(Path(path).stat().st_size)
                elif len(data) < length:
                    fresh = True  # the file may have been replaced by a longer one: look once more, now
                    continue
            fresh = True
            self._patience.sleep(effort.wait())

    def size(self, name: str) -> int:
        """Bytes of a file. See Reader.size."""
        path = f"{self._root}/{name}"
        effort = Effort(path, 0, None, None, self._patience, self.tally)
        while True:
            effort.begin()
            try:
                size = Path(path).stat().st_size
                effort.done()
                return size
            except OSError as error:
                fault = cause_of_local(error)
                if fault is None:
                    raise
                effort.failed(fault)
            self._patience.sleep(effort.wait())

    def names(self, folder: str) -> list[str]:
        """See Reader.names."""
        path = Path(f"{self._root}/{folder}")
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []

    def submit(self, name: str, start: int, length: int, crc: Crc) -> "Ahead":
        """Have the disk begin with a range; `result()` reads it."""
        with contextlib.suppress(OSError, OverflowError):  # the read itself will say it
            file = self._open(f"{self._root}/{name}")
            os.posix_fadvise(file.descriptor, start, length, os.POSIX_FADV_WILLNEED)
        return Ahead(self, name, start, length, crc)

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            self._files.clear()

    def _pread(self, path: str, start: int, length: int, *, fresh: bool) -> bytes:
        if fresh:
            with self._lock:
                self._files.pop(path, None)
        file = self._open(path)
        if start + length > _LONGEST:
            return b""
        if fresh:
            os.posix_fadvise(file.descriptor, start, length, os.POSIX_FADV_DONTNEED)
        data = os.pread(file.descriptor, length, start)
        if len(data) == length or not data:
            return data
        pieces = [data]  # Linux reads at most 2 GiB at once
        got = len(data)
        while got < length and (piece := os.pread(file.descriptor, length - got, start + got)):
            pieces.append(piece)
            got += len(piece)
        return b"".join(pieces)

    def _open(self, path: str) -> _File:
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
                return file
        try:
            file = _File(path)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            with self._lock:
                self._files.clear()
            file = _File(path)
        with self._lock:
            self._files[path] = file
            if len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)
        return file
