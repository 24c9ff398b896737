"""Archives of GNU tar: every option is accepted that stores plain data in the archive."""

import os
import shutil
import subprocess

import pytest

from tests.shards import tiny
from tests.shards.tiny import pair, pairs
from tests.sources.archives import check_exact, extract

TAR = shutil.which("tar")
IDS = range(100, 106)


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
        [r"--transform=s,^\./,images/,"],
        [r"--transform=s,^\./,very/long/folders/" + "x" * 200 + "/,"],
        ["--format=pax", r"--transform=s,^\./,very/long/folders/" + "x" * 200 + "/,"],
        ["--sort=name", "--owner=0", "--group=0", "--mtime=@0"],
        [r"--transform=s,jpg$,JPG,;s,json$,Json,"],
        *([f"--blocking-factor={factor}"] for factor in (1, 128, 1000, 2048, 9000, 16384)),
        *(["--gzip", f"--blocking-factor={factor}"] for factor in (1, 9000, 16384)),
    ],
    ids=" ".join,
)
def test_an_archive_of_any_format_and_record_size_holds_the_same_images(tree, tmp_path, arguments):
    task = tiny.ingest_tar(make(tree, *arguments), tmp_path / "root")
    assert (task.damage, task.counts["refused"]) == ([], {})
    check_exact(tmp_path / "root", IDS)


def test_an_archive_of_large_records_is_ingested_without_a_complaint(tree, tmp_path):
    task = tiny.ingest_tar(make(tree, "--blocking-factor=512"), tmp_path / "root")
    assert task.damage == []
    assert task.counts["refused"] == {}
    check_exact(tmp_path / "root", IDS)


def test_both_cases_of_one_name_are_a_duplicate(tree, tmp_path):
    (tree / "sa_100.JPG").write_bytes(b"other")
    path = make(tree, "--sort=name", names=["sa_100.jpg", "sa_100.JPG", "sa_100.json"])
    task = tiny.ingest_tar(path, tmp_path / "root")
    assert task.counts["refused"] == {"duplicate": 1}
    check_exact(tmp_path / "root", [100])


# Hard links


@pytest.mark.parametrize("arguments", [[], ["--gzip"], ["--format=pax"], ["--format=v7"]], ids=" ".join)
def test_identical_files_stored_as_hard_links_are_files(tree, tmp_path, arguments):
    for image_id in (102, 104):
        (tree / f"sa_{image_id}.jpg").unlink()
        os.link(tree / "sa_100.jpg", tree / f"sa_{image_id}.jpg")
    path = make(tree, *arguments)
    assert b"\0001" in subprocess.check_output(["gzip", "-cdf", path])  # a member of type 1
    task = tiny.ingest_tar(path, tmp_path / "root")
    assert (task.damage, task.counts["refused"]) == ([], {})
    jpegs = {image_id: jpeg for image_id, (jpeg, _) in tiny.read_back(tmp_path / "root").items()}
    assert jpegs == {i: pair(100 if i in (102, 104) else i)[0] for i in IDS}


def test_a_hard_link_to_a_member_with_a_long_name_is_a_file(tree, tmp_path):
    deep = tree / ("x" * 150)
    deep.mkdir()
    (tree / "sa_100.jpg").rename(deep / "sa_100.jpg")
    os.link(deep / "sa_100.jpg", tree / "sa_101.jpg.new")
    (tree / "sa_101.jpg.new").rename(tree / "sa_101.jpg")
    tiny.ingest_tar(make(tree, names=["x" * 150, "sa_101.jpg", "sa_101.json"]), tmp_path / "root")
    assert tiny.read_back(tmp_path / "root")[101][0] == pair(100)[0]


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


@pytest.mark.parametrize("arguments", [[], ["--format=pax"]], ids=" ".join)
def test_symbolic_links_and_sparse_files_are_refused_by_name(tree, tmp_path, arguments):
    (tree / "sa_500.jpg").symlink_to("sa_100.jpg")
    with (tree / "sa_501.jpg").open("wb") as sparse:
        sparse.truncate(1 << 20)
    tiny.ingest_tar(make(tree, "--sparse", *arguments), tmp_path / "root")
    check_exact(tmp_path / "root", IDS)
    lines = tiny.lines(tmp_path / "root", "sa_000020")
    found = sorted(
        (one["name"].rpartition("/")[2], one["reason"], one["message"].partition(";")[0]) for one in lines
    )
    assert found == [
        ("sa_500.jpg", "not_a_file", "symbolic link"),
        ("sa_501.jpg", "not_a_file", "sparse file"),
    ]


def test_absolute_and_parent_paths_are_refused(tree, tmp_path):
    names = [str(tree / "sa_100.jpg"), "../tree/sa_101.jpg", ".."]
    path = make(
        tree, "--absolute-names", "--exclude=*.tar", names=[*names[:2], "./sa_102.jpg", "./sa_102.json"]
    )
    task = tiny.ingest_tar(path, tmp_path / "root")
    assert task.counts["refused"] == {"unexpected_name": 2}
    check_exact(tmp_path / "root", [102])
