"""A source that is converted again never removes a stored image silently, and no file of a user."""

import re
import shutil
from pathlib import Path

import pytest

import sa1b
from sa1b.errors import UsageError
from tests.directories import bucket
from tests.kit import files, put, refused, run
from tests.shards.tiny_source import pairs, write_source

pytestmark = pytest.mark.usefixtures("short_commands")

IDS = {"sa_000000": [1, 2, 3, 4], "sa_000001": [11, 12, 13, 14]}
ALL = [*IDS["sa_000000"], *IDS["sa_000001"]]


def convert(paths, root, code=0, **flags):
    """`sa1b.reshard`, and the same by the command where a failure is to be read; the failures by source."""
    options = {"images_per_shard": 2, "workers": 1, **flags}
    result = sa1b.reshard(paths, root, quiet=True, **options)
    assert (result.exit_code, bool(result.failed)) == (code, code == 1)
    if code:
        words = [word for name, value in options.items() for word in typed(name.replace("_", "-"), value)]
        command = run("reshard", *paths, "--out", root, *words, "--json", code=code).json
        assert command["failed"] == result.failed
    return result.failed


def typed(flag, value):
    """The words of an option of the function."""
    if isinstance(value, bool):
        return [f"--{flag}"] * value
    return [word for one in (value if isinstance(value, list) else [value]) for word in (f"--{flag}", one)]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    for name, ids in IDS.items():
        write_source(folder / f"{name}.tar", pairs(ids))
    convert([folder / f"{name}.tar" for name in IDS], folder / "root")
    whole = pairs(IDS["sa_000000"])
    write_source(folder / "short" / "sa_000000.tar", {image_id: whole[image_id] for image_id in (1, 2, 3)})
    cut = write_source(folder / "cut" / "sa_000000.tar", whole)
    cut.write_bytes(cut.read_bytes()[:-600])  # image 4 ends it
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


@pytest.fixture(params=["folder", "bucket"])
def where(request):
    """The address of a folder."""
    return (lambda folder: bucket(folder, *IDS)) if request.param == "bucket" else lambda folder: folder


def ids(root):
    return [sample.image_id for sample in sa1b.open(root)]


LOST = {  # what is lost before, of which the images are known all the same
    "nothing": [],
    "its rows": ["tasks/sa_000000.samples"],
    "its rows and an index": ["tasks/sa_000000.samples", "sa1b-000000-0001.parquet"],
    "its task file": ["tasks/sa_000000.json"],
    "dataset.json": ["dataset.json"],
    "all but the shards": ["tasks/*", "dataset.json", "*.parquet", "*.bin"],
}


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("source", ["cut", "short"])
@pytest.mark.parametrize("lost", LOST)
def test_fewer_images_never_replace_more(made, root, where, source, lost, replace):
    for path in [path for pattern in LOST[lost] for path in root.glob(pattern)]:
        path.unlink()
    out, before = where(root), files(root)
    flags = {"redo": ["sa_000000"]} if (root / "tasks" / "sa_000000.json").exists() else {}
    if source == "short" and replace:  # as it is asked for
        convert([made / "short" / "sa_000000.tar"], out, replace=True, **flags)
        assert ids(out) == ([1, 2, 3] if lost == "all but the shards" else [1, 2, 3, *IDS["sa_000001"]])
        return
    why = convert([made / source / "sa_000000.tar"], out, code=1, replace=replace, **flags)["sa_000000"]
    assert f"{out}: has 1 image of sa_000000 that the source lacks now (4), and nothing was replaced" in why
    assert f"--out {out} --drop sa_000000`" in why
    assert ("download it again" if source == "cut" else "add --replace") in why
    assert (f"sa1b index {out}` adds the stored shards" in why) == (lost == "all but the shards")
    assert (
        files(root).items()
        >= {name: data for name, data in before.items() if name[:4] in ("sa1b", "task")}.items()
    )
    run("index", out)
    assert ids(out) == ALL
    run("reshard", "--out", out, "--drop", "sa_000000")  # the other way that the message names
    convert(
        [made / source / "sa_000000.tar"], out, code=3 if source == "cut" else 0
    ) if source == "short" else None
    assert ids(out) == ([1, 2, 3] if source == "short" else []) + IDS["sa_000001"]


def test_a_shard_that_is_gone_protects_nothing(made, root, where):
    put(root, "sa1b-000000-0001.tar", None)
    result = sa1b.reshard(
        [made / "cut" / "sa_000000.tar"],
        where(root),
        redo=["sa_000000"],
        images_per_shard=2,
        workers=1,
        quiet=True,
    )
    assert (result.exit_code, result.done) == (3, ["sa_000000"])
    assert ids(root) == [1, 2, 3, *IDS["sa_000001"]]


def test_shards_of_a_killed_run_are_replaced_by_the_whole_source(made, bare, where):
    put(bare, "sa1b-000001-0001.tar", None)
    convert([made / f"{name}.tar" for name in IDS], where(bare))
    assert files(bare) == files(made / "root")


def test_unlisted_shards_are_named_by_verify_kept_by_drop_and_added_by_index(made, bare, where):
    out = where(bare)
    convert([made / "sa_000000.tar"], out)
    report = run("verify", out, "--json").json
    (note,) = [note for note in report["notes"] if "sa1b-000001-0000.tar" in note]
    assert "4 images in 2 shards that no task file lists are not in the dataset" in note
    assert f"index {out}` adds them" in note
    assert report["unlisted_images"] == 4
    assert "Clean, but 4 stored images not in the dataset" in run("verify", out).out
    done = refused("reshard", "--out", out, "--drop", "sa_000001", names="--drop sa_000001: ")
    assert "4 images that the dataset lacks (11, 12" in done.err
    with pytest.raises(UsageError, match="4 images that the dataset lacks"):
        sa1b.reshard([], out, drop=["sa_000001"], quiet=True)
    run("index", out)
    assert ids(out) == ALL
    report = run("verify", out, "--json").json
    assert (report["findings"], report["notes"]) == ([], [])
    run("reshard", "--out", out, "--drop", "sa_000001")
    assert ids(out) == IDS["sa_000000"]


@pytest.mark.parametrize("name", ["0000.tar", "0001.tar", "0007.parquet", "0000.parquet"])
def test_a_file_of_a_user_with_the_name_of_a_shard_is_not_replaced(made, tmp_path, where, name):
    folder, name = tmp_path / "out", f"sa1b-000000-{name}"
    put(folder, name, b"mine")
    out = where(folder)
    why = convert([made / "sa_000000.tar"], out, code=1)["sa_000000"]
    assert re.search(
        f"{re.escape(f'{out}/{name}')}: has the name .* move it away, or choose another folder", why
    )
    if "0007" not in name:  # the dataset has no shard of this name
        refused("copy", made / "root", out, names="move it away")
    assert files(folder)[name] == b"mine"
    put(folder, name, None)
    convert([made / "sa_000000.tar"], out)


def test_a_file_of_a_user_is_not_dropped(root, where):
    put(root, "sa1b-000001-0007.tar", b"mine")
    put(root, "samples-0123456789abcdef.bin", b"mine")
    refused(
        "reshard", "--out", where(root), "--drop", "sa_000001", names="sa1b-000001-0007.tar: has the name"
    )
    assert ids(root) == ALL
    put(root, "sa1b-000001-0007.tar", None)
    run("reshard", "--out", where(root), "--drop", "sa_000001")
    assert files(root)["samples-0123456789abcdef.bin"] == b"mine"


@pytest.mark.parametrize("folder", ["tasks", "quarantine/sa_000000", "views", ".partial"])
def test_no_dataset_in_a_folder_of_another(made, root, folder):
    out, names = root / folder / "x", "is inside a folder of the dataset"
    refused("reshard", made / "sa_000000.tar", "--out", out, names=names)
    refused("copy", made / "root", out, names=names)
