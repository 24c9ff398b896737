"""A TCP proxy on 127.0.0.1 that makes a server far away: every byte arrives some time later, none slower.

`python -m benchmarks.latency_proxy PORT SECONDS` listens on a free port, writes it, and forwards to PORT;
half of the seconds are added on the way there, half on the way back. It ends with its standard input.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    """Pass bytes on, each `delay` seconds after it came."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due, data = await under_way.get()
            if (left := due - loop.time()) > 0:
                await asyncio.sleep(left)
            if not data:
                break
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    delivery = asyncio.create_task(deliver())
    try:
        while True:
            data = await reader.read(1 << 18)
            under_way.put_nowait((loop.time() + delay, data))
            if not data:
                break
        await delivery
    except OSError:  # one side is gone: so is the other
        writer.close()
    finally:
        delivery.cancel()
        await asyncio.wait({delivery})
        if not delivery.cancelled():
            delivery.exception()  # the same


async def serve(upstream: int, seconds: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", upstream)
        there = carry(reader, far_writer, seconds / 2)
        back = carry(far_reader, writer, seconds / 2)
        with contextlib.suppress(OSError):
            await asyncio.gather(there, back)
        far_writer.close()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)


@contextlib.contextmanager
def running(upstream: int, seconds: float) -> Iterator[int]:
    """The proxy in a process of its own; its port."""
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
