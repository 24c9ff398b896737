"""Threads: limits for calls that cannot be interrupted (system calls on a lost mount, functions in C that
wait), and a lock that a forked process finds free, whatever the threads of its parent do.

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
from typing import Any, TypeVar

T = TypeVar("T")


class OverdueError(Exception):
    """A call has not ended within its limit; its thread still waits."""


class Limited:
    """Calls with a limit; threads may share it. Its idle threads end with it."""

    def __init__(self) -> None:
        self._idle: list[_Thread] = []
        weakref.finalize(self, _end, self._idle).atexit = False

    def call(self, work: Callable[[], T], seconds: float) -> T:
        """The result of `work`, or its exception; OverdueError if it has not ended within `seconds`."""
        try:
            thread = self._idle.pop()
        except IndexError:
            thread = _Thread()
        call = _Call(work)
        thread.calls.put(call)
        if not call.ended.acquire(timeout=max(0.0, min(seconds, threading.TIMEOUT_MAX))):
            thread.calls.put(None)  # it ends after the call
            raise OverdueError(f"no answer within {seconds:.3g} s")
        self._idle.append(thread)
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def close(self) -> None:
        """End the threads that have nothing to do."""
        _end(self._idle)


class _Call:
    __slots__ = ("ended", "error", "result", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.ended = threading.Lock()
        self.ended.acquire()
        self.result: Any = None
        self.error: BaseException | None = None


class _Thread(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="sa1b-limited", daemon=True)
        self.calls: SimpleQueue[_Call | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                call.result = call.work()
            except BaseException as error:
                call.error = error
            call.ended.release()
            del call  # it may refer to large results


def _end(idle: list[_Thread]) -> None:
    while idle:
        thread = idle.pop()
        thread.calls.put(None)
        if thread is not threading.current_thread():  # which may collect garbage
            thread.join()


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
