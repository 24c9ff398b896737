"""A stream through a local cache has the batches of the folder, and its second epoch needs no store."""

import json
import random
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import sa1b
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import DataConfig
from sa1b.engine.step.feed import Feed
from sa1b.errors import UsageError
from tests import processes
from tests.shards import tiny
from tests.storage.service import REPOSITORY, Service
from tests.stream.test_loader import first
from tests.stream.test_remote import assert_same, options
from tests.stream.test_stream import SMALL, take

IMAGES, STEPS = 29, 10  # an epoch
EVERY = 1 << 30  # bytes: no shard is left out
SETTINGS: dict[str, Any] = {"global_batch": 6, "micro_batch": 3, **SMALL}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bucket")
    make(folder, long_side=160)
    return folder


def make(folder: Path, long_side: int) -> None:
    tiny.synthesize(folder / "sa_000001.tar", images=IMAGES, first_id=100, long_side=long_side)
    root = folder / "data" / "root"
    tiny.ingest_tar(folder / "sa_000001.tar", root, images_per_shard=7)


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "tables"))


def remote(port: int, **arguments: Any) -> sa1b.Stream:
    return sa1b.Stream("s3://data/root", storage_options=options(port), **{**SETTINGS, **arguments})


def local(bucket: Path, **arguments: Any) -> sa1b.Stream:
    return sa1b.Stream(bucket / "data" / "root", **{**SETTINGS, **arguments})


def requests(server: Service) -> int:
    return int(server.ask({})["GET"])


def epochs(stream: sa1b.Stream, count: int, **loader: object) -> list[sa1b.Batch]:
    return [batch for _ in range(count) for batch in DataLoader(stream, batch_size=None, **loader)]  # type: ignore[arg-type]


def half(bucket: Path) -> int:
    """A limit that leaves some shards out."""
    return sum(path.stat().st_size for path in (bucket / "data" / "root").glob("*.tar")) // 2


@pytest.mark.parametrize(("block_size", "is_whole"), [(1, False), (3, True)])
def test_batches_are_those_of_the_folder(
    bucket: Path, server: Service, tmp_path: Path, block_size: int, is_whole: bool
) -> None:
    expected = epochs(local(bucket, block_size=block_size), 2)
    given = {"block_size": block_size, "cache_bytes": EVERY if is_whole else half(bucket)}
    assert_same(epochs(remote(server.port, cache=tmp_path / "stream", **given), 2), expected)
    loader = sa1b.Loader(remote(server.port, cache=tmp_path / "loader", **given), threads=3, quiet=True)
    assert_same([batch for _ in range(2) for batch in loader], expected)


def test_the_second_epoch_makes_no_request(bucket: Path, server: Service, tmp_path: Path) -> None:
    loader = sa1b.Loader(remote(server.port, cache=tmp_path / "c", cache_bytes=EVERY), quiet=True)
    expected = epochs(local(bucket), 3)
    assert_same(list(loader), expected[:STEPS])
    before = requests(server)
    assert_same([*loader, *loader], expected[STEPS:])
    assert requests(server) == before
    stats = loader.stats()
    counts = stats["cache"]
    # Neighbours in a batch share a read, more of them in one epoch than in another.
    assert [IMAGES - counts["misses"] in range(9), 2 * IMAGES - counts["hits"] in range(18)] == [True] * 2
    assert counts["outside"] == 0
    assert f"\ncache: {counts['hits']} hits, {counts['misses']} misses, 0 reads outside\n" in repr(stats)
    assert sa1b.Loader(local(bucket), quiet=True).stats()["cache"] is None


def test_a_limit_leaves_shards_out(bucket: Path, server: Service, tmp_path: Path) -> None:
    stream = remote(server.port, cache=tmp_path / "c", cache_bytes=half(bucket))
    found = [epochs(stream, 1) and stream.stats.snapshot()["cache"] for _ in range(2)]
    assert found[0]["hits"] == 0 < found[0]["misses"] < IMAGES
    assert found[0]["outside"] > 0
    assert found[1]["hits"] > 0
    assert found[1]["misses"] == found[0]["misses"]
    assert found[1]["outside"] > found[0]["outside"]
    taken = sum(path.stat().st_blocks * 512 for path in (tmp_path / "c").rglob("*.sparse"))
    assert 0 < taken <= half(bucket)


@pytest.mark.parametrize(
    "context", ["fork", *(pytest.param(one, marks=pytest.mark.slow) for one in ("spawn", "forkserver"))]
)
def test_workers_share_the_cache(bucket: Path, server: Service, tmp_path: Path, context: str) -> None:
    stream = remote(server.port, cache=tmp_path / "c", cache_bytes=EVERY)
    workers = {"num_workers": 2, "multiprocessing_context": context}
    expected = epochs(local(bucket), 2)
    stream.dataset[0]  # the parent has connections and files of its own
    assert_same(epochs(stream, 1, **workers), expected[:STEPS])
    (folder,) = (tmp_path / "c").iterdir()
    written = {path: path.read_bytes() for path in folder.iterdir()}
    before = requests(server)
    assert_same(epochs(stream, 1, **workers), expected[STEPS:])
    # A worker that is started by spawn or forkserver opens the dataset: it reads dataset.json.
    assert requests(server) - before <= (0 if context == "fork" else 2 * 4)
    assert {path: path.read_bytes() for path in folder.iterdir()} == written


def test_the_number_of_workers_does_not_change_what_is_cached(
    bucket: Path, server: Service, tmp_path: Path
) -> None:
    found = set()
    for workers in (0, 3):
        folder = tmp_path / str(workers)
        epochs(remote(server.port, cache=folder, cache_bytes=half(bucket)), 1, num_workers=workers)
        found.add(tuple(sorted((path.name, path.read_bytes()) for path in folder.rglob("*.sparse"))))
    assert len(found) == 1


def test_a_damaged_cache_changes_nothing(bucket: Path, server: Service, tmp_path: Path) -> None:
    stream = remote(server.port, cache=tmp_path / "c", cache_bytes=EVERY, damage_log=tmp_path / "log")
    expected = epochs(local(bucket), 3)
    assert_same(epochs(stream, 1), expected[:STEPS])
    choice = random.Random(5)
    for path in (tmp_path / "c").rglob("*.sparse"):
        data = bytearray(path.read_bytes())
        for _ in range(6):
            data[choice.randrange(len(data))] ^= 1 << choice.randrange(8)
        path.write_bytes(data[: choice.randrange(len(data))] if choice.random() < 0.4 else data)
    before = requests(server)
    assert_same(epochs(stream, 1), expected[STEPS : 2 * STEPS])
    assert 3 < requests(server) - before < IMAGES
    before = requests(server)
    assert_same(epochs(stream, 1), expected[2 * STEPS :])
    assert requests(server) == before
    assert not (tmp_path / "log").exists()


def test_a_cached_dataset_is_read_while_the_store_is_gone(bucket: Path, tmp_path: Path) -> None:
    with Service("range_server", bucket) as service:
        stream = remote(service.port, cache=tmp_path / "c", cache_bytes=EVERY, deadline=5)
        epochs(stream, 1)
    assert_same(epochs(stream, 1), epochs(local(bucket), 2)[STEPS:])


def test_replaced_shards_are_other_files(tmp_path: Path) -> None:
    make(tmp_path, long_side=160)
    with Service("range_server", tmp_path) as service:
        given = {"cache": tmp_path / "c", "cache_bytes": EVERY}
        epochs(remote(service.port, **given), 1)
        old = {path.name for path in (tmp_path / "c").rglob("*.sparse")}
        shutil.rmtree(tmp_path / "data")
        make(tmp_path, long_side=144)
        found = epochs(remote(service.port, **given), 2)
        assert_same(found, epochs(local(tmp_path), 2))
    new = {path.name for path in (tmp_path / "c").rglob("*.sparse")}
    assert len(new) == len(old)
    assert not new & old


def test_a_killed_reader_leaves_a_cache_that_gives_the_same_batches(
    bucket: Path, server: Service, tmp_path: Path
) -> None:
    script = (
        "import json, sys, sa1b\n"
        "stream = sa1b.Stream('s3://data/root', storage_options=json.loads(sys.argv[1]),"
        " cache=sys.argv[2], cache_bytes=1 << 30, **json.loads(sys.argv[3]))\n"
        "for batch in sa1b.Loader(stream, threads=3, quiet=True):\n"
        "    print(flush=True)\n"
    )
    given = (json.dumps(options(server.port)), str(tmp_path / "c"), json.dumps(SETTINGS))
    for kill in range(4):
        process = processes.Process(
            [sys.executable, "-c", script, *given], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        )
        assert process.stdout is not None
        for _ in range(2 * kill):
            process.stdout.readline()
        process.kill()
        process.communicate()
    stream = remote(server.port, cache=tmp_path / "c", cache_bytes=EVERY)
    assert_same(epochs(stream, 2), epochs(local(bucket), 2))
    assert stream.stats.snapshot()["cache"]["hits"] > IMAGES


def test_samples_of_an_open_dataset_are_cached(bucket: Path, server: Service, tmp_path: Path) -> None:
    dataset = sa1b.open(
        "s3://data/root", storage_options=options(server.port), cache=tmp_path, cache_bytes=EVERY
    )
    jpegs = [dataset[i].jpeg for i in range(3)]
    before = requests(server)
    assert [dataset[i].jpeg for i in range(3)] == jpegs
    assert requests(server) == before
    stream = sa1b.Stream(dataset, **SETTINGS)
    assert_same(take(stream, STEPS), take(local(bucket), STEPS))
    with pytest.raises(ValueError, match=r"cache='x': the dataset is open already; .*sa1b\.open\(cache="):
        sa1b.Stream(dataset, cache="x", cache_bytes=1, **SETTINGS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cache": "/nvme"}, "cache='/nvme' needs a limit; also pass cache_bytes"),
        ({"cache_bytes": 10}, "cache_bytes=10 is the limit of a cache; also pass cache"),
        ({"cache": 3, "cache_bytes": 10}, "cache=3 must be a folder on a local disk"),
        ({"cache": "", "cache_bytes": 10}, "cache='' must be a folder on a local disk"),
        ({"cache": "/nvme", "cache_bytes": 0}, "cache_bytes=0 must be at least 1"),
        ({"cache": "/nvme", "cache_bytes": "1GB"}, "cache_bytes='1GB' must be a whole number"),
    ],
)
def test_arguments_of_the_cache_are_refused_by_name(
    bucket: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        local(bucket, **given)
    with pytest.raises(ValueError, match=message):
        sa1b.open(bucket / "data" / "root", **given)


def feed(bucket: Path, out: Path, **data: Any) -> Feed:
    config = DataConfig(root=str(bucket / "data" / "root"), global_batch=6, micro_batch=3, masks=5, **data)
    return Feed(
        config, 64, RankInfo(rank=0, world_size=1, local_rank=0, device=torch.device("cpu")), out, seed=3
    )


def test_training_reads_a_folder_of_another_disk_through_the_cache(bucket: Path, tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == bucket.stat().st_dev:
        pytest.skip("there is no second disk")
    cache = memory / f"sa1b-test-{tmp_path.parent.name}-{tmp_path.name}"
    try:
        plain, cached = feed(bucket, tmp_path), feed(bucket, tmp_path, cache=str(cache), cache_bytes=EVERY)
        for _ in range(2 * STEPS):
            assert_same(list(cached.step()), list(plain.step()))
        for one in (plain, cached):
            one.close()
        assert cached.loader.stats()["cache"]["hits"] > IMAGES
    finally:
        shutil.rmtree(cache)


def test_training_names_the_flag_of_a_cache_that_cannot_be_used(bucket: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--data.cache /nvme: needs a limit; also pass --data.cache-bytes"):
        DataConfig(cache="/nvme")
    with pytest.raises(UsageError, match=r"--data\.cache-bytes 5: is the limit of a cache.*--data\.cache"):
        DataConfig(cache_bytes=5)
    with pytest.raises(UsageError, match=r"--data\.cache .* is on the same disk as the dataset directory"):
        feed(bucket, tmp_path, cache=str(tmp_path / "c"), cache_bytes=EVERY)


def test_a_cache_that_holds_no_shard_is_a_warning(bucket: Path, server: Service, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"cache_bytes=5 is less than a shard; pass at least [\d,]+; the ca"):
        stream = remote(server.port, cache=tmp_path / "c", cache_bytes=5)
    with warnings.catch_warnings(action="error"):
        assert_same(first(sa1b.Loader(stream, quiet=True), STEPS), take(local(bucket), STEPS))
