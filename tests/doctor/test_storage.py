"""Dataset directory and folders of a run: missing, damaged, unreachable, slow or full."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import latency_proxy
from sa1b.programs.doctor import storage
from sa1b.programs.doctor.check import RankProcess
from sa1b.programs.doctor.report import Finding, agreement
from tests.disks import small_disk
from tests.shards import tiny_source
from tests.storage.service import Service


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset directory of 12 images in 3 shards, in a folder that a server can serve."""
    folder = tmp_path_factory.mktemp("storage")
    sources = [tiny_source.write_source(folder / "sa_000001.tar", tiny_source.pairs(range(100, 112)))]
    return tiny_source.make_root(folder / "data", sources, tiny_source.ROOTS["plain"])


def only(findings: Iterator[Finding]) -> Finding:
    (one,) = findings
    assert bool(one.remedy) == (one.state != "ok")
    return one


def test_a_good_directory(root: Path) -> None:
    found = only(storage.dataset(RankProcess(root=str(root))))
    assert found.state == "ok"
    assert found.figure.startswith("12 images in 3 shards, digest ")
    rate = only(storage.read_rate(RankProcess(root=str(root), seconds=0.1, rate=0.001)))
    assert rate.state == "ok"
    assert rate.values["samples_per_second"] > 0
    assert rate.values["sequential_bytes_per_second"] > 0
    assert 0 < rate.values["sample_bytes"] < 1e6


def test_the_first_reads_which_load_code_and_open_connections_do_not_count(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def reads(stream: object, pool: object, threads: int, sizes: list[int]) -> Iterator[int]:
        for samples, seconds in ((8, 100.0), (1000, 0.25)):
            now[0] += seconds
            yield samples

    def perf_counter() -> float:
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr(storage, "storage_reads", reads)
    monkeypatch.setattr(storage, "time", SimpleNamespace(perf_counter=perf_counter))
    found = only(storage.read_rate(RankProcess(root=str(root), seconds=0.1, rate=0.001)))
    assert found.values["samples_per_second"] == pytest.approx(1000 / 0.251)


def test_without_root_storage_is_skipped_with_a_hint() -> None:
    for work in (storage.dataset, storage.read_rate):
        found = only(work(RankProcess()))
        assert (found.state, found.figure) == ("skipped", "no ROOT was named")
        assert found.remedy == "Name the dataset directory: sa1b doctor ROOT"


def test_a_dataset_that_one_of_several_ranks_lacks(tmp_path: Path) -> None:
    process = RankProcess(root=str(tmp_path / "missing"), rank=1, world_size=2, host="gpu-1")
    (found,) = storage.dataset(process)
    assert found.figure.endswith("missing: no dataset there")
    assert found.remedy.startswith(
        "If other machines have this dataset: mount their file system on gpu-1, copy it"
    )


@pytest.mark.parametrize(
    ("name", "figure", "remedy"),
    [
        ("missing", "missing: no dataset there", "Pass the --out folder of `"),
        ("sa_000001.tar", "sa_000001.tar: no dataset there", "Pass the --out folder of `"),
        ("foo://bucket/x", "foo://bucket/x: fsspec has no protocol 'foo'", "Pass a folder, or a URL"),
    ],
)
def test_a_root_that_is_no_dataset(root: Path, name: str, figure: str, remedy: str) -> None:
    at = name if "://" in name else str(root.parent / name)
    found = only(storage.dataset(RankProcess(root=at, timeout=2)))
    assert found.state == "failed"
    assert figure in found.figure
    assert found.remedy.startswith(remedy)


def test_a_store_that_does_not_answer() -> None:
    found = only(storage.dataset(RankProcess(root="http://127.0.0.1:9/data", timeout=2, host="gpu-07")))
    assert found.state == "failed"
    assert "http://127.0.0.1:9/data/dataset.json: unavailable for 1 s: " in found.figure
    assert "Check on gpu-07 that the store runs" in found.remedy


def test_a_damaged_sample(root: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(root, tmp_path / "copy")
    for shard in copy.glob("*.tar"):
        data = bytearray(shard.read_bytes())
        shard.write_bytes(bytes(byte ^ 1 for byte in data))
    found = only(storage.dataset(RankProcess(root=str(copy))))
    assert found.state == "failed"
    assert "is damaged" in found.figure
    assert "verify" in found.remedy


def test_sources_that_failed(root: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(root, tmp_path / "copy")
    document = json.loads((copy / "dataset.json").read_text())
    document["failed"] = {"sa_000002": "truncated"}
    (copy / "dataset.json").write_text(json.dumps(document))
    found = only(storage.dataset(RankProcess(root=str(copy))))
    assert found.state == "warning"
    assert "; failed sources: 1, pending: 0" in found.figure


def test_a_slow_store(root: Path) -> None:
    with Service("range_server", root.parent) as server, latency_proxy.running(server.port, 0.1) as port:
        process = RankProcess(root=f"http://127.0.0.1:{port}/data", seconds=0.6, rate=5000)
        found = only(storage.read_rate(process))
    assert found.state == "failed"  # at most 16 reads are in flight, 10 times a second
    assert found.values["samples_per_second"] < 1000
    assert "a rank trains 5,000 samples/s" in found.figure
    assert "sa1b bench" in found.remedy


@pytest.mark.parametrize(("samples", "state"), [(30.0, "failed"), (60.0, "warning"), (90.0, "ok")])
def test_a_rate_near_the_needed_one(samples: float, state: str) -> None:
    found = storage.rate_finding(storage.Rates(samples, 500e3, 200e6), 40.0)
    assert found.state == state
    assert f"{samples:.0f} random samples/s ({samples / 2:.1f} MB/s), 200 MB/s sequential" in found.figure
    assert "a rank trains 40 samples/s (20.0 MB/s)" in found.figure


def test_the_rate_of_a_cpu_is_not_rounded_to_nothing() -> None:
    found = storage.rate_finding(storage.Rates(3000.0, 38e3, 200e6), 1.0)
    assert found.figure.endswith("a rank trains 1 sample/s (38.0 kB/s)")


def test_what_a_gpu_needs_follows_from_its_peak() -> None:
    h100, a100 = storage.rate_of_peak(989e12), storage.rate_of_peak(312e12)
    assert h100 / a100 == pytest.approx(989 / 312)
    assert 5 < a100 < 100


def test_ranks_that_see_another_dataset_are_named() -> None:
    def of(rank: int, digest: str) -> Finding:
        return Finding("dataset", "ok", digest, "", (rank,), f"gpu-{rank // 2}", {"digest": digest * 64})

    found = only(agreement([of(0, "a"), of(1, "a"), of(2, "a"), of(3, "b")]))
    assert (found.state, found.where()) == ("failed", "rank 3 on gpu-1")
    assert found.figure == "digest bbbbbbbbbbbb, and aaaaaaaaaaaa on ranks 0-2"
    assert "sa1b copy" in found.remedy


def of_out(out: Path) -> Finding:
    first, temporary = storage.space(RankProcess(out=out))
    assert temporary.figure.startswith("temporary files in ")
    assert bool(first.remedy) == (first.state != "ok")
    return first


def test_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        found = of_out(disk / "run/not/yet")
        assert (found.state, found.figure.startswith(f"--out {disk}/run/not/yet: 4 MiB free")) == (
            "failed",
            True,
        )
        (disk / "filler").write_bytes(bytes(4 << 20))
        found = of_out(disk / "run")
        assert (found.state, "No space left on device" in found.figure) == ("failed", True)
        assert not (disk / "run").exists()


def test_a_disk_without_free_files(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2 << 30) as disk:
        subprocess.run(["mount", "-o", "remount,nr_inodes=500", str(disk)], check=True)
        found = of_out(disk)
    assert found.state == "failed"
    assert "more files" in found.figure


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        found = of_out(disk / "run")
    assert (found.state, "Read-only file system" in found.figure) == ("failed", True)
    (tmp_path / "file").touch()
    assert "Not a directory" in of_out(tmp_path / "file/run").figure


def test_a_url_has_no_known_space() -> None:
    assert of_out(Path("s3://bucket/run")).state == "skipped"
