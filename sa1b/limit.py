"""Threads: results that Ctrl-C cannot block, limits for calls that cannot be interrupted (system calls on a
lost mount, functions in C that wait), and a lock that a forked process finds free, whatever the threads of
its parent do.

    limited = Limited()
    descriptor = limited.call(lambda: os.open(path, os.O_RDONLY), 300.0)

The call runs in another thread, and the caller stops waiting for it at the limit. A thread whose call has
ended is used again, so a call costs 20 µs of processor time more (measured with `os.open`).
"""

import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class OverdueError(Exception):
    """A call has not ended within its limit; its thread still waits."""


class Outcome(Generic[T]):
    """A result or an error that one thread sets and another one waits for.

    Unlike `concurrent.futures.Future`, it has no lock of Python code: if Ctrl-C interrupts a main thread
    between two instructions of such a lock, the lock stays held, and the other thread waits for it forever.
    """

    __slots__ = ("_ended", "_error", "_result", "done")

    def __init__(self) -> None:
        self._ended = threading.Lock()
        self._ended.acquire()
        self._result: Any = None
        self._error: BaseException | None = None
        self.done = False

    def set(self, result: Any = None, error: BaseException | None = None) -> None:
        """Set it, once."""
        self._result, self._error, self.done = result, error, True
        self._ended.release()

    def wait(self, seconds: float) -> bool:
        """Wait until it is set, at most for `seconds`; return whether it is."""
        if not self.done and self._ended.acquire(timeout=max(0.0, min(seconds, threading.TIMEOUT_MAX))):
            self._ended.release()
        return self.done

    def result(self) -> T:
        """The result, or the error, which is raised. It must be set."""
        if self._error is not None:
            raise self._error
        result: T = self._result
        return result


class Worker(threading.Thread):
    """A thread that runs one call after the other."""

    def __init__(self, name: str = "sa1b-limited") -> None:
        super().__init__(name=name, daemon=True)
        self._calls: SimpleQueue[tuple[Callable[[], Any], Outcome[Any]] | None] = SimpleQueue()
        self.start()

    def begin(self, work: Callable[[], T]) -> Outcome[T]:
        """Run a call after the calls that were submitted earlier."""
        outcome = Outcome[T]()
        self._calls.put((work, outcome))
        return outcome

    def end(self) -> None:
        """End the thread after its calls, without waiting for it."""
        self._calls.put(None)

    def run(self) -> None:
        while (call := self._calls.get()) is not None:
            work, outcome = call
            try:
                outcome.set(work())
            except BaseException as error:
                outcome.set(error=error)
            del call, work, outcome  # they may refer to large results


class Limited:
    """Calls with a limit; threads may share it. Its idle threads end with it."""

    def __init__(self) -> None:
        self._idle: list[Worker] = []
        weakref.finalize(self, _end, self._idle).atexit = False

    def call(self, work: Callable[[], T], seconds: float) -> T:
        """The result of `work`, or its exception; OverdueError if it has not ended within `seconds`."""
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = Worker()
        outcome = worker.begin(work)
        if not outcome.wait(seconds):
            worker.end()
            raise OverdueError(f"no answer within {seconds:.3g} s")
        self._idle.append(worker)
        return outcome.result()

    def close(self) -> None:
        """End the threads that have nothing to do."""
        _end(self._idle)


def _end(idle: list[Worker]) -> None:
    while idle:
        worker = idle.pop()
        worker.end()
        if worker is not threading.current_thread():  # which may collect garbage
            worker.join()


class ForkLock:
    """A context, as `threading.Lock`. A thread of the parent that held it does not exist in the child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _ALL.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self._lock.release()


_ALL: weakref.WeakSet[ForkLock] = weakref.WeakSet()


def _renew() -> None:
    for lock in _ALL:
        lock._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew)
