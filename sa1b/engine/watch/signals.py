"""State of this rank for the others: signals, the time before which the run stops, and failed writes. The end
of a rank that stops or fails: its message and its exit code.

A restart by torchrun must not move a --deadline of 06:00 to the next day, and +08:00 must not start again.
Therefore both count from the start of torchrun, or of this process if there is none.
"""

import contextlib
import json
import logging
import os
import re
import select
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from enum import IntEnum
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from sa1b.console import broken_pipe
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.errors import Sa1bError, UsageError
from sa1b.limit import Limited, OverdueError

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_AGAIN = "then start the same command again: it resumes from the newest checkpoint"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last one is often sent by SLURM's --signal

TABLE_SIGNAL = signal.SIGUSR2


def handle(number: signal.Signals, handler: Callable[[int, object], None] | signal.Handlers) -> None:
    """Set the handler of a signal, unless training runs in another thread than the main one."""
    # Python accepts handlers from the main thread only. A process whose main thread does not train, such as a
    # worker of Ray, belongs to another program, which handles the signals itself.
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, handler)


class WriteError(Sa1bError):
    """A file of the run cannot be written; the message names it and the remedy."""


class Stop(IntEnum):
    """Why a run stops; if ranks have different reasons, the largest one counts."""

    NONE = 0
    TERMINATED = 1  # SIGTERM; from torchrun, it may concern one machine only
    ASKED = 2  # SIGINT or SIGUSR1
    DEADLINE = 3


# Agents of torchrun look for new machines every second (torch 2.13, dynamic_rendezvous.py, cache_duration).
_AGENTS_NOTICE = 5.0
_STEPS = 16  # number of last steps of which the longest counts


class Requests:
    """What this rank is asked to do after its current step, and its first failed write.

    The run stops before `deadline`, in seconds of `clock`; None: no deadline. `limit`: seconds that the write
    of a file may take.

    Attributes:
        failure, asked: this rank's first failed write, and why this rank was asked to stop.
        table_asked: whether a signal to this rank requested the table of the ranks.
        stop, failed: what all ranks were asked; see `sa1b.engine.watch.control.Control`.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        deadline: float | None = None,
        clock: Callable[[], float] = time.time,
        limit: float = 300.0,
    ) -> None:
        self._limit, self._limited = limit, Limited()
        self.failure: WriteError | None = None
        self.asked = Stop.NONE
        self.table_asked = False
        self.stop = Stop.NONE
        self.failed = False
        self._rank_info = rank_info
        self._deadline = deadline
        self._clock = clock
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._checkpoint = 0.0

    def took(self, step: float, checkpoint: float) -> None:
        """Record the seconds of a step and of the newest checkpoint, which must fit before the deadline."""
        self._steps.append(step)
        self._checkpoint = checkpoint

    def install(self) -> None:
        """Install handlers of the signals to stop and to print the table of the ranks; see `handle`."""
        for number in SIGNALS:
            handle(number, self._on_signal)
        handle(TABLE_SIGNAL, self._on_table_signal)

    @property
    def restarts(self) -> bool:
        """Whether ranks end with an error after the stop, because one of several machines leaves or joins."""
        # Every torchrun sends SIGTERM to its ranks if a machine joins, and if it gets SIGTERM itself. If a
        # rank of another machine ended with 0, its torchrun would take the run for complete: it would end it
        # on all machines, or wait 300 s for a torchrun that has left (torch 2.13,
        # torch/distributed/elastic/agent/server/api.py).
        machines = int(os.environ.get("GROUP_WORLD_SIZE", "0"))
        return self.stop is Stop.TERMINATED and not self.failed and machines > 1

    def wait_for_agent(self) -> None:
        """Wait until torchrun asks this rank to end: it does not count a restart that it begins itself."""
        end = time.monotonic() + _AGENTS_NOTICE
        while self.asked is Stop.NONE and time.monotonic() < end:
            time.sleep(0.05)

    def own_stop(self) -> Stop:
        """Why this rank asks to stop: a signal, or a deadline too near for a step and a checkpoint."""
        due = self._deadline is not None and self._clock() + self._needed() >= self._deadline
        return Stop.DEADLINE if due else self.asked

    def write(self, path: Path, work: Callable[[], object]) -> None:
        """Write a file; if that fails, log the error and stop all ranks. WriteError: see `within`.

        The ranks stop after their step and try to save a checkpoint. Older checkpoints are kept.
        """
        try:
            self.within(path, work)
        except OSError as error:
            self.fail(
                WriteError(
                    f"{error.filename or path}: cannot be written ({error.strerror or error}); "
                    f"free space or repair the disk, {_AGAIN}"
                )
            )

    def fail(self, error: WriteError) -> None:
        """Log an error and stop all ranks after their step, unless this rank has failed before."""
        if self.failure is None:
            self.failure = error
            _LOG.error("rank %d: %s", self._rank_info.rank, error)

    def within(self, path: Path, work: Callable[[], T]) -> T:
        """The result of work on a file; WriteError if it has not ended within the limit: the disk hangs."""
        try:
            return self._limited.call(work, self._limit)
        except OverdueError as error:
            raise WriteError(
                f"{path}: {error} (--data.deadline); check the disk or the server of its mount, {_AGAIN}"
            ) from None

    def close(self) -> None:
        """End the threads that write."""
        self._limited.close()

    def check(self) -> None:
        """At the end of a run, raise the WriteError that stopped it, with the rank that had it."""
        if self.failure is not None:
            raise self.failure
        if self.failed:
            raise WriteError(
                "--out: another rank cannot write its files or open its server of figures; see that rank's "
                "message"
            )

    def _needed(self) -> float:
        return max(self._steps, default=0.0) + self._checkpoint

    def _on_table_signal(self, number: int, frame: object) -> None:
        self.table_asked = True

    def _on_signal(self, number: int, frame: object) -> None:
        self.asked = max(self.asked, Stop.TERMINATED if number == signal.SIGTERM else Stop.ASKED)
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            # A second signal ends the process at once. If the first one went to the whole process group, as
            # Ctrl-C does, torchrun sends the second one itself, and kills after 30 s.
            signal.signal(number, signal.SIG_DFL)
            if self._rank_info.rank == 0:
                name = signal.Signals(number).name
                _write(
                    f"\n{name}: stopping after this step, with a checkpoint; {name} again ends the run at "
                    "once, without one\n"
                )
        elif number != signal.SIGUSR1:
            limit = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
            if self._needed() > limit:
                _write(self._too_slow(signal.Signals(number).name, limit))

    def _too_slow(self, name: str, limit: float) -> str:
        return (
            f"\nrank {self._rank_info.rank}: {name}: torchrun kills ranks {limit:.0f} s after it, "
            f"and a step and a checkpoint took {self._needed():.0f} s; if they do not fit, the run resumes "
            "from an older checkpoint; --deadline, and SIGUSR1 to a rank, have no such limit\n"
        )


def _write(text: str) -> None:
    """Write to stderr in a signal handler; not by print, which the signal may have interrupted."""
    with suppress(OSError):  # a closed terminal or pipe must not end the run
        os.write(2, text.encode())


_CLOCK = re.compile(r"(\+?)(\d{1,2}):(\d{2})")


def deadline_of(text: str | None) -> tuple[float | None, Callable[[], float]]:
    """The time of --deadline, None without one, and the clock that it is on, in seconds. UsageError as
    `timestamp`. A duration ends in time if the clock of the calendar is set meanwhile, which a time of day
    follows.
    """
    moment = None if text is None else timestamp(text, started())
    if moment is None or text is None or not text.startswith("+"):
        return moment, time.time
    return time.monotonic() + moment - time.time(), time.monotonic


def timestamp(text: str, since: float) -> float:
    """The time of a deadline, in seconds of `time.time`; UsageError for another form, or one before `since`.

    The text is HH:MM, the next such time on the clock of this machine; +HH:MM, hours and minutes; or an ISO
    date and time, of the machine's time zone if it names none.
    """
    match = _CLOCK.fullmatch(text)
    if match is None:
        try:
            if "T" not in text and " " not in text:  # fromisoformat accepts a date alone: midnight
                raise ValueError
            moment = datetime.fromisoformat(text).timestamp()
        except ValueError:
            raise _format_error(text) from None
        if moment <= since:
            raise UsageError(f"--deadline {text}: is past; pass a later time")
        return moment
    relative, hours, minutes = match[1] == "+", int(match[2]), int(match[3])
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


PEER_LOST = (
    *("gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    "Application timeout caused pair closure",  # of gloo, where the operation has a thread of its own
)


def lost_peer(error: Exception) -> bool:
    """Whether an error of a collective means that another rank ended or does not answer."""
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in PEER_LOST)


def explain(error: Exception, rank: int, world_size: int, images: int = 1) -> str:
    """The message of a failing rank: its error, or one line if it only lost another rank. `images`: of its
    micro-batches.

    Errors of this package and of the operating system are printed without a traceback, all others with one.
    """
    lines = [f"rank {rank}: {note}" for note in getattr(error, "__notes__", [])]
    where = "error" if world_size == 1 else f"error on rank {rank}"
    if isinstance(error, Sa1bError | OSError):
        return "\n".join([*lines, f"{where}: {error}\n"])
    text = str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        reason = (text.splitlines() or ["no memory is left"])[0]
        smaller = f"--data.micro-batch (now {images}), " if images > 1 else ""
        advice = f"pass a smaller {smaller}--data.masks or --data.prefetch, or a smaller model"
        return "\n".join([*lines, f"{where}: out of memory ({reason}); {advice}\n"])
    if lost_peer(error):
        reason = (text.splitlines() or [type(error).__name__])[0]
        lines.insert(0, f"rank {rank} ends because another rank ended or does not answer ({reason})")
        return "\n".join([*lines, ""])
    trace = "".join(traceback.format_exception(error))
    return f"{trace}{where}: {type(error).__name__}: {text}\n"


def tell_torchrun(error: Exception) -> None:
    """Write the error to the file for torchrun's summary, unless this rank only lost another one."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and not lost_peer(error):
        extra = {"timestamp": str(int(time.time()))}
        document = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps(document), encoding="utf-8")


def stdout_is_closed() -> bool:
    """Whether the error is a closed standard output, and not another closed pipe or socket."""
    poll = select.poll()
    poll.register(1, 0)
    return bool(poll.poll(0))


def refused(error: UsageError, rank: int, *, on_all: bool) -> int:
    """Print why this rank cannot start, and return the exit code. With `on_all`, all ranks have this error.
    Else one machine may lack a file or a GPU, and its ranks must print it.
    """
    first = rank == 0 or (not on_all and os.environ.get("LOCAL_RANK") == "0")
    if not first and "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(5)  # torchrun ends all ranks of a machine, also those with the same error, when one ends
    if rank == 0 or not on_all:  # one write, so that lines of several ranks do not mix
        where = "error" if rank == 0 else f"error on rank {rank} (host {socket.gethostname()})"
        sys.stderr.write(f"{where}: {error}\n")
    return 2


def exit_at_once(code: int) -> NoReturn:
    """End this process without waiting for other ranks or for threads."""
    # A failed rank must not destroy its process group, because that waits for the other ranks. A successful
    # rank has written and closed everything. Threads of torch's process groups that outlive the interpreter
    # can abort it, and torchrun would then report a successful run as failed.
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = code or broken_pipe()
    sys.stderr.flush()
    os._exit(code)


def how_it_stopped(step: int, checkpoint: str, deadline: str | None, stop: Stop) -> str:
    """The last line of a run that was asked to stop and stopped after `step` steps: what resumes it."""
    before = f", before --deadline {deadline}" if stop is Stop.DEADLINE else ""
    if not step:
        return f"stopped before the first step{before}; run the same command to start again"
    before, started = f"{before}," if before else "", ""
    later = " with a later --deadline" if before and "T" in str(deadline) else ""
    unless = ""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        unless = "unless torchrun starts the ranks again, " if stop is Stop.TERMINATED else ""
        with suppress(OSError):
            words = Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8").split("\0")[:-1]
            # torchrun may have ended before its ranks, which then have another parent.
            started = f": {shlex.join(words)}" if words[-len(sys.argv) + 1 :] == sys.argv[1:] else ""
    again = f"{unless}run the same command{later} to resume from {checkpoint}{started}"
    return f"stopped after step {step:,}{before} and saved a checkpoint; {again}"
