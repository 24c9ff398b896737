"""The loader with an S3 server on loopback and added latency, compared with webdataset's stream.

The server is Ceph's object gateway if it is installed, else the small server of the tests. Server and proxy
share the cores with the reader, so the images per second include their cost. The processor time of the
reading process is the cost of the reader alone.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import fsspec

import sa1b
from benchmarks import latency_proxy
from benchmarks.material import Material
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.task import Place, Task
from tests.storage import ceph
from tests.storage.service import Service

LATENCIES = (0.0, 0.02, 0.1)  # seconds
THREADS = 2
FAR_AHEAD = 16  # batches of two images; this prefetch hides 100 ms
PASSES = 4  # passes over all images: the batches prefetched before the measurement are few in comparison


@dataclass(frozen=True)
class Server:
    """A running store.

    Attributes:
        name: name of the store in tables.
        port: port on 127.0.0.1.
        upload: uploads the files of a folder to a name in the bucket.
    """

    name: str
    port: int
    upload: Callable[[Path, str], object]
    options: Mapping[str, Any] = field(default_factory=lambda: {"key": ceph.KEY, "secret": ceph.SECRET})


def measure(
    folder: Path, material: Material, latencies: Mapping[str, Iterable[float]], rounds: int
) -> list[dict[str, Any]]:
    """Images per second by size of JPEG and latency in seconds, with masks as runs."""
    folder.mkdir()
    others = CONTENDERS["webdataset"]
    rows = []
    with running(folder) as server:
        for kind, root in material.roots.items():
            server.upload(root, kind)
            tars = None if others.missing() else material.place(others, kind)
            if tars:
                server.upload(tars.folder, f"{kind}-tars")
            for latency in latencies[kind]:
                with latency_proxy.running(server.port, latency) as port:
                    row = _row(folder, kind, root, tars, _options(port), rounds)
                    rows.append({"server": server.name, "kind": kind, "latency_seconds": latency} | row)
    return rows


@contextlib.contextmanager
def by_s3fs() -> Iterator[None]:
    """Reads are requests of s3fs, as of stores that take no presigned requests."""
    with patch("sa1b.storage.protocols.can_presign", lambda root, options: False):
        yield


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Server]:
    """The best store there is, with an empty bucket `bucket`."""
    if ceph.missing():
        (folder / "bucket").mkdir()
        with Service("range_server", folder) as service:
            yield Server(
                f"the small server of the tests; not run: Ceph ({ceph.INSTALL})",
                service.port,
                lambda files, name: (folder / "bucket" / name).symlink_to(files),
            )
        return
    with ceph.Gateway() as gateway:
        system = fsspec.filesystem("s3", **_options(gateway.port))
        system.mkdir("bucket")
        yield Server(
            "Ceph's object gateway",
            gateway.port,
            lambda files, name: system.put(str(files), f"bucket/{name}", recursive=True),
        )


def _options(port: int) -> dict[str, Any]:
    return {"key": ceph.KEY, "secret": ceph.SECRET, "endpoint_url": f"http://127.0.0.1:{port}"}


def _row(
    folder: Path, kind: str, root: Path, tars: Place | None, options: dict[str, Any], rounds: int
) -> dict[str, Any]:
    found: dict[str, list[float]] = {"local": [], "s3": [], "s3_far_ahead": [], "webdataset": []}
    ratios, busy, busy_s3fs = [], [], []
    for _ in range(rounds):
        local, local_busy = _ours(str(root), {}, folder, FAR_AHEAD)
        found["local"].append(local)
        found["s3"].append(_ours(f"s3://bucket/{kind}", options, folder)[0])
        far, far_busy = _ours(f"s3://bucket/{kind}", options, folder, FAR_AHEAD)
        found["s3_far_ahead"].append(far)
        ratios.append(far / local)
        busy.append(local_busy / far_busy)
        with by_s3fs():
            busy_s3fs.append(local_busy / _ours(f"s3://bucket/{kind}", options, folder, FAR_AHEAD)[1])
        if tars:
            found["webdataset"].append(_webdataset(f"bucket/{kind}-tars", tars, options))
    return {
        **{name: median(values) for name, values in found.items() if values},
        "of_local": median(ratios),
        "of_local_range": [min(ratios), max(ratios)],
        "busy_of_local": median(busy),
        "busy_of_local_range": [min(busy), max(busy)],
        "busy_of_local_by_s3fs": median(busy_s3fs),
    }


def _ours(root: str, options: dict[str, Any], folder: Path, prefetch: int = 2) -> tuple[float, float]:
    """Images per second, and processor seconds of this process per image."""
    stream = sa1b.Stream(
        root,
        global_batch=2,
        epochs=None,
        masks=64,
        storage_options=options or None,
        damage_log=folder / "damaged.jsonl",
    )
    batches = iter(sa1b.Loader(stream, threads=THREADS, prefetch=prefetch, quiet=True))
    rates = _rate(batches, prefetch + 1, PASSES * len(stream.view))
    batches.close()
    return rates


def _webdataset(path: str, tars: Place, options: dict[str, Any]) -> float:
    """webdataset as in its documentation for object stores: a pipe from curl. Masks are not decoded."""
    from benchmarks.peers.webdataset_tars import over

    system = fsspec.filesystem("s3", **options)
    names = sorted(path.name for path in tars.folder.glob("*.tar"))
    urls = [f"pipe:curl -s -f '{system.sign(f'{path}/{name}', expiration=3600)}'" for name in names]
    return _rate(over(PASSES * urls, tars, Task(size=None), THREADS), THREADS, None)[0]


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
