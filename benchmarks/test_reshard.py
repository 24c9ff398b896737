"""Ingest beside `gzip -dc` of the same tar, one core each, in one run.

`pytest benchmarks/test_reshard.py -s` prints megabytes of unpacked tar a second and their ratio. The tar
holds full-size synthetic pictures in random order; so little may wait in memory that most of what waits
goes through spill files, as in a tar of 11 GB.
"""

import gzip
import io
import json
import os
import random
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from sa1b.ingest.ingest import Policy, ingest
from sa1b.shards.manifest import Options
from sa1b.sources.discovery import discover
from sa1b.synthetic.source_tars import scene

PICTURES, COPIES = 40, 6
RATES: dict[str, float] = {}


@pytest.fixture(scope="module")
def tar(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A source tar and its unpacked size in bytes."""
    members = []
    for picture in range(PICTURES):
        jpeg, document = scene(picture + 1)
        for copy in range(COPIES):
            image_id = 1 + picture + copy * PICTURES
            document["image"].update(image_id=image_id, file_name=f"sa_{image_id}.jpg")
            members += [
                (f"./sa_{image_id}.jpg", jpeg),
                (f"./sa_{image_id}.json", json.dumps(document).encode()),
            ]
    random.Random(0).shuffle(members)
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as out:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    path = tmp_path_factory.mktemp("source") / "sa_000000.tar"
    path.write_bytes(gzip.compress(plain.getvalue(), 6))
    return path, len(plain.getvalue())


@pytest.fixture(autouse=True)
def one_core() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def rate(benchmark: BenchmarkFixture, name: str, size: int) -> None:
    RATES[name] = size / 1e6 / benchmark.stats.stats.min
    benchmark.extra_info["MB/s of unpacked tar"] = round(RATES[name], 1)
    print(f"\n{name}: {RATES[name]:.0f} MB/s of unpacked tar, one core")


def test_gzip(benchmark: BenchmarkFixture, tar: tuple[Path, int]) -> None:
    path, size = tar
    command = ["gzip", "-dc", str(path)]
    benchmark.pedantic(lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True), rounds=5)
    rate(benchmark, "gzip -dc", size)


@pytest.mark.parametrize("flags", [{}, {"index_runs": False}], ids=["copy", "copy, no index runs"])
def test_reshard(
    benchmark: BenchmarkFixture, tar: tuple[Path, int], tmp_path: Path, flags: dict[str, bool]
) -> None:
    path, size = tar
    (source,) = discover([path]).sources

    def run() -> None:
        ingest(source, tmp_path, Options(images_per_shard=40, **flags), Policy(spill_memory=8 << 20))

    benchmark.pedantic(
        run, setup=lambda: shutil.rmtree(tmp_path, ignore_errors=True), rounds=5, warmup_rounds=1
    )
    name = "reshard" + "".join(f" {flag}={value}" for flag, value in flags.items())
    rate(benchmark, name, size)
    print(f"{name} / gzip -dc = {RATES[name] / RATES['gzip -dc']:.2f}")
