"""Ranges of objects behind a URL, by fsspec, from one event loop in one thread of the process that reads.

The file system is made inside that loop, on first use, and never leaves the process: after a fork the child
makes its own. It is asked for one range at a time and told to repeat nothing: every attempt is ours, so it
has a time limit, is counted, and its bytes are checked. s3fs by itself returns short and flipped bodies
without an error and fills gaps with zeros when it reads whole objects; none of that code is called.
"""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from sa1b.storage.checksum import Crc
from sa1b.storage.classify import Cause, Fault, cause_of
from sa1b.storage.counters import Tally
from sa1b.storage.errors import MissingError, StorageError
from sa1b.storage.loop import Loop
from sa1b.storage.retry import Effort, Patience

T = TypeVar("T")


class RemoteOrigin:
    """Reads objects below a URL, for one process.

    Args:
        root: URL of a kind that fsspec knows.
        options: for the file system, as fsspec takes them.
        patience: times.
        tally: where reads are counted.
        in_flight: attempts at a time.
    """

    def __init__(
        self, root: str, options: Mapping[str, Any], patience: Patience, tally: Tally, in_flight: int
    ) -> None:
        self.tally = tally
        self._root = root
        self._options = options
        self._patience = patience
        self._in_flight = in_flight
        self._lock = threading.Lock()
        self._loop: Loop | None = None
        self._slots = asyncio.Semaphore(in_flight)
        self._system: Any = None
        self._systems: list[Any] = []

    def read(self, name: str, start: int, length: int, crc: Crc) -> bytes:
        """See Reader.read_range."""
        return _result(self.submit(name, start, length, crc))

    def submit(self, name: str, start: int, length: int, crc: Crc) -> "Future[bytes]":
        """Read on the origin's loop."""
        return self._begin(self._read(name, start, length, crc))

    def size(self, name: str) -> int:
        """Bytes of an object. See Reader.size."""
        return _result(self._begin(self._size(name)))

    def names(self, folder: str) -> list[str]:
        """See Reader.names."""
        return _result(self._begin(self._names(folder)))

    def close(self) -> None:
        """Cancel the reads that run, close connections, end the thread."""
        with self._lock:
            loop, self._loop = self._loop, None
            systems, self._systems, self._system = self._systems, [], None
            self._slots = asyncio.Semaphore(self._in_flight)
            if loop is not None:
                loop.close(_disconnect(systems))

    def _begin(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        with self._lock:  # whatever is begun is begun before the loop is closed, or on the next one
            if self._loop is None:
                self._loop = Loop()
            return self._loop.submit(work)

    async def _read(self, name: str, start: int, length: int, crc: Crc) -> bytes:
        url = f"{self._root}/{name}"
        effort: Effort | None = None
        while True:
            async with self._slots:
                if effort is None:  # the deadline counts from here, not from the queue
                    effort = Effort(url, start, length, crc, self._patience, self.tally)
                data = await self._attempt(effort, lambda system: _range(system, url, start, start + length))
                if data is not None:
                    if len(data) > length:
                        raise StorageError(
                            f"{effort}: {len(data):,} bytes came: the server ignores byte ranges",
                            url=url,
                            start=start,
                            length=length,
                        )
                    if effort.accept(data):
                        return data
                if effort.shorts > 1 and effort.last and effort.last.cause is Cause.SHORT:
                    size = await self._attempt(effort, lambda system: _size(system, url))
                    if size is not None:
                        effort.sized(size)
            await self._patience.pause(effort.wait())

    async def _size(self, name: str) -> int:
        url = f"{self._root}/{name}"
        return await self._ask(url, lambda system: _size(system, url))

    async def _names(self, folder: str) -> list[str]:
        url = f"{self._root}/{folder}"
        try:
            return await self._ask(url, lambda system: _names(system, url))
        except MissingError:
            return []

    async def _ask(self, url: str, ask: Callable[[Any], Awaitable[T]]) -> T:
        """The answer to a request that is not a range."""
        effort = Effort(url, 0, None, None, self._patience, self.tally)
        while True:
            async with self._slots:
                answer = await self._attempt(effort, ask)
            if answer is not None:
                effort.done()
                return answer
            await self._patience.pause(effort.wait())

    async def _attempt(self, effort: Effort, ask: Callable[[Any], Awaitable[T]]) -> T | None:
        """One request; None where it failed and may be repeated."""
        system = self._system = self._system or self._connect()
        limit = effort.begin()
        request = asyncio.ensure_future(ask(system))
        try:
            # Unlike asyncio.wait_for, this does not wait for a request that will not be cancelled.
            await asyncio.wait({request}, timeout=limit)
        finally:
            if not request.done():
                request.cancel()
        if not request.done():
            request.add_done_callback(_forget)
            effort.failed(Fault(Cause.TIMEOUTS, f"no complete answer in {limit:.3g} s"))
            return None
        error = request.exception()
        if error is None:
            return request.result()
        fault = cause_of(error)
        if fault is None:
            raise error
        if fault.cause is Cause.EXPIRED and system is self._system:
            self._system = None  # a new one looks the credentials up again
        effort.failed(fault)
        return None

    def _connect(self) -> Any:
        """The file system, made to repeat nothing and to cache nothing."""
        import fsspec

        protocol = self._root.partition("://")[0]
        options = {**self._options, "skip_instance_cache": True}
        try:
            kind = fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            advice = "pip install 'sa1b[s3]'" if protocol in ("s3", "s3a") else "install it"
            raise StorageError(f"{self._root}: {error}: {advice}", url=self._root) from None
        if kind.async_impl:
            options |= {"asynchronous": True, "use_listings_cache": False}
        if protocol in ("s3", "s3a"):
            options["config_kwargs"] = {
                "max_pool_connections": self._in_flight,
                "retries": {"total_max_attempts": 1},
                "connect_timeout": self._patience.attempt,
                "read_timeout": self._patience.attempt,
                "response_checksum_validation": "when_required",  # ranges have none; ours are checked
                "user_agent": "sa1b",  # botocore's is made anew for each request: a tenth of its time
                **options.get("config_kwargs", {}),
            }
        system = kind(**options)
        if hasattr(system, "retries"):
            system.retries = 1
        self._systems.append(system)
        return system


def _result(future: "Future[T]") -> T:
    """Wait for a read; an interrupted caller drops it."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def _range(system: Any, url: str, start: int, end: int) -> bytes:
    path = system._strip_protocol(url)
    if system.async_impl:
        return bytes(await system._cat_file(path, start=start, end=end))
    return bytes(await asyncio.to_thread(system.cat_file, path, start=start, end=end))


async def _size(system: Any, url: str) -> int:
    path = system._strip_protocol(url)
    info = await (system._info(path) if system.async_impl else asyncio.to_thread(system.info, path))
    if info.get("type") == "directory":
        raise FileNotFoundError(f"{url} is a folder")
    if info.get("size") is None:
        raise StorageError(f"{url}: the server does not tell the size", url=url)
    return int(info["size"])


async def _names(system: Any, url: str) -> list[str]:
    path = system._strip_protocol(url)
    if system.async_impl:
        entries = await system._ls(path, detail=False)
    else:
        entries = await asyncio.to_thread(system.ls, path, detail=False)
    return sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in entries)


async def _disconnect(systems: list[Any]) -> None:
    """Close the connections of file systems that have any."""
    for system in systems:
        if system.async_impl and hasattr(system, "set_session"):
            with contextlib.suppress(Exception):
                session = await system.set_session()
                await session.close()
    await asyncio.sleep(0)  # transports close in the next turn of the loop


def _forget(request: "asyncio.Future[Any]") -> None:
    """Take note of the error of a request that nobody waits for."""
    if not request.cancelled():
        request.exception()
