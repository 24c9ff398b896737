"""Ranges of objects at a URL, read from one event loop in one thread of the reading process.

The connections are created in that loop on first use. This module makes every attempt, with a timeout,
counters and verified bytes.
"""

import asyncio
import os
import selectors
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from sa1b.storage.connection import Connection
from sa1b.storage.errors import ErrorClass, Fault, FaultError, MissingError, StorageError, classify_error
from sa1b.storage.retry import CounterSet, Crc, RetryPolicy, RetryState

T = TypeVar("T")


class RemoteOrigin:
    """Reads objects below a URL, for one process, with at most `in_flight` attempts at the same time."""

    def __init__(
        self, root: str, options: Mapping[str, Any], policy: RetryPolicy, counters: CounterSet, in_flight: int
    ) -> None:
        self.counters = counters
        self._root = root
        self._options = options
        self._policy = policy
        self._in_flight = in_flight
        self._lock = threading.Lock()
        self._loop: Loop | None = None
        self._limit = asyncio.Semaphore(in_flight)
        self._connection: Connection | None = None
        self._connections: list[Connection] = []
        self._etags: dict[str, str] = {}

    def read(self, name: str, start: int, length: int, crc: Crc, *, fresh: bool = False) -> bytes:
        """See Reader.read_range; `fresh`: not from the cache of a proxy."""
        return result_of(self._start(self._read(name, start, length, crc, fresh=fresh)))

    def submit(self, name: str, start: int, length: int, crc: Crc) -> "Future[bytes]":
        """Start a read on the origin's loop."""
        return self._start(self._read(name, start, length, crc))

    def size(self, name: str) -> int:
        """Size of an object in bytes. See Reader.size."""
        return result_of(self._start(self._size(name)))

    def names(self, folder: str) -> list[str]:
        return result_of(self._start(self._names(folder)))

    def request(
        self,
        name: str,
        request: Callable[[Any], Awaitable[T]],
        size: int = 0,
        policy: RetryPolicy | None = None,
    ) -> "Future[T]":
        """Start any other request. See Reader.request."""
        url = f"{self._root}/{name}"
        return self._start(self._request(url, lambda connection: request(connection.system), size, policy))

    def forget(self, name: str) -> None:
        """Accept a replaced object from its next read on."""
        self._etags.pop(f"{self._root}/{name}", None)

    def close(self) -> None:
        """Cancel pending reads, close connections, end the thread."""
        with self._lock:
            loop, self._loop = self._loop, None
            connections, self._connections, self._connection = self._connections, [], None
            self._etags = {}
            self._limit = asyncio.Semaphore(self._in_flight)
            if loop is not None:
                loop.close(_close(connections))

    def _start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        with self._lock:  # work starts before the loop is closed, or on the next loop
            if self._loop is None:
                self._loop = Loop()
            return self._loop.submit(work)

    async def _read(self, name: str, start: int, length: int, crc: Crc, *, fresh: bool = False) -> bytes:
        url = f"{self._root}/{name}"
        state: RetryState | None = None
        while True:
            async with self._limit:
                if state is None:  # time in the queue does not count towards the deadline
                    state = RetryState(
                        url, start, length, crc=crc, policy=self._policy, counters=self.counters
                    )
                data = await self._attempt(
                    state,
                    partial(Connection.read_range, url=url, start=start, end=start + length, uncached=fresh),
                )
                if data is not None:
                    if len(data) > length:
                        raise StorageError(
                            f"{state}: {len(data):,} bytes received, the server ignores byte ranges; "
                            "use one that supports them",
                            url=url,
                            start=start,
                            length=length,
                        )
                    if state.accept(data):
                        return data
                error_class = state.last_fault.error_class if state.last_fault else None
                fresh |= error_class in (ErrorClass.SHORT, ErrorClass.CRC)  # perhaps of a proxy's cache
                if state.short_reads > 1 and error_class is ErrorClass.SHORT:
                    size = await self._attempt(state, partial(Connection.size, url=url, uncached=True))
                    if size is not None:
                        state.check_end(size)
            await self._policy.async_sleep(state.backoff())

    async def _size(self, name: str) -> int:
        url = f"{self._root}/{name}"
        return await self._request(url, lambda connection: connection.size(url))

    async def _names(self, folder: str) -> list[str]:
        url = f"{self._root}/{folder}"
        try:
            return await self._request(url, lambda connection: connection.names(url))
        except MissingError:
            return []

    async def _request(
        self,
        url: str,
        request: Callable[[Connection], Awaitable[T]],
        size: int = 0,
        policy: RetryPolicy | None = None,
    ) -> T:
        """The response to a request that is not a range."""
        state = RetryState(url, 0, None, crc=None, policy=policy or self._policy, counters=self.counters)
        state.length = size
        while True:
            async with self._limit:
                response = await self._attempt(state, request)
            if response is not None:
                state.succeed()
                return response
            await self._policy.async_sleep(state.backoff())

    async def _attempt(self, state: RetryState, request: Callable[[Connection], Awaitable[T]]) -> T | None:
        """Make one attempt; None if it failed and may be retried."""
        timeout = state.start_attempt()
        try:
            connection = self._connection = self._connection or self._connect()
        except FaultError as refusal:
            state.fail(refusal.fault)
            return None
        task = asyncio.ensure_future(request(connection))
        try:
            # Unlike asyncio.wait_for, this does not wait for a task that ignores its cancellation.
            silent = state.silent_time(timeout)
            if not (await asyncio.wait({task}, timeout=silent))[0] and silent < timeout:
                state.say_waiting()
                await asyncio.wait({task}, timeout=timeout - silent)
        finally:
            if not task.done():
                task.cancel()
        if not task.done():
            task.add_done_callback(_consume)
            state.fail(Fault(ErrorClass.TIMEOUTS, f"no complete response in {timeout:.3g} s"))
            return None
        error = task.exception()
        if error is None:
            return task.result()
        fault = classify_error(error)
        if fault is None:
            raise error
        if fault.error_class is ErrorClass.DENIED and connection.is_proven and not state.renewed_credentials:
            fault = Fault(ErrorClass.EXPIRED, fault.message)  # of the signature, or the credentials
        if fault.error_class is ErrorClass.EXPIRED and connection is self._connection:
            self._connection = None  # a new one looks up the credentials and signs again
        state.fail(fault)
        return None

    def _connect(self) -> Connection:
        connection = Connection(self._root, self._options, self._policy, self._in_flight, self._etags)
        self._connections.append(connection)
        return connection


async def _close(connections: Iterable[Connection]) -> None:
    for connection in connections:
        await connection.close()


def _consume(task: "asyncio.Future[Any]") -> None:
    """Retrieve the error of an abandoned task, so that asyncio does not report it."""
    if not task.cancelled():
        task.exception()


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
        """Cancel the coroutines, run `last`, end the thread; does nothing in a forked process."""
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
    """The number of forks between the process that imported this module and the calling process."""
    # Objects of a process are stored under this number, because the system may reuse a process id.
    return _forks[0]


def _after_fork() -> None:
    # A forked child creates its own loop. It inherits the objects of its parent, but not the thread, and
    # shares the sockets and the epoll set. If it collected a transport as garbage, this would remove the
    # socket from the parent's epoll set or close the connection. The child therefore replaces every inherited
    # connection by /dev/null and the epoll set by an empty one. This also closes its copies of the parent's
    # connections.
    _forks[0] += 1
    for loop in _loops.values():
        loop.detach()
    # Inherited loops are never collected, because an unclosed loop prints a warning when it is.
    _inherited.extend(_loops.values())
    _loops.clear()


os.register_at_fork(after_in_child=_after_fork)
