"""The loader over an S3 server of the tests on loopback, with latency added, beside webdataset's stream.

Server and proxy share the machine's cores with the readers, so the images a second say what all cost
together; the processor time of the reading process alone says what reading from a store costs it.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import sa1b
from benchmarks import latency_proxy
from benchmarks.material import Material
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.task import Place, Task
from tests.storage.service import Service

LATENCIES = (0.0, 0.02, 0.1)  # seconds
THREADS = 2
FAR_AHEAD = 16  # batches of two images: what hides 100 ms


def measure(
    folder: Path, material: Material, latencies: Mapping[str, Iterable[float]], rounds: int
) -> list[dict[str, Any]]:
    """Images a second by size of JPEG and latency, seconds; runs only, no pixels of masks."""
    (folder / "bucket").mkdir(parents=True)
    others = CONTENDERS["webdataset"]
    rows = []
    with Service("range_server", folder) as service:
        for kind, root in material.roots.items():
            (folder / "bucket" / kind).symlink_to(root)
            tars = None if others.missing() else material.place(others, kind)
            if tars:
                (folder / "bucket" / f"{kind}-tars").symlink_to(tars.folder)
            for latency in latencies[kind]:
                with latency_proxy.running(service.port, latency) as port:
                    rows.append(_row(folder, kind, root, tars, latency, port, rounds))
    return rows


def _row(
    folder: Path, kind: str, root: Path, tars: Place | None, latency: float, port: int, rounds: int
) -> dict[str, Any]:
    found: dict[str, list[float]] = {"local": [], "s3": [], "s3_far_ahead": [], "webdataset": []}
    options = {"anon": True, "endpoint_url": f"http://127.0.0.1:{port}"}
    ratios, busy = [], []
    for _ in range(rounds):
        local, local_busy = _ours(str(root), {}, folder)
        found["local"].append(local)
        found["s3"].append(_ours(f"s3://bucket/{kind}", options, folder)[0])
        far, far_busy = _ours(f"s3://bucket/{kind}", options, folder, FAR_AHEAD)
        found["s3_far_ahead"].append(far)
        ratios.append(far / local)
        busy.append(local_busy / far_busy)
        if tars:
            found["webdataset"].append(_webdataset(f"bucket/{kind}-tars", tars, port))
    return {
        "kind": kind,
        "latency_seconds": latency,
        **{name: median(values) for name, values in found.items() if values},
        "of_local": median(ratios),
        "of_local_range": [min(ratios), max(ratios)],
        "busy_of_local": median(busy),
    }


def _ours(root: str, options: dict[str, Any], folder: Path, ahead: int = 2) -> tuple[float, float]:
    """Images a second, and processor seconds an image of this process."""
    stream = sa1b.Stream(
        root, global_batch=2, masks=64, storage_options=options or None, ledger=folder / "damaged.jsonl"
    )
    batches = iter(sa1b.Loader(stream, threads=THREADS, ahead=ahead, quiet=True))
    rates = _rate(batches, ahead + 1, 4 * len(stream.view))
    batches.close()
    return rates


def _webdataset(path: str, tars: Place, port: int) -> float:
    """As its documentation reads from a store: a pipe into which curl writes."""
    from benchmarks.peers.webdataset_tars import over

    names = sorted(path.name for path in tars.folder.glob("*.tar"))
    urls = [f"pipe:curl -s -f http://127.0.0.1:{port}/{path}/{name}" for name in names]
    return _rate(over(urls, tars, Task(size=None), THREADS), THREADS, None)[0]


def _rate(batches: Iterator[Any], first: int, images: int | None) -> tuple[float, float]:
    for _ in range(first):
        next(batches)
    began, busy, got = time.perf_counter(), time.process_time(), 0
    for _ in count():
        batch = next(batches, None)
        if batch is None:
            break
        got += len(batch.ids)
        if images is not None and got >= images:
            break
    return got / (time.perf_counter() - began), (time.process_time() - busy) / got
