"""The formats of tar, and members that are not plain files."""

import io
import tarfile

import pytest

from tests.shards.tiny import checksummed, header, member
from tests.sources.archives import FILES, GOOD, damage, files, reasons, replaced, without
from tests.sources.items import BLOCK, Member


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_up_to_255_characters_come_back_in_every_format(read, form):
    name = "/".join(["folder" * 8] * 4) + "/sa_1.jpg"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for each in (name, "sa_2.jpg"):
            info = tarfile.TarInfo(each)
            info.size = 5
            tar.addfile(info, io.BytesIO(b"12345"))
    items = read(buffer.getvalue())
    assert files(items) == [(name, b"12345"), ("sa_2.jpg", b"12345")]
    assert damage(items) == []


def test_a_v7_header_without_magic_is_a_member(read):
    block = header("sa_1.jpg", 5)
    v7 = checksummed(block[:257] + bytes(255))
    assert files(read(v7 + b"12345" + bytes(507) + bytes(1024))) == [("sa_1.jpg", b"12345")]


def test_a_size_in_base_256_is_read(read):
    block = replaced(header("sa_1.jpg"), 124, b"\x80" + (5).to_bytes(11, "big"))
    assert files(read(checksummed(block) + b"12345" + bytes(507 + 1024))) == [("sa_1.jpg", b"12345")]


def test_a_checksum_of_signed_bytes_is_accepted(read):
    block = header("sa_1-é.jpg")
    signed = sum(byte - 256 * (byte > 127) for byte in block) - sum(block[148:156]) + 8 * 0x20
    assert [m.name for m in read(replaced(block, 148, b"%06o\0 " % signed) + bytes(1024))] == ["sa_1-é.jpg"]


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (b"1", "hard link"),
        (b"2", "symbolic link"),
        (b"3", "character device"),
        (b"4", "block device"),
        (b"6", "fifo"),
    ],
)
def test_what_is_no_file_has_no_content_whatever_size_it_claims(read, kind, what):
    items = read(
        header("sa_1.jpg", 4000, kind=kind, link="/etc/passwd") + member("sa_2.jpg", b"12345") + bytes(1024)
    )
    target = "/etc/passwd" if what == "hard link" else ""
    assert items == [Member("sa_1.jpg", what, 0, b"", target), Member("sa_2.jpg", "file", BLOCK, b"12345")]


def test_a_folder_has_no_content_whatever_size_it_claims(read):
    items = read(header("sa_1.jpg", 4000, kind=b"5") + member("sa_2.jpg", b"12345") + bytes(1024))
    assert items == [Member("sa_2.jpg", "file", BLOCK, b"12345")]


def test_a_member_of_unknown_type_comes_with_its_content(read):
    items = read(member("a", b"12345", kind=b"Q") + bytes(1024))
    assert items == [Member("a", "member of type b'Q'", 0, b"12345")]


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../../sa_1.jpg", "sa_\n1.jpg", "sa_\x1b[2J.jpg", "sa_é.jpg", "", "a" * 99]
)
def test_names_are_given_as_stored(read, name):
    assert files(read(member(name, b"12345") + bytes(1024))) == [(name, b"12345")]


def test_a_plain_archive_is_one_though_its_first_name_begins_like_a_gzip_file(read):
    block = checksummed(b"\x1f\x8b".ljust(100, b"\0") + header("x")[100:])
    assert files(read(block + GOOD))[1:] == FILES


def test_a_name_that_is_not_utf8_is_escaped(read):
    block = checksummed(b"sa_\xff\xfe.jpg".ljust(100, b"\0") + header("x")[100:])
    assert files(read(block + bytes(1024))) == [("sa_\\xff\\xfe.jpg", b"")]


def test_a_name_ends_at_its_first_zero_byte(read):
    block = checksummed(b"sa_1.jpg\0.json".ljust(100, b"\0") + header("x")[100:])
    assert files(read(block + bytes(1024))) == [("sa_1.jpg", b"")]


def pax(*records):
    return member("PaxHeaders/1", b"".join(records), kind=b"x")


def record(key, value):
    body = b" %s=%s\n" % (key, value)
    length = len(body) + 1
    while len(b"%d" % length) + len(body) != length:
        length += 1
    return b"%d" % length + body


def test_a_pax_header_gives_path_and_size_of_the_next_member_only(read):
    block = header("short", 0)
    data = (
        pax(record(b"path", b"sa_1.jpg"), record(b"size", b"5"), record(b"mtime", b"1.5"))
        + block
        + b"12345"
        + bytes(507)
        + member("sa_2.jpg", b"1234567")
    )
    assert files(read(data + bytes(1024))) == [("sa_1.jpg", b"12345"), ("sa_2.jpg", b"1234567")]


def test_a_pax_size_says_nothing_of_the_long_name_header_between(read):
    data = (
        pax(record(b"size", b"5")) + member("././@LongLink", b"sa_1.jpg\0", kind=b"L") + member("x", b"12345")
    )
    assert files(read(data + bytes(1024))) == [("sa_1.jpg", b"12345")]


def test_a_global_pax_header_and_a_long_link_change_nothing(read):
    data = member("g", record(b"path", b"other"), kind=b"g") + member("K", b"link\0", kind=b"K")
    assert files(read(data + member("sa_1.jpg", b"12345") + bytes(1024))) == [("sa_1.jpg", b"12345")]


@pytest.mark.parametrize(
    "content",
    [
        b"garbage",
        b"0 path=x\n",
        b"-5 path=x\n",
        b"999999999999 path=x\n",
        b"000001000" + b"0" * 5000,
        b"1" * 5000,
        b"8 path=x\n",
        b"9 pathxx\n",
        b"9 path=x" + b"y",
        record(b"size", b"-1"),
        record(b"size", b"1e3"),
        record(b"size", "٣".encode()),
        record(b"size", b"9" * 5000),
        record(b"size", b""),
    ],
    ids=lambda content: repr(content[:24]),
)
def test_a_malformed_pax_header_is_damage_and_costs_no_member(read, content):
    items = read(pax(content) + member("sa_1.jpg", b"12345") + bytes(1024))
    assert files(items) == [("sa_1.jpg", b"12345")]
    assert [(d.reason, d.offset) for d in damage(items)] == [("bad_extended_header", 0)]


def test_a_pax_size_that_lies_is_a_size_that_lies(read):
    items = read(pax(record(b"size", b"%d" % (1 << 62))) + GOOD)
    assert files(items) == without(0)
    assert reasons(items) == ["bad_size"]


def test_a_huge_extended_header_is_refused(read):
    items = read(member("x", bytes(2 << 20), kind=b"L") + GOOD)
    assert files(items) == FILES
    assert reasons(items) == ["bad_size"]


@pytest.mark.parametrize("form", ["zeroed", "flipped"])
def test_a_pax_header_whose_member_is_damaged_is_not_applied_to_the_next(read, form):
    block = header("x", 5) if form == "flipped" else bytes(BLOCK)
    block = replaced(block, 0, b"y") if form == "flipped" else block
    data = pax(record(b"path", b"sa_1.jpg"), record(b"size", b"5")) + block
    items = read(data + member("sa_2.jpg", b"1234567") + bytes(1024))
    assert files(items) == [("sa_2.jpg", b"1234567")]
    assert len(damage(items)) == 1
