"""Worker processes that cannot hang or lose work silently: one process per task, watched to its end.

A pool that loses a worker waits for ever or drops what it held. Here every task has its own process and
pipe; a process that dies without an answer is started again, and after `retries` the task is reported by
name while the others go on. If the watching process dies, its workers end themselves.
"""

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from sa1b.errors import Sa1bError

_CONTEXT = multiprocessing.get_context("spawn")  # no threads, locks or handles of the parent come along


@dataclass(frozen=True, slots=True)
class Event:
    """Something a task said, or its end.

    Attributes:
        task: index of the task.
        kind: "progress" (value: what it reported), "done" (value: its result), "failed" (value: a Failure),
            "died" (value: how its process ended; it will be tried again) or "lost" (value: the same; it
            will not).
    """

    task: int
    kind: Literal["progress", "done", "failed", "died", "lost"]
    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that ended a task: its class's name, its message, and where it came from.

    `expected`: of the package's family of errors, or an OSError.
    """

    kind: str
    message: str
    trace: str
    expected: bool = False


@dataclass(slots=True)
class _Running:
    task: int
    process: BaseProcess
    pipe: Connection
    answered: bool = False


def supervise(
    function: Callable[..., Any], tasks: list[tuple[Any, ...]], *, workers: int, retries: int = 2
) -> Generator[Event, None, None]:
    """Run function(*task, report) for every task in its own process, at most `workers` at a time.

    `function` and the arguments must be importable and picklable; `report(value)` sends progress. Closing
    the iterator, or an exception in its consumer (Ctrl-C included), ends all processes first.
    """
    waiting = list(range(len(tasks)))
    deaths = dict.fromkeys(waiting, 0)
    running: dict[Connection, _Running] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                one = _start(function, tasks, waiting.pop(0))
                running[one.pipe] = one
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                one = running[pipe]
                try:
                    kind, value = pipe.recv()
                except (EOFError, OSError):
                    del running[pipe]
                    pipe.close()
                    one.process.join()
                    if one.answered:
                        continue
                    deaths[one.task] += 1
                    again = deaths[one.task] <= retries
                    yield Event(one.task, "died" if again else "lost", _describe(one.process.exitcode))
                    if again:
                        waiting.insert(0, one.task)
                    continue
                one.answered = kind != "progress"
                yield Event(one.task, kind, value)
    finally:
        for one in running.values():
            one.process.kill()
        for one in running.values():
            one.process.join()
            one.pipe.close()


def _start(function: Callable[..., Any], tasks: list[tuple[Any, ...]], task: int) -> _Running:
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_work, args=(theirs, function, tasks[task]), daemon=True)
    # Ctrl-C reaches the whole process group; a new process must not hear it while it still imports.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return _Running(task, process, ours)


def _work(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    # Ctrl-C reaches the whole process group; the parent decides what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    answer: tuple[str, Any]
    try:
        answer = ("done", function(*arguments, lambda value: pipe.send(("progress", value))))
    except Exception as error:
        expected = isinstance(error, (Sa1bError, OSError))
        answer = ("failed", Failure(type(error).__name__, str(error), traceback.format_exc(), expected))
    pipe.send(answer)


def _end_with_parent(pipe: Connection) -> None:
    """The parent never sends: the pipe becomes readable when it is gone."""
    pipe.poll(None)
    os._exit(1)


def _describe(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        hint = ", perhaps out of memory" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"ended with code {exitcode} without an answer"
