import json
from dataclasses import replace

import fsspec
import pytest

import sa1b
from benchmarks.gpu.stand_in import HostLane
from sa1b.stream.decoders import DECODERS, GpuDecoder
from sa1b.stream.stats import LoaderSettings, limit_of, remedy
from sa1b.stream.throughput import measure
from tests.cli.verb import called, runner
from tests.shards.tiny_source import ROOTS, make_root, pairs, write_source

run = runner("bench")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    source = write_source(folder / "sa_000001.tar", pairs(range(8)))
    return make_root(folder / "root", [source], ROOTS["plain"])


def test_rates_and_what_limits_as_json_and_as_a_table(root):
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    common = ("--image-size", 64, "--batch", 3, "--threads", 2, "--seconds", 1)
    done = run(root, *common, "--dense", 32, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert set(found["images_per_second"]) == {"storage", "decode", "loader"}
    assert all(rate > 0 for rate in found["images_per_second"].values())
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["shares"]["device"] > 0  # masks were rasterised
    assert found["limit"] in ("storage", *found["shares"])
    assert (found["threads"], found["dense"], found["batch"]) == (2, 32, 3)
    shown = run(root, *common)
    assert shown.returncode == 0
    assert "images of 64 pixels, up to 64 masks as runs, 2 threads, cpu" in shown.stdout
    assert "bench" in shown.stderr
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--image-size", 0], "--image-size 0: must be at least 1"),
        (["--threads", 0], "--threads 0: must be at least 1"),
        (["--masks", -1], "--masks -1: must be at least 0"),
        (["--seconds", "0.5"], "--seconds 0.5: must be from 1 to 3600"),
        (["--device", "tpu"], "--device tpu: must be cpu or cuda"),
        (["--decode", "gpu"], "decodes into memory of a GPU, not of cpu; pass --device"),
        (["--view", "nothing"], "no view 'nothing'"),
        (["--cache", "x"], "--cache x: needs a limit; also pass --cache-bytes"),
        (["--cache-bytes", 9], "--cache-bytes 9: is the limit of a cache; also pass --cache"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_line(root, arguments, message):
    done = called("bench")(root, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_storage_limits_where_it_delivers_little_more_than_the_loader_takes():
    shares = {"read": 0.2, "decode": 0.7, "pick": 0.1}
    assert limit_of(110.0, 100.0, shares) == "storage"
    assert limit_of(1000.0, 100.0, shares) == "decode"


@pytest.mark.parametrize(
    ("limit", "changes", "text"),
    [
        ("storage", {}, "reshard to 64 px: "),
        ("storage", {"stored": 64}, "use faster storage"),
        ("storage", {"is_local": False, "stored": 64}, "cache the data on a local disk with --cache"),
        ("storage", {"is_local": False, "cached": True}, "raise --cache-bytes if the cache does not hold"),
        ("read", {}, "add processes or threads (--processes, --threads, now 1 x 2 for 8 processors)"),
        ("read", {"threads": 8}, "give the loader more than 8 processors"),
        ("decode", {"threads": 4, "processes": 2, "stored": 64}, "give the loader more than 8 processors"),
        ("decode", {"threads": 8}, "reshard to 64 px: "),
        ("pick", {"threads": 8}, "lower --masks"),
        ("decode", {"stored": 64, "threads": 8, "on_gpu": True}, "decode on the GPU: --decode gpu"),
        ("device", {"threads": 8}, "lower --dense"),
        ("device", {"on_gpu": True}, "lower --dense"),
    ],
)
def test_the_remedy_has_the_flags_of_this_command(limit, changes, text):
    settings = LoaderSettings(2, 8, True, False, None, 64, False, trains=False)
    found = remedy(limit, replace(settings, **changes))
    assert text in found
    assert "--data." not in found


def test_reads_from_a_local_cache_are_counted(root, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "tables"))
    memory = fsspec.filesystem("memory")
    memory.put(str(root), "/bench", recursive=True)
    stream = sa1b.Stream(
        "memory://bench",
        global_batch=3,
        epochs=None,
        image_size=64,
        cache=tmp_path / "cache",
        cache_bytes=1 << 30,
    )
    found = measure(stream, seconds=1, threads=2, quiet=True)
    assert found["cache"]["hits"] > 0
    assert found["cache"]["misses"] == found["cache"]["outside"] == 0  # the first measurement has filled it
    assert f"Cache: {found['cache']['hits']:,} hits, 0 misses, 0 reads outside.\n" in found.table()


def test_a_decoder_of_micro_batches_is_measured_with_micro_batches(root, monkeypatch):
    made = GpuDecoder(HostLane, "cpu")
    monkeypatch.setitem(DECODERS, "torchcodec", lambda: made)
    options = {"global_batch": 3, "epochs": None, "image_size": 64}
    found = measure(sa1b.Stream(root, decoder="torchcodec", **options), seconds=0.5, threads=2, quiet=True)
    assert found["decoder"] == "torchcodec"
    assert found["on_cpu"] == 0
    assert "cpu, decoded there by torchcodec (0.0% of the images on the CPU)\n" in found.table()
    assert found["images_per_second"]["decode"] > 0
    plain = measure(sa1b.Stream(root, **options), seconds=0.5, threads=2, quiet=True)
    assert (plain["decoder"], plain["on_cpu"]) == ("cpu", None)
    assert "decoded there" not in plain.table()
