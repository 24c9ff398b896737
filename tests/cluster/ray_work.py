"""Functions that run as tasks of Ray."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path


def count(limit: int, report: Callable[[int], None]) -> int:
    """Report 0, 1, ... and return the limit."""
    for number in range(limit):
        report(number)
    return limit


def folder(report: Callable[[int], None]) -> str:
    """The folder of the task."""
    return str(Path.cwd())


def fail(report: Callable[[int], None]) -> None:
    raise ValueError("no")


def die_until(path: Path, times: int, report: Callable[[int], None]) -> str:
    """Kill the own process so many times."""
    with path.open("ab") as file:
        file.write(b"x")
    report(0)
    if path.stat().st_size <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def stall_once(path: Path, report: Callable[[int], None]) -> str:
    """Report nothing for a long time, the first time."""
    report(0)
    if not path.exists():
        path.touch()
        time.sleep(600)
    return "alive"


def call(*arguments: object) -> object:
    """Call the first argument with the others."""
    function, *others = arguments
    assert callable(function)
    return function(*others)
