"""Archives of GNU tar: every option is accepted that stores plain data in the archive."""

import os
import shutil
import subprocess

import pytest

from sa1b.sources.discovery import discover
from sa1b.sources.source import SourceReader
from sa1b.sources.tar_stream import Damage
from tests.shards import tiny
from tests.shards.tiny import pair, pairs
from tests.sources.archives import check_exact, extract

TAR = shutil.which("tar")
IDS = range(100, 106)
EXPECTED = sorted(pairs(IDS))


def is_gnu():
    return TAR is not None and "GNU tar" in subprocess.check_output([TAR, "--version"], text=True)


pytestmark = pytest.mark.skipif(not is_gnu(), reason="no GNU tar here")


@pytest.fixture
def tree(tmp_path):
    """A folder of extracted pairs."""
    folder = tmp_path / "tree"
    extract(pairs(IDS), images=folder)
    return folder


def make(folder, *arguments, names=(".",)):
    """An archive of a folder, made by GNU tar."""
    path = folder.parent / "sa_000020.tar"
    subprocess.run([TAR, *arguments, "-cf", path, *names], cwd=folder, check=True)
    return path


def read(path):
    """All items, and the content of files by name without folders."""
    reader = SourceReader(discover([path]).sources[0])
    try:
        items = list(reader.items())
    finally:
        reader.close()
    assert [item for item in items if isinstance(item, Damage)] == []
    return items, [(f"./{one.name.rsplit('/', 1)[-1]}", one.data) for one in items if one.kind == "file"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--format=ustar"],
        ["--format=v7"],
        ["--format=oldgnu"],
        ["--format=pax"],
        ["--format=pax", "--pax-option=globexthdr.name=g,comment=x"],
        ["--xattrs"],
        ["--gzip"],
        ["--label=SA-1B volume 20"],
        ["--transform=s,^,images/,"],
        ["--transform=s,^,very/long/folders/" + "x" * 200 + "/,"],
        ["--format=pax", "--transform=s,^,very/long/folders/" + "x" * 200 + "/,"],
        ["--sort=name", "--owner=0", "--group=0", "--mtime=@0"],
    ],
    ids=" ".join,
)
def test_an_archive_of_any_format_holds_the_same_files(tree, arguments):
    items, files = read(make(tree, *arguments))
    assert sorted(files) == EXPECTED
    assert {item.kind for item in items} <= {"file", "folder"}


@pytest.mark.parametrize("gzip", [[], ["--gzip"]], ids=["plain", "gzip"])
@pytest.mark.parametrize("factor", [1, 20, 128, 512, 1000, 2048, 9000, 16384])
def test_padding_to_a_record_of_any_usual_size_is_no_damage(tree, factor, gzip):
    path = make(tree, f"--blocking-factor={factor}", *gzip)
    assert gzip or path.stat().st_size % (512 * factor) == 0
    _, files = read(path)
    assert sorted(files) == EXPECTED


def test_an_archive_of_large_records_is_ingested_without_a_complaint(tree, tmp_path):
    task = tiny.ingest_tar(make(tree, "--blocking-factor=512"), tmp_path / "root")
    assert task.damage == []
    assert task.counts["refused"] == {}
    check_exact(tmp_path / "root", IDS)


def test_names_in_upper_case_are_pairs(tree, tmp_path):
    path = make(tree, r"--transform=s,jpg$,JPG,;s,json$,Json,")
    assert any(item.name.endswith(".JPG") for item in read(path)[0])
    tiny.ingest_tar(path, tmp_path / "root")
    check_exact(tmp_path / "root", IDS)


def test_both_cases_of_one_name_are_a_duplicate(tree, tmp_path):
    (tree / "sa_100.JPG").write_bytes(b"other")
    path = make(tree, "--sort=name", names=["sa_100.jpg", "sa_100.JPG", "sa_100.json"])
    task = tiny.ingest_tar(path, tmp_path / "root")
    assert task.counts["refused"] == {"duplicate": 1}
    check_exact(tmp_path / "root", [100])


# Hard links


@pytest.mark.parametrize("arguments", [[], ["--gzip"], ["--format=pax"], ["--format=v7"]], ids=" ".join)
def test_identical_files_stored_as_hard_links_are_files(tree, arguments):
    for image_id in (102, 104):
        (tree / f"sa_{image_id}.jpg").unlink()
        os.link(tree / "sa_100.jpg", tree / f"sa_{image_id}.jpg")
    path = make(tree, *arguments)
    assert b"\0001" in subprocess.check_output(["gzip", "-cdf", path])  # a member of type 1
    items, files = read(path)
    expected = dict(EXPECTED) | {f"./sa_{image_id}.jpg": pair(100)[0] for image_id in (102, 104)}
    assert dict(files) == expected
    assert len(files) == len(expected)
    assert {item.kind for item in items} <= {"file", "folder"}


def test_a_hard_link_to_a_member_with_a_long_name_is_a_file(tree):
    deep = tree / ("x" * 150)
    deep.mkdir()
    for name in ("sa_100.jpg", "sa_100.json"):
        (tree / name).rename(deep / name)
    os.link(deep / "sa_100.jpg", tree / "sa_900.jpg")
    _, files = read(make(tree, names=["x" * 150, "sa_900.jpg"]))
    assert dict(files)["./sa_900.jpg"] == pair(100)[0]


def test_a_file_that_is_named_twice_is_one_file(tree, tmp_path):
    task = tiny.ingest_tar(make(tree, names=[".", ".", "./sa_100.jpg"]), tmp_path / "root")
    assert task.counts["refused"] == {}
    check_exact(tmp_path / "root", IDS)


def test_hard_links_are_ingested(tree, tmp_path):
    (tree / "sa_101.jpg").rename(tree / "a_name_of_no_pair")
    os.link(tree / "a_name_of_no_pair", tree / "sa_101.jpg")
    task = tiny.ingest_tar(make(tree, "--sort=name", "--gzip"), tmp_path / "root")
    assert task.counts["refused"] == {"unexpected_name": 1}
    check_exact(tmp_path / "root", IDS)


def test_symbolic_links_and_sparse_files_are_refused_by_name(tree, tmp_path):
    (tree / "sa_500.jpg").symlink_to("sa_100.jpg")
    with (tree / "sa_501.jpg").open("wb") as sparse:
        sparse.truncate(1 << 20)
    kinds = {"./sa_500.jpg": "symbolic link", "./sa_501.jpg": "sparse file"}
    items, _ = read(make(tree, "--sparse"))
    assert {item.name: item.kind for item in items if item.kind not in ("file", "folder")} == kinds
    items, _ = read(make(tree, "--sparse", "--format=pax"))
    assert sorted(item.kind for item in items if item.kind not in ("file", "folder")) == sorted(
        kinds.values()
    )


def test_absolute_and_parent_paths_are_refused(tree, tmp_path):
    names = [str(tree / "sa_100.jpg"), "../tree/sa_101.jpg", ".."]
    path = make(
        tree, "--absolute-names", "--exclude=*.tar", names=[*names[:2], "./sa_102.jpg", "./sa_102.json"]
    )
    task = tiny.ingest_tar(path, tmp_path / "root")
    assert task.counts["refused"] == {"unexpected_name": 2}
    check_exact(tmp_path / "root", [102])
