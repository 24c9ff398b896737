"""Hard links inside an archive: links that become files, and links that remain links."""

import gzip as gzip_file
import tracemalloc

import pytest

from sa1b.sources import tar_reader
from sa1b.sources.tar_reader import members, resolve_links
from sa1b.sources.tar_stream import Damage, Member, StoredStream
from tests.shards import tiny
from tests.shards.tiny import header, member, pair, pair_members
from tests.sources.archives import files, reasons

END = bytes(1024)


def link(name, target):
    return header(name, kind=b"1", link=target)


@pytest.fixture
def resolved(tmp_path):
    """Bytes of an archive -> all items with hard links resolved, and how often the archive was opened."""

    def read(data):
        path = tmp_path / "source.tar"
        path.write_bytes(data)
        opened = []

        def reopen():
            opened.append(StoredStream(path))
            return opened[-1]

        first = StoredStream(path)
        try:
            return list(resolve_links(members(first), reopen)), len(opened)
        finally:
            first.close()

    return read


def test_an_archive_without_links_is_read_once(resolved):
    assert resolved(member("a", b"1") + END) == ([Member("a", "file", 0, b"1")], 0)


@pytest.mark.parametrize("pack", [bytes, gzip_file.compress])
def test_a_link_gets_the_data_of_the_earlier_file_and_its_own_name_and_offset(resolved, pack):
    data = member("a", b"1") + link("b", "a") + member("c", b"3") + END
    assert resolved(pack(data)) == (
        [Member("a", "file", 0, b"1"), Member("c", "file", 1536, b"3"), Member("b", "file", 1024, b"1")],
        1,
    )


def test_a_link_to_a_link_gets_the_data_too(resolved):
    items, _ = resolved(member("a", b"1") + link("b", "a") + link("c", "b") + link("d", "c") + END)
    assert files(items) == [("a", b"1"), ("b", b"1"), ("c", b"1"), ("d", b"1")]


def test_a_link_to_its_own_name_adds_nothing(resolved):
    items, _ = resolved(member("a", b"1") + link("a", "a") + link("b", "a") + END)
    assert files(items) == [("a", b"1"), ("b", b"1")]
    assert len(items) == 2


@pytest.mark.parametrize(
    "data",
    [
        link("b", "a") + member("a", b"1"),  # a later file
        link("b", "missing"),
        link("b", "/etc/passwd"),
        link("b", "../a"),
        link("b", "c") + link("c", "b"),
        link("b", "b"),
        member("a", b"", kind=b"5") + link("b", "a/"),
        member("a", b"", kind=b"2", link="/etc/passwd") + link("b", "a"),
    ],
    ids=["later", "missing", "absolute", "parent", "loop", "itself", "folder", "symbolic link"],
)
def test_a_link_to_anything_but_an_earlier_file_stays_a_link(resolved, data):
    items, _ = resolved(data + END)
    left = [item for item in items if item.name in ("b", "c")]
    assert left
    assert all((item.kind, item.data) == ("hard link", b"") for item in left)


def test_a_link_whose_target_is_damaged_is_refused_with_the_reason(resolved, tmp_path):
    bad = bytearray(member("./sa_5.jpg", pair(5)[0]))
    bad[130] ^= 1
    good = b"".join(member(*one) for one in pair_members(6))
    data = good + bytes(bad) + link("./sa_7.jpg", "./sa_5.jpg") + member(*pair_members(7)[1]) + END
    items, _ = resolved(data)
    assert reasons(items) == ["bad_header"]
    (tmp_path / "sa_000020.tar").write_bytes(data)
    task = tiny.ingest_tar(tmp_path / "sa_000020.tar", tmp_path / "root")
    assert task.counts["refused"] == {"json_partner_lost": 1, "not_a_file": 1}
    messages = [line["message"] for line in tiny.lines(tmp_path / "root", "sa_000020")]
    assert "hard link to './sa_5.jpg', which is not an earlier file of the archive" in messages


def test_the_first_of_two_files_of_one_name_counts(resolved):
    items, _ = resolved(member("a", b"1") + member("a", b"2") + link("b", "a") + END)
    assert files(items)[-1] == ("b", b"1")


def test_damage_is_reported_once(resolved):
    items, _ = resolved(b"x" + member("a", b"1") + link("b", "a") + member("c", b"3"))
    assert reasons(items) == ["bad_header", "no_end_marker"]
    assert files(items)[-1] == ("b", b"1")


def test_more_links_than_the_limit_stay_links(resolved, monkeypatch):
    monkeypatch.setattr(tar_reader, "MAX_LINKS", 2)
    items, _ = resolved(member("a", b"1") + b"".join(link(f"b{i}", "a") for i in range(5)) + END)
    assert [item.kind for item in items].count("hard link") == 3
    assert len(files(items)) == 3


def test_memory_does_not_grow_with_what_lies_between_a_link_and_its_target(tmp_path):
    path = tmp_path / "source.tar"
    with path.open("wb") as out:
        for i in range(40):
            out.write(member(f"a{i}", bytes(4 << 20)))
        for i in range(40):
            out.write(link(f"b{i}", f"a{i}"))
        out.write(END)
    stream = StoredStream(path)
    tracemalloc.start()
    try:
        count = 0
        for item in resolve_links(members(stream), lambda: StoredStream(path)):
            assert not isinstance(item, Damage)
            count += len(item.data) == 4 << 20
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        stream.close()
    assert count == 80
    assert peak < 32 << 20  # of 160 MB
