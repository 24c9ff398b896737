"""Retries of failed reads: checksums, counters, waiting times, the deadline, and the errors that end a read.

`RetryState` is the state of one read. It does no input or output and does not sleep, so that threads and
coroutines share the implementation and a test can use its own clock.

Retries use exponential backoff with full jitter: the wait before the n-th retry is a random time between 0
and min(max_backoff, initial_backoff * 2**n), so that thousands of readers that failed at the same time do not
retry at the same time (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).
"""

import asyncio
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from crc32c import crc32c

from sa1b.errors import printable
from sa1b.storage.errors import (
    FULL,
    Counters,
    DamageError,
    DeniedError,
    ErrorClass,
    ExpiredError,
    Fault,
    MissingError,
    RequestPlace,
    StorageError,
    UnavailableError,
)
from sa1b.storage.protocols import kind_of

CERTIFICATES = (
    "a file with the certificate of the store's authority is set with AWS_CA_BUNDLE (s3://) or SSL_CERT_FILE "
    "(https://)"
)
_MIN_TIMEOUT = 1.0  # seconds that the last attempt before the deadline gets at least
_system = random.SystemRandom()
_FIRST_WARNING = 3.0  # seconds that a read is silent about an outage
_SILENCE = 15.0  # seconds between two warnings of a process
_warned = [float("-inf")]  # time of the last warning
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a range and its crc32c; `start` is counted from the start of the range."""

    start: int
    length: int
    crc: int


Crc = int | tuple[Part, ...] | None


def parts_of(crc: Crc, length: int) -> tuple[Part, ...]:
    """The parts of a range of `length` bytes that are verified."""
    if crc is None:
        return ()
    return (Part(0, length, crc),) if isinstance(crc, int) else crc


def wrong_parts(data: bytes, parts: tuple[Part, ...]) -> Iterator[tuple[Part, int]]:
    """Parts whose crc32c is wrong, each with the value found."""
    view = memoryview(data)
    for part in parts:
        if (actual := crc32c(view[part.start : part.start + part.length])) != part.crc:
            yield part, actual


class CounterSet:
    """Counters that several threads may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._waited = 0.0

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():  # Counter.update takes three times as long
                self._counts[name] += count

    def add_wait(self, seconds: float) -> None:
        """Add to the seconds spent between attempts."""
        with self._lock:
            self._waited += seconds

    def snapshot(self) -> Counters:
        with self._lock:
            return Counters(**self._counts, waited=self._waited)


def random_fraction() -> float:
    """A random number in [0, 1) from the operating system, which has no state that a fork could copy."""
    return _system.random()


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Time limits of a reader in seconds, with its clock and its source of random numbers."""

    deadline: float = 300.0  # of one read over all its attempts, from the start of the first attempt
    attempt_timeout: float = 15.0  # of one attempt, plus `length / min_throughput`
    min_throughput: float = 256 * 1024  # bytes per second below which a response counts as stalled
    initial_backoff: float = 0.1  # upper limit of the random wait before the first retry
    max_backoff: float = 10.0  # upper limit of any wait
    slow_after: float = 5.0  # successful attempts that take longer are counted as slow
    clock: Callable[[], float] = time.monotonic  # monotonic seconds
    sleep: Callable[[float], object] = time.sleep  # in a thread
    async_sleep: Callable[[float], Awaitable[object]] = asyncio.sleep  # in a coroutine
    random: Callable[[], float] = random_fraction  # in [0, 1)


class RetryState:
    """The attempts of one read.

    Every attempt is `start_attempt()`, the request, then `accept(data)` or `fail(fault)`. Until the bytes are
    correct, `backoff()` returns the seconds to sleep before the next attempt.

    The URL is for messages. `length` is None for a request that is not a range (the size of an object). `crc`
    is the crc32c of the range or of its parts; None: unknown.
    """

    def __init__(
        self, url: str, start: int, length: int | None, crc: Crc, policy: RetryPolicy, counters: CounterSet
    ) -> None:
        self.url, self.start, self.length = url, start, length or 0
        self._parts = parts_of(crc, self.length)
        self._is_range = length is not None
        self._policy, self._counters = policy, counters
        self._read_start = self._attempt_start = policy.clock()
        self._attempts = 0
        self._wrong_crcs: set[tuple[int, int]] = set()
        self.renewed_credentials = False
        self.last_fault: Fault | None = None
        self.short_reads = 0

    def start_attempt(self) -> float:
        """Count an attempt that starts now; returns its timeout in seconds."""
        self._attempts += 1
        self._counters.add(attempts=1)
        self._attempt_start = self._policy.clock()
        timeout = self._policy.attempt_timeout + self.length / self._policy.min_throughput
        return min(timeout, max(self._remaining(), _MIN_TIMEOUT))

    def accept(self, data: bytes) -> bool:
        """Whether `data` has the right length and crc32c.

        The same wrong crc32c twice means that the stored bytes are damaged, and raises DamageError, because
        damage in transit does not repeat. Different wrong values mean damage in transit, which a retry fixes.
        """
        if len(data) != self.length:
            received = f"{len(data):,} bytes received, {self.length:,} requested"
            self._record(Fault(ErrorClass.SHORT, received))
            return False
        for part, actual in wrong_parts(data, self._parts):
            mismatch = f"crc32c {actual:#010x}, {part.crc:#010x} expected"
            self._record(Fault(ErrorClass.CRC, mismatch))
            start = self.start + part.start
            if (start, actual) in self._wrong_crcs:
                raise DamageError(
                    f"{self.url}, bytes {start:,} to {start + part.length:,}: {mismatch}, in two separate "
                    "reads; the stored bytes are damaged: restore the file from a copy",
                    url=self.url,
                    start=start,
                    length=part.length,
                    expected=part.crc,
                    found=actual,
                )
            self._wrong_crcs.add((start, actual))
            return False
        self.succeed(len(data))
        return True

    def succeed(self, size: int = 0) -> None:
        """Count a successful attempt that returned `size` bytes."""
        seconds = self._policy.clock() - self._attempt_start
        self._counters.add(reads=1, bytes=size, slow=int(seconds > self._policy.slow_after))

    def fail(self, fault: Fault) -> None:
        """Count a failed attempt; MissingError, DeniedError or StorageError: a retry cannot help."""
        self._record(fault)
        if fault.error_class is ErrorClass.MISSING:
            is_remote = "://" in self.url
            what = (
                f"no such object ({fault.message}); check the URL"
                if is_remote
                else "no such file; check the path"
            )
            raise MissingError(f"{self.url}: {what}", **self._range)
        if fault.error_class is ErrorClass.DENIED:
            is_remote = "://" in self.url
            way = kind_of(self.url).advice if is_remote else "change its permissions, or run as another user"
            raise DeniedError(f"{self.url}: access denied ({fault.message}); {way}", **self._range)
        if fault.error_class is ErrorClass.EXPIRED:
            if self.renewed_credentials:
                raise ExpiredError(
                    f"{self.url}: expired ({fault.message}); {kind_of(self.url).advice}", **self._range
                )
            self.renewed_credentials = True
        if fault.error_class is ErrorClass.REFUSED:
            way = "check the URL and the credentials"
            if "CERTIFICATE_VERIFY_FAILED" in fault.message:
                way = CERTIFICATES
            elif any(code in fault.message for code in FULL):
                way = "the store is full: free space in it, or raise its quota"
            raise StorageError(f"{self}: the request was refused ({fault.message}); {way}", **self._range)

    def check_end(self, size: int) -> None:
        """DamageError if an object of `size` bytes ends before the range; for a short read."""
        end = self.start + self.length
        if size < end:
            raise DamageError(
                f"{self}: the object ends at byte {size:,}; it is truncated or was replaced: restore it "
                "from a copy",
                expected=end,
                found=size,
                **self._range,
            )

    def backoff(self) -> float:
        """Seconds to sleep before the next attempt; UnavailableError: the deadline has passed."""
        remaining = self._remaining()
        last_error = self.last_fault.message if self.last_fault else "no attempt was made"
        if remaining <= 0:
            counters = self._counters.snapshot()
            raise UnavailableError(
                f"{self}: unavailable: {self._attempts} attempts in {self._policy.deadline:g} s; "
                f"last: {last_error}; this process: {counters}",
                last_error=last_error,
                counters=counters,
                **self._range,
            )
        ceiling = self._policy.initial_backoff * 2.0 ** min(self._attempts - 1, 60)
        seconds = min(self._policy.random() * min(ceiling, self._policy.max_backoff), remaining)
        self._warn(seconds, remaining, last_error)
        self._counters.add_wait(seconds)
        return seconds

    def silent_time(self, timeout: float) -> float:
        """Seconds of an attempt that starts now until `say_waiting`: later for a response of many bytes."""
        waited = self._policy.clock() - self._read_start
        usual = self.length / self._policy.min_throughput
        return min(timeout, (max(_FIRST_WARNING - waited, 0.0) or _FIRST_WARNING) + usual)

    def say_waiting(self) -> None:
        """Log that an attempt has no response yet: without a response, the attempt fails only at its
        timeout.
        """
        self._warn(_FIRST_WARNING, self._remaining(), "no response yet")

    def _warn(self, wait: float, remaining: float, last_error: str) -> None:
        """Log from time to time that a store does not respond, so that a command does not seem to hang."""
        now = self._policy.clock()
        if now + wait - self._read_start >= _FIRST_WARNING and abs(now - _warned[0]) >= _SILENCE:
            _warned[0] = now
            _LOG.warning("%s; retrying for up to %.0f s more", printable(f"{self}: {last_error}"), remaining)

    def __str__(self) -> str:
        if not self._is_range:
            return self.url
        return f"{self.url}, bytes {self.start:,} to {self.start + self.length:,}"

    @property
    def _range(self) -> RequestPlace:
        return {"url": self.url, "start": self.start, "length": self.length}

    @property
    def time_left(self) -> float:
        """Seconds until the deadline, for an attempt that starts now."""
        return max(self._remaining(), _MIN_TIMEOUT)

    def _remaining(self) -> float:
        return self._read_start + self._policy.deadline - self._policy.clock()

    def _record(self, fault: Fault) -> None:
        self.last_fault = fault
        if fault.error_class is ErrorClass.SHORT:
            self.short_reads += 1
        if fault.error_class.transient:
            self._counters.add(**{fault.error_class.value: 1})
