"""Counters of the reads of one process, by error class."""

import threading
from collections import Counter
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Counters:
    """A snapshot of the counters. A failed attempt is counted in exactly one error class.

    Attributes:
        reads: ranges that were read.
        attempts: requests for these ranges; attempts - reads is the number of retries.
        bytes: bytes returned to the caller.
        resets: connections refused, reset or closed early.
        timeouts: no complete response within the timeout of one attempt.
        throttled: 503 and 429, "slow down".
        server_errors: other 5xx responses.
        short: responses with another length than the range, or with another range.
        crc: responses of the right length with a wrong crc32c.
        device: input/output errors of a local or mounted disk.
        expired: responses that the credentials or the signature have expired.
        slow: attempts that succeeded, but took longer than `RetryPolicy.slow_after` seconds.
        waited: seconds spent between attempts, over all reads.
    """

    reads: int = 0
    attempts: int = 0
    bytes: int = 0
    resets: int = 0
    timeouts: int = 0
    throttled: int = 0
    server_errors: int = 0
    short: int = 0
    crc: int = 0
    device: int = 0
    expired: int = 0
    slow: int = 0
    waited: float = 0.0

    @property
    def faults(self) -> int:
        """Attempts that failed with an error that a retry may fix."""
        return (
            self.resets
            + self.timeouts
            + self.throttled
            + self.server_errors
            + self.short
            + self.crc
            + self.device
            + self.expired
        )

    def __str__(self) -> str:
        """The counters that are not zero: `reads 3, attempts 5, resets 2`."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ", ".join(f"{name} {value:,.10g}" for name, value in named if value) or "nothing read"


class CounterSet:
    """Counters that several threads may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._waited = 0.0

    def add(self, **counts: int) -> None:
        """Add to counters by name."""
        with self._lock:
            self._counts.update(counts)

    def add_wait(self, seconds: float) -> None:
        """Add to the seconds spent between attempts."""
        with self._lock:
            self._waited += seconds

    def snapshot(self) -> Counters:
        """The counters now."""
        with self._lock:
            return Counters(**self._counts, waited=self._waited)
