"""Finishing: what succeeded can be read, what did not is listed, and nothing readable is taken away."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import sa1b
from sa1b.cli import main
from sa1b.errors import LockedError, TableError, UsageError
from sa1b.ingest import finish as finish_module
from sa1b.ingest.finish import Finished, drop_source, finish
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.reshard import reshard
from sa1b.shards import commit
from sa1b.shards.documents import Options
from sa1b.shards.manifest import dataset_document, read_dataset, read_tasks, table_name, write_task
from sa1b.shards.sample_table import read_facts
from sa1b.storage.claim import Claim
from sa1b.storage.store import FolderStore
from sa1b.verify.verify import verify
from tests import processes
from tests.ingest import inside
from tests.ingest.test_several_runs import files
from tests.shards import tiny

OPTIONS = Options(images_per_shard=4)


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    for number in range(3):
        tiny.make_tar(folder / f"sa_00000{number}.tar", range(100 * number, 100 * number + 6))
    (folder / "sa_000009.tar").write_bytes(b"\x1f\x8b no gzip behind it")
    return folder


@pytest.fixture(scope="module")
def made(tars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("made") / "root"
    paths = [tars / "sa_000000.tar", tars / "sa_000001.tar"]
    assert reshard(paths, made, OPTIONS, Policy(), IngestRun(quiet=True)).exit_code() == 0
    return made


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A finished directory of two sources."""
    return shutil.copytree(made, tmp_path / "root")


def ids(root: Path) -> list[int]:
    return [int(one) for one in sa1b.open(root).table.image_id]


def test_a_corrupt_tar_added_to_a_finished_directory_is_listed_and_the_rest_stays_readable(
    root: Path, tars: Path
) -> None:
    summary = reshard([tars / "sa_000009.tar"], root, OPTIONS, Policy(), IngestRun(quiet=True))
    assert summary.exit_code() == 1
    assert "Partial: " in summary.table(root)
    dataset = sa1b.open(root)
    assert len(dataset) == 12
    assert list(dataset.failed) == ["sa_000009"]
    assert "no usable pair" in dataset.failed["sa_000009"]
    assert "partial: 1 source failed (sa_000009)" in repr(dataset)
    assert dataset[0].jpeg
    assert verify(root, workers=0, quiet=True).findings == []


def test_a_stream_says_once_that_its_dataset_is_partial(root: Path, tars: Path) -> None:
    reshard([tars / "sa_000009.tar"], root, OPTIONS, Policy(), IngestRun(quiet=True))
    with pytest.warns(UserWarning, match=r"is partial: 1 source failed \(sa_000009\)") as caught:
        sa1b.Stream(root, global_batch=2, image_size=32, masks=2)
    assert len([one for one in caught if "partial" in str(one.message)]) == 1


def test_what_failed_and_succeeds_later_leaves_no_trace(root: Path, tars: Path, tmp_path: Path) -> None:
    late = tmp_path / "sa_000002.tar"
    late.write_bytes((tars / "sa_000009.tar").read_bytes())
    assert reshard([late], root, OPTIONS, Policy(), IngestRun(quiet=True)).exit_code() == 1
    shutil.copy2(tars / "sa_000002.tar", late)
    assert reshard([late], root, OPTIONS, Policy(), IngestRun(quiet=True)).exit_code() == 0
    whole = tmp_path / "whole"
    paths = [tars / f"sa_00000{number}.tar" for number in range(3)]
    reshard(paths, whole, OPTIONS, Policy(), IngestRun(quiet=True))
    assert files(root) == files(whole)


def test_sources_that_are_expected_or_claimed_are_pending(root: Path) -> None:
    claim = Claim.take(FolderStore(root), "tasks/sa_000007.claim")
    assert claim is not None
    with claim:
        finished = finish(root, ["sa_000000", "sa_000005"])
    assert finished.pending == ["sa_000005", "sa_000007"]
    assert sa1b.open(root).pending == ["sa_000005", "sa_000007"]
    for name in finished.pending:
        assert finish(root).is_partial
        drop_source(root, name)
    assert "pending" not in read_dataset(root)


def test_finishing_again_writes_nothing(root: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
    finish(root)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()} == before


def test_no_shard_or_index_is_read_to_finish(root: Path, tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reshard([tars / "sa_000002.tar"], root, OPTIONS, Policy(), IngestRun(quiet=True, task=(0, 1)))
    assert len(sa1b.open(root)) == 12

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("an index was read")

    monkeypatch.setattr(commit.pq, "read_table", refused)
    assert not finish(root).is_partial
    assert len(sa1b.open(root)) == 18


def test_rows_that_are_not_written_yet_are_written_by_the_next_run(root: Path, tars: Path) -> None:
    tasks = {name: replace(task, samples=None) for name, task in read_tasks(root).items()}
    for name, task in tasks.items():
        (root / "tasks" / f"{name}.samples").unlink()
        write_task(root, task)
    table = table_name(root)
    assert table is not None
    with (root / table).open("rb") as file:
        document = dataset_document(tasks, table, read_facts(file))
    (root / "dataset.json").write_bytes(document)
    assert len(sa1b.open(root)) == 12
    assert verify(root, workers=0, quiet=True).findings == []
    reshard([tars / "sa_000002.tar"], root, OPTIONS, Policy(), IngestRun(quiet=True))
    assert len(sa1b.open(root)) == 18
    assert sorted(path.name for path in root.glob("tasks/*.samples")) == [
        f"sa_00000{number}.samples" for number in range(3)
    ]


@pytest.mark.parametrize("damage", ["missing", "flipped", "cut"])
def test_rows_of_a_source_that_are_damaged_are_made_again_from_its_indexes(
    root: Path, tars: Path, damage: str
) -> None:
    rows = root / "tasks" / "sa_000001.samples"
    right = rows.read_bytes()
    if damage == "missing":
        rows.unlink()
    else:
        rows.write_bytes(
            right[:-8] if damage == "cut" else bytes([*right[:200], right[200] ^ 1, *right[201:]])
        )
    reshard([tars / "sa_000002.tar"], root, OPTIONS, Policy(), IngestRun(quiet=True))
    assert rows.read_bytes() == right
    assert len(sa1b.open(root)) == 18


def test_dropping_a_source_makes_a_stuck_directory_whole_again(
    root: Path, tars: Path, tmp_path: Path
) -> None:
    before = files(root)
    twin = tmp_path / "sa_000008.tar"
    shutil.copy(tars / "sa_000001.tar", twin)
    # As two machines do it that know nothing of each other: each finishes its task.
    (root / "dataset.json").rename(tmp_path / "kept.json")
    inside.ingest_tar(twin, root, images_per_shard=4)
    (tmp_path / "kept.json").rename(root / "dataset.json")
    finished = finish(root)
    assert list(finished.failed) == ["sa_000008"]
    assert "image 100 of sa_000008 is in sa_000001 already" in finished.failed["sa_000008"]
    assert "--drop" in finished.failed["sa_000008"]
    assert len(sa1b.open(root)) == 12
    assert not drop_source(root, "sa_000008").is_partial
    assert files(root) == before


def test_the_other_of_two_twins_can_be_dropped_too(root: Path, tars: Path, tmp_path: Path) -> None:
    twin = tmp_path / "sa_000008.tar"
    shutil.copy(tars / "sa_000001.tar", twin)
    (root / "dataset.json").unlink()
    inside.ingest_tar(twin, root, images_per_shard=4)
    finish(root)
    drop_source(root, "sa_000001")
    assert sorted(sa1b.open(root).manifest["sources"]) == ["sa_000000", "sa_000008"]
    assert ids(root) == [*range(6), *range(100, 106)]
    assert not list(root.glob("sa1b-000001-*"))
    assert verify(root, workers=0, quiet=True).findings == []


def test_of_three_sources_with_one_image_the_first_one_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for number, images in ((1, range(100, 103)), (2, range(102, 105)), (3, range(102, 103))):
        tiny.make_tar(folder / f"sa_00000{number}.tar", images)
    sources = sorted(folder.iterdir())
    summary = reshard(sources, tmp_path / "root", Options(), Policy(), IngestRun(quiet=True))
    assert (summary.done, sorted(summary.failed)) == (["sa_000001"], ["sa_000002", "sa_000003"])
    for message in summary.failed.values():
        assert "is in sa_000001 already" in message
    assert ids(tmp_path / "root") == [100, 101, 102]


def test_what_cannot_be_dropped_is_said(root: Path) -> None:
    with pytest.raises(UsageError, match=r"--drop sa_000005: .* has no such source; it has sa_000000"):
        drop_source(root, "sa_000005")
    claim = Claim.take(FolderStore(root), "tasks/sa_000001.claim")
    assert claim is not None
    path = root / "tasks" / "sa_000001.claim"
    with (
        claim,
        pytest.raises(
            LockedError,
            match=rf"is writing this source; .* \({path}: held until process {os.getpid()} of this",
        ),
    ):
        drop_source(root, "sa_000001")
    assert len(sa1b.open(root)) == 12


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/", "../", "../../src", "../tasks", "sa_..", "./sa_000001", "a\0b"]
)
def test_only_a_bare_name_can_be_dropped(root: Path, tmp_path: Path, name: str) -> None:
    for path in ("root/quarantine/sa_000001/refused.jsonl", "src/mine.txt", "root/quarantine/mine.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("kept")
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
    with pytest.raises(SystemExit) as ended:
        main(["reshard", "--out", str(root), "--drop", name])
    assert ended.value.code == 0
    assert sorted(finish(root).tasks) == ["sa_000000"]
    assert [path for path in root.rglob("*") if "000001" in path.name] == []
    assert not killed.exists()


def test_a_source_made_with_other_options_is_left_out_and_named(root: Path, tars: Path) -> None:
    inside.ingest_tar(tars / "sa_000002.tar", root, images_per_shard=4, keep_json=True)
    finished = finish(root)
    assert "made with --keep-json, sa_000000 with no --keep-json" in finished.failed["sa_000002"]
    assert len(sa1b.open(root)) == 12
    assert not drop_source(root, "sa_000002").is_partial


def test_opening_waits_for_a_table_that_is_replaced_in_this_moment(
    root: Path, tars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = sa1b.Dataset._read_manifest
    calls = 0

    def read(self: sa1b.Dataset) -> dict[str, object]:
        nonlocal calls
        found = original(self)
        calls += 1
        if calls == 1:
            reshard([tars / "sa_000002.tar"], root, OPTIONS, Policy(), IngestRun(quiet=True))
        return found

    monkeypatch.setattr(sa1b.Dataset, "_read_manifest", read)
    assert len(sa1b.open(root)) == 18
    (root / table_name(root)).unlink()
    with pytest.raises(TableError, match="missing"):
        sa1b.open(root)


def test_a_failure_of_a_source_that_is_in_the_dataset_is_not_recorded(root: Path) -> None:
    finish_module.record_failure(root, "sa_000001", "SourceError", "of a second attempt")
    assert not (root / "tasks" / "sa_000001.failed").exists()
    finish_module.record_failure(root, "sa_000004", "SourceError", "why")
    assert json.loads((root / "tasks" / "sa_000004.failed").read_text()) == {
        "error": "SourceError",
        "message": "why",
    }
    (root / "tasks" / "sa_000004.failed").write_text("{")
    assert "damaged" in finish(root).failed["sa_000004"]


def test_ten_thousand_parts_and_more_are_in_the_order_of_their_numbers(root: Path) -> None:
    tasks = read_tasks(root)
    first = tasks["sa_000000"].shards[0]
    names = [f"sa1b-000000-{part:04d}.tar" for part in range(9_998, 10_002)]
    tasks["sa_000000"] = replace(
        tasks["sa_000000"], shards=[replace(first, name=name) for name in reversed(names)]
    )
    with (root / table_name(root)).open("rb") as file:
        document = json.loads(dataset_document(tasks, "t", read_facts(file)))
    assert [shard["name"] for shard in document["shards"]][:4] == names


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_text("{")])
def test_a_source_whose_task_file_is_lost_stays_in_the_dataset(
    root: Path, tars: Path, added: bool, change: Callable[[Path], object]
) -> None:
    before = sa1b.open(root).table.image_id.tolist()
    change(root / "tasks" / "sa_000001.json")
    if added:
        summary = reshard([tars / "sa_000002.tar"], root, OPTIONS, Policy(), IngestRun(quiet=True))
        assert (summary.failed, summary.complete) == ({}, False)
    finished = finish(root)
    assert (finished.lost, finished.is_partial) == (["sa_000001"], True)
    assert "1 with a lost or damaged task file (sa_000001)" in finished.line(root)
    dataset = sa1b.open(root)
    assert set(before) <= set(dataset.table.image_id.tolist())
    assert [dataset.by_id(one).jpeg for one in before] == [tiny.pair(one)[0] for one in before]
    (root / "tasks" / "sa_000001.json").unlink(missing_ok=True)
    reshard([tars / "sa_000001.tar"], root, OPTIONS, Policy(), IngestRun(quiet=True))
    assert sa1b.open(root).lacks() == ""


def test_what_is_pending_stays_so_until_it_is_done_or_dropped(root: Path, tars: Path) -> None:
    finish(root, ["sa_000002", "sa_000005"])
    summary = reshard([tars / "sa_000000.tar"], root, OPTIONS, Policy(), IngestRun(quiet=True))
    assert (summary.exit_code(), summary.complete) == (0, False)  # all that was named is in
    assert finish(root).pending == ["sa_000002", "sa_000005"]
    reshard([tars / "sa_000002.tar"], root, OPTIONS, Policy(), IngestRun(quiet=True))
    assert finish(root).pending == ["sa_000005"]
    assert not drop_source(root, "sa_000005").is_partial


def test_a_changed_manifest_is_written_again(root: Path) -> None:
    path = root / "dataset.json"
    right = path.read_bytes()
    path.write_bytes(right.replace(b'"name": "sa1b-000000-0000.tar"', b'"name": "sa1b-q00000-0000.tar"'))
    assert path.read_bytes() != right
    finish(root)
    assert path.read_bytes() == right


def test_damaged_parts_of_a_source_are_named_by_every_finish(root: Path, tars: Path, tmp_path: Path) -> None:
    cut = tmp_path / "sa_000002.tar"
    data = (tars / "sa_000002.tar").read_bytes()
    cut.write_bytes(data[: len(data) * 2 // 3])
    summary = reshard([cut], root, OPTIONS, Policy(), IngestRun(quiet=True))
    assert summary.exit_code() == 3
    assert "Complete except for the damaged parts of sa_000002" in finish(root).line(root)


def test_nothing_to_finish_is_no_success(tmp_path: Path) -> None:
    assert finish(tmp_path).tasks == {}
    line = [sys.executable, "tools/reshard.py", "--out", str(tmp_path), "--finish", "--json"]
    done = processes.run(line, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert json.loads(done.stdout)["complete"] is False


def test_five_names_of_a_kind_are_listed_and_the_rest_counted(root: Path, tmp_path: Path) -> None:
    names = [f"sa_{number:06d}" for number in range(6)]
    tasks = read_tasks(root)
    some = Finished(tasks, pending=names[:5]).line(tmp_path)
    assert f"5 pending ({', '.join(names[:5])})." in some
    more = Finished(tasks, dict.fromkeys(names, "why")).line(tmp_path)
    assert f"6 failed ({', '.join(names[:5])} and 1 more)." in more


def test_finishing_what_is_up_to_date_reads_no_rows(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("rows were read")

    monkeypatch.setattr(finish_module, "tables_of", refused)
    assert not finish(root).is_partial
