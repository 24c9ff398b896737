"""Why a run stops, the time before which it does, and the end of a rank: its message and its exit code."""

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
from contextlib import suppress
from datetime import datetime, timedelta
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from sa1b.console import broken_pipe
from sa1b.engine.watch.watchdog import Phases
from sa1b.errors import Sa1bError, UsageError
from sa1b.limit import Limited, OverdueError
from sa1b.storage.atomic import start_of

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last one is often sent by SLURM's --signal
_TOLD = 1.0  # seconds to wait for the rank that fails to say so


class WriteError(Sa1bError):
    """A file of the run cannot be written; the message names it and the remedy."""


class Stop(IntEnum):
    """Why a run stops; if ranks have different reasons, the largest one counts."""

    NONE = 0
    TERMINATED = 1  # SIGTERM; from torchrun, it may concern one machine only
    ASKED = 2  # SIGINT or SIGUSR1
    DEADLINE = 3
    FAILED = 4  # a file cannot be written


def deadline_of(text: str | None) -> float | None:
    """The time of --deadline, in seconds of `time.time`; UsageError for another form, or if it is past."""
    if text is None:
        return None
    # HH:MM and +HH:MM count from the start of the run, so that a restart by torchrun does not move them.
    since, match = started(), re.fullmatch(r"(\+?)(\d{1,2}):([0-5]\d)", text)
    try:
        if match and match[1]:
            return since + 60 * (60 * int(match[2]) + int(match[3]))
        if match:
            start = datetime.fromtimestamp(since)
            that_day = start.replace(hour=int(match[2]), minute=int(match[3]), second=0, microsecond=0)
            return (that_day + timedelta(days=that_day <= start)).timestamp()
        if "T" not in text and " " not in text:  # fromisoformat accepts a date alone: midnight
            raise ValueError
        moment = datetime.fromisoformat(text).timestamp()
    except ValueError:
        way = "a time such as 06:30, a duration such as +08:00, or a date and time such as 2026-01-31T06:30"
        raise UsageError(f"--deadline {text}: must be {way}") from None
    if moment <= since:
        raise UsageError(f"--deadline {text}: is past; pass a later time")
    return moment


def started() -> float:
    """The start of torchrun, or of this process if there is none, in seconds of `time.time`."""
    ticks = start_of(os.getpid() if "TORCHELASTIC_RUN_ID" not in os.environ else os.getppid())
    assert ticks is not None  # of a living process
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


PEER_LOST = (
    *("gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    "Application timeout caused pair closure",  # of gloo, where the operation has a thread of its own
)


def lost_peer(error: Exception) -> bool:
    """Whether an error of a collective means that another rank ended or does not answer."""
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in PEER_LOST)


def failed(error: Exception, rank: int, world_size: int, images: int, phases: Phases) -> int:
    """Print why this rank fails, in one line but for unexpected errors; `images`: of its micro-batches."""
    told = _tell(error, rank, phases)
    where, text = "error" if world_size == 1 else f"error on rank {rank}", str(error)
    notes = "".join(f"rank {rank}: {note}\n" for note in getattr(error, "__notes__", []))
    reason = (text.splitlines() or [type(error).__name__])[0]
    if isinstance(error, Sa1bError | OSError):
        line = f"{notes}{where}: {error}"
    elif isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        smaller = f"--data.micro-batch (now {images}), " if images > 1 else ""
        advice = f"pass a smaller {smaller}--data.masks or --data.prefetch, or a smaller model"
        line = f"{notes}{where}: out of memory ({reason}); {advice}"
    elif lost_peer(error):
        line = f"rank {rank} ends because another rank ended or does not answer ({reason}){told}"
        if not phases.steps and re.search(r"tim(ed|ing) ?out|timeout|did not answer", text, re.IGNORECASE):
            names = ", ".join(name for _, name in socket.if_nameindex())
            line += "; if the ranks run, set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME on each machine to the"
            line += f" interface that reaches the others; {socket.gethostname()} has {names}"
    else:
        line = f"{''.join(traceback.format_exception(error))}{where}: {type(error).__name__}: {text}"
    sys.stderr.write(f"{line}\n")  # at once: lines of ranks do not mix
    return 1


def refused(error: UsageError, rank: int, phases: Phases, *, on_all: bool) -> int:
    """Print why this rank cannot start: each rank, unless the error is `on_all`; return the exit code."""
    _tell(error, rank, phases)
    first = rank == 0 or (not on_all and os.environ.get("LOCAL_RANK") == "0")
    if not first and "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(5)  # torchrun ends all ranks of a machine, also those with the same error, when one ends
    if rank == 0 or not on_all:  # one write, so that lines of several ranks do not mix
        where = "error" if rank == 0 else f"error on rank {rank} (host {socket.gethostname()})"
        sys.stderr.write(f"{where}: {error}\n")
    return 2


def _tell(error: Exception, rank: int, phases: Phases) -> str:
    """Tell torchrun and the other ranks that this one fails, or return what the one that it lost told."""
    lost, file = lost_peer(error), os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and not lost:  # for torchrun's summary
        extra = {"timestamp": str(int(time.time()))}
        document = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
        with suppress(OSError):
            Path(file).write_text(json.dumps(document), encoding="utf-8")

    def tell() -> str:
        store, key = _get_default_store(), "sa1b/failed"
        if not lost:
            store.set(key, f"rank {rank} (host {socket.gethostname()}) failed in {phases.current.name}")
            return ""
        store.wait([key], timedelta(seconds=_TOLD))
        time.sleep(_TOLD)  # torchrun prints the reason of the rank that it finds first
        return f"; {store.get(key).decode()}"

    try:
        several = dist.is_initialized() and dist.get_world_size() > 1
        return Limited().call(tell, 3 * _TOLD) if several else ""
    except (RuntimeError, ValueError, OverdueError):  # the store may be lost, too
        return ""


def stdout_is_closed() -> bool:
    """Whether the error is a closed standard output, and not another closed pipe or socket."""
    poll = select.poll()
    poll.register(1, 0)
    return bool(poll.poll(0))


def exit_at_once(code: int) -> NoReturn:
    """End this process without waiting for other ranks or for threads."""
    # A failed rank would wait for the others in its process group; after a success, threads of torch that
    # outlive the interpreter can abort it, and torchrun would report a failure.
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
            started = f": {shlex.join(words)}" if words[-len(sys.argv) + 1 :] == sys.argv[1:] else ""
    again = f"{unless}run the same command{later} to resume from {checkpoint}{started}"
    return f"stopped after step {step:,}{before} and saved a checkpoint; {again}"
