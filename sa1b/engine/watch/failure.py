"""How a rank ends that fails: its message, its exit code."""

import contextlib
import json
import os
import select
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from sa1b.console import broken_pipe
from sa1b.engine.watch.control import Control
from sa1b.engine.watch.signals import Stop
from sa1b.errors import Sa1bError, UsageError

PEER_LOST = (
    *("gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    "Application timeout caused pair closure",  # of gloo, where the operation has a thread of its own
)


def lost_peer(error: Exception) -> bool:
    """Whether an error of a collective means that another rank ended or does not answer."""
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in PEER_LOST)


def explain(error: Exception, rank: int, world_size: int) -> str:
    """The message of a failing rank: its error, or one line if it only lost another rank.

    Errors of this package and of the operating system are printed without a traceback, all others with one.
    """
    lines = [f"rank {rank}: {note}" for note in getattr(error, "__notes__", [])]
    where = "error" if world_size == 1 else f"error on rank {rank}"
    if isinstance(error, Sa1bError | OSError):
        return "\n".join([*lines, f"{where}: {error}\n"])
    text = str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        reason = (text.splitlines() or ["no memory is left"])[0]
        advice = "pass a smaller --data.micro-batch, --data.masks or --data.prefetch, or a smaller model"
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


def how_it_stopped(step: int, deadline: str | None, control: Control) -> str:
    """The last line of a run that was asked to stop, after so many steps."""
    stop = control.stop
    before = f", before --deadline {deadline}," if stop is Stop.DEADLINE else ""
    if not step:
        return f"stopped before the first step{before.rstrip(',')}; run the same command to start again"
    stopped = f"stopped after step {step:,}{before} and saved a checkpoint"
    if stop is Stop.TERMINATED and "TORCHELASTIC_RUN_ID" in os.environ:
        return f"{stopped}; unless torchrun starts the ranks again, run the same command to resume"
    if stop is Stop.DEADLINE and "T" in str(deadline):
        return f"{stopped}; run the same command with a later --deadline to resume"
    return f"{stopped}; run the same command to resume"
