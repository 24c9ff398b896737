"""Indexes, sample table and dataset.json made again, while readers have them open, and after interruptions."""

import os
import shutil
from pathlib import Path

import pytest

from sa1b import Dataset
from sa1b.console import command
from sa1b.errors import ManifestError, OutOfMemoryError
from sa1b.ingest.finish import finish
from sa1b.shards import index, manifest
from sa1b.verify import rebuild as rebuild_module
from sa1b.verify.rebuild import rebuild_root, rebuild_tables
from tests.verify.checking import check_here

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def plain(root):
    return root


def remove(root, *patterns):
    for pattern in patterns:
        for path in root.glob(pattern):
            path.unlink()


def clean(root):
    return check_here(root, deep=True).findings == []


def test_only_what_is_claimed_is_indexed(plain):
    shutil.copy(plain / "sa1b-000001-0000.tar", plain / "sa1b-000009-0000.tar")
    rebuild_root(plain, quiet=True)
    assert not (plain / "sa1b-000009-0000.parquet").exists()


# When dataset.json and some task files are lost


def advised(root):
    return {one.remedy for one in check_here(root).findings}


def test_shards_of_a_source_whose_task_file_is_lost_too_are_kept(plain):
    images = len(Dataset(plain))
    remove(plain, "tasks/sa_000001.json", "dataset.json")
    assert f"`{command('index')} {plain}`" in advised(plain)
    with pytest.raises(ManifestError, match="no intact task file of sa_000001; omit --tables"):
        rebuild_tables(plain)
    assert rebuild_root(plain, quiet=True).complete
    assert len(Dataset(plain)) == images
    report = check_here(plain, deep=True)
    assert (report.findings, report.notes) == ([], [])


def test_finishing_says_which_source_is_missing(plain):
    remove(plain, "tasks/sa_000001.json", "dataset.json")
    finished = finish(plain)
    assert (sorted(finished.tasks), finished.pending) == (["sa_000002"], ["sa_000001"])
    assert not any(" rm " in note or "remove" in note for note in check_here(plain).notes)


# When it cannot


def test_a_claim_without_a_heartbeat_is_no_hindrance(plain):
    claim = plain / "tasks" / "sa_000002.claim"
    claim.write_text('{"host": "node7", "pid": 4711, "process": "another-1", "token": "theirs"}')
    os.utime(claim, (0, 0))
    assert rebuild_tables(plain).complete


# Readers meanwhile


def test_an_index_of_other_bytes_changes_dataset_json_in_one_step(plain, monkeypatch):
    """The libraries have other versions now: task files and dataset.json follow, the old ones stay till then."""
    monkeypatch.setattr(index, "ROW_GROUP_IMAGES", 2)
    documents = [manifest.read_dataset(plain)]
    replace_file = Path.replace

    def watched(path, target):
        documents.append(manifest.read_dataset(plain))
        return replace_file(path, target)

    monkeypatch.setattr(Path, "replace", watched)
    summary = rebuild_root(plain, workers=0, quiet=True)
    assert len(summary.notes) == 4  # one shard holds two images
    assert all(document == documents[0] for document in documents)
    assert manifest.read_dataset(plain) != documents[0]
    assert clean(plain)


# Interrupted and resumed


def test_a_rebuild_without_memory_ends_with_a_message_and_goes_on(plain, monkeypatch):
    real = rebuild_module.rebuild_index

    def refuse(shard, *arguments, **options):
        if shard.name.startswith("sa1b-000002"):
            raise MemoryError
        return real(shard, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(rebuild_module, "rebuild_index", refuse)
        with pytest.raises(OutOfMemoryError, match=r"sa1b-000002-0000\.tar: .* fewer --workers"):
            rebuild_root(plain, workers=0, quiet=True)
    assert rebuild_root(plain, workers=0, quiet=True).resumed == 4
