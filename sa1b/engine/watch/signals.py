"""Why a run stops, the time before which it does, and the end of a rank: its message and its exit code.

A restart by torchrun must not move a --deadline of 06:00 to the next day, and +08:00 must not start again.
Therefore both count from the start of torchrun, or of this process if there is none.
"""

import json
import os
import re
import select
import shlex
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from sa1b.console import broken_pipe
from sa1b.errors import Sa1bError, UsageError
from sa1b.storage.atomic import start_of

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last one is often sent by SLURM's --signal


class WriteError(Sa1bError):
    """A file of the run cannot be written; the message names it and the remedy."""


class Stop(IntEnum):
    """Why a run stops; if ranks have different reasons, the largest one counts."""

    NONE = 0
    TERMINATED = 1  # SIGTERM; from torchrun, it may concern one machine only
    ASKED = 2  # SIGINT or SIGUSR1
    DEADLINE = 3


def deadline_of(text: str | None) -> tuple[float | None, Callable[[], float]]:
    """The time of --deadline, None without one, and the clock that it is on, in seconds. A duration ends in
    time if the clock of the calendar is set meanwhile, which a time of day follows.
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
    match = re.fullmatch(r"(\+?)(\d{1,2}):([0-5]\d)", text)
    try:
        if match and match[1]:
            return since + 60 * (60 * int(match[2]) + int(match[3]))
        if match:
            start = datetime.fromtimestamp(since)
            that_day = start.replace(hour=int(match[2]), minute=int(match[3]), second=0, microsecond=0)
            both = (that_day.timestamp(), (that_day + timedelta(days=1)).timestamp())
            return next(moment for moment in both if moment > since)
        if "T" not in text and " " not in text:  # fromisoformat accepts a date alone: midnight
            raise ValueError
        moment = datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise UsageError(
            f"--deadline {text}: must be a time such as 06:30, a duration such as +08:00, or a date and time "
            "such as 2026-01-31T06:30"
        ) from None
    if moment <= since:
        raise UsageError(f"--deadline {text}: is past; pass a later time")
    return moment


def started() -> float:
    """The start of torchrun, or of this process if there is none, in seconds of `time.time`."""
    ticks = start_of(os.getpid() if "TORCHELASTIC_RUN_ID" not in os.environ else os.getppid())
    if ticks is None:  # systems without /proc
        return time.time()
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


PEER_LOST = (
    *("gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    "Application timeout caused pair closure",  # of gloo, where the operation has a thread of its own
)


def lost_peer(error: Exception) -> bool:
    """Whether an error of a collective means that another rank ended or does not answer."""
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in PEER_LOST)


_TIMED_OUT = re.compile(r"tim(ed|ing) ?out|timeout|did not answer", re.IGNORECASE)


def explain(error: Exception, rank: int, world_size: int, images: int = 1, *, starting: bool = False) -> str:
    """The message of a failing rank: its error, or one line if it only lost another rank. `images`: of its
    micro-batches; `starting`: no step was begun.

    Errors of this package and of the operating system are printed without a traceback, all others with one.
    """
    where, text = "error" if world_size == 1 else f"error on rank {rank}", str(error)
    notes = "".join(f"rank {rank}: {note}\n" for note in getattr(error, "__notes__", []))
    if isinstance(error, Sa1bError | OSError):
        return f"{notes}{where}: {error}\n"
    reason = (text.splitlines() or [type(error).__name__])[0]
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        smaller = f"--data.micro-batch (now {images}), " if images > 1 else ""
        advice = f"pass a smaller {smaller}--data.masks or --data.prefetch, or a smaller model"
        return f"{notes}{where}: out of memory ({reason}); {advice}\n"
    if not lost_peer(error):
        trace = "".join(traceback.format_exception(error))
        return f"{trace}{where}: {type(error).__name__}: {text}\n"
    line = f"rank {rank} ends because another rank ended or does not answer ({reason})"
    line = "; ".join([line, *getattr(error, "__notes__", [])])
    if starting and _TIMED_OUT.search(text):
        names = ", ".join(name for _, name in socket.if_nameindex())
        line += (
            "; if the ranks run, set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME on each machine to the "
            f"interface that reaches the others; {socket.gethostname()} has {names}"
        )
    return f"{line}\n"


def failed(error: Exception, rank: int, world_size: int, images: int, *, starting: bool) -> int:
    """Print why this rank fails, see `explain`, and return the exit code."""
    tell_torchrun(error)
    text = explain(error, rank, world_size, images, starting=starting)
    sys.stderr.write(text)  # at once: lines of ranks do not mix
    return 1


def tell_torchrun(error: Exception) -> None:
    """Write the error to the file for torchrun's summary, unless this rank only lost another one."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and not lost_peer(error):
        extra = {"timestamp": str(int(time.time()))}
        document = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
        with suppress(OSError):
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
    tell_torchrun(error)
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
