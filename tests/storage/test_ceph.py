"""Against a production object store on this machine: Ceph's gateway, with real signatures.

`pytest -m ceph`; skipped where the programs are not installed.
"""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import google_crc32c
import pytest
import s3fs

from sa1b.storage import http_range
from sa1b.storage.cache import fetch_once
from sa1b.storage.errors import DamageError, DeniedError, MissingError, ReplacedError, UnavailableError
from sa1b.storage.reader import Range, Reader
from sa1b.storage.retry import RetryPolicy
from tests.storage import ceph
from tests.storage.conftest import HASTY
from tests.storage.service import Service
from tests.storage.test_workers import WAYS, read_by_workers

pytestmark = [
    pytest.mark.ceph,
    pytest.mark.skipif(bool(ceph.missing()), reason=f"no {', '.join(ceph.missing())}: {ceph.INSTALL}"),
]
SIZE = 16_000_000


@dataclass(frozen=True)
class Objects:
    gateway: ceph.Gateway
    data: bytes

    def ranges(self, count: int, seed: int, longest: int = 100_000) -> list[Range]:
        rng = random.Random(seed)
        found = []
        for _ in range(count):
            length = rng.randrange(1, longest)
            start = rng.randrange(SIZE - length)
            crc = int(google_crc32c.value(self.data[start : start + length]))
            found.append(Range("a.tar", start, length, crc))
        return found

    def slices(self, ranges: list[Range]) -> list[bytes]:
        return [self.data[item.start : item.start + item.length] for item in ranges]


@pytest.fixture(scope="module")
def objects(gateway: ceph.Gateway) -> Objects:
    system = fsspec.filesystem("s3", **gateway.options, skip_instance_cache=True)
    system.mkdir("bucket")
    data = random.Random(0).randbytes(SIZE)
    system.pipe_file("bucket/root/a.tar", data)
    return Objects(gateway, data)


def test_ranges_one_by_one_and_at_once(objects: Objects) -> None:
    ranges = objects.ranges(200, seed=1)
    with Reader("s3://bucket/root", options=objects.gateway.options) as reader:
        assert [reader.read_range(r.name, r.start, r.length, r.crc) for r in ranges] == objects.slices(ranges)
        assert list(reader.read_ranges(ranges)) == objects.slices(ranges)
        assert reader.size("a.tar") == SIZE
        assert reader.counters().faults == 0


@pytest.mark.slow  # quick: test_classify.py and test_presign.py
def test_error_responses_are_distinguished(objects: Objects) -> None:
    with Reader("s3://bucket/root", options=objects.gateway.options) as reader:
        with pytest.raises(MissingError):
            reader.read_range("none.tar", 0, 10)
        for start in (SIZE - 5, SIZE, SIZE + 5):
            with pytest.raises(DamageError, match="ends at byte 16,000,000"):
                reader.read_range("a.tar", start, 10)
        with pytest.raises(DamageError, match="crc32c"):
            reader.read_range("a.tar", 0, 10, 1)
    with Reader("s3://nobucket", options=objects.gateway.options) as reader, pytest.raises(MissingError):
        reader.read_range("a.tar", 0, 10)
    for wrong in ({"secret": "wrong"}, {"key": "NOBODY"}):
        options = {**objects.gateway.options, **wrong}
        with Reader("s3://bucket/root", options=options) as reader, pytest.raises(DeniedError):
            reader.read_range("a.tar", 0, 10)


@pytest.mark.slow  # quick: test_faults.py
@pytest.mark.parametrize("rate", [0.01, 0.05, 0.2])
def test_faults_in_between_change_nothing(objects: Objects, rate: float) -> None:
    ranges = objects.ranges(600, seed=2)
    with (
        Service("fault_proxy", objects.gateway.port, 9, rate) as proxy,
        Reader(
            "s3://bucket/root",
            options={**objects.gateway.options, "endpoint_url": proxy.url},
            retry_policy=HASTY,
        ) as reader,
    ):
        began = time.monotonic()
        assert list(reader.read_ranges(ranges, prefetch=100)) == objects.slices(ranges)
        log = proxy.ask({"do": "log"})
        print(
            f"\n{rate:.0%}: {len(log['faults'])} faults in {log['requests']} requests, 0 of 600 wrong, ",
            end="",
        )
        print(f"{time.monotonic() - began:.1f} s; {reader.counters()}")
        assert len(log["faults"]) >= 600 * rate / 2


@contextmanager
def presigned_only() -> Iterator[None]:
    """Refuse requests by s3fs, so that all reads are presigned."""

    async def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("a request by s3fs")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3fs.S3FileSystem, "_call_s3", refused)
        yield


def test_presigned_requests_serve_every_kind_of_read(objects: Objects) -> None:
    ranges = objects.ranges(50, seed=5)
    fsspec.filesystem("s3", **objects.gateway.options).pipe_file("bucket/root/empty", b"")
    with Reader("s3://bucket/root", options=objects.gateway.options) as reader, presigned_only():
        assert list(reader.read_ranges(ranges)) == objects.slices(ranges)
        assert (reader.size("a.tar"), reader.size("empty")) == (SIZE, 0)
        assert reader.read_whole("empty", 10) == b""
        with pytest.raises(MissingError):
            reader.size("none.tar")
        assert reader.counters().faults == 0


@pytest.mark.slow  # quick: test_presign.py
def test_signatures_that_expire_are_renewed(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = objects.ranges(60, seed=6)
    monkeypatch.setattr(http_range, "LIFETIME", 2)
    for margin, expired in ((0.5, False), (-1000.0, True)):  # signed again in time, and never
        monkeypatch.setattr(http_range, "_MARGIN", margin)
        with Reader("s3://bucket/root", options=objects.gateway.options) as reader, presigned_only():
            found = []
            for item in ranges:
                found.append(reader.read_range(item.name, item.start, item.length, item.crc))
                time.sleep(0.08)
            assert found == objects.slices(ranges)
            counters = reader.counters()
            assert (counters.expired > 0) == expired
            assert counters.faults == counters.expired < 5


def test_a_replaced_object_is_an_error_that_names_it(objects: Objects) -> None:
    system = fsspec.filesystem("s3", **objects.gateway.options, skip_instance_cache=True)
    system.pipe_file("bucket/root/b.tar", b"a" * 1000)
    with Reader("s3://bucket/root", options=objects.gateway.options) as reader:
        assert reader.read_range("b.tar", 5, 10) == b"a" * 10
        system.pipe_file("bucket/root/b.tar", b"b" * 1000)
        with presigned_only(), pytest.raises(ReplacedError, match="s3://bucket/root/b.tar: replaced since"):
            reader.read_range("b.tar", 5, 10)
        assert reader.counters().faults == 0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("way", WAYS)
def test_workers_however_they_are_started(objects: Objects, workers: int, way: str) -> None:
    ranges = objects.ranges(80, seed=8)
    with Reader("s3://bucket/root", options=objects.gateway.options, deadline=120) as reader:
        found = read_by_workers(reader, ranges, workers, way if workers else None)
        assert sorted(found) == sorted(objects.slices(ranges))
        assert reader.counters().resets == 0


@pytest.mark.slow  # quick: test_cache.py
def test_a_table_is_fetched_once(objects: Objects, tmp_path: Path) -> None:
    import hashlib

    digest = hashlib.sha256(objects.data).hexdigest()
    with Reader("s3://bucket/root", options=objects.gateway.options) as reader:
        began = time.monotonic()
        path = fetch_once(reader, "a.tar", digest, tmp_path)
        took = time.monotonic() - began
        assert path.read_bytes() == objects.data
        print(f"\nfetched {SIZE / 1e6:.0f} MB at {SIZE / 1e6 / took:.0f} MB/s, hashed and flushed")


def killed(objects: Objects, seconds: float, policy: RetryPolicy) -> None:
    """Read on while the gateway is killed and, when a request has failed and after so many seconds, started again."""
    ranges = objects.ranges(800, seed=3)
    found: list[bytes] = []
    begun, gone = threading.Event(), threading.Event()

    def read() -> None:
        for data in reader.read_ranges(ranges):
            found.append(data)
            if len(found) == 100:
                begun.set()
                gone.wait(90)

    began = time.monotonic()
    with Reader("s3://bucket/root", options=objects.gateway.options, retry_policy=policy) as reader:
        reads = threading.Thread(target=read)
        reads.start()
        assert begun.wait(90)
        objects.gateway.kill_gateway()
        gone.set()
        ceph.wait_for(lambda: reader.counters().resets > 0, "a request that fails")
        time.sleep(seconds)
        objects.gateway.start_gateway()  # by the main thread: daemons end with the thread that started them
        reads.join(90)
        assert found == objects.slices(ranges)
        print(f"\ngateway away for {seconds:g} s: {time.monotonic() - began:.1f} s; {reader.counters()}")


def test_a_killed_gateway_is_waited_for(objects: Objects) -> None:
    killed(objects, 0, HASTY)


@pytest.mark.slow
def test_a_gateway_killed_for_a_minute_is_waited_for(objects: Objects) -> None:
    killed(objects, 60, RetryPolicy())


@pytest.mark.slow
def test_a_store_that_throttles_is_read_to_the_end() -> None:
    throttle = "rgw scheduler type = throttler\nrgw max concurrent requests = 2"
    with ceph.Gateway(throttle) as gateway:
        system = fsspec.filesystem("s3", **gateway.options, skip_instance_cache=True)
        system.mkdir("bucket")
        data = random.Random(0).randbytes(8_000_000)
        system.pipe_file("bucket/a.tar", data)
        ranges = [Range("a.tar", 4000 * i, 500_000) for i in range(400)]
        options = {**gateway.options}
        with Reader("s3://bucket", options=options, attempts_in_flight=32, retry_policy=HASTY) as reader:
            for item, found in zip(ranges, reader.read_ranges(ranges), strict=True):
                assert found == data[item.start : item.start + item.length]
            print(f"\nthrottled gateway: {reader.counters()}")
            assert reader.counters().throttled > 0
        gateway.kill_gateway()
        with (
            Reader("s3://bucket", options=options, deadline=1) as reader,
            pytest.raises(UnavailableError, match="s3://bucket/a.tar"),
        ):
            reader.read_range("a.tar", 0, 10)
