"""Processor time of one range request to an S3 store on this machine, by size: signed once, and by s3fs.

Only the reading process is counted. The store is Ceph's object gateway if it is installed, else the small
server of the tests; over TLS, a proxy on this machine ends it. Both ways run in turns, 16 requests in flight,
every range verified by its crc32c.
"""

import random
import time
from pathlib import Path
from statistics import median
from typing import Any

from crc32c import crc32c

from benchmarks.object_store import by_s3fs, running
from sa1b.storage.reader import Range, Reader
from tests.storage.service import Service
from tests.storage.tls_proxy import certificate

SIZES = {16_384: 500, 65_536: 400, 330_000: 150, 2_000_000: 40}  # bytes: requests of a round
OBJECT = 64_000_000  # bytes
ROUNDS = 7
IN_FLIGHT = 16


def measure(folder: Path) -> dict[str, Any]:
    """Milliseconds of the processor for a request: {"16384 bytes, plain": {"signed": ..., "s3fs": ...}}."""
    data = random.Random(0).randbytes(OBJECT)
    (folder / "up").mkdir()
    (folder / "up" / "a.tar").write_bytes(data)
    made, key = certificate(folder)
    found: dict[str, Any] = {}
    with running(folder) as server, Service("tls_proxy", server.port, made, key) as proxy:
        server.upload(folder / "up", "root")
        plain = {**server.options, "endpoint_url": f"http://127.0.0.1:{server.port}"}
        tls = {
            **server.options,
            "endpoint_url": f"https://127.0.0.1:{proxy.port}",
            "client_kwargs": {"verify": str(made)},
        }
        for size, count in SIZES.items():
            ranges = _ranges(data, size, count)
            for name, options in (("plain", plain), ("TLS", tls)):
                found[f"{size} bytes, {name}"] = _compare(options, ranges)
    return {"server": server.name, "in_flight": IN_FLIGHT, "rounds": ROUNDS, "requests": found}


def _compare(options: dict[str, Any], ranges: list[Range]) -> dict[str, float]:
    times: dict[str, list[float]] = {"signed": [], "s3fs": []}
    for _ in range(ROUNDS):
        times["signed"].append(_milliseconds(options, ranges))
        with by_s3fs():
            times["s3fs"].append(_milliseconds(options, ranges))
    ratios = [old / new for new, old in zip(times["signed"], times["s3fs"], strict=True)]
    return {**{name: median(values) for name, values in times.items()}, "times_less": median(ratios)}


def _milliseconds(options: dict[str, Any], ranges: list[Range]) -> float:
    with Reader("s3://bucket/root", options=options, attempts_in_flight=IN_FLIGHT) as reader:
        for _ in reader.read_ranges(ranges[: 2 * IN_FLIGHT]):  # opens the connections
            pass
        began = time.process_time()
        for _ in reader.read_ranges(ranges):
            pass
        spent = time.process_time() - began
        assert reader.counters().faults == 0
    return 1e3 * spent / len(ranges)


def _ranges(data: bytes, size: int, count: int) -> list[Range]:
    rng = random.Random(size)
    starts = [rng.randrange(len(data) - size) for _ in range(count)]
    return [Range("a.tar", at, size, crc32c(data[at : at + size])) for at in starts]
