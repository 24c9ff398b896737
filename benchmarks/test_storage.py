"""Verified ranges compared with plain reads, from a local file and from the tests' S3 server on this machine.

`pytest benchmarks/test_storage.py` prints the speed of each one relative to plain reads; below 1, the
difference is the cost of verification. Plain s3fs verifies nothing and retries; the server shares the two
cores.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from crc32c import crc32c
from pytest_benchmark.fixture import BenchmarkFixture

from sa1b.storage.reader import Range, Reader
from tests.storage.service import Service

SIZE = 64_000_000
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("storage")
    (folder / "data").mkdir()
    (folder / "data" / "a.tar").write_bytes(random.Random(0).randbytes(SIZE))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Service]:
    with Service("range_server", folder) as service:
        yield service


def ranges_of(folder: Path, count: int, length: int) -> list[Range]:
    draws = random.Random(1)
    data = (folder / "data" / "a.tar").read_bytes()
    starts = [draws.randrange(SIZE - length) for _ in range(count)]
    return [Range("a.tar", at, length, crc32c(data[at : at + length])) for at in starts]


def note(benchmark: BenchmarkFixture, ranges: list[Range]) -> None:
    rate = sum(item.length for item in ranges) / benchmark.stats.stats.median / 1e6
    benchmark.extra_info["MB/s"] = round(rate)
    print(f"\n{benchmark.name}: {rate:,.0f} MB/s")


@pytest.mark.parametrize("way", ["open and read", "read_range", "read_range without crc", "read_ranges"])
@pytest.mark.benchmark(group="local ranges of 300 kB")
def test_local(benchmark: BenchmarkFixture, folder: Path, way: str) -> None:
    ranges = ranges_of(folder, 200, 300_000)
    path = folder / "data" / "a.tar"

    def plain() -> None:
        for item in ranges:
            with path.open("rb", buffering=0) as file:
                file.seek(item.start)
                file.read(item.length)

    with Reader(folder / "data") as reader:

        def checked() -> None:
            for item in ranges:
                reader.read_range(item.name, item.start, item.length, item.crc)

        def unchecked() -> None:
            for item in ranges:
                reader.read_range(item.name, item.start, item.length)

        def many() -> None:
            for _ in reader.read_ranges(ranges):
                pass

        ways = {
            "open and read": plain,
            "read_range": checked,
            "read_range without crc": unchecked,
            "read_ranges": many,
        }
        benchmark.extra_info["reference"] = way == "open and read"
        benchmark(ways[way])
    note(benchmark, ranges)


@pytest.mark.parametrize("length", [64_000, MEGABYTE])
@pytest.mark.parametrize("way", ["s3fs", "read_range"])
def test_serial(benchmark: BenchmarkFixture, folder: Path, server: Service, way: str, length: int) -> None:
    ranges = ranges_of(folder, 40, length)
    options = {"anon": True, "endpoint_url": server.url}
    system = fsspec.filesystem("s3", **options)

    def plain() -> None:
        for item in ranges:
            system.cat_file("data/a.tar", start=item.start, end=item.start + item.length)

    with Reader("s3://data", options=options) as reader:

        def checked() -> None:
            for item in ranges:
                reader.read_range(item.name, item.start, item.length, item.crc)

        benchmark.group = f"s3, ranges of {length // 1000} kB, one by one"
        benchmark.extra_info["reference"] = way == "s3fs"
        benchmark.pedantic(plain if way == "s3fs" else checked, rounds=10, warmup_rounds=1)
    note(benchmark, ranges)


@pytest.mark.parametrize("length", [64_000, MEGABYTE])
@pytest.mark.parametrize("way", ["s3fs", "read_ranges"])
def test_concurrent(
    benchmark: BenchmarkFixture, folder: Path, server: Service, way: str, length: int
) -> None:
    ranges = ranges_of(folder, 160, length)
    options = {"anon": True, "endpoint_url": server.url, "config_kwargs": {"max_pool_connections": 16}}
    system = fsspec.filesystem("s3", **options)

    def plain() -> None:
        system.cat_ranges(
            ["data/a.tar"] * len(ranges),
            [item.start for item in ranges],
            [item.start + item.length for item in ranges],
            batch_size=16,
            on_error="raise",
        )

    with Reader("s3://data", options=options, attempts_in_flight=16) as reader:

        def checked() -> None:
            for _ in reader.read_ranges(ranges):
                pass

        benchmark.group = f"s3, ranges of {length // 1000} kB, 16 in flight"
        benchmark.extra_info["reference"] = way == "s3fs"
        benchmark.pedantic(plain if way == "s3fs" else checked, rounds=10, warmup_rounds=1)
    note(benchmark, ranges)
