"""--deadline: the time before which a run stops with a checkpoint.

A restart by torchrun must not move a deadline of 06:00 to the next day, and +08:00 must not start again.
Therefore both count from the start of torchrun, or of this process if there is none.
"""

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from sa1b.errors import UsageError

_CLOCK = re.compile(r"(\+?)(\d{1,2}):(\d{2})")


def of(text: str | None) -> tuple[float | None, Callable[[], float]]:
    """The time of --deadline, None without one, and the clock that it is on, in seconds.

    A duration ends in time if the clock of the calendar is set meanwhile, which a time of day follows.

    Raises:
        UsageError: see `timestamp`.
    """
    moment = None if text is None else timestamp(text, started())
    if moment is None or text is None or not text.startswith("+"):
        return moment, time.time
    return time.monotonic() + moment - time.time(), time.monotonic


def timestamp(text: str, since: float) -> float:
    """The time of a deadline, in seconds of `time.time`.

    Args:
        text: HH:MM, the next such time on the clock of this machine; +HH:MM, hours and minutes; or an ISO
            date and time, of the machine's time zone if it names none.
        since: start of the run; deadlines are later.

    Raises:
        UsageError: the text is none of these, or the time was before the start of the run.
    """
    found = _CLOCK.fullmatch(text)
    if found is None:
        try:
            if "T" not in text and " " not in text:  # fromisoformat accepts a date alone: midnight
                raise ValueError
            moment = datetime.fromisoformat(text).timestamp()
        except ValueError:
            raise _format_error(text) from None
        if moment <= since:
            raise UsageError(f"--deadline {text}: is past; pass a later time")
        return moment
    relative, hours, minutes = found[1] == "+", int(found[2]), int(found[3])
    if minutes > 59 or (hours > 23 and not relative):
        raise _format_error(text)
    if relative:
        return since + 60 * (60 * hours + minutes)
    start = datetime.fromtimestamp(since)
    on_that_day = start.replace(hour=hours, minute=minutes, second=0, microsecond=0)
    later = [on_that_day + timedelta(days=days) for days in (0, 1)]
    return next(moment.timestamp() for moment in later if moment.timestamp() > since)


def _format_error(text: str) -> UsageError:
    return UsageError(
        f"--deadline {text}: must be a time such as 06:30, a duration such as +08:00, or a date and time "
        "such as 2026-01-31T06:30"
    )


def started() -> float:
    """The start of torchrun, or of this process if there is none, in seconds of `time.time`."""
    process = "self" if "TORCHELASTIC_RUN_ID" not in os.environ else str(os.getppid())
    with suppress(OSError, ValueError, IndexError, StopIteration):
        # The name of the process, in parentheses, may contain spaces.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot
    return time.time()
