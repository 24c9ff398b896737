import shutil
from dataclasses import replace

import pytest

from sa1b.errors import LockedError, ManifestError
from sa1b.ingest.ingest import Policy
from sa1b.ingest.reshard import reshard
from sa1b.ingest.worker import Run
from sa1b.shards import manifest
from sa1b.shards.commit import write_dataset
from sa1b.shards.manifest import Options, table_name
from sa1b.storage.publish import lock
from sa1b.verify.rebuild import rebuild_root, rebuild_shards
from sa1b.verify.verify import verify
from tests.shards.tiny_source import ROOTS, make_root, two_sources


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return two_sources(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def roots(sources, tmp_path_factory):
    folder = tmp_path_factory.mktemp("roots")
    return {name: make_root(folder / name, sources, options) for name, options in ROOTS.items()}


@pytest.fixture(params=ROOTS)
def root(request, roots, tmp_path):
    return shutil.copytree(roots[request.param], tmp_path / "root")


@pytest.fixture
def plain(roots, tmp_path):
    return shutil.copytree(roots["plain"], tmp_path / "root")


def content(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def remove(root, *patterns):
    for pattern in patterns:
        for path in root.glob(pattern):
            path.unlink()


def clean(root):
    return verify(root, deep=True, workers=0, quiet=True).findings == []


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


def test_the_same_bytes_come_back(root):
    written = content(root)
    remove(root, "*.parquet", "samples-*.bin", "dataset.json")
    summary = rebuild_root(root, quiet=True)
    assert content(root) == written
    assert (summary.exit_code(), summary.complete, summary.notes) == (0, True, [])
    assert (summary.shards, summary.images) == (5, 19)


def test_damaged_files_are_replaced(plain):
    written = content(plain)
    for name in ("sa1b-000001-0001.parquet", table_name(plain), "dataset.json"):
        flip(plain / name, 100)
    rebuild_root(plain, quiet=True)
    assert content(plain) == written


def test_single_shards(root):
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
    summary = rebuild_root(plain, quiet=True)
    assert content(plain) == written  # the index of the intact shard is back
    assert list(summary.failed) == [shard.name]
    assert str(shard) in summary.failed[shard.name]
    assert "at offset" in summary.failed[shard.name]
    assert (summary.exit_code(), summary.complete) == (1, False)


def test_a_tar_whose_content_has_changed_is_refused(plain):
    """Its structure is whole: only the recorded digest tells. An index of it would vouch for the damage."""
    shard = plain / "sa1b-000001-0001.tar"
    flip(shard, 512 + 700)
    written = content(plain)
    for summary in (rebuild_root(plain, quiet=True), rebuild_shards([shard], quiet=True)):
        assert "has changed since" in summary.failed[shard.name]
        assert content(plain) == written


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
    assert note.startswith("sa1b-000001-0000.parquet: not the bytes")
    assert "pyarrow 1.0, now" in note
    assert clean(plain)


def test_a_task_file_that_the_manifest_does_not_vouch_for_is_not_taken_over(plain):
    task = manifest.read_tasks(plain)["sa_000001"]
    manifest.write_task(plain, replace(task, counts={**task.counts, "refused": {"bad_rle": 3}}))
    before = content(plain)
    with pytest.raises(ManifestError, match=r"sa_000001\.json: not as dataset\.json vouches for it"):
        rebuild_root(plain, quiet=True)
    assert content(plain) == before


def test_only_what_is_claimed_is_indexed(plain):
    shutil.copy(plain / "sa1b-000001-0000.tar", plain / "sa1b-000009-0000.tar")
    rebuild_root(plain, quiet=True)
    assert not (plain / "sa1b-000009-0000.parquet").exists()


# Task files lost


def test_task_files_from_dataset_json(root):
    written = content(root)
    options = manifest.read_dataset(root)["options"]
    remove(root, "tasks/*.json", "*.parquet", "samples-*.bin")
    summary = rebuild_root(root, quiet=True)
    assert "made again from the shards" in summary.notes[0]
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


def test_everything_from_the_tars_alone(root):
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
    assert "cannot be noticed" in summary.notes[1]
    assert clean(root)


def test_reshard_does_a_source_again_whose_task_file_was_lost(plain, sources):
    written = content(plain)
    remove(plain, "tasks/*.json")
    rebuild_root(plain, quiet=True)
    summary = reshard(sources, plain, ROOTS["plain"], Policy(), Run(workers=2, quiet=True))
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


# When it cannot


def test_a_folder_without_shards_is_refused(tmp_path):
    with pytest.raises(ManifestError, match="holds no shards"):
        rebuild_root(tmp_path, quiet=True)


def test_a_root_that_is_written_to_is_refused(plain):
    with lock(plain), pytest.raises(LockedError):
        rebuild_root(plain, quiet=True)
    with lock(plain), pytest.raises(LockedError):
        rebuild_shards([plain / "sa1b-000001-0000.tar"], quiet=True)
