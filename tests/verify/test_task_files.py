"""Damage to task files and their rows: each is named itself, with the command that repairs it."""

import shutil

import pytest

from sa1b.shards import manifest
from sa1b.shards.commit import write_dataset
from tests.verify.checking import check, edit_json

TASK = "tasks/sa_000002.json"
ROWS = "tasks/sa_000002.samples"


def only(report):
    (finding,) = report.findings
    return finding


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format": "sa1b-shards-1"}', b"\xff\xfe", None])
def test_a_task_file_that_cannot_be_read(root, damage):
    if damage is None:
        (root / TASK).unlink()
        (root / TASK).mkdir()
    else:
        (root / TASK).write_bytes(damage)
    report = check(root)
    finding = only(report)
    assert (finding.kind, finding.file) == ("task_unreadable", TASK)
    assert report.images == 19  # dataset.json lists what is there


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"kind": "tar"', '"kind":  "tar"'),
        ('"members"', '"membres"'),
        ('"mtime_ns"', '"mtime"'),
        ('"name": "sa_000002"', '"name": "sa_000003"'),
        ('"pyarrow"', '"pyrow"'),
        ('"sha256": "', '"sha256": "x'),
    ],
)
def test_a_task_file_that_is_not_as_it_is_written(root, old, new):
    path = root / TASK
    path.write_text(path.read_text().replace(old, new, 1))
    finding = only(check(root))
    assert finding.file == TASK
    assert finding.kind in ("task_damaged", "task_unreadable")


def test_the_task_file_of_another_dataset(root, roots):
    """A foreign task file under the right name: it is named, and not every shard of the source."""
    shutil.copy(roots["keep_json"] / TASK, root / TASK)
    finding = only(check(root))
    assert (finding.kind, finding.file) == ("task_differs", TASK)


def test_a_count_that_dataset_json_was_written_with(root):
    task = manifest.read_tasks(root)["sa_000001"]
    task.counts["jpg_bytes"] += 1
    manifest.write_task(root, task)
    write_dataset(root, manifest.read_tasks(root))
    assert only(check(root)).kind == "task_counts"


def test_a_shard_that_only_dataset_json_changed(root):
    edit_json(root / "dataset.json", lambda document: document["shards"][0].update(masks=7))
    report = check(root)
    assert {(one.kind, one.file) for one in report.findings} == {("dataset_differs", "dataset.json")}
    assert "shards.sa1b-000001-0000.tar.masks is 7" in report.findings[0].message


def test_dataset_json_is_compared_with_the_task_files_that_are_left(root):
    (root / TASK).unlink()
    edit_json(root / "dataset.json", lambda document: document["shards"][0].update(masks=7))
    assert {(one.kind, one.file) for one in check(root).findings} == {
        ("dataset_differs", "dataset.json"),
        ("task_missing", TASK),
    }


@pytest.mark.parametrize("name", ["../../etc/passwd", "sa1b-000001-0009.tar"])
def test_a_name_that_is_no_shard_of_the_source_is_not_opened(root, name):
    (root / TASK).write_text((root / TASK).read_text().replace("sa1b-000002-0000.tar", name))
    finding = only(check(root))
    assert (finding.kind, finding.file) == ("task_unreadable", TASK)
    assert name in finding.message
    (root / "dataset.json").unlink()
    assert all(one.shard != name or one.kind.endswith("_missing") for one in check(root).findings)
