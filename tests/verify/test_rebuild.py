"""Indexes, sample table and dataset.json made again, while readers have them open, and after interruptions."""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sa1b.console import command
from sa1b.errors import LockedError, ManifestError, OutOfMemoryError
from sa1b.ingest.finish import finish
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.reshard import reshard
from sa1b.shards import index, manifest
from sa1b.shards.commit import write_dataset
from sa1b.shards.dataset import Dataset
from sa1b.shards.documents import Options
from sa1b.storage.claim import Claim
from sa1b.storage.store import FolderStore
from sa1b.verify import rebuild as rebuild_module
from sa1b.verify.rebuild import rebuild_root, rebuild_shards, rebuild_tables
from tests.shards.tiny_source import ROOTS, make_root
from tests.verify.checking import check, content, flip

SHARD = "sa1b-000001-0000.tar"
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def plain(root):
    return root


def remove(root, *patterns):
    for pattern in patterns:
        for path in root.glob(pattern):
            path.unlink()


def clean(root):
    return check(root, deep=True).findings == []


def test_the_same_bytes_come_back(each_root):
    root = each_root
    written = content(root)
    remove(root, "*.parquet", "samples-*.bin", "dataset.json")
    summary = rebuild_root(root, quiet=True)
    assert content(root) == written
    assert (summary.exit_code(), summary.complete, summary.notes) == (0, True, [])
    assert (summary.shards, summary.images) == (5, 19)


def test_damaged_files_are_replaced(plain):
    written = content(plain)
    for name in ("sa1b-000001-0001.parquet", manifest.table_name(plain), "dataset.json"):
        flip(plain / name, 100)
    rebuild_root(plain, quiet=True)
    assert content(plain) == written


def test_single_shards(each_root):
    root = each_root
    written = content(root)
    shards = [root / "sa1b-000001-0000.tar", root / "sa1b-000002-0000.tar"]
    for shard in shards:
        shard.with_suffix(".parquet").unlink()
    summary = rebuild_shards(shards, quiet=True)
    assert content(root) == written
    assert (summary.shards, summary.notes, summary.exit_code()) == (2, [], 0)


def test_a_shard_alone_in_a_folder(roots, tmp_path):
    shutil.copy(roots["plain"] / "sa1b-000001-0000.tar", tmp_path)
    rebuild_shards([tmp_path / "sa1b-000001-0000.tar"], quiet=True)
    made = (tmp_path / "sa1b-000001-0000.parquet").read_bytes()
    assert made == (roots["plain"] / "sa1b-000001-0000.parquet").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "sa1b-000001-0000.parquet",
        "sa1b-000001-0000.tar",
    ]


@pytest.mark.parametrize(
    "change", [lambda data: data[:3000], lambda data: b"", lambda data: data.replace(b"sa_10", b"sa_20", 1)]
)
def test_a_damaged_tar_is_named_and_its_index_left_alone(plain, change):
    shard = plain / "sa1b-000001-0001.tar"
    shard.write_bytes(change(shard.read_bytes()))
    written = content(plain)
    (plain / "sa1b-000001-0000.parquet").unlink()
    summary = rebuild_root(plain, workers=0, quiet=True)
    after = content(plain)
    assert after.pop(".index-progress.jsonl")  # the next run goes on from here
    assert after == written  # the index of the intact shard is back
    assert list(summary.failed) == [shard.name]
    assert str(shard) in summary.failed[shard.name]
    assert "offset" in summary.failed[shard.name]
    assert (summary.exit_code(), summary.complete) == (1, False)


def test_a_tar_whose_content_has_changed_is_refused(plain):
    """Its structure is whole: only the recorded digest tells. An index of it would vouch for the damage."""
    shard = plain / "sa1b-000001-0001.tar"
    flip(shard, 512 + 700)
    written = content(plain)
    for summary in (rebuild_root(plain, quiet=True), rebuild_shards([shard], quiet=True)):
        assert "has changed since" in summary.failed[shard.name]
        assert {**content(plain), ".index-progress.jsonl": b""} == {**written, ".index-progress.jsonl": b""}


def test_a_missing_tar_is_named(plain):
    (plain / "sa1b-000001-0001.tar").unlink()
    summary = rebuild_root(plain, quiet=True)
    assert "not there" in summary.failed["sa1b-000001-0001.tar"]
    assert summary.exit_code() == 1


def test_an_index_of_other_versions_is_said_and_recorded(plain):
    task = manifest.read_tasks(plain)["sa_000001"]
    shards = [replace(task.shards[0], index_sha256="0" * 64), *task.shards[1:]]
    manifest.write_task(plain, replace(task, shards=shards, versions={**task.versions, "pyarrow": "1.0"}))
    write_dataset(plain, manifest.read_tasks(plain))
    summary = rebuild_root(plain, quiet=True)
    (note,) = summary.notes
    assert note.startswith("sa1b-000001-0000.parquet: its bytes differ")
    assert "pyarrow 1.0, now" in note
    assert clean(plain)


def test_a_task_file_that_dataset_json_does_not_list_is_not_taken_over(plain):
    task = manifest.read_tasks(plain)["sa_000001"]
    manifest.write_task(plain, replace(task, counts={**task.counts, "refused": {"bad_rle": 3}}))
    before = content(plain)
    with pytest.raises(ManifestError, match=r"sa_000001\.json: not the one that dataset\.json lists"):
        rebuild_root(plain, quiet=True)
    assert content(plain) == before


def test_only_what_is_claimed_is_indexed(plain):
    shutil.copy(plain / "sa1b-000001-0000.tar", plain / "sa1b-000009-0000.tar")
    rebuild_root(plain, quiet=True)
    assert not (plain / "sa1b-000009-0000.parquet").exists()


# Task files lost


def test_task_files_from_dataset_json(each_root):
    root = each_root
    written = content(root)
    options = manifest.read_dataset(root)["options"]
    remove(root, "tasks/*.json", "*.parquet", "samples-*.bin")
    summary = rebuild_root(root, quiet=True)
    assert "rebuilt from the shards" in summary.notes[0]
    again = content(root)
    differing = {name for name in written if again[name] != written[name]}
    assert differing == {"tasks/sa_000001.json", "tasks/sa_000002.json", "dataset.json"}
    assert manifest.read_dataset(root)["options"] == options
    assert clean(root)


def test_one_task_file_from_dataset_json(plain):
    (plain / "tasks" / "sa_000002.json").unlink()
    rebuild_root(plain, quiet=True)
    tasks = manifest.read_tasks(plain)
    assert tasks["sa_000002"].source["sha256"] is None
    assert tasks["sa_000001"].source["sha256"] is not None
    assert tasks["sa_000002"].options == tasks["sa_000001"].options
    assert clean(plain)


def test_everything_from_the_tars_alone(each_root):
    root = each_root
    tasks = manifest.read_tasks(root)
    remove(root, "tasks/*.json", "samples-*.bin", "dataset.json")
    summary = rebuild_root(root, quiet=True)
    for name, task in manifest.read_tasks(root).items():
        assert task.options == tasks[name].options
        assert task.shards == tasks[name].shards
        assert task.largest == tasks[name].largest
        assert {what: task.counts[what] for what in ("images", "masks", "jpg_bytes")} == {
            what: tasks[name].counts[what] for what in ("images", "masks", "jpg_bytes")
        }
    assert "cannot be detected" in summary.notes[1]
    assert clean(root)


def test_reshard_does_a_source_again_whose_task_file_was_lost(plain, sources):
    written = content(plain)
    remove(plain, "tasks/*.json")
    rebuild_root(plain, quiet=True)
    summary = reshard(sources, plain, ROOTS["plain"], Policy(), IngestRun(workers=2, quiet=True))
    assert summary.done == ["sa_000001", "sa_000002"]
    assert content(plain) == written


def test_a_gap_in_the_shards_of_a_lost_task_is_refused(plain):
    remove(plain, "tasks/*.json", "samples-*.bin", "dataset.json", "sa1b-000001-0001.tar")
    with pytest.raises(ManifestError, match=r"sa1b-000001-0001\.tar"):
        rebuild_root(plain, quiet=True)


def test_shards_of_different_runs_are_refused(plain, tmp_path, sources):
    other = make_root(tmp_path / "other", sources[1:], Options(images_per_shard=2))
    for path in other.glob("sa1b-*"):
        shutil.copy(path, plain)
    remove(plain, "tasks/*.json", "samples-*.bin", "dataset.json")
    with pytest.raises(ManifestError, match="differ in images in full shards"):
        rebuild_root(plain, quiet=True)


# When dataset.json and some task files are lost


def advised(root):
    return {one.remedy for one in check(root).findings}


def test_shards_of_a_source_whose_task_file_is_lost_too_are_kept(plain):
    images = len(Dataset(plain))
    remove(plain, "tasks/sa_000001.json", "dataset.json")
    assert f"`{command('index')} {plain}`" in advised(plain)
    with pytest.raises(ManifestError, match="no intact task file of sa_000001; omit --tables"):
        rebuild_tables(plain)
    assert rebuild_root(plain, quiet=True).complete
    assert len(Dataset(plain)) == images
    report = check(plain, deep=True)
    assert (report.findings, report.notes) == ([], [])


def test_finishing_says_which_source_is_missing(plain):
    remove(plain, "tasks/sa_000001.json", "dataset.json")
    finished = finish(plain)
    assert (sorted(finished.tasks), finished.pending) == (["sa_000002"], ["sa_000001"])
    assert not any(" rm " in note or "remove" in note for note in check(plain).notes)


def test_images_that_only_the_sample_table_shows_are_not_forgotten(plain):
    remove(plain, "tasks/sa_000001.*", "dataset.json", "sa1b-000001-*")
    table = plain / manifest.table_name(plain)
    for rebuild in (rebuild_tables, lambda root: rebuild_root(root, quiet=True)):
        with pytest.raises(ManifestError, match=rf"{table.name}: lists \d+ images that no shard"):
            rebuild(plain)
    assert finish(plain).tasks.keys() == {"sa_000002"}
    assert table.exists()
    remove(plain, "dataset.json")
    table.rename(plain.parent / table.name)  # as the message says
    assert rebuild_tables(plain).complete


# When it cannot


def test_a_folder_without_shards_is_refused(tmp_path):
    with pytest.raises(ManifestError, match="no dataset there"):
        rebuild_root(tmp_path, quiet=True)


def test_a_dataset_that_is_written_to_is_refused(plain):
    """Nothing is changed while reshard holds a source, or another rebuild the directory."""
    before = content(plain)
    for name in ("tasks/sa_000002.claim", ".index.claim"):
        with Claim.take(FolderStore(plain), name):
            for call in (rebuild_root, rebuild_tables, lambda root, **_: rebuild_shards([root / SHARD])):
                with pytest.raises(LockedError, match="at work on sa_000002|being indexed"):
                    call(plain)
    assert content(plain) == before


def test_a_claim_without_a_heartbeat_is_no_hindrance(plain):
    claim = plain / "tasks" / "sa_000002.claim"
    claim.write_text('{"host": "node7", "pid": 4711, "process": "another-1", "token": "theirs"}')
    os.utime(claim, (0, 0))
    assert rebuild_tables(plain).complete


# Readers meanwhile


@pytest.mark.parametrize("rebuild", [rebuild_root, rebuild_tables])
def test_the_dataset_can_be_opened_at_every_moment(plain, rebuild, monkeypatch):
    """No step removes or invalidates what readers open: before each rename the dataset is whole."""
    remove(plain, "*.parquet") if rebuild is rebuild_root else None
    opened = []
    replace_file = Path.replace

    def watched(path, target):
        opened.append(len(Dataset(plain)[0].jpeg))
        return replace_file(path, target)

    monkeypatch.setattr(Path, "replace", watched)
    if rebuild is rebuild_root:
        rebuild_root(plain, workers=0, quiet=True)
    else:
        rebuild_tables(plain)
    assert opened


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


def test_an_index_of_other_bytes_of_one_shard(plain, monkeypatch):
    monkeypatch.setattr(index, "ROW_GROUP_IMAGES", 2)
    rebuild_shards([plain / SHARD], workers=0, quiet=True)
    assert clean(plain)


# Interrupted and resumed


class Stopped(Exception):
    pass


def stop_after(monkeypatch, shards):
    """Interrupt a rebuild when it is about to begin another shard."""
    real, begun = rebuild_module.rebuild_index, []

    def counted(shard, *arguments, **options):
        if len(begun) == shards:
            raise Stopped
        begun.append(shard.name)
        return real(shard, *arguments, **options)

    monkeypatch.setattr(rebuild_module, "rebuild_index", counted)
    return begun


def test_an_interrupted_rebuild_goes_on(each_root, monkeypatch):
    root, written = each_root, content(each_root)
    remove(root, "*.parquet")
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stopped):
            rebuild_root(root, workers=0, quiet=True)
    begun = stop_after(monkeypatch, 99)
    summary = rebuild_root(root, workers=0, quiet=True)
    assert len(begun) == 2
    assert (summary.shards, summary.resumed, summary.images, summary.complete) == (5, 3, 19, True)
    assert "3 before the interruption" in summary.table(root)
    assert content(root) == written


@pytest.mark.parametrize("change", ["index", "index_missing", "shard_time", "shard", "line"])
def test_what_changed_since_is_done_again(plain, monkeypatch, change):
    written = content(plain)
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(Stopped):
            rebuild_root(plain, workers=0, quiet=True)
    shard = plain / SHARD
    if change == "index":
        flip(shard.with_suffix(".parquet"), 500)
    elif change == "index_missing":
        shard.with_suffix(".parquet").unlink()
    elif change == "shard_time":
        os.utime(shard)
    elif change == "shard":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:  # a crash cut the record
        record = plain / ".index-progress.jsonl"
        record.write_bytes(record.read_bytes()[:-20])
    begun = stop_after(monkeypatch, 99)
    summary = rebuild_root(plain, workers=0, quiet=True)
    assert begun[0] == SHARD
    assert summary.resumed == 0
    if change == "shard":
        assert SHARD in summary.failed
    else:
        assert content(plain) == written


def test_an_interruption_between_task_files_and_dataset_json_is_repaired(plain, monkeypatch):
    """The task files are new, dataset.json still lists the old ones: the next run does not refuse them."""
    monkeypatch.setattr(index, "ROW_GROUP_IMAGES", 2)
    with monkeypatch.context() as patch:
        patch.setattr(rebuild_module, "write_dataset", lambda *arguments: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            rebuild_root(plain, workers=0, quiet=True)
    assert len(Dataset(plain)) == 19
    summary = rebuild_root(plain, workers=0, quiet=True)
    assert (summary.resumed, summary.complete) == (5, True)
    assert clean(plain)


def test_processes_give_the_same_bytes(plain):
    written = content(plain)
    remove(plain, "*.parquet")
    summary = rebuild_root(plain, workers=2, quiet=True)
    assert content(plain) == written
    assert (summary.shards, summary.bytes) == (5, sum(path.stat().st_size for path in plain.glob("*.tar")))


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


def test_a_killed_rebuild_goes_on(plain):
    """SIGKILL at a moment when some indexes are done; the same command then ends it."""
    written = content(plain)
    remove(plain, "*.parquet")
    program = (
        "import sys, time; from pathlib import Path; from sa1b.verify import rebuild\n"
        "real = rebuild.rebuild_index\n"
        "def slow(shard, *arguments, **options):\n"
        "    if shard.name.startswith('sa1b-000002'): time.sleep(600)\n"
        "    return real(shard, *arguments, **options)\n"
        "rebuild.rebuild_index = slow\n"
        "rebuild.rebuild_root(Path(sys.argv[1]), workers=0, quiet=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(plain)], cwd=REPOSITORY)
    record = plain / ".index-progress.jsonl"
    while not record.exists() or record.read_bytes().count(b"\n") < 5:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    summary = rebuild_root(plain, workers=0, quiet=True)
    assert (summary.resumed, summary.shards) == (4, 5)
    assert content(plain) == written


# Only the tables


@pytest.mark.parametrize("lost", ["dataset.json", "samples-*.bin", "tasks/sa_000002.samples"])
def test_tables_without_reading_a_shard(plain, lost):
    written = content(plain)
    remove(plain, lost)
    for path in plain.glob("*.tar"):
        path.chmod(0)
        path.rename(path.with_suffix(".hidden"))
    summary = rebuild_tables(plain)
    for path in plain.glob("*.hidden"):
        path.chmod(0o644)
        path.rename(path.with_suffix(".tar"))
    assert summary.complete
    assert content(plain) == written


def test_tables_of_a_damaged_samples_file(plain):
    written = content(plain)
    flip(plain / "tasks" / "sa_000001.samples", 300)
    flip(plain / manifest.table_name(plain), 300)
    rebuild_tables(plain)
    assert content(plain) == written


def test_tables_need_task_files_and_indexes(plain):
    (plain / "tasks" / "sa_000002.json").unlink()
    with pytest.raises(ManifestError, match="no intact task file of sa_000002"):
        rebuild_tables(plain)


def test_sources_that_failed_stay_recorded(plain):
    tasks = manifest.read_tasks(plain)
    write_dataset(plain, tasks, {"sa_000007": "gzip stream is cut"}, ["sa_000008"])
    before = manifest.read_dataset(plain)
    rebuild_root(plain, workers=0, quiet=True)
    assert manifest.read_dataset(plain) == before
