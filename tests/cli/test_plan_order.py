"""`sa1b plan order`: the simulated reads are those of real streams, and each figure follows from its limit."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sa1b
from sa1b.programs.plan.order_plan import Limits, OrderCase
from sa1b.programs.plan.order_reads import batch_figures, simulate
from sa1b.programs.synthetic import source_tars as synthetic
from sa1b.report import bar
from sa1b.shards.commit import write_dataset
from sa1b.shards.manifest import read_tasks
from sa1b.stream.batch_stream import BatchStream
from tests.cli.verb import called
from tests.shards import tiny
from tests.storage.service import Service
from tests.stream.test_remote import options
from tests.stream.test_stream import SMALL

order = called("plan")
NONE = Limits(gpus=2, bytes=None, requests=None, decoded=None, trained=None)
SETTINGS: dict[str, Any] = {"global_batch": 12, "micro_batch": 2, "world_size": 4, "epochs": None, **SMALL}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bucket")
    for name, tars in (("root", (1, 2)), ("mine", (3,))):
        root = folder / "data" / name
        for tar in tars:
            path = folder / f"sa_00000{tar}.tar"
            synthetic.write_tar(path, images=15 + tar, first_id=100 * tar, long_side=120)
            tiny.ingest_tar(path, root, images_per_shard=7)
        write_dataset(root, read_tasks(root))
    return folder


@pytest.fixture(scope="module")
def root(bucket: Path) -> Path:
    return bucket / "data" / "root"


@pytest.fixture(scope="module")
def server(bucket: Path) -> Iterator[Service]:
    with Service("range_server", bucket) as service:
        yield service


def half(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("*.tar")) // 2


def real_epochs(streams: list[BatchStream], steps: int, epochs: int) -> list[dict[str, int]]:
    """What the streams of a node read from the store, and from the cache, in each epoch."""
    pieces = [stream.plan.micro_batches(0) for stream in streams]
    readers = [source.dataset.reader for stream in streams for source in stream.sources()]
    before = [reader.counters() for reader in readers]
    totals, found = dict.fromkeys(("requests", "bytes", "hits", "misses", "outside"), 0), []
    with ExitStack() as stack:
        for reader in readers:
            stack.enter_context(reader.used())
        for _ in range(epochs):
            for _ in range(steps):
                for stream, own in zip(streams, pieces, strict=True):
                    assert len(list(stream.read(islice(own, stream.plan.count)))) == stream.plan.count
            counted = [reader.counters() for reader in readers]
            cached = [reader.cache.counts() for reader in readers if reader.cache is not None]
            now = {
                "requests": sum(b.reads - a.reads for a, b in zip(before, counted, strict=True)),
                "bytes": sum(b.bytes - a.bytes for a, b in zip(before, counted, strict=True)),
                **{name: sum(getattr(one, name) for one in cached) for name in ("hits", "misses", "outside")},
            }
            found.append({name: now[name] - totals[name] for name in now})
            totals = now
    return found


def simulated(stream: BatchStream, cache_bytes: int, epochs: int) -> list[dict[str, int]]:
    figures = simulate(
        OrderCase("", stream, batch_figures(stream), cache_bytes),
        epochs,
        NONE,
        bar(0, "", "step", quiet=True),
    )
    names = ("requests", "bytes", "hits", "misses", "outside")
    return [{name: getattr(one, name) for name in names} for one in figures.epochs]


@pytest.mark.parametrize(("block_size", "cached"), [(1, False), (1, True), (3, False), (3, True)])
def test_reads_and_hits_are_those_of_real_streams(
    bucket: Path, root: Path, server: Service, tmp_path: Path, block_size: int, cached: bool
) -> None:
    given = {"storage_options": options(server.port), "block_size": block_size, **SETTINGS}
    if cached:
        given |= {"cache": tmp_path / "cache", "cache_bytes": half(root)}
    streams: list[BatchStream] = [sa1b.Stream("s3://data/root", rank=rank, **given) for rank in range(2)]
    real = real_epochs(streams, streams[0].steps_per_epoch, 3)
    expected = simulated(sa1b.Stream(root, rank=0, block_size=block_size, **SETTINGS), half(root) * cached, 3)
    if not cached:  # a stream without a cache counts no ranges beside it
        expected = [{**one, "outside": 0} for one in expected]
    assert real == expected
    assert sum(one["hits"] for one in real[1:]) > 0 or not cached


def test_a_mixture_reads_what_is_simulated(bucket: Path, root: Path, server: Service, tmp_path: Path) -> None:
    def mix(rank: int, place: str, **given: Any) -> sa1b.Mix:
        sources = {
            name: (sa1b.Stream(f"{place}/{name}", rank=rank, seed=n, **SETTINGS, **given), 2 + n)
            for n, name in enumerate(("root", "mine"))
        }
        return sa1b.Mix(sources)

    size = half(root)
    remote = {"storage_options": options(server.port), "cache": tmp_path / "cache", "cache_bytes": size}
    streams: list[BatchStream] = [mix(rank, "s3://data", **remote) for rank in range(2)]
    assert real_epochs(streams, streams[0].steps_per_epoch, 2) == simulated(mix(0, str(root.parent)), size, 2)


def test_the_time_of_an_epoch_is_that_of_the_slowest_limit(root: Path) -> None:
    stream = sa1b.Stream(root, rank=0, **SETTINGS)

    def epoch(**limits: float) -> Any:
        given = Limits(
            **{"gpus": 2, "bytes": None, "requests": None, "decoded": None, "trained": None, **limits}
        )
        return simulate(
            OrderCase("", stream, batch_figures(stream), 0), 1, given, bar(0, "", "step", quiet=True)
        ).epochs[0]

    assert (epoch().seconds, epoch().limit, epoch().images_per_second) == (None, None, None)
    images = 3 * 6  # steps, and images of the node in each
    assert epoch(trained=9.0).seconds == pytest.approx(images / 9)
    assert epoch(trained=9.0).images_per_second == pytest.approx(18.0)  # two nodes
    assert epoch(bytes=1e3).seconds == pytest.approx(epoch().bytes / 1e3)
    assert epoch(requests=10.0).seconds == pytest.approx(epoch().requests / 10)
    both = epoch(trained=9.0, decoded=3.0)
    assert (both.limit, both.seconds) == ("decoding", pytest.approx(images / 3))


def test_blocks_lower_the_shards_of_a_step_and_the_spread(tmp_path: Path) -> None:
    ids = range(800)
    for tar in range(8):
        path = tmp_path / f"sa_00000{tar}.tar"
        tiny.make_tar(path, ids[100 * tar : 100 * (tar + 1)])
        tiny.ingest_tar(path, tmp_path / "shards", images_per_shard=50)
    write_dataset(tmp_path / "shards", read_tasks(tmp_path / "shards"))
    found = {}
    for size in (1, 8):
        stream = sa1b.Stream(
            tmp_path / "shards", global_batch=64, rank=0, world_size=8, block_size=size, epochs=None, **SMALL
        )
        figures = simulate(
            OrderCase("", stream, batch_figures(stream), 0), 1, NONE, bar(0, "", "step", quiet=True)
        )
        found[size] = figures.batch
        assert (figures.images, figures.steps) == (800, 13)
        assert figures.batch.tars_at_random == pytest.approx(8 * (1 - (7 / 8) ** 64))
    assert (found[1].shards > 14, found[8].shards < 9) == (True, True)
    assert (found[1].rank_shards > 6, found[8].rank_shards <= 2) == (True, True)
    assert (found[1].neighbours < 0.3, found[8].neighbours > 0.99) == (True, True)
    assert found[1].distance == pytest.approx(800 * (1 - np.sqrt(0.5)), rel=0.15)
    assert found[8].distance == 1


def test_cases_side_by_side_on_the_command_line(root: Path, tmp_path: Path) -> None:
    (tmp_path / "mix<b>.yaml").write_text(
        f"sources:\n  a: {{root: {root}, weight: 2}}\n  b: {{root: {root.parent / 'mine'}, weight: 1}}\n"
    )
    words = [
        "order",
        root,
        "--mix",
        tmp_path / "mix<b>.yaml",
        "--ranks",
        4,
        "--gpus",
        2,
        "--global-batch",
        12,
    ]
    words += ["--block-size", "3,1", "--cache-gb", "0,0.5", "--epochs", 2, "--node-rate", 0.001]
    done = order(*words, "--report", tmp_path / "order.html")
    assert (done.returncode, done.stderr) == (0, "")
    heading, _, heads, *lines = done.stdout.splitlines()
    assert heading == f"{root}: 4 ranks on 2 nodes, 12 images a step"
    assert heads.split()[:2] == ["one", "step"]
    orders = ["blocks of 1", "blocks of 3", "mix<b>.yaml"]
    assert [line.split("  ")[0] for line in lines[:3]] == orders
    cases = [f"{name}{cache}" for name in orders for cache in ("", ", cache 0.5 GB")]
    assert [line.split("  ")[0] for line in lines[5:17:2]] == cases
    page = (tmp_path / "order.html").read_text()
    assert (page.count("<svg"), "<!--" in page, "<b>" in page) == (3, False, False)
    document = json.loads(order(*words, "--json").stdout)
    assert [case["name"] for case in document["cases"]] == cases
    epochs = [case["epochs"] for case in document["cases"]]
    assert all(one[0]["limit"] == "bytes" for one in epochs)
    assert [one[1]["hit_rate"] > 0 for one in epochs] == [False, True] * 3


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "ROOT or --mix: missing; add a dataset directory"),
        (["--mix", "none.yaml"], "--mix none.yaml: No such file or directory"),
        (["--view", "train", "--mix", "none.yaml"], "--view: needs the dataset directory of the view; add ROOT"),
        (["ROOT", "--block-size", "1,x"], "--block-size 'x': must be whole numbers of at least 1"),
        (["ROOT", "--cache-gb", "-1"], "--cache-gb '-1': must be numbers of at least 0"),
        (["ROOT", "--cache-gb", "nan"], "--cache-gb 'nan': must be numbers of at least 0"),
        (["ROOT", "--ranks", "300"], "--global-batch 256: has 256 samples for 300 ranks"),
        (["ROOT", "--block-size", "7"], "--global-batch 256 must be a multiple of --block-size 7"),
        (["ROOT", "--view", "none"], "none"),
        (["ROOT", "--report", "missing/order.html"], "--report missing/order.html: there is no folder missing"),
        (["nothing"], "nothing: no dataset there; pass the --out folder"),
    ],
)  # fmt: skip
def test_refusals(root: Path, words: list[str], reason: str) -> None:
    done = order("order", *(str(root) if word == "ROOT" else word for word in words))
    assert done.returncode == 2
    assert reason in done.stderr
    assert done.stdout == ""
