"""An event loop in a separate thread, with support for forked children.

A forked child inherits the objects, but not the thread. It shares the sockets and the epoll set with its
parent. If the child collected a transport as garbage, this would remove the socket from the parent's epoll
set or close the connection. The child therefore replaces every inherited connection by /dev/null and the
epoll set by an empty one. This also closes the child's copies of the parent's connections.
"""

import asyncio
import os
import selectors
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_CLOSING = 5.0  # seconds that each step of closing may take


class Loop:
    """Runs coroutines for other threads of the process that created it."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._last: Coroutine[Any, Any, None] | None = None
        self._thread = threading.Thread(target=self._run, name="sa1b-storage", daemon=True)
        _loops[id(self)] = self
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine. Must not be called during `close`."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel the running coroutines, run `last`, end the thread.

        Does nothing in a process that inherited the loop.
        """
        if _loops.pop(id(self), None) is None:
            last.close()
            return
        self._last = last
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:  # the garbage collector may run in any thread
            self._thread.join(2 * _CLOSING)

    def detach(self) -> None:
        """Release the connections of the parent in a forked child."""
        fresh = selectors.DefaultSelector()
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in list(self._selector.get_map()):
            if isinstance(descriptor, int):
                os.dup2(nothing, descriptor, inheritable=False)
        os.dup2(fresh.fileno(), self._selector.fileno(), inheritable=False)
        self._loop.set_exception_handler(_silence)  # suppress warnings about unclosed transports
        os.close(nothing)
        fresh.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._end())
        finally:
            self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSING)
        for last in (self._last, self._loop.shutdown_default_executor()):
            if last is not None:
                # At the exit of the interpreter no thread starts; the executor has ended by then.
                await asyncio.wait({asyncio.gather(last, return_exceptions=True)}, timeout=_CLOSING)
        self._loop.set_exception_handler(_silence)  # no warning about a thread whose request is stalled


def result_of(future: "Future[T]") -> T:
    """Wait for a result; cancel the work if the caller is interrupted."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _silence(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An exception handler that prints nothing."""


_forks = [0]
_loops: dict[int, Loop] = {}
_inherited: list[Loop] = []


def generation() -> int:
    """The number of forks between the process that imported this module and the calling process.

    Objects of a process are stored under this number, because the system may reuse a process id.
    """
    return _forks[0]


def _after_fork() -> None:
    _forks[0] += 1
    for loop in _loops.values():
        loop.detach()
    # Inherited loops are never collected, because an unclosed loop prints a warning when it is.
    _inherited.extend(_loops.values())
    _loops.clear()


os.register_at_fork(after_in_child=_after_fork)
