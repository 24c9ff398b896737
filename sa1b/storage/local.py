"""Ranges of files on local and mounted disks, read with `pread`.

A disk error is retried like a network error, see `classify_local_error`. A file that ends too early counts as
damaged at once. After a wrong crc32c the file is opened again and its cached pages are dropped, so that the
second read comes from the disk.

A mount whose server is lost blocks system calls without limit. Files are therefore opened and ranges read by
another thread, within the deadline of the policy. A range that the operating system has in memory is read by
the calling thread, which saves two switches of threads.
"""

import contextlib
import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from sa1b.limit import Limited, OverdueError
from sa1b.storage.errors import ErrorClass, Fault, FaultError, StorageError, classify_local_error
from sa1b.storage.retry import CounterSet, Crc, RetryPolicy, RetryState

T = TypeVar("T")
_LONGEST = 2**63 - 1  # bytes of a file; a damaged table may point beyond
OPEN_FILES = 256  # a quarter of the usual limit of a process


class OpenFile:
    """An open file. It is closed once unreferenced, not when it leaves the table of open files."""

    __slots__ = ("descriptor",)

    def __init__(self, path: str, flags: int) -> None:
        # Without O_NONBLOCK, opening a named pipe waits for a writer.
        self.descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        mode = os.fstat(self.descriptor).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISDIR(mode):
            what = "a named pipe" if stat.S_ISFIFO(mode) else "a folder"
            raise StorageError(f"{path}: is {what}, not a file; restore the file from a copy", url=path)

    def __del__(self) -> None:
        descriptor = getattr(self, "descriptor", None)  # None if opening failed
        if descriptor is not None:
            os.close(descriptor)

    def read(self, start: int, length: int) -> bytes:
        """The bytes of a range, or fewer if the file ends before."""
        data = os.pread(self.descriptor, length, start)
        if len(data) == length or not data:
            return data
        pieces, got = [data], len(data)  # Linux reads at most 2 GiB at once
        while got < length and (piece := os.pread(self.descriptor, length - got, start + got)):
            pieces.append(piece)
            got += len(piece)
        return b"".join(pieces)

    def has_in_memory(self, place: int) -> bool:
        """Whether the operating system has this byte in memory; False where it cannot tell, as for NFS."""
        flag = getattr(os, "RWF_NOWAIT", None)
        with contextlib.suppress(OSError, OverflowError):
            return flag is not None and os.preadv(self.descriptor, [bytearray(1)], place, flag) == 1
        return False


class OpenFiles:
    """The open files of a process: at most OPEN_FILES, those used last. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[str, OpenFile] = OrderedDict()

    def find(self, path: str) -> OpenFile | None:
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
            return file

    def open(self, path: str, flags: int = os.O_RDONLY) -> OpenFile:
        """Open a file, and keep it open. Raises OSError."""
        try:
            file = OpenFile(path, flags)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self.clear()
            file = OpenFile(path, flags)
        with self._lock:
            self._files[path] = file
            if len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)
        return file

    def forget(self, path: str) -> None:
        """Open the file again at its next use."""
        with self._lock:
            self._files.pop(path, None)

    def clear(self) -> None:
        with self._lock:
            self._files.clear()


@dataclass(frozen=True, slots=True)
class LocalRead:
    """A pending read of a range that the operating system prefetches, without a thread."""

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
    """Reads files below a folder, for one process."""

    def __init__(self, root: Path, policy: RetryPolicy, counters: CounterSet) -> None:
        self.counters = counters
        self._root = os.fspath(root)
        self._policy = policy
        self._files = OpenFiles()
        self._limited = Limited()

    def read(self, name: str, start: int, length: int, crc: Crc, *, fresh: bool = False) -> bytes:
        """As Reader.read_range; a blocked read ends at the deadline too. `fresh`: not from a cache."""
        path = f"{self._root}/{name}"
        state = RetryState(path, start, length, crc=crc, policy=self._policy, counters=self.counters)
        while True:
            state.start_attempt()
            try:
                file = self._open(state, path, fresh=fresh)
                work = partial(_pread, file, start, length, fresh=fresh)
                near = not fresh and file.has_in_memory(start + length - 1)  # a prefetch ends with this byte
                data = work() if near else self._in_time(state, work)
            except FaultError as error:
                state.fail(error.fault)
            except OSError as error:
                fault = classify_local_error(error)
                if fault is None:
                    raise
                state.fail(fault)
            else:
                if state.accept(data):
                    return data
                if fresh and len(data) < length:
                    state.check_end(Path(path).stat().st_size)
                elif len(data) < length:
                    fresh = True  # the file may have been replaced by a longer one: read again at once
                    continue
            fresh = True
            self._policy.sleep(state.backoff())

    def size(self, name: str) -> int:
        """Bytes of a file. See Reader.size."""
        path = Path(f"{self._root}/{name}")
        return self._retried(path, lambda: path.stat().st_size)

    def names(self, folder: str) -> list[str]:
        path = Path(f"{self._root}/{folder}")
        return self._retried(path, lambda: _names(path))

    def _retried(self, path: Path, work: Callable[[], T]) -> T:
        state = RetryState(str(path), 0, None, crc=None, policy=self._policy, counters=self.counters)
        while True:
            state.start_attempt()
            try:
                response = self._in_time(state, work)
                state.succeed()
                return response
            except FaultError as error:
                state.fail(error.fault)
            except OSError as error:
                fault = classify_local_error(error)
                if fault is None:
                    raise
                state.fail(fault)
            self._policy.sleep(state.backoff())

    def submit(self, name: str, start: int, length: int, crc: Crc) -> "LocalRead":
        """Let the system prefetch a range; `result()` reads it. UnavailableError: not opened in time."""
        path = f"{self._root}/{name}"
        with contextlib.suppress(OSError, OverflowError):  # the read raises the error
            file = self._files.find(path)
            if file is None:
                state = RetryState(path, start, length, crc=None, policy=self._policy, counters=self.counters)
                try:
                    file = self._open(state, path)
                except FaultError as error:
                    state.start_attempt()
                    state.fail(error.fault)
                    state.backoff()  # raises the error, because the deadline has passed
                    return LocalRead(self, name, start, length, crc)
            if hasattr(os, "posix_fadvise"):  # macOS does not have it
                os.posix_fadvise(file.descriptor, start, length, os.POSIX_FADV_WILLNEED)
        return LocalRead(self, name, start, length, crc)

    def close(self) -> None:
        self._files.clear()
        self._limited.close()

    def _open(self, state: RetryState, path: str, *, fresh: bool = False) -> OpenFile:
        if fresh:
            self._files.forget(path)
        return self._files.find(path) or self._in_time(state, partial(self._files.open, path))

    def _in_time(self, state: RetryState, work: Callable[[], T]) -> T:
        try:
            return self._limited.call(work, state.time_left)
        except OverdueError as error:
            reason = f"{error} from the disk or the server of its mount"
            raise FaultError(Fault(ErrorClass.TIMEOUTS, reason)) from None


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def _pread(file: OpenFile, start: int, length: int, *, fresh: bool) -> bytes:
    if start + length > _LONGEST:
        return b""
    if fresh and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.descriptor, start, length, os.POSIX_FADV_DONTNEED)
    return file.read(start, length)
