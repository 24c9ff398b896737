"""Measure how many images per second a machine can load from a dataset directory, and find the bottleneck.

Three measurements of the same random images, of which the first two are upper bounds of the third:

    storage   reading the bytes of samples as the loader does; local files leave the page cache first
    decode    decoding JPEG files in memory to images of the padded square, with all threads
    loader    `sa1b.Loader`: all stages together, warm
"""

import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch

from sa1b.console import counted
from sa1b.report import bar
from sa1b.shards.sample import PendingRead, location_of
from sa1b.storage.errors import DamageError
from sa1b.stream.dataset import Stream
from sa1b.stream.decode import EncodedImage
from sa1b.stream.decoders import LANES, GpuDecoder
from sa1b.stream.loader import Loader
from sa1b.stream.stats import STAGES, LoaderSettings, limit_of, limiting, remedy

LABELS = {
    "read": "reading",
    "pick": "choosing masks",
    "decode": "JPEG decoding",
    "collate": "collating",
    "device": "copying, and rasterising dense masks",
}
_SAMPLES = 64  # JPEG files that are kept in memory
_PORTION = 8  # images that a thread decodes in one job


class Throughput(dict[str, Any]):
    """The measurement as JSON values, and as text."""

    def __init__(self, settings: str, **values: Any) -> None:
        super().__init__(values)
        self._settings = settings

    def document(self) -> dict[str, Any]:
        return self

    def table(self) -> str:
        lines = [f"{self._settings}\n"]
        lines += [f"  {name:<7}  {rate:10,.0f} images/s" for name, rate in self["images_per_second"].items()]
        lines[1] += f"  {self['storage_bytes_per_second'] / 1e6:,.0f} MB/s"
        shares = (f"{LABELS[name]} {share:.0%}" for name, share in self["shares"].items() if share >= 0.01)
        lines.append(f"\nBusy time of the loader: {', '.join(shares)}.")
        if (cache := self["cache"]) is not None:
            lines.append(
                "Cache: {hits:,} hits, {misses:,} misses, {outside:,} reads outside.".format(**cache)
            )
        return "\n".join([*lines, f"Limit: {LABELS.get(self['limit'], self['limit'])}. {self['advice']}"])


def measure(stream: Stream, *, seconds: float = 15.0, quiet: bool = False, **of_loader: Any) -> Throughput:
    """Measure storage, decoder and loader of an endless stream for `seconds`; `of_loader`: its options."""
    loader = Loader(stream, **of_loader, quiet=True)
    threads = loader.processes * loader.threads
    with ThreadPoolExecutor(threads) as pool, bar(3, "bench", "measurement", quiet) as shown:

        def timed(steps: Iterator[int]) -> float:
            """Units per second of one measurement, which takes a third of `seconds`."""
            began, units = time.perf_counter(), 0
            for number in steps:
                units += number
                if time.perf_counter() - began >= seconds / 3:
                    break
            shown.update()
            return units / (time.perf_counter() - began)

        sizes: list[int] = []
        storage = timed(storage_reads(stream, pool, threads, sizes))
        images = _images(stream)
        decoded = timed(_decodes(stream, images, pool, threads, loader.device))
        batches = iter(loader)
        for _ in range(loader.prefetch + 2 * loader.processes):  # then all buffers are allocated
            next(batches)
        before = stream.stats.snapshot()
        rate = timed(map(len, batches))
        after = stream.stats.snapshot()
        batches.close()
    busy = {name: after[name]["seconds"] - before[name]["seconds"] for name in STAGES}
    limit = limit_of(storage, rate, busy)
    stored = max(max(simplejpeg.decode_jpeg_header(image.jpeg)[:2]) for image in images)
    text = remedy(limit, replace(LoaderSettings.of(loader), stored=stored, trains=False))
    cache = before["cache"] and {name: n - before["cache"][name] for name, n in after["cache"].items()}
    options, dense, place, on_cpu = stream.options, loader.dense, str(loader.device), None
    if isinstance(stream.decoder, GpuDecoder):
        on_cpu = 1 - stream.decoder.counts["gpu"] / max(stream.decoder.counts.total(), 1)
        place += f", decoded there by {options.decoder} ({on_cpu:.1%} of the images on the CPU)"
    output = "runs" if dense is None else f"pixels at {dense} x {dense}"
    processes = f"{loader.processes} processes of " if loader.processes > 1 else ""
    return Throughput(
        f"images of {options.image_size} pixels, up to {counted(options.masks, 'mask')} as {output}, "
        f"{processes}{counted(loader.threads, 'thread')}, {place}",
        root=str(stream.root),
        threads=threads,  # of all processes
        image_size=options.image_size,
        masks=options.masks,
        dense=dense,
        batch=stream.plan.micro_batch,
        device=str(loader.device),
        decoder=options.decoder,
        on_cpu=on_cpu,  # share of the images that a decoder of the GPU left to the CPU
        images_per_second={"storage": storage, "decode": decoded, "loader": rate},
        storage_bytes_per_second=storage * sum(sizes) / max(len(sizes), 1),
        shares=limiting(busy)[1],  # of the threads' busy time in each stage of the loader
        limit=limit,  # "storage", or the stage with the largest share of the busy time
        advice=f"{text[0].upper()}{text[1:]}.",
        cache=cache,  # reads from the local cache and the store; None without a cache
    )


def storage_reads(stream: Stream, pool: ThreadPoolExecutor, threads: int, sizes: list[int]) -> Iterator[int]:
    """Read an endless stream. Yields the samples of each batch; their bytes are appended to `sizes`."""

    def take(read: PendingRead) -> int:
        with suppress(DamageError):
            return len(read.begun.result())
        return 0

    pieces, ahead = stream.plan.micro_batches(0), max(1, 2 * threads // stream.plan.micro_batch)
    while True:
        reads: list[PendingRead] = []
        for piece in itertools.islice(pieces, ahead):
            rows = stream.rows(np.arange(piece.start, piece.stop))
            if stream.dataset.reader.is_local:
                _forget(stream, rows)
            reads += stream.dataset.submit(rows)
        sizes += pool.map(take, reads)
        yield len(reads)


def _forget(stream: Stream, rows: list[int]) -> None:
    for row in rows:
        at = location_of(stream.dataset.table, row, stream.dataset.shards)
        path = Path(stream.dataset.reader.url(at.shard))
        with suppress(OSError, AttributeError), path.open("rb") as file:  # macOS has none
            os.posix_fadvise(file.fileno(), at.start, at.stop - at.start, os.POSIX_FADV_DONTNEED)


def _images(stream: Stream) -> list[EncodedImage]:
    images, pieces = list[EncodedImage](), stream.plan.micro_batches(0)
    while len(images) < _SAMPLES:
        pending = stream.submit(next(pieces))
        pending.pick(0, len(pending), pending.busy)
        images += filter(None, pending.encoded)
    return images


def _decodes(
    stream: Stream, images: list[EncodedImage], pool: ThreadPoolExecutor, threads: int, device: torch.device
) -> Iterator[int]:
    decoder, size = stream.decoder, stream.options.image_size
    jobs = min(threads, 2 * LANES) if decoder.batched else threads
    portion = stream.plan.micro_batch if decoder.batched else _PORTION
    shape = (jobs, portion if decoder.batched else 1, size, size, 3)
    memory = torch.empty(shape, dtype=torch.uint8, device="cpu" if decoder.device.type == "cpu" else device)

    def work(number: int, out: torch.Tensor) -> int:
        some = [images[i % len(images)] for i in range(number * portion, (number + 1) * portion)]
        for first in range(0, portion, len(out)):
            decoder.decode(some[first : first + len(out)], out)
        return portion

    for first in itertools.count(0, jobs):
        yield sum(pool.map(work, itertools.count(first), memory))
