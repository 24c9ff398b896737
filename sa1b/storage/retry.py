"""How long one read goes on, how it waits between attempts, and when it gives up and with which error.

The state of a read is an `Effort`; it does no input or output and sleeps for nobody, so that threads and
coroutines use the same one, and a test can drive it with a clock of its own.

Waits follow "exponential backoff with full jitter": before the n-th repetition a random time between 0 and
min(longest_wait, first_wait * 2**n), so that thousands of readers that failed together do not return
together (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypedDict

from sa1b.storage.checksum import Crc, parts_of, wrong_parts
from sa1b.storage.classify import Cause, Fault
from sa1b.storage.counters import Tally
from sa1b.storage.errors import (
    DamageError,
    DeniedError,
    ExpiredError,
    MissingError,
    StorageError,
    UnavailableError,
)

CREDENTIALS = (
    "credentials are looked up in this order: the options key, secret, token, profile or anon; "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN); the profile AWS_PROFILE in "
    "~/.aws/credentials and ~/.aws/config; the container's or the machine's role. "
    "AWS_ENDPOINT_URL names a store other than Amazon's. "
    "A store also answers so for an object that does not exist where listing is not allowed"
)
_LAST = 1.0  # seconds that the last attempt before the deadline gets at least
_system = random.SystemRandom()


class _Place(TypedDict):
    url: str
    start: int
    length: int


def draw() -> float:
    """A random number in [0, 1) from the system: processes forked from one another do not share its state."""
    return _system.random()


@dataclass(frozen=True, slots=True)
class Patience:
    """Times of a reader, in seconds, and what measures them.

    Attributes:
        deadline: of one read over all its attempts, counted from the first one.
        attempt: of one attempt, plus `length / slowest`.
        slowest: bytes a second below which an answer counts as stalled.
        first_wait: upper limit of the random wait before the first repetition.
        longest_wait: upper limit of any wait.
        slow: an attempt that took longer is counted as slow.
        clock: seconds that only run forward.
        sleep: waits in a thread.
        pause: waits in a coroutine.
        draw: random numbers in [0, 1).
    """

    deadline: float = 300.0
    attempt: float = 15.0
    slowest: float = 256 * 1024
    first_wait: float = 0.1
    longest_wait: float = 10.0
    slow: float = 5.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    pause: Callable[[float], Awaitable[object]] = asyncio.sleep
    draw: Callable[[], float] = draw


class Effort:
    """The attempts of one read.

    Every attempt is `begin()`, the request, then `accept(data)` or `failed(fault)`; when the bytes are not
    good yet, `wait()` gives the seconds to sleep before the next one.

    Args:
        url: path or URL of the object, for messages.
        start: first byte of the range.
        length: bytes of the range; None for a request that is not a range (the size of an object).
        crc: crc32c of the range or of its parts, None where it is not known.
    """

    def __init__(
        self, url: str, start: int, length: int | None, crc: Crc, patience: Patience, tally: Tally
    ) -> None:
        self.url, self.start, self.length = url, start, length or 0
        self._parts = parts_of(crc, self.length)
        self._exact = length is not None
        self._patience, self._tally = patience, tally
        self._first = self._began = patience.clock()
        self._attempts = 0
        self._seen: set[tuple[int, int]] = set()
        self._asked_again = False
        self.last: Fault | None = None
        self.shorts = 0

    def begin(self) -> float:
        """Note that an attempt begins now; the seconds it may take."""
        self._attempts += 1
        self._tally.add(attempts=1)
        self._began = self._patience.clock()
        limit = self._patience.attempt + self.length / self._patience.slowest
        return min(limit, max(self._remaining(), _LAST))

    def accept(self, data: bytes) -> bool:
        """Whether these are the bytes.

        A wrong crc32c that comes twice the same is what is stored: bits that flip on the way do not flip
        twice alike. Different wrong values are the way's fault, and asking again helps.

        Raises:
            DamageError: the stored bytes have another crc32c.
        """
        if len(data) != self.length:
            self._note(Fault(Cause.SHORT, f"{len(data):,} bytes came, {self.length:,} were asked for"))
            return False
        for part, found in wrong_parts(data, self._parts):
            words = f"crc32c {found:#010x}, {part.crc:#010x} expected"
            self._note(Fault(Cause.CRC, words))
            start = self.start + part.start
            if (start, found) in self._seen:
                raise DamageError(
                    f"{self.url}, bytes {start:,} to {start + part.length:,}: {words}, in two separate "
                    "reads: the stored bytes are damaged",
                    url=self.url,
                    start=start,
                    length=part.length,
                    expected=part.crc,
                    found=found,
                )
            self._seen.add((start, found))
            return False
        self.done(len(data))
        return True

    def done(self, size: int = 0) -> None:
        """Note that the attempt gave what was asked for."""
        took = self._patience.clock() - self._began
        self._tally.add(reads=1, bytes=size, slow=int(took > self._patience.slow))

    def failed(self, fault: Fault) -> None:
        """Note a failed attempt.

        Raises:
            MissingError, DeniedError, StorageError: asking again cannot help.
        """
        self._note(fault)
        if fault.cause is Cause.MISSING:
            raise MissingError(f"{self.url}: no such object ({fault.words})", **self._place)
        if fault.cause is Cause.DENIED:
            advice = CREDENTIALS if "://" in self.url else "this user may not read it"
            raise DeniedError(f"{self.url}: access denied ({fault.words}); {advice}", **self._place)
        if fault.cause is Cause.EXPIRED:
            if self._asked_again:
                raise ExpiredError(f"{self.url}: expired ({fault.words}); {CREDENTIALS}", **self._place)
            self._asked_again = True
        if fault.cause is Cause.REFUSED:
            raise StorageError(f"{self}: the request was refused ({fault.words})", **self._place)

    def sized(self, size: int) -> None:
        """Judge a range that came short by the size of the object, in bytes.

        Raises:
            DamageError: the object ends before the range does.
        """
        end = self.start + self.length
        if size < end:
            raise DamageError(
                f"{self}: the object ends at byte {size:,}: cut off, or another object of that name",
                expected=end,
                found=size,
                **self._place,
            )

    def wait(self) -> float:
        """Seconds to sleep before the next attempt.

        Raises:
            UnavailableError: the deadline has passed.
        """
        remaining = self._remaining()
        words = self.last.words if self.last else "no attempt was made"
        if remaining <= 0:
            counters = self._tally.snapshot()
            raise UnavailableError(
                f"{self}: unavailable: {self._attempts} attempts in {self._patience.deadline:g} s; "
                f"last: {words}; this process: {counters}",
                cause=words,
                counters=counters,
                **self._place,
            )
        ceiling = self._patience.first_wait * 2.0 ** min(self._attempts - 1, 60)
        seconds = min(self._patience.draw() * min(ceiling, self._patience.longest_wait), remaining)
        self._tally.wait(seconds)
        return seconds

    def __str__(self) -> str:
        if not self._exact:
            return self.url
        return f"{self.url}, bytes {self.start:,} to {self.start + self.length:,}"

    @property
    def _place(self) -> _Place:
        return {"url": self.url, "start": self.start, "length": self.length}

    def _remaining(self) -> float:
        return self._first + self._patience.deadline - self._patience.clock()

    def _note(self, fault: Fault) -> None:
        self.last = fault
        if fault.cause is Cause.SHORT:
            self.shorts += 1
        if fault.cause.transient:
            self._tally.add(**{fault.cause.value: 1})
