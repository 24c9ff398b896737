"""A folder of objects, and the small range server over it."""

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from sa1b.storage.bucket import BucketStore
from sa1b.storage.reader import Range, Reader
from sa1b.storage.retry import RetryPolicy
from tests.storage import azurite, ceph, gcs
from tests.storage.service import Service

SIZE = 4_000_000
BUCKETS = ("data", "denied", "norange", "brief", "header", "shifted", "strange")
HASTY = RetryPolicy(deadline=60, attempt_timeout=0.6, initial_backoff=0.02, max_backoff=0.2)
# An answer is never given up by these, so that a machine under load counts what an idle one does.
UNHURRIED = RetryPolicy(deadline=60, initial_backoff=HASTY.initial_backoff, max_backoff=HASTY.max_backoff)


class WaitedTime:
    """A clock that only waiting moves: a busy machine reaches no deadline earlier, an idle one none later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)

    def policy(self, deadline: float) -> RetryPolicy:
        """By this clock, with the longest wait before each retry; an attempt has a minute of real time."""
        return RetryPolicy(
            deadline=deadline, attempt_timeout=60, clock=self, async_sleep=self.sleep, random=lambda: 1.0
        )


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> WaitedTime:
    monkeypatch.setattr("sa1b.storage.retry._MIN_TIMEOUT", 60.0)
    return WaitedTime()


@dataclass(frozen=True)
class Store:
    """Objects below FOLDER/data, served as s3://data."""

    folder: Path
    port: int
    service: Service

    def options(self, port: int | None = None) -> dict[str, Any]:
        return {"anon": True, "endpoint_url": f"http://127.0.0.1:{port or self.port}"}

    def signed(self, port: int | None = None) -> dict[str, Any]:
        """Options with credentials."""
        return {"key": "KEY", "secret": "secret", "endpoint_url": f"http://127.0.0.1:{port or self.port}"}

    def bytes(self, name: str = "a.bin") -> bytes:
        return (self.folder / "data" / name).read_bytes()

    def ranges(self, count: int, seed: int = 0, longest: int = 60_000, name: str = "a.bin") -> list[Range]:
        """Random ranges of an object with their crc32c."""
        rng = random.Random(seed)
        data = self.bytes(name)
        found = []
        for _ in range(count):
            length = rng.randrange(1, longest)
            start = rng.randrange(len(data) - length + 1)
            found.append(Range(name, start, length, int(google_crc32c.value(data[start : start + length]))))
        return found

    def slices(self, ranges: list[Range]) -> list[bytes]:
        """What the ranges hold, read by plain means."""
        data = {name: self.bytes(name) for name in {item.name for item in ranges}}
        return [data[item.name][item.start : item.start + item.length] for item in ranges]


@pytest.fixture(scope="session")
def gateway() -> Iterator[ceph.Gateway]:
    """A real store, with pages of 100 names instead of 1000."""
    if ceph.missing():
        pytest.skip(f"no {', '.join(ceph.missing())}: {ceph.INSTALL}")
    began = time.monotonic()
    with ceph.Gateway("rgw max listing results = 100") as running:
        print(f"\nCeph's gateway is up in {time.monotonic() - began:.1f} s")
        yield running
        folder = running.folder
    assert not folder.exists()
    assert not ceph.processes_below(folder)


def make_bucket(store: BucketStore) -> None:
    name = store.root.split("/")[2]
    with Reader(f"s3://{name}", options=store.options) as reader:
        reader.request("", lambda system: system._call_s3("create_bucket", Bucket=name)).result()


@pytest.fixture
def ceph_bucket(gateway: ceph.Gateway, tmp_path: Path) -> Iterator[BucketStore]:
    """A dataset directory in a new bucket of the real store."""
    name = secrets.token_hex(8)
    with contextlib.closing(
        BucketStore(f"s3://{name}/shards", scratch=tmp_path / "scratch", options=gateway.options)
    ) as bucket:
        make_bucket(bucket)
        yield bucket
        assert bucket.uploads() == []


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[gcs.Server]:
    pytest.importorskip("gcsfs")
    if gcs.missing():
        pytest.skip(f"no {gcs.PROGRAM}: {gcs.INSTALL}")
    with gcs.Server() as running:
        yield running


@pytest.fixture(scope="session")
def azurite_server() -> Iterator[azurite.Server]:
    pytest.importorskip("adlfs")
    if azurite.missing():
        pytest.skip(f"no {azurite.PROGRAM}: {azurite.INSTALL}")
    with azurite.Server() as running:
        yield running


def directory_of(server: gcs.Server | azurite.Server, scratch: Path) -> BucketStore:
    """A dataset directory in a new bucket or container of an emulator."""
    root = f"{server.protocol}://{server.new_bucket()}/shards"
    return BucketStore(root, scratch=scratch, options=server.options)


@pytest.fixture(params=["gs", "az"])
def cloud(request: pytest.FixtureRequest) -> gcs.Server | azurite.Server:
    """An emulator of a store without the S3 protocol."""
    name = {"gs": "gcs_server", "az": "azurite_server"}[request.param]
    found: gcs.Server | azurite.Server = request.getfixturevalue(name)
    return found


@pytest.fixture
def cloud_bucket(cloud: gcs.Server | azurite.Server, tmp_path: Path) -> Iterator[BucketStore]:
    with contextlib.closing(directory_of(cloud, tmp_path / "scratch")) as bucket:
        yield bucket


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("store")
    for bucket in BUCKETS:
        (folder / bucket / "deep").mkdir(parents=True)
        (folder / bucket / "a.bin").write_bytes(random.Random(1).randbytes(SIZE))
        (folder / bucket / "deep" / "b c+ü.bin").write_bytes(random.Random(2).randbytes(50_000))
        (folder / bucket / "empty.bin").write_bytes(b"")
    with Service("range_server", folder) as service:
        yield Store(folder, service.port, service)
