"""A TCP proxy on 127.0.0.1 that adds latency to a server without reducing its bandwidth.

`python -m benchmarks.latency_proxy PORT SECONDS` listens on a free port, writes it, and forwards to PORT;
half of the seconds are added in each direction. It ends when its standard input is closed.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path


class Side(asyncio.Protocol):
    """One of the two connections of a client: received bytes are written to the other one `delay` seconds
    later.

    It uses plain callbacks, because the proxy shares the cores with the measured processes.
    """

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.transport: asyncio.Transport
        self.other: Side | None = None
        self._under_way: deque[bytes | None] = deque()  # None: end of the data

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._carry(data)

    def eof_received(self) -> bool:
        self._carry(None)
        return True  # the other direction continues

    def connection_lost(self, error: Exception | None) -> None:
        self._carry(None)
        if error is not None and self.other is not None:
            self.other.transport.abort()

    def _carry(self, data: bytes | None) -> None:
        self._under_way.append(data)
        asyncio.get_running_loop().call_later(self.delay, self._arrive)

    def _arrive(self) -> None:
        data = self._under_way.popleft()  # timers of the same moment run in any order
        if self.other is None or self.other.transport.is_closing():  # no server is listening
            return
        transport = self.other.transport
        if data is not None:
            transport.write(data)
        elif self.transport.is_closing():
            transport.close()
        else:
            with contextlib.suppress(OSError):  # the client closed its connection at the same moment
                transport.write_eof()


class Near(Side):
    """The client's side, which reads nothing until the connection to the server is established."""

    def __init__(self, upstream: int, delay: float) -> None:
        super().__init__(delay)
        self._upstream = upstream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.pause_reading()
        self._joining = asyncio.ensure_future(self._join())

    async def _join(self) -> None:
        try:
            _, self.other = await asyncio.get_running_loop().create_connection(
                lambda: Side(self.delay), "127.0.0.1", self._upstream
            )
        except OSError:
            self.transport.abort()
            return
        self.other.other = self
        self.transport.resume_reading()


async def serve(upstream: int, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Near(upstream, seconds / 2), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    os._exit(0)


@contextlib.contextmanager
def running(upstream: int, seconds: float) -> Iterator[int]:
    """Start the proxy in a separate process; returns its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.latency_proxy", str(upstream), str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(10)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
