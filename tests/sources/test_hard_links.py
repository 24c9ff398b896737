"""Hard links inside an archive: links that become files, and links that remain links."""

import tracemalloc

import pytest

from sa1b.sources.tar_reader import members, resolve_links
from sa1b.sources.tar_stream import Damage, StoredStream
from tests.shards import tiny
from tests.shards.tiny import gzip_bytes, header, member, pair, pair_members
from tests.sources.archives import damage, files, reasons
from tests.sources.items import Member

END = bytes(1024)


def link(name, target):
    return header(name, kind=b"1", link=target)


@pytest.mark.parametrize("pack", [bytes, gzip_bytes])
def test_a_link_gets_the_data_of_the_earlier_file_and_its_own_name_and_offset(read, pack):
    assert read(pack(member("a", b"1") + link("b", "a") + member("c", b"3") + END)) == [
        Member("a", "file", 0, b"1"),
        Member("b", "file", 1024, b"1"),
        Member("c", "file", 1536, b"3"),
    ]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (member("a", b"1") + link("b", "a") + link("c", "b") + link("d", "c"), "a1 b1 c1 d1"),
        (member("a", b"1") + link("a", "a") + link("b", "a"), "a1 b1"),  # the first adds nothing
        (member("a", b"1") + member("a", b"2") + link("b", "a"), "a1 a2 b1"),
    ],
    ids=["to a link", "to its own name", "to the first of two"],
)
def test_a_link_to_a_file_of_that_name_is_a_file(read, data, expected):
    items = read(data + END)
    assert " ".join(name + content.decode() for name, content in files(items)) == expected
    assert len(items) == len(files(items))


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
def test_a_link_to_anything_but_an_earlier_file_stays_a_link(read, data):
    left = [item for item in read(data + END) if item.name in ("b", "c")]
    assert left
    assert all((item.kind, item.data) == ("hard link", b"") for item in left)


def test_a_link_whose_target_is_damaged_is_refused_with_the_reason(tmp_path):
    bad = bytearray(member("./sa_5.jpg", pair(5)[0]))
    bad[130] ^= 1
    good = b"".join(member(*one) for one in pair_members(6))
    data = good + bytes(bad) + link("./sa_7.jpg", "./sa_5.jpg") + member(*pair_members(7)[1]) + END
    (tmp_path / "sa_000020.tar").write_bytes(data)
    task = tiny.ingest_tar(tmp_path / "sa_000020.tar", tmp_path / "root")
    assert [one["reason"] for one in task.damage] == ["bad_header"]
    assert task.counts["refused"] == {"json_partner_lost": 1, "not_a_file": 1}
    messages = [line["message"] for line in tiny.lines(tmp_path / "root", "sa_000020")]
    assert any("./sa_5.jpg" in message for message in messages)


def test_damage_is_reported_once(read):
    items = read(b"x" + member("a", b"1") + link("b", "a") + member("c", b"3"))
    assert reasons(items) == ["bad_header", "no_end_marker"]
    assert files(items) == [("a", b"1"), ("b", b"1"), ("c", b"3")]
    assert len(items) == len(files(items)) + len(damage(items))


def test_more_links_than_the_limit_stay_links(read):
    limit = 1 << 16
    *_, last, more = read(
        member("a", b"1") + (limit - 1) * link("a", "a") + link("b", "a") + link("c", "a") + END
    )
    assert (last.name, last.kind, more.name, more.kind) == ("b", "file", "c", "hard link")


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
