"""Verified reads: the bytes of a range of a file or object, or an error that states the reason.

    with Reader("s3://bucket/sa1b") as reader:
        data = reader.read_range("sa1b-000020-0003.tar", 1_536, 330_000, crc=0x1C291CA3)

A reader has only settings until its first read. It can be pickled, forked and shared by threads. Every
process opens its own connections on its first read, with one thread and one event loop.
"""

import contextlib
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from crc32c import crc32c

from sa1b.arguments import BadType, BadValue, plain_root
from sa1b.limit import ForkLock
from sa1b.storage.errors import Counters, DamageError, ReplacedError, StorageError
from sa1b.storage.local import LocalOrigin, LocalRead
from sa1b.storage.remote import RemoteOrigin, generation
from sa1b.storage.retry import CounterSet, Crc, RetryPolicy

if TYPE_CHECKING:  # numpy, which its formula imports, is not needed to read
    from sa1b.storage.range_cache import CachedRead, RangeCache

T = TypeVar("T")
PIECE = 8 << 20  # bytes of one request for a large object
_REPLACEMENTS = 8  # times that a small object may be replaced while it is read
_AGREEMENTS = 16  # reads of one range before giving up on two that agree


@dataclass(frozen=True, slots=True)
class Range:
    """A range of a file or object."""

    name: str  # relative to the reader's root
    start: int
    length: int
    crc: Crc = None  # crc32c of the range, or of its parts (sa1b.storage.retry); None: unknown


class Reader:
    """Reads ranges below a root: a folder, or a URL that fsspec supports (s3://, http://, memory://, ...).

    Every read is verified by CRC-32C and retried with exponential backoff and jitter until a deadline. It is
    retried after connection resets, timeouts, 5xx and 429 responses, short bodies, wrong checksums and
    input/output errors of a disk; all other errors are raised at once, see sa1b.storage.errors. A range
    without a crc is not verified: a bit flipped in transit goes unnoticed.

    Credentials come from the standard locations, or from `options`, which are passed to fsspec's file system,
    such as {"anon": True} or {"endpoint_url": "http://127.0.0.1:9000"}.

    Args:
        deadline: seconds of one read over all its attempts, from the start of the first attempt.
        attempt_timeout: seconds of one attempt, plus one second for every 256 KiB of the range.
        attempts_in_flight: requests to a URL at the same time, per process; a range that waits for its retry
            does not count. With a folder, read_ranges uses the prefetch of the operating system instead.
        retry_policy: all times and the clock; overrides deadline and attempt_timeout.

    Attributes:
        cache: a cache on a local disk through which `submit` reads; None: every range is read from the root.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        deadline: float = 300.0,
        attempt_timeout: float = 15.0,
        attempts_in_flight: int = 16,
        options: Mapping[str, Any] | None = None,
        retry_policy: RetryPolicy | None = None,
    ) -> None:
        if attempts_in_flight < 1:
            raise BadValue(f"attempts_in_flight is {attempts_in_flight}; at least 1")
        text = plain_root(root)
        self.is_local = "://" not in text
        self.root = text.rstrip("/") if not self.is_local else (text.rstrip("/") or "/")
        self._folder = Path(self.root).absolute()  # of a local root: the process may change its folder
        self.retry_policy = retry_policy or RetryPolicy(deadline=deadline, attempt_timeout=attempt_timeout)
        self.attempts_in_flight = attempts_in_flight
        self.cache: RangeCache | None = None
        self._options = dict(options or {})
        self._prepare()

    def read_range(self, name: str, start: int, length: int, crc: Crc = None) -> bytes:
        """The `length` bytes of one range, verified by `crc`. Thread-safe.

        A range of length 0 is empty and needs no request. The name is relative to the root, with "/" between
        folders. `crc` is the crc32c of the range, or of its parts; None: the range is not verified.

        Raises:
            MissingError: the object does not exist.
            ReplacedError: the object is not the one that this process has read first. Detected in S3 stores
                and on web servers that send an ETag.
            DeniedError: the store denies access; ExpiredError is a subclass.
            DamageError: the stored bytes have another crc32c, or the object ends too early.
            UnavailableError: the deadline passed.
            StorageError: the store rejects the request.
            ValueError: a negative range, or a name outside of the root.
        """
        _check(name, start, length)
        return self._origin().read(name, start, length, crc) if length else b""

    def submit(self, item: Range) -> "Future[bytes] | LocalRead | CachedRead":
        """Start to read a range: `result()` returns or raises what `read_range` does; `cancel()` drops the
        read.
        """
        _check(item.name, item.start, item.length)
        if not item.length:
            return _nothing()
        origin = self._origin()
        if self.cache is not None:
            return self.cache.submit(origin, item.name, item.start, item.length, item.crc)
        return origin.submit(item.name, item.start, item.length, item.crc)

    def read_ranges(self, ranges: Iterable[Range], *, prefetch: int | None = None) -> Iterator[bytes]:
        """The bytes of many ranges, in their order, with many requests in flight.

        `ranges` is consumed lazily. At most `prefetch` ranges are in flight or in memory, by default 2 *
        attempts_in_flight, so that a slow first range does not stop the others. The error of a failed range
        is raised when the iterator reaches that range, as by read_range. Closing it early drops pending
        reads.
        """
        pending: deque[Future[bytes] | LocalRead | CachedRead] = deque()
        try:
            for item in ranges:
                pending.append(self.submit(item))
                if len(pending) >= (prefetch or 2 * self.attempts_in_flight):
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()

    def read_agreed(self, name: str, start: int, length: int, first: bytes | None = None) -> bytes:
        """A range without a known crc, read until two reads agree, so that damage in transit is detected.

        The bytes of an earlier read count as the first one. DamageError: no two of many reads agree; else as
        read_range.
        """
        seen = set() if first is None else {crc32c(first)}
        for _ in range(_AGREEMENTS):
            data = self._origin().read(name, start, length, None, fresh=True)
            crc = crc32c(data)
            if crc in seen:
                return data
            seen.add(crc)
        raise DamageError(
            f"{self.url(name)}, bytes {start:,} to {start + length:,}: differs in every read; "
            "check the disk, memory and network of this machine",
            url=self.url(name),
            start=start,
            length=length,
        )

    def read_whole(self, name: str, cap: int) -> bytes:
        """A small object, such as dataset.json. At a URL it is read twice, see `read_agreed`. Raises the
        errors of `read_range`; StorageError also if the object is larger than `cap` bytes.
        """
        for _ in range(_REPLACEMENTS):
            with contextlib.suppress(ReplacedError):  # while it was read
                return self._read_whole(name, cap)
        return self._read_whole(name, cap)

    def _read_whole(self, name: str, cap: int) -> bytes:
        self.forget(name)
        size = self.size(name)
        if size > cap:
            raise StorageError(
                f"{self.url(name)}: {size:,} bytes, at most {cap:,} expected; restore it from a copy",
                url=self.url(name),
            )
        if self.is_local or not size:
            return self.read_range(name, 0, size)
        pieces = self.read_ranges(pieces_of(name, size))
        starts = range(0, size, PIECE)
        return b"".join(
            self.read_agreed(name, at, len(piece), piece) for at, piece in zip(starts, pieces, strict=True)
        )

    def forget(self, name: str) -> None:
        """Accept another object of this name from the next read on, instead of a ReplacedError."""
        origin = self._origin()
        if isinstance(origin, RemoteOrigin):
            origin.forget(name)

    def size(self, name: str) -> int:
        """Size of a file or object in bytes. Raises the errors of read_range."""
        _check(name, 0, 0)
        return self._origin().size(name)

    def names(self, folder: str) -> list[str]:
        """Names of the files or objects directly in a folder, sorted; empty if it does not exist."""
        _check(folder, 0, 0)
        return self._origin().names(folder)

    def request(
        self,
        name: str,
        request: Callable[[Any], Awaitable[T]],
        *,
        size: int = 0,
        policy: RetryPolicy | None = None,
    ) -> "Future[T]":
        """Start a request that is not a read, such as a write, handled as reads are.

        `request` makes one attempt with fsspec's file system in the event loop of the storage thread, and
        returns a value other than None. It is called again after an error that a retry may fix; the failed
        attempt may have changed the store. The name is for messages. `size`: bytes that the request sends or
        receives, for the timeout of an attempt.
        """
        origin = self._origin()
        if isinstance(origin, LocalOrigin):
            raise BadType(f"{self.root} is a folder")
        return origin.request(name, request, size, policy)

    def url(self, name: str) -> str:
        """Path or URL of an object."""
        return f"{self.root.rstrip('/')}/{name}"

    def counters(self) -> Counters:
        """The counters of the reads of this process so far."""
        return self._origin().counters.snapshot()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Context of many reads; the end of the last one of this process closes files and connections."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                is_last = not self._users
            if is_last:
                self.close()

    def close(self) -> None:
        """Close files and connections, end the threads, reset the counters; a later read reconnects."""
        if self.cache is not None:
            self.cache.close()
        _close(self._origins)

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_origins", "_finalizer", "_lock", "_users")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def _prepare(self) -> None:
        self._origins: dict[int, LocalOrigin | RemoteOrigin] = {}
        self._lock, self._users = ForkLock(), 0
        self._finalizer = weakref.finalize(self, _close, self._origins)

    def _origin(self) -> LocalOrigin | RemoteOrigin:
        """The origin of this process. A forked child creates its own."""
        origin = self._origins.get(generation())
        return origin or self._origins.setdefault(
            generation(), self._make()
        )  # atomic: no lock that a fork could copy

    def _make(self) -> LocalOrigin | RemoteOrigin:
        counters = CounterSet()
        if self.is_local:
            return LocalOrigin(self._folder, self.retry_policy, counters)
        return RemoteOrigin(self.root, self._options, self.retry_policy, counters, self.attempts_in_flight)


def pieces_of(name: str, size: int) -> Iterator[Range]:
    """An object of `size` bytes as ranges of PIECE bytes."""
    return (Range(name, start, min(PIECE, size - start)) for start in range(0, size, PIECE))


def _check(name: str, start: int, length: int) -> None:
    if start < 0 or length < 0:
        raise BadValue(f"{name}: {length} bytes at {start} are not a range")
    if not name or name.startswith("/") or ".." in name.split("/"):
        raise BadValue(f"{name!r} is not the name of an object below a root")


def _nothing() -> "Future[bytes]":
    future: Future[bytes] = Future()
    future.set_result(b"")
    return future


def _close(origins: dict[int, LocalOrigin | RemoteOrigin]) -> None:
    origin = origins.pop(generation(), None)
    if origin is not None:
        origin.close()
