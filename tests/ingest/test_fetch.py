"""`sa1b fetch`: a dataset directory of some images only."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import sa1b
from tests import kit, processes
from tests.cli.verb import runner
from tests.directories import bucket
from tests.ingest.test_several_runs import files
from tests.shards import tiny
from tests.sources.strange_server import SECRET, StrangeServer
from tests.storage.range_server import LINKED
from tests.storage.service import Service

fetch = runner("fetch")
locate = runner("locate")
reshard = runner("reshard")
verify = runner("verify")
FIRST = {"sa_000019": 212_562, "sa_000020": 223_750, "sa_000021": 234_937}


@pytest.fixture
def downloads(tmp_path: Path) -> Path:
    folder = tmp_path / "host" / "linked"
    folder.mkdir(parents=True)
    for name, first in FIRST.items():
        tiny.make_tar(folder / f"{name}.tar", range(first, first + 6), gzip=name != "sa_000019")
    return folder


def write_ids(path: Path, *ids: int) -> Path:
    path.write_text("\n".join(map(str, ids)))
    return path


def write_links(path: Path, host: Service, query: str = LINKED) -> Path:
    path.write_text("\n".join(f"{name}.tar\t{host.url}/linked/{name}.tar?{query}" for name in FIRST))
    return path


def stored(root: Path) -> list[int]:
    return list(sa1b.open(root).table.image_id.tolist())


def source_of(root: Path, name: str) -> dict[str, object]:
    return dict(json.loads((root / "tasks" / f"{name}.json").read_text())["source"])


def test_the_wanted_images_and_no_others(tmp_path: Path, downloads: Path, host: Service) -> None:
    root = tmp_path / "root"
    ids = write_ids(tmp_path / "ids.txt", 223_752, 212_562, 223_752)
    links = write_links(tmp_path / "links.txt", host)
    done = fetch("--ids", ids, "--links", links, "--out", root, "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert stored(root) == [212_562, 223_752]
    assert f"Complete: {root}/dataset.json" in done.stdout
    assert verify(root, "--deep").returncode == 0
    for name in ("sa_000019", "sa_000020"):
        source = source_of(root, name)
        assert (source["size"], source["mtime_ns"]) == (None, None)
    # The records are those of a complete conversion.
    whole = tmp_path / "whole"
    assert reshard(downloads, "--out", whole).returncode == 0
    for image_id in stored(root):
        mine, other = sa1b.open(root).by_id(image_id), sa1b.open(whole).by_id(image_id)
        assert mine.jpeg == other.jpeg
        assert mine.annotations.rle.tobytes() == other.annotations.rle.tobytes()
    stream = sa1b.Stream(root, global_batch=2, image_size=32, masks=2, epochs=1)
    assert sum(len(batch) for batch in sa1b.Loader(stream, threads=1, quiet=True)) == 2


def test_more_images_later_and_then_all_of_a_source(tmp_path: Path, downloads: Path) -> None:
    root, ids = tmp_path / "root", tmp_path / "ids.txt"
    assert fetch(downloads, "--ids", write_ids(ids, 223_752), "--out", root).returncode == 0
    done = fetch(downloads, "--ids", write_ids(ids, 223_753, 223_752, 234_937), "--out", root, "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["stored_before"], summary["stored"]) == (1, 3)
    assert summary["read"] == ["sa_000020", "sa_000021"]
    assert stored(root) == [223_752, 223_753, 234_937]
    done = fetch(downloads, "--ids", ids, "--out", root, "--json")
    assert json.loads(done.stdout)["read"] == []
    # reshard does not take the source for finished, and fetch does not read a finished one.
    done = reshard(downloads / "sa_000020.tar", "--out", root)
    assert done.returncode == 0, done.stderr
    assert "1 now, 0 found finished" in done.stdout
    assert stored(root) == [*range(223_750, 223_756), 234_937]
    assert source_of(root, "sa_000020")["size"] == (downloads / "sa_000020.tar").stat().st_size
    done = fetch(downloads, "--ids", write_ids(ids, 223_755), "--out", root, "--json")
    assert json.loads(done.stdout)["read"] == []
    assert verify(root, "--deep").returncode == 0


def test_missing_images_are_reported_and_not_searched_again(tmp_path: Path, downloads: Path) -> None:
    root = tmp_path / "root"
    lacking = [223_750, 223_751, 223_753, 223_754]
    tiny.make_tar(downloads / "sa_000020.tar", lacking)
    ids = write_ids(tmp_path / "ids.txt", 223_750, 223_752)
    done = fetch(downloads, "--ids", ids, "--out", root, "--json")
    assert done.returncode == 3, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["missing"], summary["refused"]) == ([223_752], [])
    assert len(str(source_of(root, "sa_000020")["sha256"])) == 64  # the tar was read to its end
    done = fetch(downloads, "--ids", ids, "--out", root, "--json")
    assert (done.returncode, json.loads(done.stdout)["read"]) == (3, [])
    assert verify(root, "--deep").returncode == 0
    # The digest of a tar that was read to its end protects from a tar with other content.
    tiny.make_tar(downloads / "sa_000020.tar", range(223_750, 223_756))
    done = reshard(downloads / "sa_000020.tar", "--out", root)
    assert done.returncode == 1
    assert "with other content (some of its pairs, sha256" in done.stdout
    done = reshard(downloads / "sa_000020.tar", "--out", root, "--replace")
    assert done.returncode == 0, done.stdout
    assert stored(root) == list(range(223_750, 223_756))
    # Nothing at all: no dataset, and nothing left behind.
    ids.write_text("1")
    done = fetch(downloads / "sa_000020.tar", "--ids", ids, "--out", tmp_path / "none")
    assert done.returncode == 3
    assert "missing: 1" in done.stdout
    assert "None of the images is stored" in done.stdout
    assert not (tmp_path / "none" / "dataset.json").exists()


def test_a_refused_image(tmp_path: Path, downloads: Path) -> None:
    members = [*tiny.pair_members(223_750, jpeg=b"no image"), *tiny.pair_members(223_751)]
    tiny.write_tar(downloads / "sa_000020.tar", members, True)
    ids = write_ids(tmp_path / "ids.txt", 223_750, 223_751)
    done = fetch(downloads, "--ids", ids, "--out", tmp_path / "root", "--json")
    assert done.returncode == 3, done.stdout
    assert json.loads(done.stdout)["refused"] == [223_750]
    assert verify(tmp_path / "root", "--deep").returncode == 0


def test_a_tar_with_other_content_is_refused(tmp_path: Path, downloads: Path) -> None:
    root, ids = tmp_path / "root", tmp_path / "ids.txt"
    assert fetch(downloads, "--ids", write_ids(ids, 223_752), "--out", root).returncode == 0
    tiny.make_tar(downloads / "sa_000020.tar", range(223_753, 223_756))
    done = fetch(downloads, "--ids", write_ids(ids, 223_753), "--out", root)
    assert done.returncode == 1
    assert "has image 223752" in done.stdout
    assert "its content differs" in done.stdout
    assert stored(root) == [223_752]


def test_expired_links_and_a_newer_list(tmp_path: Path, host: Service) -> None:
    root, links = tmp_path / "root", write_links(tmp_path / "links.txt", host)
    links.write_text(links.read_text().replace(f"20.tar?{LINKED}", "20.tar?Signature=SECRET"))
    ids = write_ids(tmp_path / "ids.txt", 212_562, 223_752)
    done = fetch("--ids", ids, "--links", links, "--out", root)
    assert done.returncode == 1
    assert f"{links}, line 2: sa_000020.tar: the link has expired" in done.stdout
    assert "=SECRET" not in done.stdout + done.stderr
    assert "AWS" not in done.stdout
    assert "SECRET" not in "".join(path.read_text() for path in (root / "tasks").glob("*.[fj]*"))
    assert stored(root) == [212_562]
    write_links(links, host)
    done = fetch("--ids", ids, "--links", links, "--out", root, "--json")
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["read"] == ["sa_000020"]


def test_links_that_are_not_needed_are_not_used(tmp_path: Path, host: Service) -> None:
    links = write_links(tmp_path / "links.txt", host)
    links.write_text(links.read_text().replace(f"19.tar?{LINKED}", "19.tar?old"))
    ids = write_ids(tmp_path / "ids.txt", 223_752)
    assert fetch("--ids", ids, "--links", links, "--out", tmp_path / "root").returncode == 0


def test_after_an_interrupt_the_same_command_resumes(tmp_path: Path, downloads: Path) -> None:
    root, links = tmp_path / "root", tmp_path / "links.txt"
    ids = write_ids(tmp_path / "ids.txt", 212_562, 223_752)

    def list_links(first: StrangeServer, second: StrangeServer) -> None:
        names = ((first, "sa_000019.tar"), (second, "sa_000020.tar"))
        links.write_text("\n".join(f"{name}\t{server.url}/a/{name}?{SECRET}" for server, name in names))

    with StrangeServer(downloads) as good, StrangeServer(downloads, "stalls") as stalling:
        list_links(good, stalling)
        command = [sys.executable, "-m", "sa1b", "fetch", "--ids", ids, "--links", links, "--out", root]
        process = processes.Process(
            [*command, "--json"], start_new_session=True, stdout=subprocess.PIPE, text=True
        )
        while len(stalling.requests) < 3 or not (root / "tasks" / "sa_000019.json").exists():
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        assert json.loads(out)["exit_code"] == 130
        list_links(good, good)
        done = fetch("--ids", ids, "--links", links, "--out", root, "--json")
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["read"] == ["sa_000020"]
    assert stored(root) == [212_562, 223_752]
    assert verify(root, "--deep").returncode == 0


def test_a_bucket_gets_the_bytes_of_a_folder(tmp_path: Path, downloads: Path) -> None:
    """Whatever the user has in the scratch folder stays there, old and new."""
    url, scratch = bucket(tmp_path / "bucket", *FIRST), tmp_path / "scratch"
    mine = [scratch / name for name in ("thesis/data/results.csv", "owner", ".partial/host-1/sa_1.tar")]
    for path in mine:
        kit.put(path.parent, path.name, b"mine")
    (scratch / ".partial" / "empty").mkdir()
    two_hours_ago = time.time() - 7200
    for path in (*scratch.rglob("*"), scratch):
        os.utime(path, (two_hours_ago, two_hours_ago))
    before = {*scratch.rglob("*")}
    for out, flags in ((url, ("--scratch", scratch)), (tmp_path / "root", ())):
        for wanted in ((212_562,), (212_562, 223_752)):  # the second run adds an image
            ids = write_ids(tmp_path / "ids.txt", *wanted)
            assert kit.run("fetch", downloads, "--ids", ids, "--out", out, *flags, "--json").json[
                "stored"
            ] == len(wanted)
    assert files(tmp_path / "bucket") == files(tmp_path / "root")
    assert {*scratch.rglob("*")} == before
    assert [path.read_bytes() for path in mine] == [b"mine"] * 3
    assert locate(url, 223_752).returncode == 0


def test_an_index_of_the_same_tars(tmp_path: Path, downloads: Path) -> None:
    for number, name in enumerate(FIRST):
        (downloads / f"{name}.tar").rename(downloads / f"sa_{2 - number:06d}.tar")
    small = tmp_path / "small"
    assert reshard(downloads, "--out", small, "--image-size", 32).returncode == 0
    ids = write_ids(tmp_path / "ids.txt", 212_563)
    done = fetch(downloads, "--ids", ids, "--out", tmp_path / "root", "--index", small, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["read"] == ["sa_000002"]


def test_wrong_arguments(tmp_path: Path, downloads: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    ids = write_ids(tmp_path / "ids.txt", 1)
    for arguments, words in (
        (("--ids", ids), "no SOURCE to read"),
        ((downloads, "--ids", tmp_path / "empty.txt"), "contains no image id"),
        ((downloads, "--ids", tmp_path / "no.txt"), "no such file"),
        ((downloads,), "--ids FILE[:COLUMN]: missing"),
        ((downloads, "--ids", ids, "--workers", 0), "--workers 0: must be at least 1"),
        ((downloads, "--ids", ids, "--max-rate", 0), "--max-rate 0: must be more than 0"),
        ((downloads, "--ids", ids, "--quality", 5), "needs --image-size"),
        ((downloads, "--ids", ids, "--index", downloads), "no dataset there"),
        ((downloads / "none.tar", "--ids", ids), "no such file or folder"),
    ):
        done = fetch(*arguments, "--out", tmp_path / "root")
        assert done.returncode == 2, (arguments, done.stdout)
        assert words in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr


def test_a_truncated_tar_is_damage_and_its_next_download_is_read(tmp_path: Path, downloads: Path) -> None:
    root, tar = tmp_path / "root", downloads / "sa_000019.tar"
    whole, last = tar.read_bytes(), FIRST["sa_000019"] + 5
    ids = write_ids(tmp_path / "ids.txt", *range(FIRST["sa_000019"], last + 1))
    tar.write_bytes(whole[: len(whole) // 2])
    done = fetch(tar, "--ids", ids, "--out", root)
    assert done.returncode == 1
    assert "FAILED sa_000019" in done.stdout
    assert "download it again" in done.stdout
    before = len(stored(root))
    assert 0 < before < 6
    tar.write_bytes(whole)
    done = fetch(tar, "--ids", ids, "--out", root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(stored(root)) == 6


def test_another_download_of_a_tar_is_searched_again(tmp_path: Path, downloads: Path) -> None:
    root, tar, first = tmp_path / "root", downloads / "sa_000019.tar", FIRST["sa_000019"]
    ids = write_ids(tmp_path / "ids.txt", first + 2, first + 6)
    tiny.make_tar(tar, [first, first + 1, first + 2, first + 7])
    assert fetch(tar, "--ids", ids, "--out", root).returncode == 3
    assert fetch(tar, "--ids", ids, "--out", root, "--json").stdout.count('bytes_read": 0') == 1
    tiny.make_tar(tar, range(first, first + 8))
    done = fetch(tar, "--ids", ids, "--out", root)
    assert done.returncode == 0, done.stdout
    assert stored(root) == [first + 2, first + 6]


@pytest.mark.parametrize("linked", [False, True])
def test_another_download_of_equal_size_and_time_is_searched_again(
    tmp_path: Path, downloads: Path, linked: bool
) -> None:
    tar, first = downloads / "sa_000019.tar", FIRST["sa_000019"]
    ids = write_ids(tmp_path / "ids.txt", first, first + 2)

    def download(*images: int) -> None:
        tiny.write_tar(tar, [one for i in images for one in tiny.pair_members(i)], False)
        with tar.open("ab") as file:
            file.truncate(65536)
        os.utime(tar, (1e9, 1e9))

    def missing() -> tuple[list[int], list[str]]:
        done = kit.run("fetch", *words, "--ids", ids, "--out", tmp_path / "root", "--json", code=None).json
        return done["missing"], done["read"]

    download(first, first + 1)
    with Service("range_server", tmp_path) as server:
        (tmp_path / "links.txt").write_text(f"{tar.name}\t{server.url}/host/linked/{tar.name}?{LINKED}")
        words = ("--links", tmp_path / "links.txt") if linked else (tar,)
        assert missing() == ([first + 2], ["sa_000019"])
        assert missing() == ([first + 2], [])
        download(first, first + 2)
        assert missing() == ([], ["sa_000019"])


def test_a_shard_of_an_earlier_part_that_is_gone_is_read_again(tmp_path: Path, downloads: Path) -> None:
    root = tmp_path / "root"
    earlier = write_ids(tmp_path / "earlier.txt", FIRST["sa_000019"] + 1)
    ids = write_ids(tmp_path / "ids.txt", FIRST["sa_000020"])
    assert fetch(downloads, "--ids", earlier, "--out", root).returncode == 0
    (root / "sa1b-000019-0000.tar").unlink()
    done = fetch(downloads / "sa_000020.tar", "--ids", ids, "--out", root)
    assert done.returncode == 1
    assert "sa1b-000019-0000.tar is missing or truncated; add the tar of sa_000019" in done.stdout
    assert fetch(downloads, "--ids", ids, "--out", root).returncode == 0
    assert stored(root) == [FIRST["sa_000019"] + 1, FIRST["sa_000020"]]
    assert verify(root, "--deep").returncode == 0


@pytest.mark.parametrize("damage", ["shard", "task", "task and rows"])
def test_the_advice_for_a_part_repairs_it_and_takes_no_more(
    tmp_path: Path, downloads: Path, damage: str
) -> None:
    root = tmp_path / "root"
    ids = write_ids(tmp_path / "ids.txt", FIRST["sa_000019"] + 1, FIRST["sa_000020"])
    assert fetch(downloads, "--ids", ids, "--out", root).returncode == 0
    before = files(root)
    if damage == "shard":
        data = bytearray((root / "sa1b-000019-0000.tar").read_bytes())
        data[3000] ^= 1
        (root / "sa1b-000019-0000.tar").write_bytes(data)
    else:
        (root / "tasks" / "sa_000019.json").write_text("{")
    if damage == "task and rows":
        (root / "tasks" / "sa_000019.samples").write_bytes(b"")
    report = json.loads(verify(root, "--json").stdout)
    (advice,) = {one["remedy"] for one in report["findings"] if "PATH/TO" in one["remedy"]}
    words = shlex.split(re.findall("`([^`]+)`", advice)[0])
    words = words[words.index("fetch") + 1 :]
    (tmp_path / "one.txt").write_text(str(FIRST["sa_000020"]))  # the list need not have the ids of this part
    paths = {"PATH/TO/sa_000019.tar": downloads / "sa_000019.tar", "PATH/TO/IDS.txt": tmp_path / "one.txt"}
    done = fetch(*(paths.get(word, word) for word in words))
    assert done.returncode == 0, done.stdout + done.stderr
    shards = {name: data for name, data in before.items() if name.startswith("sa1b-")}
    assert {name: data for name, data in files(root).items() if name.startswith("sa1b-")} == shards
    assert verify(root, "--deep").returncode == 0


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, range]:
    """Of twelve tars of SA-1B's blocks of ids, from which a few are left out here and there, the first, one, the last."""
    folder, first, found = tmp_path_factory.mktemp("blocks"), 5, {}
    for number in range(12):
        found[f"sa_{number:06d}"] = block = range(first, first + 11_186 - 7 * (number % 3))
        tiny.make_tar(folder / f"sa_{number:06d}.tar", [block[0], block[100], block[-1]])
        first = block[-1] + 1 + 3 * (number % 2)
    found["folder"] = folder
    return found


@pytest.mark.parametrize(
    ("places", "flags", "read"),
    [
        ([("sa_000003", 100), ("sa_000007", 0), ("sa_000007", -1), ("sa_000011", -1)], [], range(3, 7)),
        ([("sa_000001", -1, 2)], [], range(1, 5)),  # in no tar: between two blocks
        ([("sa_000011", -1, 10**9)], [], range(1, 3)),
        ([("sa_000000", 0, -5)], [], range(1, 2)),
        ([("sa_000004", 200)], [], range(1, 2)),  # within a block
        ([("sa_000004", 200)], ["--search-all"], range(12, 13)),
    ],
)
def test_few_other_tars_are_read_than_those_of_the_images(
    tmp_path: Path, blocks: dict[str, Any], places: list[tuple[Any, ...]], flags: list[str], read: range
) -> None:
    wanted = [blocks[name][place] + sum(more) for name, place, *more in places]
    ids = write_ids(tmp_path / "ids.txt", *wanted)
    words = ("fetch", blocks["folder"], "--ids", ids, "--out", tmp_path / "root", "--json")
    there = [] if len(places) == 1 else wanted
    done = kit.run(*words, *flags, code=0 if there else 3).json
    assert (sorted({*wanted} - {*there}), len(there)) == (done["missing"], done["stored"])
    assert len(done["read"]) in read
    assert len(done["read"]) == len({*done["read"]})
    if there:
        assert {name for name, *_ in places} <= {*done["read"]}


def test_tars_of_other_blocks_are_searched_and_names_without_a_number_always(tmp_path: Path) -> None:
    for name, ids in {
        "sa_000000": [20, 21],
        "sa_000001": [1],
        "sa_000002": [10, 12],
        "x": [90],
        "y": [7],
    }.items():
        tiny.make_tar(tmp_path / "in" / f"{name}.tar", ids)
    ids = write_ids(tmp_path / "ids.txt", 21, 1, 12, 90)
    words = ("fetch", tmp_path / "in", "--ids", ids, "--out", tmp_path / "root", "--json")
    assert {90, 21} <= {*range(100)} - {*kit.run(*words, code=None).json["missing"]}
    assert kit.run(*words, "--search-all").json["missing"] == []
    assert stored(tmp_path / "root") == [1, 12, 21, 90]
