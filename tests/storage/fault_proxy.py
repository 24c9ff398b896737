"""An HTTP proxy in front of one server that breaks a share of the requests, the same ones every time.

`python -m tests.storage.fault_proxy PORT SEED RATE [KIND ...]` listens on a free port of 127.0.0.1, writes
it, and forwards to PORT. Whether a request is broken, and how, is computed from the seed, what it asks for
and how often that was asked before: not from its turn, which depends on the clock. So a seed replayed gives
the same faults, whatever the concurrency.

    latency       the answer begins 50 to 250 ms late
    reset         the connection is reset before the answer
    reset_body    the connection is reset in the middle of the body
    stall         no answer, for ever
    stall_body    half a body, then nothing, for ever
    busy          503 SlowDown, for this request and the next two for the same bytes
    short         half a body under a Content-Length that fits it
    flip          one bit of the body is flipped

These faults are of GET. Of PUT, POST and DELETE, on which all others are passed on:

    write_latency write_reset write_stall write_busy
    write_flip    one bit of the body that the client sent is flipped
    write_lost    the server's answer is dropped, and the connection reset
    write_silent  the server's answer is dropped, and the connection stays open for ever

Questions on standard input: {"do": "log"} answers what was broken, [path, range, visit, kind] each, sorted;
{"do": "outage", "seconds": S} resets every connection for S seconds; {"do": "clear"} forgets log and visits;
{"do": "rate", "rate": R} breaks another share from now on.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import random
import re
import socket
import struct
import sys
import time
from collections import Counter
from typing import Any

WRITES = tuple(f"write_{kind}" for kind in ("latency", "reset", "stall", "busy", "flip", "lost", "silent"))
KINDS = ("latency", "reset", "reset_body", "stall", "stall_body", "busy", "short", "flip")
_BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_FOR_EVER = 3600.0


class Proxy:
    def __init__(self, upstream: int, seed: int, rate: float, kinds: tuple[str, ...]) -> None:
        self.upstream, self.seed, self.rate, self.kinds = upstream, seed, rate, kinds
        self.visits: Counter[tuple[str, str]] = Counter()
        self.busy: Counter[tuple[str, str]] = Counter()
        self.log: list[tuple[str, str, int, str]] = []
        self.outage_ends = 0.0
        self.outage_hits = 0
        self.open: set[asyncio.StreamWriter] = set()

    def plan(self, method: str, path: str, wanted: str) -> tuple[str | None, random.Random]:
        """The fault of this request, and the random numbers for its details."""
        path = re.sub("(uploadId=|[.]probe-|[.]clock-)[^&/]*", r"\1", path)  # random, so not the same again
        path = re.sub("^/[0-9a-f]{16}/", "/bucket/", path)  # and the bucket of a test
        path = path.partition("?X-Amz-")[0]  # a signature depends on the time
        key = (f"{method} {path}", wanted)
        self.visits[key] += 1
        visit = self.visits[key]
        words = f"{self.seed}/{method}/{path}/{wanted}/{visit}".encode()
        rng = random.Random(hashlib.sha256(words).digest())
        kind = None
        if self.busy[key]:
            self.busy[key] -= 1
            kind = "busy"
        elif rng.random() < self.rate:
            reads = method == "GET"
            writes = method in ("PUT", "POST", "DELETE")
            kinds = [one for one in self.kinds if (writes if one.startswith("write_") else reads)]
            kind = rng.choice(kinds).removeprefix("write_") if kinds else None
            if kind == "busy":
                self.busy[key] = 2
        if kind is not None:
            self.log.append((*key, visit, kind))
        return kind, rng

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a client."""
        self.open.add(writer)
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while True:
                head, fields = await _head(reader)
                if time.monotonic() < self.outage_ends:
                    self.outage_hits += 1
                    _reset(writer)
                    return
                if fields.get("expect", "").lower() == "100-continue":
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    head = b"\r\n".join(
                        line for line in head.split(b"\r\n") if not line.lower().startswith(b"expect:")
                    )
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
                kind, rng = self.plan(method, path, fields.get("range", ""))
                if kind == "latency":
                    await asyncio.sleep(rng.uniform(0.05, 0.25))
                elif kind == "reset":
                    _reset(writer)
                    return
                elif kind == "stall":
                    await asyncio.sleep(_FOR_EVER)
                elif kind == "busy":
                    writer.write(
                        b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\n"
                        b"Content-Length: %d\r\n\r\n%s" % (len(_BUSY), _BUSY)
                    )
                    continue
                elif kind == "flip" and method != "GET" and body:
                    at = rng.randrange(len(body))
                    body = body[:at] + bytes([body[at] ^ 1 << rng.randrange(8)]) + body[at + 1 :]
                if upstream is None:
                    upstream = await asyncio.open_connection("127.0.0.1", self.upstream)
                upstream[1].write(head + body)
                if not await self._answer(upstream[0], writer, method, kind, rng):
                    return
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # one of the two went away, or the proxy ends
        finally:
            self.open.discard(writer)
            for stream in (writer, upstream[1] if upstream else None):
                if stream is not None:
                    stream.close()

    async def _answer(
        self,
        upstream: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        method: str,
        kind: str | None,
        rng: random.Random,
    ) -> bool:
        """Pass an answer on, broken if planned; whether the connection goes on."""
        head, fields = await _head(upstream)
        size = 0 if method == "HEAD" else int(fields.get("content-length", 0))
        body = bytearray(await upstream.readexactly(size))
        if fields.get("transfer-encoding") == "chunked" and method != "HEAD":
            body = await _chunks(upstream)
            head = re.sub(rb"(?i)transfer-encoding: chunked", b"Content-Length: %d" % len(body), head)
        if kind == "short" and body:
            del body[len(body) // 2 :]
            head = b"\r\n".join(
                b"Content-Length: %d" % len(body) if line.lower().startswith(b"content-length:") else line
                for line in head.split(b"\r\n")
            )
        elif kind == "flip" and method == "GET" and body:
            body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
        elif kind == "silent":
            await asyncio.sleep(_FOR_EVER)
        elif kind == "lost":
            _reset(writer)
            return False
        if kind in ("reset_body", "stall_body"):
            writer.write(head + body[: rng.randrange(len(body) + 1) // 2])
            await writer.drain()
            if kind == "stall_body":
                await asyncio.sleep(_FOR_EVER)
            await asyncio.sleep(0.01)  # what was sent arrives before the reset overtakes it
            _reset(writer)
            return False
        writer.write(head + body)
        await writer.drain()
        return True

    def answer(self, question: dict[str, Any]) -> Any:
        if question["do"] == "outage":
            self.outage_ends = time.monotonic() + float(question["seconds"])
            for writer in list(self.open):
                _reset(writer)
        elif question["do"] == "rate":
            self.rate = float(question["rate"])
        elif question["do"] == "clear":
            self.log.clear()
            self.visits.clear()
            self.busy.clear()
        elif question["do"] == "log":
            return {
                "faults": sorted(self.log),
                "outage_hits": self.outage_hits,
                "requests": sum(self.visits.values()),
            }
        return {}


async def _head(reader: asyncio.StreamReader) -> tuple[bytes, dict[str, str]]:
    """The head of a message, as it came and as fields in lower case."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")[1:-2]
    fields = dict(line.split(":", 1) for line in lines)
    return head, {name.lower(): value.strip() for name, value in fields.items()}


async def _chunks(reader: asyncio.StreamReader) -> bytearray:
    """A body that is sent in chunks."""
    body = bytearray()
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    handle = writer.get_extra_info("socket")
    if handle is not None:
        with contextlib.suppress(OSError):
            handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def main() -> None:
    upstream, seed, rate, *kinds = sys.argv[1:]
    proxy = Proxy(int(upstream), int(seed), float(rate), tuple(kinds) or KINDS)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    questions = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(questions), sys.stdin
    )
    while line := await questions.readline():
        print(json.dumps(proxy.answer(json.loads(line))), flush=True)
    os._exit(0)  # at once, whatever is stalled


if __name__ == "__main__":
    asyncio.run(main())
