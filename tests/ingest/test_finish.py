"""Finishing: what succeeded can be read, what did not is listed, and nothing readable is taken away."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import sa1b
from sa1b.cli import main
from sa1b.errors import TableError
from tests import kit
from tests.kit import files, put, refused, run
from tests.shards import tiny
from tests.storage.store_server import StoreServer
from tests.storage.test_wrong_answers import ended


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    for number in range(3):
        tiny.make_tar(folder / f"sa_00000{number}.tar", range(100 * number, 100 * number + 6))
    (folder / "sa_000009.tar").write_bytes(b"\x1f\x8b no gzip behind it")
    return folder


def reshard(root: object, *sources: Path, **options: Any) -> Any:
    return sa1b.reshard(sources, root, images_per_shard=4, quiet=True, **options)


@pytest.fixture(scope="module")
def made(tars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("made") / "root"
    assert reshard(made, tars / "sa_000000.tar", tars / "sa_000001.tar").exit_code == 0
    return made


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A finished directory of two sources."""
    return shutil.copytree(made, tmp_path / "root")


@pytest.fixture
def twins(root: Path, tars: Path, tmp_path: Path) -> Path:
    """The directory, with the shards and the task file of another source of the same images.

    As two machines make it that know nothing of each other.
    """
    twin, other = tmp_path / "sa_000008.tar", tmp_path / "other"
    shutil.copy(tars / "sa_000001.tar", twin)
    reshard(other, twin)
    for name, data in files(other).items():
        if "000008" in name:
            put(root, name, data)
    return root


def ids(root: Path) -> list[int]:
    return [int(one) for one in sa1b.open(root).table.image_id]


def findings(root: Path) -> list[object]:
    return list(run("verify", root, "--json", code=None).json["findings"])


def claimed(root: Path, source: str, age: float = 0) -> Path:
    """The claim of a process of another machine, which wrote it so many seconds ago."""
    path = root / "tasks" / f"{source}.claim"
    holder = {"host": "node7", "pid": 7, "process": f"{'0' * 12}-7", "token": "theirs", "timeout": 1000}
    path.write_text(json.dumps(holder))
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_a_corrupt_tar_added_to_a_finished_directory_is_listed_and_the_rest_stays_readable(
    root: Path, tars: Path
) -> None:
    added = reshard(root, tars / "sa_000009.tar")
    assert (added.exit_code, [*added.failed]) == (1, ["sa_000009"])
    assert "Partial: " in added.text
    dataset = sa1b.open(root)
    assert len(dataset) == 12
    assert list(dataset.failed) == ["sa_000009"]
    assert "no usable pair" in dataset.failed["sa_000009"]
    assert "partial: 1 source failed (sa_000009)" in repr(dataset)
    assert dataset[0].jpeg
    assert findings(root) == []
    with pytest.warns(UserWarning, match=r"is partial: 1 source failed \(sa_000009\)") as caught:
        sa1b.Stream(root, global_batch=2, image_size=32, masks=2)
    assert len([one for one in caught if "partial" in str(one.message)]) == 1
    put(root, "tasks/sa_000009.failed", b"{")
    reshard(root, tars / "sa_000000.tar")
    assert "sa_000009.failed: damaged" in sa1b.open(root).failed["sa_000009"]


def test_the_failure_of_a_second_attempt_leaves_the_first_in_the_dataset(
    root: Path, tars: Path, tmp_path: Path
) -> None:
    before, bad = files(root), tmp_path / "sa_000001.tar"
    shutil.copy(tars / "sa_000009.tar", bad)
    assert [*reshard(root, bad, replace=True).failed] == ["sa_000001"]
    assert files(root) == before


def test_what_failed_and_succeeds_later_leaves_no_trace(root: Path, tars: Path, tmp_path: Path) -> None:
    late = tmp_path / "sa_000002.tar"
    late.write_bytes((tars / "sa_000009.tar").read_bytes())
    assert reshard(root, late).exit_code == 1
    shutil.copy2(tars / "sa_000002.tar", late)
    assert reshard(root, late).exit_code == 0
    whole = tmp_path / "whole"
    reshard(whole, *(tars / f"sa_00000{number}.tar" for number in range(3)))
    assert files(root) == files(whole)


def test_a_source_that_another_process_has_claimed_is_pending_until_it_is_done_or_dropped(
    root: Path, tars: Path
) -> None:
    claim, unfinished = claimed(root, "sa_000002"), claimed(root, "sa_000007")
    assert reshard(root, tars / "sa_000000.tar").exit_code == 0  # all that was named is in
    assert sa1b.open(root).pending == ["sa_000002", "sa_000007"]
    refused("reshard", "--out", root, "--drop", "sa_000007", names=str(unfinished))
    for path in (claim, unfinished):
        path.unlink()
    reshard(root, tars / "sa_000002.tar")
    assert sa1b.open(root).pending == ["sa_000007"]
    run("reshard", "--out", root, "--drop", "sa_000007")
    assert b"pending" not in (root / "dataset.json").read_bytes()


def test_finishing_again_writes_nothing(root: Path, tars: Path) -> None:
    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}

    before = times()
    assert reshard(root, tars / "sa_000000.tar").exit_code == 0
    assert times() == before


def test_no_shard_or_index_is_read_to_finish_and_no_row_of_what_is_up_to_date(
    root: Path, tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "KEY")
    whole = tmp_path / "whole"
    assert reshard(whole, *(tars / f"sa_00000{number}.tar" for number in range(3))).exit_code == 0
    with StoreServer(page=100) as store:
        store.load(root)
        flags = ("--endpoint", store.url, "--scratch", tmp_path / "scratch", "--images-per-shard", 4)
        assert ended(("reshard", tars / "sa_000001.tar", "--out", store.root, *flags)).code == 0
        assert not store.asked("GET", "*.samples")
        assert ended(("reshard", tars / "sa_000002.tar", "--out", store.root, *flags)).code == 0
        assert store.asked("GET", "*.samples")
        assert not [one for ending in ("tar", "parquet") for one in store.asked("GET", f"*00[01]-*.{ending}")]
        assert store.files() == files(whole)


@pytest.mark.parametrize("damage", ["missing", "flipped", "cut", "unknown"])
def test_rows_of_a_source_that_are_damaged_are_made_again_from_its_indexes(
    root: Path, tars: Path, damage: str
) -> None:
    rows, task = root / "tasks" / "sa_000001.samples", root / "tasks" / "sa_000001.json"
    right = rows.read_bytes()
    if damage == "flipped":
        kit.flip(root, "tasks/sa_000001.samples", 200, 1)
    elif damage == "cut":
        rows.write_bytes(right[:-8])
    else:
        rows.unlink()
    if damage == "unknown":  # as versions before have written it
        document = json.loads(task.read_text())
        del document["samples"]
        task.write_text(json.dumps(document))
    reshard(root, tars / "sa_000002.tar")
    assert rows.read_bytes() == right
    assert len(sa1b.open(root)) == 18


def test_dropping_a_source_makes_a_stuck_directory_whole_again(twins: Path, made: Path, tars: Path) -> None:
    reshard(twins, tars / "sa_000000.tar")
    dataset = sa1b.open(twins)
    assert list(dataset.failed) == ["sa_000008"]
    assert "image 100 of sa_000008 is in sa_000001 already" in dataset.failed["sa_000008"]
    assert "--drop" in dataset.failed["sa_000008"]
    assert len(dataset) == 12
    run("reshard", "--out", twins, "--drop", "sa_000008")
    assert files(twins) == files(made)


def test_the_other_of_two_twins_can_be_dropped_too(twins: Path) -> None:
    run("reshard", "--out", twins, "--drop", "sa_000001")
    assert sorted(sa1b.open(twins).manifest["sources"]) == ["sa_000000", "sa_000008"]
    assert ids(twins) == [*range(6), *range(100, 106)]
    assert not list(twins.glob("sa1b-000001-*"))
    assert findings(twins) == []


def test_of_three_sources_with_one_image_the_first_one_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for number, images in ((1, range(100, 103)), (2, range(102, 105)), (3, range(102, 103))):
        tiny.make_tar(folder / f"sa_00000{number}.tar", images)
    found = sa1b.reshard(sorted(folder.iterdir()), tmp_path / "root", quiet=True)
    assert (found.done, sorted(found.failed)) == (["sa_000001"], ["sa_000002", "sa_000003"])
    for message in found.failed.values():
        assert "is in sa_000001 already" in message
    assert ids(tmp_path / "root") == [100, 101, 102]


@pytest.mark.parametrize("age", [0, 600])
def test_what_cannot_be_dropped_is_said(root: Path, age: float) -> None:
    done = refused("reshard", "--out", root, "--drop", "sa_000005", names="--drop sa_000005: ")
    assert "it has sa_000000, sa_000001" in done.err
    claim = claimed(root, "sa_000001", age)
    refused("reshard", "--out", root, "--drop", "sa_000001", names=str(claim))
    assert len(sa1b.open(root)) == 12


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/", "../", "../../src", "../tasks", "sa_..", "./sa_000001", "a\0b"]
)
def test_only_a_bare_name_can_be_dropped(root: Path, tmp_path: Path, name: str) -> None:
    for path in ("root/quarantine/sa_000001/refused.jsonl", "src/mine.txt", "root/quarantine/mine.txt"):
        put(tmp_path, path, b"kept")
    before = files(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["reshard", "--out", str(root), "--drop", "sa_000000", "--drop", name])
    assert ended.value.code == 2
    assert files(tmp_path) == before


@pytest.mark.parametrize("name", ["sa_000001/", "sa_000001.tar"])
def test_a_source_is_dropped_by_the_name_of_its_folder_or_tar(root: Path, name: str) -> None:
    quarantined, killed = (
        root / "quarantine" / "sa_000001",
        root / f".dataset.json.{'0' * 12}-7-01234567.partial",
    )
    quarantined.mkdir(parents=True)
    killed.touch()
    os.utime(killed, (0, 0))
    run("reshard", "--out", root, "--drop", name)
    assert sorted(sa1b.open(root).manifest["sources"]) == ["sa_000000"]
    assert [path for path in root.rglob("*") if "000001" in path.name] == []
    assert not killed.exists()


def test_opening_waits_for_a_table_that_is_replaced_in_this_moment(
    root: Path, tars: Path, tmp_path: Path
) -> None:
    (table,) = (path.name for path in root.glob("samples-*.bin"))
    after = shutil.copytree(root, tmp_path / "after")
    reshard(after, tars / "sa_000002.tar")

    def replace(what: str, key: str) -> None:
        if key.endswith(table):
            store.load(after)
            store.objects.pop(key, None)

    with StoreServer() as store:
        store.load(root)
        store.before = replace
        assert len(sa1b.open(store.root, storage_options=store.options)) == 18
        assert store.asked("GET HEAD", f"*{table}")
    next(after.glob("samples-*.bin")).unlink()
    with pytest.raises(TableError, match="missing"):
        sa1b.open(after)


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("content", [None, b"{"])
def test_a_source_whose_task_file_is_lost_stays_in_the_dataset(
    root: Path, tars: Path, added: bool, content: bytes | None
) -> None:
    before = ids(root)
    put(root, "tasks/sa_000001.json", content)
    found = reshard(root, tars / ("sa_000002.tar" if added else "sa_000000.tar"))
    assert (found.failed, found.document["complete"]) == ({}, False)
    assert "task file (sa_000001)" in found.text
    dataset = sa1b.open(root)
    assert set(before) <= set(ids(root))
    assert [dataset.by_id(one).jpeg for one in before] == [tiny.pair(one)[0] for one in before]
    (root / "tasks" / "sa_000001.json").unlink(missing_ok=True)
    assert reshard(root, tars / "sa_000001.tar").document["complete"]
    assert findings(root) == []


def test_a_changed_manifest_is_written_again(root: Path, tars: Path) -> None:
    path = root / "dataset.json"
    right = path.read_bytes()
    path.write_bytes(right.replace(b'"name": "sa1b-000000-0000.tar"', b'"name": "sa1b-q00000-0000.tar"'))
    assert path.read_bytes() != right
    reshard(root, tars / "sa_000000.tar")
    assert path.read_bytes() == right


def test_damaged_parts_of_a_source_are_named_by_every_finish(root: Path, tars: Path, tmp_path: Path) -> None:
    cut = tmp_path / "sa_000002.tar"
    data = (tars / "sa_000002.tar").read_bytes()
    cut.write_bytes(data[: len(data) * 2 // 3])
    assert reshard(root, cut).exit_code == 3
    again = reshard(root, tars / "sa_000000.tar")
    assert "sa_000002: " in again.text
    assert "--replace" in again.text
