"""A source that is converted again never removes a stored image silently, and no file of a user."""

import shutil
from pathlib import Path

import pytest

import sa1b
from sa1b.errors import UsageError
from sa1b.ingest.finish import drop_source
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.reshard import reshard
from sa1b.programs.transfer.dataset_copy import copy_dataset
from sa1b.shards.documents import Options
from sa1b.storage.bucket import BucketStore
from sa1b.verify.rebuild import rebuild_root
from sa1b.verify.verify import verify
from tests.shards import tiny

OPTIONS = Options(images_per_shard=2)
IDS = {"sa_000000": [1, 2, 3, 4], "sa_000001": [11, 12, 13, 14]}


def convert(paths, root, **flags):
    return reshard(paths, root, OPTIONS, Policy(), IngestRun(quiet=True, **flags))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    for name, ids in IDS.items():
        tiny.write_tar(folder / f"{name}.tar", tiny.pairs(ids, None), gzip=False)
    convert([folder / f"{name}.tar" for name in IDS], folder / "root")
    (folder / "cut").mkdir()
    whole = (folder / "sa_000000.tar").read_bytes()
    (folder / "cut" / "sa_000000.tar").write_bytes(whole[: len(whole) // 2])
    return folder


@pytest.fixture
def root(made, tmp_path) -> Path:
    return shutil.copytree(made / "root", tmp_path / "root")


@pytest.fixture
def bare(made, tmp_path) -> Path:
    """Shards without tasks, dataset.json and indexes."""
    (tmp_path / "bare").mkdir()
    for path in (made / "root").glob("*.tar"):
        shutil.copy(path, tmp_path / "bare")
    return tmp_path / "bare"


def content(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir() if path.is_file()}


def ids(root: Path) -> list[int]:
    return sa1b.open(root).table.image_id.tolist()


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("lost", ["", "tasks/sa_000000.samples", "sa1b-000000-0001.parquet"])
def test_a_damaged_source_removes_no_image_of_a_finished_one(made, root, replace, lost):
    if lost:
        (root / "tasks" / "sa_000000.samples").unlink()
        (root / lost).unlink(missing_ok=True)
    before = content(root)
    summary = convert([made / "cut" / "sa_000000.tar"], root, redo=("sa_000000",), replace=replace)
    why = summary.failed["sa_000000"]
    assert summary.exit_code() == 1
    assert "2 images of sa_000000 that the source lacks now (3, 4)" in why
    assert f"--out {root} --drop sa_000000" in why
    assert "download it again" in why
    assert content(root).items() >= {k: v for k, v in before.items() if not k.startswith("samples")}.items()
    assert (root / "tasks" / "sa_000000.json").exists()
    if not lost:
        assert ids(root) == [*IDS["sa_000000"], *IDS["sa_000001"]]


def test_a_shard_that_is_gone_protects_nothing(made, root):
    (root / "sa1b-000000-0001.tar").unlink()
    summary = convert([made / "cut" / "sa_000000.tar"], root, redo=("sa_000000",))
    assert summary.done == ["sa_000000"]
    assert ids(root) == [1, 2, *IDS["sa_000001"]]


def test_an_intact_source_with_fewer_images_needs_replace(root, tmp_path):
    other = tiny.write_tar(tmp_path / "sa_000000.tar", tiny.pairs([1, 2, 3]), gzip=False)
    summary = convert([other], root, redo=("sa_000000",))
    assert "1 image of sa_000000 that the source lacks now (4)" in summary.failed["sa_000000"]
    assert "add --replace" in summary.failed["sa_000000"]
    assert convert([other], root, redo=("sa_000000",), replace=True).done == ["sa_000000"]
    assert ids(root) == [1, 2, 3, *IDS["sa_000001"]]


def test_shards_that_nothing_lists_are_kept_and_added(made, bare):
    before = content(bare)
    summary = convert([made / "cut" / "sa_000000.tar"], bare)
    assert "2 images of sa_000000 that the source lacks now (3, 4)" in summary.failed["sa_000000"]
    assert f"index {bare}` adds" in summary.failed["sa_000000"]
    assert content(bare).items() >= before.items()
    rebuild_root(bare, workers=0, quiet=True)
    assert ids(bare) == [*IDS["sa_000000"], *IDS["sa_000001"]]


def test_shards_of_a_killed_run_are_replaced_by_the_whole_source(made, bare):
    (bare / "sa1b-000001-0001.tar").unlink()
    assert convert([made / f"{name}.tar" for name in IDS], bare).complete
    assert content(bare) == content(made / "root")


def test_unlisted_shards_are_named_by_verify_and_added_by_index(made, bare):
    assert convert([made / "sa_000000.tar"], bare).done == ["sa_000000"]
    report = verify(bare, workers=0, quiet=True)
    (note,) = [note for note in report.notes if "sa1b-000001-0000.tar" in note]
    assert "4 images in 2 shards that no task file lists are not in the dataset" in note
    assert f"index {bare}` adds them" in note
    assert not report.table().endswith(f"Clean: {bare}")
    with pytest.raises(UsageError, match=r"--drop sa_000001: .*4 images that the dataset lacks \(11, 12"):
        drop_source(bare, "sa_000001")
    assert rebuild_root(bare, workers=0, quiet=True).complete
    assert ids(bare) == [*IDS["sa_000000"], *IDS["sa_000001"]]
    report = verify(bare, workers=0, quiet=True)
    assert (report.findings, report.notes) == ([], [])
    assert report.table().endswith(f"Clean: {bare}")
    drop_source(bare, "sa_000001")
    assert ids(bare) == IDS["sa_000000"]


def test_index_leaves_out_unlisted_shards_with_images_of_the_dataset_and_damaged_ones(made, root):
    shutil.copy(root / "sa1b-000001-0000.tar", root / "sa1b-000007-0000.tar")
    shutil.copy(root / "sa1b-000001-0000.tar", root / "sa1b-000008-0000.tar")
    with (root / "sa1b-000008-0000.tar").open("r+b") as file:
        file.seek(2000)
        file.write(b"damage")
    summary = rebuild_root(root, workers=0, quiet=True)
    assert (summary.complete, summary.failed) == (True, {})
    for shard in ("sa1b-000007-0000.tar", "sa1b-000008-0000.tar"):
        assert any(shard in note for note in summary.notes)
    assert ids(root) == [*IDS["sa_000000"], *IDS["sa_000001"]]


@pytest.mark.parametrize(
    "name",
    ["sa1b-000000-0000.tar", "sa1b-000000-0001.tar", "sa1b-000000-0007.parquet", "sa1b-000000-0000.parquet"],
)
def test_a_file_of_a_user_with_the_name_of_a_shard_is_not_replaced(made, tmp_path, name):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("mine")
    summary = convert([made / "sa_000000.tar"], out)
    assert f"{out / name}: has the name" in summary.failed["sa_000000"]
    assert "move it away, or choose another folder" in summary.failed["sa_000000"]
    assert (out / name).read_text() == "mine"
    if "0007" not in name:  # the dataset has no shard of this name
        with pytest.raises(UsageError, match="move it away"):
            copy_dataset(made / "root", out, quiet=True)
    assert (out / name).read_text() == "mine"
    (out / name).unlink()
    assert convert([made / "sa_000000.tar"], out).done == ["sa_000000"]


def test_a_file_of_a_user_is_not_dropped(root):
    (root / "sa1b-000001-0007.tar").write_text("mine")
    (root / "samples-0123456789abcdef.bin").write_text("mine")
    with pytest.raises(UsageError, match=r"sa1b-000001-0007\.tar: has the name"):
        drop_source(root, "sa_000001")
    assert ids(root) == [*IDS["sa_000000"], *IDS["sa_000001"]]
    (root / "sa1b-000001-0007.tar").unlink()
    drop_source(root, "sa_000001")
    assert (root / "samples-0123456789abcdef.bin").read_text() == "mine"


def test_a_bucket_keeps_the_images(made, root, tmp_path):
    store = BucketStore(f"local://{root}", scratch=tmp_path / "scratch", options={"auto_mkdir": True})
    summary = convert([made / "cut" / "sa_000000.tar"], store, redo=("sa_000000",))
    assert "(3, 4)" in summary.failed["sa_000000"]
    for path in [*root.glob("*.parquet"), *root.glob("tasks/*"), root / "dataset.json"]:
        path.unlink()
    summary = convert([made / "cut" / "sa_000000.tar"], store)
    assert "(3, 4)" in summary.failed["sa_000000"]


def test_one_command_repairs_a_lost_dataset_json_and_task_file(root):
    (root / "dataset.json").unlink()
    (root / "tasks" / "sa_000001.json").unlink()
    (remedy,) = verify(root, workers=0, quiet=True).found.remedies()
    assert remedy.endswith(f"index {root}`")
    rebuild_root(root, workers=0, quiet=True)
    assert verify(root, workers=0, quiet=True).findings == []


@pytest.mark.parametrize("folder", ["tasks", "quarantine/sa_000000", "views", ".partial"])
def test_no_dataset_in_a_folder_of_another(made, root, folder):
    for work in (
        lambda out: convert([made / "sa_000000.tar"], out),
        lambda out: copy_dataset(made / "root", out, quiet=True),
    ):
        with pytest.raises(UsageError, match=r"is inside a folder of the dataset"):
            work(root / folder / "x")
