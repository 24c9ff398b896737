"""The loader over an S3 server of the tests on loopback, with latency added, beside webdataset's stream.

Server and proxy share the machine's cores with the readers, so that the ratio to a local folder says what
they cost together.
"""

import time
from collections.abc import Iterator
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
KIND = "1024"  # the smaller files: waiting counts most
THREADS = 2
FAR_AHEAD = 16  # batches of two images: what hides 100 ms


def measure(folder: Path, material: Material, rounds: int) -> list[dict[str, Any]]:
    """Images a second by latency; runs only, no pixels of masks."""
    root = material.roots[KIND]
    (folder / "bucket").mkdir(parents=True)
    (folder / "bucket" / "root").symlink_to(root)
    others = CONTENDERS["webdataset"]
    tars = None if others.missing() else material.place(others, KIND)
    if tars:
        (folder / "bucket" / "tars").symlink_to(tars.folder)
    rows = []
    with Service("range_server", folder) as service:
        for latency in LATENCIES:
            with latency_proxy.running(service.port, latency) as port:
                found: dict[str, list[float]] = {"local": [], "s3": [], "s3_far_ahead": [], "webdataset": []}
                for _ in range(rounds):
                    found["local"].append(_ours(str(root), {}, folder))
                    options = {"anon": True, "endpoint_url": f"http://127.0.0.1:{port}"}
                    found["s3"].append(_ours("s3://bucket/root", options, folder))
                    found["s3_far_ahead"].append(_ours("s3://bucket/root", options, folder, FAR_AHEAD))
                    if tars:
                        found["webdataset"].append(_webdataset(tars, port))
                ratios = [far / near for far, near in zip(found["s3_far_ahead"], found["local"], strict=True)]
                rows.append(
                    {
                        "latency_seconds": latency,
                        **{name: median(values) for name, values in found.items() if values},
                        "of_local": median(ratios),
                        "of_local_range": [min(ratios), max(ratios)],
                    }
                )
    return rows


def _ours(root: str, options: dict[str, Any], folder: Path, ahead: int = 2) -> float:
    stream = sa1b.Stream(
        root, global_batch=2, masks=64, storage_options=options or None, ledger=folder / "damaged.jsonl"
    )
    batches = iter(sa1b.Loader(stream, threads=THREADS, ahead=ahead, quiet=True))
    rate = _rate(batches, ahead + 1, 4 * len(stream.view))
    batches.close()
    return rate


def _webdataset(tars: Place, port: int) -> float:
    """As its documentation reads from a store: a pipe into which curl writes."""
    from benchmarks.peers.webdataset_tars import over

    names = sorted(path.name for path in tars.folder.glob("*.tar"))
    urls = [f"pipe:curl -s -f http://127.0.0.1:{port}/bucket/tars/{name}" for name in names]
    return _rate(over(urls, tars, Task(size=None), THREADS), THREADS, None)


def _rate(batches: Iterator[Any], first: int, images: int | None) -> float:
    for _ in range(first):
        next(batches)
    began, got = time.perf_counter(), 0
    for _ in count():
        batch = next(batches, None)
        if batch is None:
            break
        got += len(batch.ids)
        if images is not None and got >= images:
            break
    return got / (time.perf_counter() - began)
