"""What happened to the reads of one process, counted by cause."""

import threading
from collections import Counter
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Counters:
    """A snapshot. Counts of attempts, unless stated otherwise; the causes exclude one another.

    Attributes:
        reads: ranges asked for by the caller.
        attempts: requests made for them; attempts - reads were repetitions.
        bytes: bytes handed to the caller.
        resets: connections refused, reset or closed in the middle.
        timeouts: no complete answer within the time of one attempt.
        throttled: 503 and 429, "slow down".
        server_errors: other answers of the 5xx class.
        short: bodies of another length than the range.
        crc: bodies of the right length with a wrong crc32c.
        device: input/output errors of a local or mounted disk.
        expired: answers that the credentials have expired.
        slow: attempts that succeeded, but took longer than `Patience.slow` seconds.
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
        """Attempts that failed and were, or could have been, repeated."""
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


class Tally:
    """Counters that threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._waited = 0.0

    def add(self, **counts: int) -> None:
        """Add to the counters named."""
        with self._lock:
            self._counts.update(counts)

    def wait(self, seconds: float) -> None:
        """Add to the seconds spent between attempts."""
        with self._lock:
            self._waited += seconds

    def snapshot(self) -> Counters:
        with self._lock:
            return Counters(**self._counts, waited=self._waited)
