"""The stream from an object store has the sequence and bytes of the original folder, also after failures."""

import gc
import json
import shutil
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.utils.data import DataLoader

import sa1b
from benchmarks import latency_proxy
from sa1b import Dataset
from sa1b.errors import ManifestError
from sa1b.shards.manifest import table_name
from sa1b.storage.errors import MissingError, ReplacedError, UnavailableError
from sa1b.storage.reader import Reader
from sa1b.storage.retry import RetryPolicy
from tests import kit, processes
from tests.shards import tiny
from tests.storage.conftest import HASTY, WaitedTime
from tests.storage.service import REPOSITORY, Service
from tests.stream.test_loader import first
from tests.stream.test_stream import SMALL, assert_equal, damage, take

STEPS = 12


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FOLDER/data/root is both a folder and s3://data/root of a server over FOLDER."""
    folder = tmp_path_factory.mktemp("bucket")
    tiny.synthesize(folder / "sa_000001.tar", images=29, first_id=100, long_side=160)
    root = folder / "data" / "root"
    tiny.ingest_tar(folder / "sa_000001.tar", root, images_per_shard=7)
    kit.run("view", root, "--images-where", "masks >= 1", "--subset", "80%", "--name", "most")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry without waiting."""

    def reader(root: str, *, deadline: float, options: Any) -> Reader:
        return Reader(root, options=options, retry_policy=HASTY)

    monkeypatch.setattr("sa1b.shards.dataset.Reader", reader)


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines are reached by waits of retries, which take no time."""

    def reader(root: str, *, deadline: float, options: Any) -> Reader:
        return Reader(root, options=options, retry_policy=WaitedTime().policy(deadline))

    monkeypatch.setattr("sa1b.storage.retry._MIN_TIMEOUT", 60.0)
    monkeypatch.setattr("sa1b.shards.dataset.Reader", reader)


def options(port: int) -> dict[str, Any]:
    return {"anon": True, "endpoint_url": f"http://127.0.0.1:{port}"}


def remote(port: int, **arguments: Any) -> sa1b.Stream:
    given = {"global_batch": 6, "micro_batch": 3, "epochs": None, **SMALL, **arguments}
    return sa1b.Stream("s3://data/root", storage_options=options(port), **given)


def local(bucket: Path, **arguments: Any) -> sa1b.Stream:
    return sa1b.Stream(
        bucket / "data" / "root",
        **{"global_batch": 6, "micro_batch": 3, "epochs": None, **SMALL, **arguments},
    )


def assert_same(found: list[sa1b.Batch], expected: list[sa1b.Batch]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)


def test_an_object_store_gives_the_batches_of_the_folder(bucket: Path, server: Service) -> None:
    expected = take(local(bucket), STEPS)
    assert_same(take(remote(server.port), STEPS), expected)
    assert_same(first(sa1b.Loader(remote(server.port), quiet=True), STEPS), expected)


def test_any_file_system_that_fsspec_knows_serves(bucket: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(bucket / "data" / "root"), "/root", recursive=True)
    stream = sa1b.Stream("memory://root", global_batch=6, micro_batch=3, epochs=None, **SMALL)
    assert_same(take(stream, STEPS), take(local(bucket), STEPS))


@pytest.mark.parametrize(
    "context", ["fork", *(pytest.param(one, marks=pytest.mark.slow) for one in ("spawn", "forkserver"))]
)
def test_workers_however_they_are_started(bucket: Path, server: Service, context: str) -> None:
    stream = remote(server.port)
    stream.dataset.reader.size("dataset.json")  # the parent has connections of its own
    found = take(stream, 6, num_workers=2, multiprocessing_context=context)
    assert_same(found, take(local(bucket), 6))


def test_a_view_is_found_by_its_name(bucket: Path, server: Service) -> None:
    stream = remote(server.port, view="most")
    assert len(stream.view) < 29
    assert_same(take(stream, STEPS), take(local(bucket, view="most"), STEPS))
    with pytest.raises(ManifestError, match=r"'least' is no view of s3://data/root\. Known: most"):
        remote(server.port, view="least")


def test_a_run_of_samples_is_one_read(server: Service) -> None:
    alone, together = remote(server.port, block_size=1), remote(server.port, block_size=3)
    requests = []
    for stream in (alone, together):
        before = stream.dataset.reader.counters().reads
        for reading in stream.submit(next(stream.plan.micro_batches(0))).reads:
            reading.result()
        requests.append(stream.dataset.reader.counters().reads - before)
    assert requests == [3, 1]


def test_a_sample_is_at_most_one_request_if_each_takes_20_ms(bucket: Path, server: Service) -> None:
    with (
        Service("fault_proxy", server.port, 0, 0.0) as counted,
        latency_proxy.running(counted.port, 0.02) as slow,
    ):
        stream = remote(slow, epochs=1)
        before = counted.ask({"do": "log"})["requests"]
        found = list(sa1b.Loader(stream, quiet=True))
        requests = counted.ask({"do": "log"})["requests"] - before
    images = sorted(image_id for batch in found for image_id in batch.ids.tolist())
    assert images == sorted(stream.dataset.table.image_id.tolist())
    assert 0 < requests <= len(images)  # samples beside each other are one


def test_batches_of_runs_are_those_of_the_folder(bucket: Path, server: Service) -> None:
    expected = take(local(bucket, block_size=3), STEPS)
    assert_same(take(remote(server.port, block_size=3), STEPS), expected)
    assert_same(first(sa1b.Loader(remote(server.port, block_size=3), quiet=True), STEPS), expected)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("rate", [*(pytest.param(one, marks=pytest.mark.slow) for one in (0.01, 0.05)), 0.2])
def test_faults_on_the_way_change_nothing(bucket: Path, server: Service, tmp_path: Path, rate: float) -> None:
    damage_log = tmp_path / "damage_log.jsonl"
    steps = {0.01: 8, 0.05: 3, 0.2: 1}[rate] * STEPS  # some dozens of faults
    expected = take(local(bucket), steps)
    with Service("fault_proxy", server.port, 5, rate) as proxy:
        assert_same(take(remote(proxy.port, damage_log=damage_log), steps), expected)
        loader = sa1b.Loader(remote(proxy.port, damage_log=damage_log), threads=3, quiet=True)
        assert_same(first(loader, steps), expected)
        assert len(proxy.ask({"do": "log"})["faults"]) > 3
    assert not damage_log.exists()


def outage(bucket: Path, server: Service, damage_log: Path, seconds: float) -> None:
    expected = take(local(bucket), 5 * STEPS)
    with Service("fault_proxy", server.port, 1, 0.0) as proxy:
        found = []
        for batch in sa1b.Loader(remote(proxy.port, damage_log=damage_log), quiet=True):
            found.append(batch)
            if len(found) == STEPS:
                proxy.ask({"do": "outage", "seconds": seconds})
                went = time.monotonic()
            if len(found) == len(expected):
                break
        assert time.monotonic() - went >= seconds
        assert proxy.ask({"do": "log"})["outage_hits"] > 0
    assert_same(found, expected)
    assert not damage_log.exists()


@pytest.mark.usefixtures("hasty")
def test_an_outage_is_waited_out(bucket: Path, server: Service, tmp_path: Path) -> None:
    outage(bucket, server, tmp_path / "damage_log.jsonl", 0.5)


@pytest.mark.slow
def test_an_outage_of_a_minute_is_waited_out(bucket: Path, server: Service, tmp_path: Path) -> None:
    outage(bucket, server, tmp_path / "damage_log.jsonl", 60)


def gone(server: Service, damage_log: Path, way: str) -> None:
    with Service("fault_proxy", server.port, 1, 0.0) as proxy:
        stream = remote(proxy.port, damage_log=damage_log, deadline=10)
        batches = (
            iter(sa1b.Loader(stream, quiet=True))
            if way == "loader"
            else iter(DataLoader(stream, batch_size=None, num_workers=2 * (way == "workers")))
        )
        next(batches)
        proxy.ask({"do": "outage", "seconds": 600})
        with pytest.raises(UnavailableError, match=r"s3://data/root/sa1b-000001-.*unavailable: .* in 10 s"):
            list(islice(batches, STEPS))
    assert not damage_log.exists()
    # After an error a deleted DataLoader waits 5 s for each worker, then sends SIGTERM: it must not wait again.
    for worker in getattr(batches, "_workers", ()):
        worker.terminate()
        worker.join(300)
        assert worker.exitcode == 0
    del batches
    gc.collect()


@pytest.mark.usefixtures("waited")
@pytest.mark.parametrize("way", ["stream", "workers", "loader"])
def test_a_store_that_is_gone_stops_the_stream_and_is_named(
    server: Service, tmp_path: Path, way: str
) -> None:
    gone(server, tmp_path / "damage_log.jsonl", way)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["stream", "workers", "loader"])
def test_a_store_that_is_gone_is_waited_for_until_the_deadline(
    server: Service, tmp_path: Path, way: str
) -> None:
    began = time.monotonic()
    gone(server, tmp_path / "damage_log.jsonl", way)
    assert time.monotonic() - began >= 5  # the last of the waits that fit into 10 s may be left out


def test_a_shard_that_is_missing_stops_the_stream(bucket: Path, tmp_path: Path) -> None:
    shutil.copytree(bucket / "data" / "root", tmp_path / "data" / "root")
    shard = sorted((tmp_path / "data" / "root").glob("*.tar"))[1]
    shard.unlink()
    with Service("range_server", tmp_path) as service:
        for stream, way_out in (
            (remote(service.port, damage_log=tmp_path / "l"), "copy it again from the dataset directory"),
            (local(tmp_path, damage_log=tmp_path / "l"), r"`[^`]*verify .*root` says how to restore it"),
        ):
            message = f"root/{shard.name}: the shard is missing; {way_out}"
            with pytest.raises(MissingError, match=message) as error:
                take(stream, STEPS)
            assert "at position" in error.value.__notes__[0]
    assert not (tmp_path / "l").exists()


def test_a_shard_that_is_replaced_between_two_reads_stops_the_stream(bucket: Path, tmp_path: Path) -> None:
    shutil.copytree(bucket / "data" / "root", tmp_path / "data" / "root")
    damage_log = tmp_path / "damage_log.jsonl"
    with Service("range_server", tmp_path) as service:
        stream = remote(service.port, damage_log=damage_log)
        expected = take(local(bucket), STEPS)
        batches = iter(DataLoader(stream, batch_size=None))
        found = [next(batches) for _ in range(5)]  # an epoch: every shard was read
        for shard in (tmp_path / "data" / "root").glob("*.tar"):
            reversed_bytes = shard.read_bytes()[::-1]
            shard.unlink()
            shard.write_bytes(reversed_bytes)
        with pytest.raises(
            ReplacedError, match=r"s3://data/root/sa1b-000001-\d+\.tar: replaced since"
        ) as error:
            found.extend(islice(batches, STEPS))
        assert "at position" in error.value.__notes__[0]
        assert_same(found, expected[: len(found)])
    assert not damage_log.exists()


@pytest.mark.parametrize("where", ["store", "folder"])
def test_a_shard_that_was_replaced_before_its_first_read_stops_the_stream(
    bucket: Path, tmp_path: Path, where: str
) -> None:
    root = tmp_path / "data" / "root"
    shutil.copytree(bucket / "data" / "root", root)
    damage_log = tmp_path / "damage_log.jsonl"
    with Service("range_server", tmp_path) as service:
        stream = (
            remote(service.port, damage_log=damage_log)
            if where == "store"
            else local(tmp_path, damage_log=damage_log)
        )
        tiny.synthesize(tmp_path / "sa_000001.tar", images=29, first_id=100, long_side=144)
        shutil.rmtree(root)
        tiny.ingest_tar(tmp_path / "sa_000001.tar", root, images_per_shard=7)
        with pytest.raises(ReplacedError, match=r"root/sa1b-000001-\d+\.tar: replaced since the dataset was"):
            take(stream, STEPS)
    assert not damage_log.exists()


def test_damage_in_the_store_is_damage_of_the_folder(bucket: Path, tmp_path: Path) -> None:
    shutil.copytree(bucket / "data" / "root", tmp_path / "data" / "root")
    damage(tmp_path / "data" / "root", range(3))
    with Service("range_server", tmp_path) as service:
        found = take(remote(service.port, damage_log=tmp_path / "remote"), STEPS)
        found_in_runs = take(remote(service.port, damage_log=tmp_path / "runs", block_size=3), STEPS)
    expected = take(local(tmp_path, damage_log=tmp_path / "local"), STEPS)
    assert_same(found, expected)
    assert_same(found_in_runs, take(local(tmp_path, damage_log=tmp_path / "l", block_size=3), STEPS))
    listed = [
        [{**json.loads(line), "reason": ""} for line in (tmp_path / name).read_text().splitlines()]
        for name in ("remote", "local")
    ]
    assert listed[0] == listed[1]
    assert len(listed[0]) >= 3


def test_the_table_is_copied_once_for_all_processes(server: Service, cache: Path) -> None:
    script = (
        "import json, sys, sa1b\n"
        "stream = sa1b.Stream('s3://data/root', global_batch=2, storage_options=json.loads(sys.argv[1]))\n"
        "print(len(stream.view))\n"
    )
    with Service("fault_proxy", server.port, 1, 0.0) as proxy:
        command = [sys.executable, "-c", script, json.dumps(options(proxy.port))]
        running = [
            processes.Process(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) for _ in range(3)
        ]
        assert [process.communicate()[0] for process in running] == ["29\n"] * 3
        asked = proxy.ask({"do": "log"})["requests"]
    (copy,) = cache.glob("sa1b/*/samples-*.bin")
    # dataset.json three times: its size and two reads; the table once: its size and one read.
    assert asked == 3 * 3 + 2
    assert (
        copy.stat().st_size
        == Dataset("s3://data/root", storage_options=options(server.port)).manifest["samples"]["bytes"]
    )


def test_a_place_that_is_no_root_is_said(server: Service) -> None:
    with pytest.raises(
        ManifestError, match=r"s3://data/other: no dataset there .*no such object.*; pass a copy of"
    ):
        sa1b.open("s3://data/other", storage_options=options(server.port))


def test_a_table_that_does_not_fit_is_refused(bucket: Path, tmp_path: Path) -> None:
    shutil.copytree(bucket / "data" / "root", tmp_path / "data" / "root")
    root = tmp_path / "data" / "root"
    table = root / table_name(root)
    data = bytearray(table.read_bytes())
    data[200] ^= 1
    table.write_bytes(data)
    with (
        Service("range_server", tmp_path) as service,
        pytest.raises(Exception, match=r"samples-\w+\.bin: sha256"),
    ):
        remote(service.port)


def test_a_deadline_is_kept(server: Service) -> None:
    stream = remote(server.port, deadline=7)
    assert stream.dataset.reader.retry_policy == RetryPolicy(deadline=7)
    assert torch.equal(take(stream, 1)[0].ids, take(remote(server.port), 1)[0].ids)
