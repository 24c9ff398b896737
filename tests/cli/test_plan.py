"""`sa1b plan`: what a conversion will take before it starts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit import refused, run
from tests.shards import tiny
from tests.storage.range_server import LINKED
from tests.storage.service import Service


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


def planned(*words: object, code: int = 0) -> dict[str, Any]:
    found = run("plan", *words, "--json", code=code).json
    assert found["exit_code"] == code
    return dict(found)


def test_bytes_and_finished_sources_and_no_file_written(tmp_path: Path, downloads: Path) -> None:
    root, sizes = tmp_path / "root", {path.stem: path.stat().st_size for path in downloads.iterdir()}
    before = {*tmp_path.rglob("*")}
    found = planned(downloads, "--out", root)
    assert {*tmp_path.rglob("*")} == before
    assert found["bytes_to_read"] == sum(sizes.values())
    assert found["shard_bytes"] == int(1.1 * sum(sizes.values()))
    assert (found["image_size"], found["sources"]) == (1024, 3)
    assert 0 < found["shard_bytes_with_image_size"] < found["shard_bytes"]
    run("reshard", downloads / "sa_000001.tar", "--out", root)
    before = {*tmp_path.rglob("*")}
    found = planned(downloads, "--out", root)
    assert {*tmp_path.rglob("*")} == before
    assert found["finished"] == ["sa_000001"]
    assert found["bytes_to_read"] == sum(sizes.values()) - sizes["sa_000001"]
    shown = run("plan", downloads, "--out", root).out
    assert f"3: 2 to convert, 1 finished in {root}" in shown
    assert "free" in shown


def test_the_smaller_rate_limits(downloads: Path) -> None:
    slow = planned(downloads, "--rate", 0.001)
    assert slow["hours"] == pytest.approx(slow["bytes_to_read"] / 1000 / 3600)
    fast = planned(downloads, "--rate", 1e9, "--workers", 100)
    assert fast["hours"] == pytest.approx(
        fast["bytes_to_read"] / fast["bytes_per_second"]["processor"] / 3600
    )
    resized = planned(downloads, "--rate", 1e9, "--workers", 100, "--image-size", 512)
    assert resized["hours"] > 3 * fast["hours"]
    assert "limited by reading: 1 MB/s" in run("plan", downloads, "--rate", 1).out
    assert "pass --rate" in run("plan", downloads).out


def test_a_conversion_on_several_nodes_is_not_that_of_this_machine(downloads: Path) -> None:
    words = (downloads, "--cpus", 32, "--workers", 32)
    one, four = planned(*words), planned(*words, "--nodes", 4)
    assert (one["cpus"], four["cpus"]) == (32, 32)
    assert one["hours"] == pytest.approx(4 * four["hours"])
    assert four["bytes_per_second"]["processor"] == pytest.approx(
        4 * planned(downloads, "--cpus", 8, "--workers", 8)["bytes_per_second"]["processor"] * 4
    )
    assert four["spill_bytes"] >= one["spill_bytes"]
    limited = planned(*words, "--nodes", 4, "--rate", 1)
    assert limited["hours"] == pytest.approx(limited["bytes_to_read"] / 1e6 / 3600)
    assert "4 nodes with 32 workers on 32 CPUs" in run("plan", *words, "--nodes", 4).out
    assert "CPUs of this machine (--cpus: others)" in run("plan", downloads).out


def test_expired_links_are_listed(tmp_path: Path, host: Service) -> None:
    links = tmp_path / "links.txt"
    lines = [f"sa_00000{n}.tar\t{host.url}/linked/sa_00000{n}.tar?{LINKED}" for n in range(3)]
    links.write_text("\n".join(lines).replace(f"1.tar?{LINKED}", "1.tar?Signature=hidden"))
    found = planned("--links", links, "--out", tmp_path / "root", code=1)
    assert list(found["failed"]) == ["sa_000001"]
    done = run("plan", "--links", links, code=1)
    assert "FAILED sa_000001" in done.out
    assert f"{links}, line 2: sa_000001.tar: the link has expired" in done.out
    assert "hidden" not in done.out + done.err
    requests = host.ask({})
    assert (requests["HEAD"], requests["GET"]) == (3 * 2, 2)  # one for a byte of the link that is refused
    assert requests["bytes"] < 1000


def test_a_bucket_needs_scratch_space(tmp_path: Path, downloads: Path) -> None:
    found = planned(downloads, "--out", "memory://bucket/shards", "--scratch", tmp_path / "scratch")
    assert found["staged_bytes"] > 0
    assert found["needed_bytes"] == found["staged_bytes"] + found["spill_bytes"]
    assert not (tmp_path / "scratch").exists()


def test_a_disk_that_is_too_small(tmp_path: Path, downloads: Path) -> None:
    with (downloads / "sa_000000.tar").open("ab") as file:
        file.truncate(8 << 40)  # a hole, which takes no space
    found = planned(downloads, "--out", tmp_path / "root", code=1)
    assert found["free_bytes"] < found["needed_bytes"]
    assert "too little" in run("plan", downloads, "--out", tmp_path / "root", code=1).out


def test_wrong_arguments(tmp_path: Path, downloads: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    refused("plan", names="SOURCE or --links")
    refused("plan", downloads, "--workers", 0, names="--workers 0")
    refused("plan", downloads, "--rate", "nan", names="--rate nan")
    refused("plan", downloads, "--image-size", 3, names="--image-size 3")
    refused("plan", "--links", tmp_path / "empty.txt", names="empty.txt")
    refused("plan", tmp_path / "none", names=f"{tmp_path / 'none'}")
