"""Folders of pairs as sources: their layouts, and files that are not members."""

import errno
import os
import time
from pathlib import Path

import pytest

from sa1b.errors import SourceError
from sa1b.sources.discovery import discover
from sa1b.sources.source import SourceReader, digest_of_source
from sa1b.sources.tar_stream import MAX_MEMBER_BYTES
from tests.ingest import inside
from tests.shards import tiny
from tests.shards.tiny import pair_members, pairs
from tests.sources.archives import check_exact, extract

IDS = range(100, 106)


@pytest.mark.parametrize("name", ["sa_000020", "pictures"])
def test_a_flat_folder_of_pairs_is_a_source_of_its_name(tmp_path, name):
    extract(pairs(IDS), images=tmp_path / name)
    (source,) = discover([tmp_path / name]).sources
    assert (source.name, source.kind) == (name, "folder")
    assert source.size == sum(len(data) for _, data in pairs(IDS))
    tiny.ingest_tar(tmp_path / name, tmp_path / "root")
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
    extract(pairs(IDS[1:]), images=tmp_path / "c")
    a, b, c = (digest_of_source(discover([tmp_path / name]).sources[0]) for name in "abc")
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
    result = discover([folder])
    assert [source.name for source in result.sources] == ["sa_000020"]
    assert [one.path.name for one in result.not_taken] == ["notes.txt"]
    tiny.ingest_tar(folder, tmp_path / "root")
    check_exact(tmp_path / "root", IDS)


def test_endings_in_upper_case_are_pairs(tmp_path):
    extract(pairs(IDS), images=tmp_path / "sa_000020")
    for path in list((tmp_path / "sa_000020").iterdir()):
        path.rename(path.with_suffix(path.suffix.upper()))
    (source,) = discover([tmp_path / "sa_000020"]).sources
    assert source.size == sum(len(data) for _, data in pairs(IDS))
    tiny.ingest_tar(tmp_path / "sa_000020", tmp_path / "root")
    check_exact(tmp_path / "root", IDS)


def test_of_two_cases_of_one_name_the_usual_one_counts_and_the_other_is_refused(tmp_path):
    folder = tmp_path / "sa_000020"
    extract(pairs(IDS), images=folder)
    (folder / f"sa_{IDS[0]}.JPG").write_bytes(b"other")
    task = tiny.ingest_tar(folder, tmp_path / "root")
    check_exact(tmp_path / "root", IDS)
    assert task.counts["refused"] == {"duplicate": 1}


def test_patterns_leave_files_of_a_folder_out(tmp_path):
    folder = tmp_path / "sa_000020"
    extract(pairs(IDS), images=folder)
    (source,) = discover([folder], ignore=[f"sa_{IDS[0]}.*"]).sources
    reader = SourceReader(source)
    assert sorted({item.name for item in reader.items()}) == sorted(name[2:] for name, _ in pairs(IDS[1:]))


# Bad files


def read_all(source):
    reader = SourceReader(source)
    return {item.name: item for item in reader.items()}, reader


def test_a_file_of_six_gigabytes_costs_that_member_alone_and_is_not_read(tmp_path):
    folder = tmp_path / "sa_000020"
    extract([*pairs(IDS), pair_members(500)[1]], images=folder)
    with (folder / "sa_500.jpg").open("wb") as sparse:
        sparse.truncate(6 << 30)
    task = tiny.ingest_tar(folder, tmp_path / "root")
    check_exact(tmp_path / "root", IDS)
    assert task.counts["refused"] == {"member_oversized": 1, "json_unpaired": 1}
    (line,) = [line for line in tiny.lines(tmp_path / "root", "sa_000020") if line["name"] == "sa_500.jpg"]
    assert line["message"] == "6,442,450,944 bytes, more than the 33,554,432 that a member may have"
    (source,) = discover([folder]).sources
    assert source.size < 1 << 30
    assert len(digest_of_source(source)) == 64


def test_a_file_of_just_the_limit_is_read(tmp_path):
    extract(pairs(IDS[:1]), images=tmp_path)
    (tmp_path / "sa_500.jpg").write_bytes(bytes(MAX_MEMBER_BYTES))
    (tmp_path / "sa_501.jpg").write_bytes(bytes(MAX_MEMBER_BYTES + 1))
    items, _ = read_all(discover([tmp_path]).sources[0])
    assert [items[f"sa_{i}.jpg"].kind for i in (500, 501)] == ["file", "oversized file"]


def test_a_file_that_vanishes_before_it_is_read_costs_that_member_alone(tmp_path, monkeypatch):
    folder = tmp_path / "sa_000020"
    extract(pairs(IDS), images=folder)
    lost = folder / f"sa_{IDS[-1]}.jpg"
    once = []

    def vanish(parts):
        if not once:
            once.append(lost.unlink())

    reader = SourceReader(discover([folder]).sources[0], progress=vanish)
    items = {item.name: item for item in reader.items()}
    assert (items[lost.name].kind, items[lost.name].detail) == (
        "unreadable file",
        "cannot be read: No such file or directory",
    )
    assert [item.kind for name, item in items.items() if name != lost.name] == ["file"] * 11
    reader.check_unchanged()


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_file_that_cannot_be_read_costs_that_member_alone(tmp_path, monkeypatch, number):
    folder = tmp_path / "sa_000020"
    extract(pairs(IDS), images=folder)
    bad = folder / f"sa_{IDS[2]}.json"
    usual = Path.open

    def failing(path, *arguments, **keywords):
        if path == bad:
            raise OSError(number, os.strerror(number), str(path))
        return usual(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", failing)
    task = inside.ingest_tar(folder, tmp_path / "root")
    monkeypatch.undo()
    check_exact(tmp_path / "root", [i for i in IDS if i != IDS[2]])
    assert task.counts["refused"] == {"member_unreadable": 1, "jpg_unpaired": 1}


def test_a_folder_below_that_cannot_be_listed_is_refused_not_left_out(tmp_path, monkeypatch):
    folder = tmp_path / "sa_000020"
    extract(pairs(IDS[:3]), images=folder / "images", annotations=folder / "annotations")
    extract(pairs(IDS[3:]), images=folder / "images" / "b", annotations=folder / "annotations")
    usual = os.scandir

    def failing(path):
        if path == folder / "images" / "b":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return usual(path)

    monkeypatch.setattr(os, "scandir", failing)
    task = inside.ingest_tar(folder, tmp_path / "root")
    monkeypatch.undo()
    check_exact(tmp_path / "root", IDS[:3])
    assert task.counts["refused"] == {"member_unreadable": 1, "json_unpaired": 3}


# Changes while it is read


@pytest.mark.parametrize("change", ["overwritten", "replaced", "added", "removed"])
def test_a_folder_that_changes_while_it_is_read_is_noticed_though_times_are_restored(tmp_path, change):
    folder = tmp_path / "sa_000020"
    extract(pairs(IDS), images=folder)
    first = folder / f"sa_{IDS[0]}.jpg"
    time.sleep(0.02)  # one tick of the clock of the file system
    reader = SourceReader(discover([folder]).sources[0])
    items = reader.items()
    next(items)
    stat = first.stat()
    match change:
        case "overwritten":
            first.write_bytes(bytes(stat.st_size))
        case "replaced":
            (folder / "new").write_bytes(bytes(stat.st_size))
            (folder / "new").rename(first)
        case "added":
            (folder / "sa_500.jpg").write_bytes(b"")
        case _:
            first.unlink()
    if first.exists():
        os.utime(first, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    list(items)
    with pytest.raises(SourceError, match=r"sa_000020: files changed while they were read; run the same"):
        reader.check_unchanged()


def test_a_folder_that_is_read_by_others_meanwhile_is_unchanged(tmp_path):
    extract(pairs(IDS), images=tmp_path)
    reader = SourceReader(discover([tmp_path]).sources[0])
    for item in reader.items():
        (tmp_path / item.name).read_bytes()
    reader.check_unchanged()
