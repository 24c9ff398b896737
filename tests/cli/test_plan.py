"""`sa1b plan`: what a conversion will take before it starts."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sa1b.programs.plan import ingest_plan as planning
from tests.cli.verb import called, runner
from tests.shards import tiny
from tests.storage.range_server import LINKED
from tests.storage.service import Service

plan = called("plan")
reshard = runner("reshard")
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def downloads(tmp_path: Path) -> Path:
    folder = tmp_path / "host" / "linked"
    folder.mkdir(parents=True)
    for number in range(3):
        tiny.make_tar(folder / f"sa_00000{number}.tar", range(10 * number, 10 * number + 4))
    return folder


@pytest.fixture
def host(downloads: Path) -> Iterator[Service]:
    service = Service("range_server", downloads.parent)
    try:
        yield service
    finally:
        service.stop()


def document(*arguments: object, code: int = 0) -> dict[str, object]:
    done = plan(*arguments, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["exit_code"] == code
    return dict(found)


def paths_below(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_bytes_and_finished_sources_and_no_file_written(tmp_path: Path, downloads: Path) -> None:
    root = tmp_path / "root"
    before = paths_below(tmp_path)
    sizes = {path.stem: path.stat().st_size for path in downloads.iterdir()}
    found = document(downloads, "--out", root)
    assert paths_below(tmp_path) == before
    assert found["bytes_to_read"] == sum(sizes.values())
    assert found["shard_bytes"] == int(1.1 * sum(sizes.values()))
    assert found["image_size"] == 1024
    assert 0 < found["shard_bytes_with_image_size"] < found["shard_bytes"]
    assert reshard(downloads / "sa_000001.tar", "--out", root).returncode == 0
    before = paths_below(tmp_path)
    found = document(downloads, "--out", root)
    assert paths_below(tmp_path) == before
    assert found["finished"] == ["sa_000001"]
    assert found["bytes_to_read"] == sum(sizes.values()) - sizes["sa_000001"]
    shown = plan(downloads, "--out", root)
    assert shown.returncode == 0
    assert f"3: 2 to convert, 1 finished in {root}" in shown.stdout
    assert "free" in shown.stdout


def test_the_smaller_rate_limits(downloads: Path) -> None:
    slow = document(downloads, "--rate", 0.001)
    total = slow["bytes_to_read"]
    assert isinstance(total, int)
    assert slow["hours"] == pytest.approx(total / 1000 / 3600)
    fast = document(downloads, "--rate", 1e9, "--workers", 100)
    assert fast["hours"] == pytest.approx(total / (fast["cpus"] * planning.PROCESSOR_RATE) / 3600)
    resized = document(downloads, "--rate", 1e9, "--workers", 100, "--image-size", 512)
    assert resized["hours"] == pytest.approx(planning.RESIZING * fast["hours"])
    assert "limited by reading: 1 MB/s" in plan(downloads, "--rate", 1).stdout
    assert "pass --rate" in plan(downloads).stdout


def test_rates_are_those_of_the_benchmarks() -> None:
    path = REPOSITORY / "benchmarks" / "results" / "intel-xeon-2-cores-parts.json"
    figures = json.loads(path.read_text())["parts"]["reshard"]["figures"]
    assert pytest.approx(figures["bytes_per_second, wall"], rel=0.15) == planning.WORKER_RATE
    assert pytest.approx(figures["bytes_per_second, processor"], rel=0.15) == planning.PROCESSOR_RATE


def test_expired_links_are_listed(tmp_path: Path, host: Service) -> None:
    links = tmp_path / "links.txt"
    lines = [f"sa_00000{n}.tar\t{host.url}/linked/sa_00000{n}.tar?{LINKED}" for n in range(3)]
    links.write_text("\n".join(lines).replace(f"1.tar?{LINKED}", "1.tar?Signature=hidden"))
    found = document("--links", links, "--out", tmp_path / "root", code=1)
    assert list(found["failed"]) == ["sa_000001"]
    done = plan("--links", links)
    assert done.returncode == 1
    assert "FAILED sa_000001" in done.stdout
    assert f"{links}, line 2: sa_000001.tar: the link has expired" in done.stdout
    assert "hidden" not in done.stdout + done.stderr
    requests = host.ask({})
    assert requests["GET"] <= 3 * 2
    assert requests["bytes"] < 1000


def test_an_unreachable_server_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sa1b.sources import remote_sources
    from sa1b.sources.stored_file import read_links

    monkeypatch.setattr(remote_sources, "_DEADLINE", 1.0)
    monkeypatch.setattr(remote_sources, "_REQUESTS", 1)
    links = tmp_path / "links.txt"
    links.write_text(
        "\n".join(f"sa_{n:06d}.tar\thttp://127.0.0.1:9/x/sa_{n:06d}.tar?S=hidden" for n in range(500))
    )
    named = remote_sources.named_links(read_links(links)[0])
    sources, failed = remote_sources.remote_sources(named)  # 500 s if every link were requested
    assert (len(sources), len(failed)) == (0, 500)
    assert all("unavailable" in why and "hidden" not in why for why in failed.values())
    assert f"{links}, line 500: sa_000499.tar" in failed["sa_000499"]


def test_a_bucket_needs_scratch_space(tmp_path: Path, downloads: Path) -> None:
    found = document(downloads, "--out", "memory://bucket/shards", "--scratch", tmp_path / "scratch")
    assert found["staged_bytes"] > 0
    assert found["needed_bytes"] == found["staged_bytes"] + found["spill_bytes"]
    assert not (tmp_path / "scratch").exists()


def test_a_disk_that_is_too_small(tmp_path: Path, downloads: Path) -> None:
    with (downloads / "sa_000000.tar").open("ab") as file:
        file.truncate(8 << 40)  # a hole, which takes no space
    found = document(downloads, "--out", tmp_path / "root", code=1)
    assert found["free_bytes"] < found["needed_bytes"]
    assert "too little" in plan(downloads, "--out", tmp_path / "root").stdout


def test_wrong_arguments(tmp_path: Path, downloads: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    for arguments, words in (
        ((), "SOURCE or --links: missing"),
        ((downloads, "--workers", 0), "--workers 0: must be at least 1"),
        ((downloads, "--rate", "nan"), "--rate nan: must be more than 0"),
        ((downloads, "--image-size", 3), "--image-size 3: must be from 16"),
        (("--links", tmp_path / "empty.txt"), "lists no tar of SA-1B"),
        ((tmp_path / "none",), "no such file or folder"),
    ):
        done = plan(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), done.stdout
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
