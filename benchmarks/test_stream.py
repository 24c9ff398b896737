"""The stream compared with the JPEG decoder alone: images per second on one core, unless stated otherwise.

`pytest benchmarks/test_stream.py -s` prints images/s and ratios. The decoder alone decodes the same files
at the same DCT scale and resizes them into the same buffer, nothing else.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import sa1b
from sa1b.ingest.ingest import ingest
from sa1b.ingest.policy import Policy
from sa1b.masks.grid import framed_size
from sa1b.programs.synthetic import source_tars as synthetic
from sa1b.shards.commit import write_dataset
from sa1b.shards.documents import Options
from sa1b.shards.manifest import read_tasks
from sa1b.sources.discovery import discover

IMAGES = 32
SIZE = 1024
RATES: dict[str, float] = {}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Shards of original size and of 1024 pixels, of the same full-size synthetic images."""
    folder = tmp_path_factory.mktemp("stream")
    synthetic.write_tar(folder / "sa_000000.tar", images=IMAGES, first_id=1)
    (source,) = discover([folder / "sa_000000.tar"]).sources
    found = {}
    for name, options in (("original", Options()), ("1024", Options(image_size=SIZE, quality=90))):
        found[name] = folder / name
        found[name].mkdir()
        ingest(source, found[name], options, Policy())
        write_dataset(found[name], read_tasks(found[name]))
    return found


@pytest.fixture(autouse=True)
def cores(request: pytest.FixtureRequest) -> Iterator[None]:
    """One core, or the test's parameter `threads`; libraries start no threads."""
    callspec = getattr(request.node, "callspec", None)
    threads = callspec.params.get("threads", 1) if callspec else 1
    before, torch_threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, sorted(before)[:threads])
    torch.set_num_threads(1)
    yield
    os.sched_setaffinity(0, before)
    torch.set_num_threads(torch_threads)


@pytest.fixture(autouse=True)
def recorded(figures: dict[str, dict[str, object]]) -> Iterator[None]:
    yield
    figures["stream"] = {f"{name}, images/s": rate for name, rate in RATES.items()}


def report(benchmark: BenchmarkFixture, name: str, beside: str | None) -> None:
    RATES[name] = IMAGES / benchmark.stats.stats.min
    ratio = f", {RATES[name] / RATES[beside]:.2f} of {beside}" if beside else ""
    benchmark.extra_info["images/s"] = round(RATES[name], 1)
    print(f"\n{name}: {RATES[name]:.1f} images/s{ratio}")


@pytest.mark.parametrize("kind", ["original", "1024"])
def test_decoder_alone(benchmark: BenchmarkFixture, roots: dict[str, Path], kind: str) -> None:
    samples = [(s.jpeg, s.annotations.height, s.annotations.width) for s in sa1b.open(roots[kind])]
    slot = np.zeros((SIZE, SIZE, 3), np.uint8)
    cv2.setNumThreads(1)  # the resize of sa1b.stream.decode

    def run() -> None:
        for jpeg, height, width in samples:
            rows, columns = framed_size(height, width, SIZE)
            image = simplejpeg.decode_jpeg(jpeg, "RGB", min_height=rows, min_width=columns)
            cv2.resize(image, (columns, rows), dst=slot[:rows, :columns])

    benchmark.pedantic(run, rounds=7, warmup_rounds=1)
    report(benchmark, f"decoder, {kind}", None)


@pytest.mark.parametrize("dense", [None, SIZE, 256], ids=["runs", "dense 1024", "dense 256"])
@pytest.mark.parametrize("kind", ["original", "1024"])
def test_stream(benchmark: BenchmarkFixture, roots: dict[str, Path], kind: str, dense: int | None) -> None:
    stream = sa1b.Stream(roots[kind], global_batch=4, image_size=SIZE, masks=64)
    buffer = torch.empty((4 * 64, dense, dense), dtype=torch.uint8) if dense else None

    def run() -> None:
        batches = iter(stream)
        for _ in range(IMAGES // 4):
            batch = next(batches)
            if dense and buffer is not None:
                batch.masks.dense(dense, out=buffer[: len(batch.masks)])

    benchmark.pedantic(run, rounds=7, warmup_rounds=1)
    report(benchmark, f"stream, {kind}" + (f", dense {dense}" if dense else ""), f"decoder, {kind}")


@pytest.mark.parametrize("threads", [1, 2])
def test_loader(benchmark: BenchmarkFixture, roots: dict[str, Path], threads: int) -> None:
    def run() -> None:
        stream = sa1b.Stream(roots["original"], global_batch=4, image_size=SIZE, masks=64)
        batches = iter(sa1b.Loader(stream, threads=threads, quiet=True))
        for _ in range(IMAGES // 4):
            next(batches)
        batches.close()

    benchmark.pedantic(run, rounds=7, warmup_rounds=1)
    beside = "loader, 1 threads" if threads > 1 else "decoder, original"
    report(benchmark, f"loader, {threads} threads", beside)
