"""A check while others work on the directory, and of directories that are not complete."""

import shutil

import pytest

import sa1b
from sa1b.console import command
from sa1b.ingest.finish import finish
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.reshard import reshard
from sa1b.shards import manifest
from sa1b.shards.commit import write_dataset
from sa1b.shards.documents import Options
from sa1b.storage.claim import Claim
from sa1b.storage.store import FolderStore
from sa1b.verify import root_check
from sa1b.verify import verify as verify_module
from tests.shards.tiny_source import ROOTS, make_root, pairs, write_source
from tests.verify.checking import check_here, content, kinds


def test_a_partial_directory_is_clean_and_says_so_once(root):
    write_dataset(root, manifest.read_tasks(root), {"sa_000007": "gzip stream is cut"}, ["sa_000008", "x"])
    report = check_here(root)
    assert (report.findings, report.exit_code()) == ([], 0)
    assert [note for note in report.notes if "partial" in note] == [
        "partial: failed sources 1, pending 2; dataset.json lists them"
    ]


def test_what_is_being_worked_on_is_a_note(root):
    """A source that is done again: its task file is gone for a moment, its shards are there."""
    (root / "tasks" / "sa_000002.json").unlink()
    (root / ".partial").mkdir(exist_ok=True)
    (root / ".partial" / "node7-4711").mkdir()
    shutil.copy(root / "sa1b-000001-0000.tar", root / "sa1b-000003-0000.tar")
    with (
        Claim.take(FolderStore(root), "tasks/sa_000002.claim"),
        Claim.take(FolderStore(root), "tasks/sa_000003.claim"),
    ):
        report = check_here(root)
    assert report.findings == []
    (first, second, staging) = report.notes
    assert first.startswith("source sa_000002 is being worked on by ")
    assert second.startswith("source sa_000003 is being worked on by ")
    assert "node7-4711" in staging
    assert report.shards == 4  # the shard of sa_000002 may change at any moment


def test_a_source_that_dataset_json_does_not_list_yet_is_a_note(sources, tmp_path):
    root = make_root(tmp_path / "root", sources, ROOTS["plain"])
    write_dataset(root, {"sa_000002": manifest.read_tasks(root)["sa_000002"]})
    report = check_here(root)
    assert report.findings == []
    (note,) = report.notes
    assert "does not list yet: sa_000001" in note
    assert f"`{command('reshard')} --out {root} --finish`" in note


def test_an_unlisted_task_file_that_is_damaged_is_a_finding(root):
    (root / "tasks" / "sa_000009.json").write_text("{")
    assert {(one.kind, one.file) for one in check_here(root).findings} == {
        ("task_unreadable", "tasks/sa_000009.json")
    }


def test_leftovers_of_failed_and_interrupted_runs_are_notes(root):
    (root / "tasks" / "sa_000009.failed").write_text('{"error": "SourceError", "message": "cut"}')
    (root / "tasks" / "sa_000010.samples").write_bytes(b"")
    (root / "samples-0123456789abcdef.bin").write_bytes(b"")
    report = check_here(root)
    assert report.findings == []
    notes = "\n".join(report.notes)
    for said in ("failed: sa_000009", "sa_000010.samples", "samples-0123456789abcdef.bin"):
        assert said in notes


def test_an_interrupted_rebuild_is_a_note_only_if_something_is_damaged(root):
    (root / ".index-progress.jsonl").write_bytes(b"")
    assert check_here(root).notes == []  # repaired by other means since
    next(root.glob("*.parquet")).unlink()
    (note,) = check_here(root).notes
    assert f"sa1b index {root}` resumes it" in note


def test_nothing_is_changed_or_locked(root):
    before = content(root)
    with Claim.take(FolderStore(root), ".dataset.claim"):
        check_here(root, deep=True)
    assert content(root) == before


def test_claims_count_where_their_age_cannot_be_measured(root, monkeypatch):
    """A directory that cannot be written to, such as a snapshot taken while reshard was running."""
    (root / "tasks" / "sa_000002.claim").write_text("{}")
    (root / "tasks" / "sa_000002.json").unlink()

    def refuse(self, folder=""):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(FolderStore, "now", refuse)
    report = check_here(root)
    assert report.findings == []
    assert (
        report.notes[0]
        == "source sa_000002 is being worked on by another process: its task file is not checked"
    )


def grow_during(monkeypatch, action):
    """Call `action` once, after the first shard was checked."""
    real, done = verify_module.check_shard, []

    def checked(expected, *arguments, **options):
        result = real(expected, *arguments, **options)
        if not done:
            done.append(action())
        return result

    monkeypatch.setattr(verify_module, "check_shard", checked)


def test_a_source_added_during_the_check(root, sources, tmp_path, monkeypatch):
    new = write_source(tmp_path / "sa_000003.tar", pairs(range(500, 503), seed=3))

    def add():
        reshard(
            [*sources, new], root, Options(images_per_shard=5), Policy(), IngestRun(workers=1, quiet=True)
        )

    grow_during(monkeypatch, add)
    report = check_here(root)
    assert (report.findings, report.shards) == ([], 5)
    assert len(manifest.read_dataset(root)["sources"]) == 3


def test_a_source_replaced_during_the_check_is_no_damage(root, tmp_path, monkeypatch):
    other = write_source(tmp_path / "other" / "sa_000002.tar", pairs(range(600, 609), seed=4))
    run = IngestRun(workers=1, quiet=True, replace=True)
    grow_during(monkeypatch, lambda: reshard([other], root, Options(images_per_shard=5), Policy(), run))
    report = check_here(root)
    assert report.findings == []
    assert any("replaced or dropped while they were checked" in note for note in report.notes)
    monkeypatch.undo()
    assert check_here(root).findings == []


@pytest.mark.parametrize("parts", [10_001])
def test_shards_are_taken_by_the_number_of_their_part(root, parts):
    """Part 10,000 comes after part 9,999 everywhere: the table counts shards in this order."""
    task = manifest.read_tasks(root)["sa_000002"]
    (info,) = task.shards
    names = [f"sa1b-000002-{part:04d}.tar" for part in range(parts)]
    from dataclasses import replace

    from sa1b.verify.recover import lost_sources
    from sa1b.verify.report import VerifyReport
    from sa1b.verify.root_check import RootCheck

    many = replace(task, shards=[replace(info, name=name) for name in names])
    manifest.write_task(root, many)
    (root / "dataset.json").unlink()
    expected = [one.info.name for one in RootCheck(root, VerifyReport(str(root), False)).expected()]
    assert expected[-parts:] == names
    for name in names[1:]:
        (root / name).touch()
    shutil.rmtree(root / "tasks")
    assert lost_sources(root, {}, None)["sa_000002"] == names
    report = check_here(root)
    assert "dataset_missing" in kinds(report)


def test_a_source_replaced_while_the_files_are_read_is_no_damage(root, tmp_path, monkeypatch):
    """All files are of one version of dataset.json."""
    other = write_source(tmp_path / "other" / "sa_000002.tar", pairs(range(600, 609), seed=4))
    real, done = root_check.TaskCheck, []

    def replaced(*arguments):
        if not done:
            done.append(True)
            run = IngestRun(workers=1, quiet=True, replace=True)
            reshard([other], root, Options(images_per_shard=5), Policy(), run)
        return real(*arguments)

    monkeypatch.setattr(root_check, "TaskCheck", replaced)
    report = check_here(root)
    assert (report.findings, report.notes) == ([], [])


def test_shards_of_a_source_added_during_the_check_are_no_leftovers(root, sources, tmp_path, monkeypatch):
    new = write_source(tmp_path / "sa_000003.tar", pairs(range(500, 503), seed=3))
    grow_during(
        monkeypatch,
        lambda: reshard([new], root, Options(images_per_shard=5), Policy(), IngestRun(workers=1, quiet=True)),
    )
    assert check_here(root).notes == []


def test_a_source_with_images_of_another_is_not_said_to_be_added_by_finish(root, tmp_path):
    ids = sa1b.open(root).table.image_id[:3].tolist()
    twin = make_root(
        tmp_path / "twin", [write_source(tmp_path / "sa_000009.tar", pairs(ids))], ROOTS["plain"]
    )
    for path in (*twin.glob("sa1b-*"), *twin.glob("tasks/*")):
        shutil.copy(path, root / path.relative_to(twin))
    assert any(f"--out {root} --finish` adds them" in note for note in check_here(root).notes)
    finish(root)
    (note,) = (note for note in check_here(root).notes if "sa_000009" in note)
    assert "finished and not in the dataset: image" in note
    assert "--finish" not in note
