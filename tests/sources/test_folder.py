"""Folders of pairs as sources: their layouts, and files that are not members."""

import errno
import os

import pytest

import sa1b
from tests.kit import fail, run_when
from tests.shards import tiny
from tests.shards.tiny import pair_members, pairs
from tests.sources.archives import check_exact, extract
from tests.sources.meanwhile import reshard_while

IDS = range(100, 106)
MAX_MEMBER_BYTES = 32 << 20


@pytest.mark.parametrize("name", ["sa_000020", "pictures"])
def test_a_flat_folder_of_pairs_is_a_source_of_its_name(tmp_path, name):
    extract(pairs(IDS), images=tmp_path / name)
    source = tiny.ingest_tar(tmp_path / name, tmp_path / "root").source
    assert (source["name"], source["kind"]) == (name, "folder")
    assert source["size"] == sum(len(data) for _, data in pairs(IDS))
    check_exact(tmp_path / "root", IDS)


def test_images_beside_annotations_are_one_source(tmp_path):
    folder = tmp_path / "sa_000020"
    extract(pairs(IDS), images=folder / "images", annotations=folder / "annotations")
    tiny.ingest_tar(folder, tmp_path / "root")
    check_exact(tmp_path / "root", IDS)


def test_half_a_pair_in_a_folder_is_refused_and_costs_no_other(tmp_path):
    extract([*pairs(IDS), pair_members(500)[0]], images=tmp_path / "sa_000020")
    task = tiny.ingest_tar(tmp_path / "sa_000020", tmp_path / "root")
    check_exact(tmp_path / "root", IDS)
    assert task.counts["refused"] == {"jpg_unpaired": 1}


@pytest.mark.parametrize("kind", ["link to nothing", "fifo", "folder"])
def test_what_is_no_file_in_a_folder_is_not_read_and_costs_no_other(tmp_path, kind):
    folder = tmp_path / "sa_000020"
    extract([*pairs(IDS), pair_members(500)[1]], images=folder)
    odd = folder / "sa_500.jpg"
    match kind:
        case "fifo":
            os.mkfifo(odd)
        case "folder":
            odd.mkdir()
        case _:
            odd.symlink_to(tmp_path / "gone")
    task = tiny.ingest_tar(folder, tmp_path / "root")
    check_exact(tmp_path / "root", IDS)
    assert task.counts["refused"]["json_unpaired"] == 1


def test_links_to_files_of_the_folder_are_read_and_others_refused(tmp_path):
    """A link may name any file of the machine; a folder that is a link is the user's choice."""
    linked = tmp_path / "sa_000020"
    extract(pairs(IDS), images=linked / ".real")
    extract(pairs([999]), images=tmp_path / "elsewhere")
    for path in [*(linked / ".real").iterdir(), *(tmp_path / "elsewhere").iterdir()]:
        (linked / path.name).symlink_to(path)
    task = tiny.ingest_tar(linked, tmp_path / "root")
    check_exact(tmp_path / "root", IDS)
    assert list(task.counts["refused"]) == ["not_a_file"]


def test_the_digest_of_a_folder_depends_on_names_and_contents_only(tmp_path):
    extract(pairs(IDS), images=tmp_path / "a")
    extract(pairs(IDS, seed=1), images=tmp_path / "b" / "images", annotations=tmp_path / "b" / "annotations")
    extract([(name.replace("105", "106"), data) for name, data in pairs(IDS)], images=tmp_path / "c")
    a, b, c = (tiny.ingest_tar(tmp_path / name, tmp_path / f"of_{name}").source["sha256"] for name in "abc")
    assert a == b != c


# Layouts


def test_pairs_beside_images_and_annotations_are_part_of_the_source(tmp_path):
    folder = tmp_path / "sa_000020"
    extract(pairs(IDS[:4]), images=folder / "images", annotations=folder / "annotations")
    extract(pairs(IDS[4:]), images=folder)
    tiny.ingest_tar(folder, tmp_path / "root")
    check_exact(tmp_path / "root", IDS)


def test_images_and_annotations_are_read_at_any_depth(tmp_path):
    folder = tmp_path / "sa_000020"
    extract(pairs(IDS[:3]), images=folder / "images" / "a", annotations=folder / "annotations" / "x" / "y")
    extract(pairs(IDS[3:]), images=folder / "images" / "b", annotations=folder / "annotations")
    (folder / "images" / "b" / "loop").symlink_to(folder / "images")
    (folder / "images" / "notes.txt").write_text("notes")
    made = sa1b.reshard(folder, tmp_path / "root", workers=1, quiet=True)
    assert made.done == ["sa_000020"]
    assert [one["path"] for one in made.document["not_taken"]] == [str(folder / "images" / "notes.txt")]
    check_exact(tmp_path / "root", IDS)


def test_endings_in_upper_case_are_pairs(tmp_path):
    extract(pairs(IDS), images=tmp_path / "sa_000020")
    for path in list((tmp_path / "sa_000020").iterdir()):
        path.rename(path.with_suffix(path.suffix.upper()))
    task = tiny.ingest_tar(tmp_path / "sa_000020", tmp_path / "root")
    assert task.source["size"] == sum(len(data) for _, data in pairs(IDS))
    check_exact(tmp_path / "root", IDS)


def test_of_two_cases_of_one_name_the_usual_one_counts_and_the_other_is_refused(tmp_path):
    folder = tmp_path / "sa_000020"
    extract(pairs(IDS), images=folder)
    (folder / f"sa_{IDS[0]}.JPG").write_bytes(b"other")
    task = tiny.ingest_tar(folder, tmp_path / "root")
    check_exact(tmp_path / "root", IDS)
    assert task.counts["refused"] == {"duplicate": 1}


def test_patterns_leave_files_of_a_folder_out(tmp_path):
    extract(pairs(IDS), images=tmp_path / "sa_000020")
    task = tiny.ingest_tar(tmp_path / "sa_000020", tmp_path / "root", ignore=[f"sa_{IDS[0]}.*"])
    assert task.counts["refused"] == {}
    check_exact(tmp_path / "root", IDS[1:])


# Bad files


def test_a_file_above_the_limit_costs_that_member_alone_and_is_not_read(tmp_path):
    folder = tmp_path / "sa_000020"
    extract([*pairs(IDS), pair_members(500)[1]], images=folder)
    sizes = {"sa_500.jpg": 6 << 30, "sa_501.jpg": MAX_MEMBER_BYTES + 1, "sa_502.jpg": MAX_MEMBER_BYTES}
    for name, size in sizes.items():
        with (folder / name).open("wb") as sparse:
            sparse.truncate(size)
    task = tiny.ingest_tar(folder, tmp_path / "root")
    check_exact(tmp_path / "root", IDS)
    assert task.counts["refused"] == {"member_oversized": 2, "json_unpaired": 1, "jpg_unpaired": 1}
    assert task.source["size"] < 1 << 30
    lines = {one["name"]: one for one in tiny.lines(tmp_path / "root", "sa_000020")}
    assert "6,442,450,944 bytes" in lines["sa_500.jpg"]["message"]
    assert [lines[name]["bytes"] for name in sizes] == [0, 0, MAX_MEMBER_BYTES]


@pytest.mark.parametrize(
    ("lost", "number"),
    [("sa_105.json", None), ("sa_102.json", errno.EIO), ("sa_102.json", errno.EACCES)],
    ids=["removed", "EIO", "EACCES"],
)
def test_a_file_that_cannot_be_read_costs_that_member_alone(tmp_path, lost, number):
    folder = tmp_path / "sa_000020"
    extract(pairs(IDS), images=folder)
    words = (folder, "--out", tmp_path / "root")
    if number is None:  # after the files were listed
        done = reshard_while("removed", folder / lost, "read", "*/sa_100.jpg", *words)
    else:
        done = run_when(["reshard", *words], "read", folder / lost, fail, number)
    assert done.code == 3, done.err
    check_exact(tmp_path / "root", [i for i in IDS if str(i) not in lost])
    reasons = {one["name"]: one["reason"] for one in tiny.lines(tmp_path / "root", "sa_000020")}
    assert reasons == {lost: "member_unreadable", lost.replace("json", "jpg"): "jpg_unpaired"}


def test_a_folder_below_that_cannot_be_listed_is_refused_not_left_out(tmp_path):
    folder = tmp_path / "sa_000020"
    extract(pairs(IDS[:3]), images=folder / "images", annotations=folder / "annotations")
    extract(pairs(IDS[3:]), images=folder / "images" / "b", annotations=folder / "annotations")
    below = folder / "images" / "b"
    words = ["reshard", folder, "--out", tmp_path / "root"]
    done = run_when(words, "os.scandir", below, fail, errno.EACCES)
    assert done.code == 3, done.err
    check_exact(tmp_path / "root", IDS[:3])
    reasons = [one["reason"] for one in tiny.lines(tmp_path / "root", "sa_000020")]
    assert sorted(reasons) == ["json_unpaired"] * 3 + ["member_unreadable"]
