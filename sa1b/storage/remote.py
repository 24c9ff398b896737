"""Ranges of objects at a URL, read from one event loop in one thread of the reading process.

The connections are created in that loop on first use, and a forked child creates its own. This module makes
every attempt, with a timeout, counters and verified bytes.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from sa1b.storage.checksum import Crc
from sa1b.storage.classify import ErrorClass, Fault, FaultError, classify_error
from sa1b.storage.connection import Connection
from sa1b.storage.counters import CounterSet
from sa1b.storage.errors import MissingError, StorageError
from sa1b.storage.loop import Loop, result_of
from sa1b.storage.retry import RetryPolicy, RetryState

T = TypeVar("T")


class RemoteOrigin:
    """Reads objects below a URL, for one process.

    Args:
        root: URL of a scheme that fsspec supports.
        options: options of fsspec's file system.
        policy: times and retries.
        counters: counts the reads.
        in_flight: attempts at the same time.
    """

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
        """See Reader.names."""
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
                    state = RetryState(url, start, length, crc, self._policy, self.counters)
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
        state = RetryState(url, 0, None, None, policy or self._policy, self.counters)
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
            await asyncio.wait({task}, timeout=timeout)
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
