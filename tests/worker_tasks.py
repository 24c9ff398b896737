"""The tasks of the workers in test_workers.py. New processes import this module, so it does not import pytest."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

Report = Callable[[object], None]
STALL = 3  # seconds


def double(value: int, report: Report) -> int:
    report(value)
    return 2 * value


def fail(value: int, report: Report) -> int:
    raise ValueError(f"cannot do {value}")


def die(marker: str, times: int, report: Report) -> str:
    """Killed `times` times, then done."""
    path = Path(marker)
    seen = len(path.read_text()) if path.exists() else 0
    if seen < times:
        path.write_text("x" * (seen + 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def double_and_stay(value: int, report: Report) -> int:
    """Answers, and has a thread that keeps its process alive."""
    threading.Thread(target=threading.Event().wait).start()
    return 2 * value


def leave(report: Report) -> None:
    os._exit(0)


def sleep(marker: str, report: Report) -> None:
    Path(marker).write_text(str(os.getpid()))
    time.sleep(60)


def mixed(kind: str, marker: str, report: Report) -> str:
    return die(marker, 99, report) if kind == "dies" else kind


def stall(marker: str, times: int, report: Report) -> str:
    """Silent forever in its first `times` processes; then slower than the limit, but with reports."""
    path = Path(marker)
    seen = len(path.read_text()) if path.exists() else 0
    path.write_text("x" * (seen + 1))
    if seen < times:
        report("begun")
        time.sleep(600)
    for _ in range(12):
        report("alive")
        time.sleep(STALL / 10)
    return "done"


def act(kind: str, marker: str, report: Report) -> object:
    match kind:
        case "stall" | "stall once":
            return stall(marker, 99 if kind == "stall" else 1, report)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "stop within a message":
            return stop_within_a_message(marker, report)
    return double(1, report)


def stop_within_a_message(marker: str, report: Report) -> str:
    """In its first process: reports its id and stops while it sends a message that fits no buffer."""
    if Path(marker).exists():
        return "done"
    Path(marker).touch()
    report(os.getpid())
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    report("x" * (4 << 20))
    return "not stopped"


def full_disk(report: Report) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/disk/file")


def no_memory(report: Report) -> None:
    raise MemoryError("4 GB")


def chatter(count: int, report: Report) -> None:
    for value in range(count):
        report(value)


def sleep_or_double(kind: str, marker: str, report: Report) -> None:
    if kind == "sleep":
        sleep(marker, report)
    while not Path(marker).exists() or not Path(marker).read_text():
        time.sleep(0.01)


def interrupts_blocked(report: Report) -> bool:
    """Whether Ctrl-C was blocked since the start of this process."""
    status = Path("/proc/self/status").read_text()
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:")]
    return bool(int(mask, 16) & 1 << signal.SIGINT - 1)
