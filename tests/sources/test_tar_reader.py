"""What the archive reader makes of every kind of bytes: members, or damage with offset, length and content."""

import gzip as gzip_file
import io
import random
import tarfile

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sa1b.sources.member import MAX_KEPT_BYTES, Damage, Member
from sa1b.sources.tar_header import BLOCK
from sa1b.sources.tar_reader import MAX_MEMBER_BYTES, members
from sa1b.sources.tar_stream import StoredStream
from tests.shards.tiny import checksummed, gzip_bytes, header, member, tar_bytes

FILES = [(f"./sa_{i}.jpg", random.Random(i).randbytes(300 + 400 * i)) for i in range(6)]
GOOD = tar_bytes(FILES)


@pytest.fixture
def read(tmp_path):
    """Bytes of an archive file -> all that the reader yields."""

    def read(data):
        path = tmp_path / "source.tar"
        path.write_bytes(data)
        stream = StoredStream(path)
        try:
            return list(members(stream))
        finally:
            stream.close()

    return read


def files(items):
    return [(item.name, item.data) for item in items if isinstance(item, Member) and item.kind == "file"]


def damage(items):
    return [item for item in items if isinstance(item, Damage)]


def reasons(items):
    return [item.reason for item in damage(items)]


def offset_of(number, data=GOOD):
    """Where the header of FILES[number] begins."""
    return data.index(FILES[number][0].encode() + b"\0")


def replaced(data, start, new):
    return data[:start] + new + data[start + len(new) :]


def without(*numbers):
    return [file for number, file in enumerate(FILES) if number not in numbers]


# Gzip


@pytest.mark.parametrize("form", [bytes, gzip_bytes], ids=["plain", "gzip"])
def test_a_good_archive_gives_its_members_in_order_and_no_damage(read, form):
    assert read(form(GOOD)) == [
        Member(name, "file", offset_of(number), data) for number, (name, data) in enumerate(FILES)
    ]


@pytest.mark.parametrize("cut", [0, 1, BLOCK, 700, 1500, len(GOOD) - 1, len(GOOD)])
def test_gzip_of_several_members_is_one_stream(read, cut):
    assert read(gzip_bytes(GOOD[:cut]) + gzip_bytes(GOOD[cut:])) == read(GOOD)


def test_gzip_members_may_meet_anywhere_in_what_is_read_at_a_time(read):
    # The file is read 64 KB at a time, its last 8 bytes alone: the next member's magic can be torn apart.
    for size in range(65536 - 24, 65536):
        first = gzip_file.compress(GOOD[:1000], mtime=0)
        padding = bytes(size - len(first))
        assert read(first + padding + gzip_bytes(GOOD[1000:])) == read(GOOD)


def test_zero_bytes_behind_a_gzip_stream_are_padding(read):
    assert read(gzip_bytes(GOOD) + bytes(1000)) == read(GOOD)


def test_other_bytes_behind_a_gzip_stream_are_damage(read):
    items = read(gzip_bytes(GOOD) + b"HTTP/1.1 200 OK")
    assert files(items) == FILES
    assert reasons(items) == ["gzip_trailing_bytes"]
    assert items[-1].offset == len(GOOD)


def test_a_truncated_gzip_stream_gives_what_came_before_the_cut(read):
    stored = gzip_bytes(GOOD)
    items = read(stored[: len(stored) // 2])
    got = files(items)
    assert 0 < len(got) < len(FILES)
    assert got == FILES[: len(got)]
    assert reasons(items)[-1] == "gzip_truncated"
    assert items[-1].offset == max(item.offset + item.length for item in damage(items))


@pytest.mark.parametrize("missing", [1, 4, 8])
def test_a_gzip_stream_without_its_checksum_loses_no_member(read, missing):
    items = read(gzip_bytes(GOOD)[:-missing])
    assert files(items) == FILES
    assert reasons(items) == ["gzip_truncated"]


@pytest.mark.parametrize("place", range(-8, 0))
def test_a_wrong_gzip_checksum_or_length_is_reported_and_loses_no_member(read, place):
    stored = bytearray(gzip_bytes(GOOD))
    stored[place] ^= 1
    items = read(bytes(stored))
    assert files(items) == FILES
    assert reasons(items) == ["gzip_checksum"]


def test_no_flipped_bit_of_a_gzip_stream_goes_unnoticed(read):
    stored = gzip_bytes(GOOD)
    draw = random.Random(0)
    for _ in range(300):
        flipped = bytearray(stored)
        flipped[draw.randrange(10, len(stored))] ^= 1 << draw.randrange(8)
        assert any(reason.startswith("gzip_") for reason in reasons(read(bytes(flipped))))


def test_a_corrupt_gzip_block_loses_at_most_what_was_read_at_a_time(read):
    content = [(f"./sa_{i}.jpg", random.Random(i).randbytes(20_000)) for i in range(20)]
    stored = bytearray(gzip_file.compress(tar_bytes(content), 0, mtime=0))
    block = 10  # blocks that are not compressed: one byte of flags, length, its complement, content
    while block < len(stored) // 2:
        block += 5 + int.from_bytes(stored[block + 1 : block + 3], "little")
    stored[block + 3] ^= 1
    items = read(bytes(stored))
    got = files(items)
    assert got == content[: len(got)]
    assert len(got) * 20_500 > block - 65536 - 20_500
    assert items[-1].reason == "gzip_corrupt"


def test_a_gzip_bomb_of_zeros_is_damage_without_content(read):
    (found,) = read(gzip_file.compress(bytes(50 << 20), 9, mtime=0))
    assert (found.reason, found.length, found.data) == ("zero_tail", 50 << 20, b"")


# Cuts


def test_an_archive_cut_between_members_is_reported(read):
    items = read(GOOD[: offset_of(4)])
    assert files(items) == FILES[:4]
    assert damage(items) == [Damage("no_end_marker", items[-1].message, offset_of(4))]


def test_an_archive_cut_in_a_header_is_reported_with_the_bytes(read):
    start = offset_of(4)
    items = read(GOOD[: start + 100])
    assert files(items) == FILES[:4]
    assert damage(items) == [
        Damage("header_truncated", items[-1].message, start, 100, GOOD[start : start + 100])
    ]


def test_an_archive_cut_inside_a_member_is_reported_with_the_bytes(read):
    start = offset_of(4)
    items = read(GOOD[: start + BLOCK + 700])
    assert files(items) == FILES[:4]
    (cut,) = damage(items)
    assert (cut.reason, cut.offset, cut.length) == ("member_truncated", start, BLOCK + 700)
    assert cut.data == GOOD[start : start + BLOCK + 700]


def test_an_archive_cut_in_its_last_padding_keeps_the_member(read):
    end = offset_of(5) + BLOCK + len(FILES[5][1])
    items = read(GOOD[: end + 1])
    assert files(items) == FILES
    assert reasons(items) == ["no_end_marker"]


def test_one_zero_block_ends_an_archive(read):
    assert read(GOOD[:-BLOCK]) == read(GOOD)


def test_an_archive_padded_to_a_record_of_any_usual_size_is_whole(read):
    assert read(GOOD + bytes(10240 - len(GOOD) % 10240)) == read(GOOD + bytes(60_000)) == read(GOOD)


def test_an_archive_that_ends_in_too_many_zeros_is_reported_as_incomplete(read):
    # What is left of a download into a file made at full size.
    start = offset_of(3)
    items = read(GOOD[:start] + bytes(1 << 20))
    assert files(items) == FILES[:3]
    assert [(d.reason, d.offset, d.length) for d in damage(items)] == [("zero_tail", start, 1 << 20)]
    assert "is the file complete?" in items[-1].message


def test_an_empty_file_is_an_archive_without_end(read):
    assert reasons(read(b"")) == ["no_end_marker"]


# Headers

FIELDS = {
    "name": (0, 100),
    "mode": (100, 108),
    "uid": (108, 116),
    "gid": (116, 124),
    "size": (124, 136),
    "mtime": (136, 148),
    "type": (156, 157),
    "link": (157, 257),
    "magic": (257, 265),
    "user": (265, 297),
    "group": (297, 329),
    "device": (329, 345),
    "prefix": (345, 500),
    "rest": (500, 512),
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_flipped_bit_in_a_header_costs_that_member_alone(read, field):
    start, stop = FIELDS[field]
    at = offset_of(2)
    end = offset_of(3)
    for place in {at + start, at + (start + stop) // 2, at + stop - 1}:
        for bit in range(8):
            items = read(replaced(GOOD, place, bytes([GOOD[place] ^ 1 << bit])))
            assert files(items) == without(2)
            (found,) = damage(items)
            assert (found.reason, found.offset, found.length) == ("bad_header", at, end - at)
            assert found.data[1:] != b""
            assert len(found.data) == end - at


def test_a_flipped_bit_in_a_checksum_costs_that_member_or_nothing(read):
    at = offset_of(2)
    for place in range(at + 148, at + 156):
        for bit in range(8):
            items = read(replaced(GOOD, place, bytes([GOOD[place] ^ 1 << bit])))
            assert (files(items), reasons(items)) in ((FILES, []), (without(2), ["bad_header"]))


def test_a_damaged_header_names_the_member_it_may_have_been_of(read):
    at = offset_of(2)
    (found,) = damage(read(replaced(GOOD, at + 130, b"?")))
    assert found.message == f"damaged header, perhaps of sa_2.jpg; {offset_of(3) - at:,} bytes skipped"


@pytest.mark.parametrize("number", [0, 2, 5])
def test_a_zeroed_header_costs_that_member_alone(read, number):
    at = offset_of(number)
    items = read(replaced(GOOD, at, bytes(BLOCK)))
    assert files(items) == without(number)
    assert [(d.reason, d.offset) for d in damage(items)] == [
        ("zero_blocks", at),
        ("bad_header", at + BLOCK),
    ]


def test_zero_blocks_between_members_are_reported_and_end_nothing(read):
    at = offset_of(3)
    items = read(GOOD[:at] + bytes(5 * BLOCK) + GOOD[at:])
    assert files(items) == FILES
    assert [(d.reason, d.offset, d.length) for d in damage(items)] == [("zero_blocks", at, 5 * BLOCK)]


def test_a_second_archive_behind_the_end_of_the_first_is_read_too(read):
    items = read(tar_bytes(FILES[:3]) + tar_bytes(FILES[3:]))
    assert files(items) == FILES
    assert reasons(items) == ["zero_blocks"]


def test_garbage_behind_the_end_is_reported(read):
    items = read(GOOD + b"garbage")
    assert files(items) == FILES
    assert items[-1].data.rstrip(b"\0") == b"garbage"


@pytest.mark.parametrize("size", [-1, -(1 << 40), MAX_MEMBER_BYTES + 1, 8**11, 1 << 62, 1 << 80])
def test_an_impossible_size_costs_that_member_alone_whatever_the_checksum(read, size):
    at = offset_of(2)
    field = b"\xff" if size < 0 else b"\x80"
    field += (size % (1 << 88)).to_bytes(11, "big")
    items = read(replaced(GOOD, at, checksummed(replaced(GOOD[at : at + BLOCK], 124, field))))
    assert files(items) == without(2)
    (found,) = damage(items)
    assert (found.reason, found.offset, found.length) == ("bad_size", at, offset_of(3) - at)
    assert f"{size:,}" in found.message


@pytest.mark.parametrize("more", [600, BLOCK, 1500, 4000, 100_000, MAX_MEMBER_BYTES - 1200])
def test_a_size_that_swallows_the_next_members_costs_that_member_alone(read, more):
    at = offset_of(2)
    size = len(FILES[2][1]) + more
    items = read(replaced(GOOD, at, header(FILES[2][0], size)))
    assert files(items) == without(2)
    (found,) = damage(items)
    assert (found.reason, found.offset, found.length) == ("bad_size", at, offset_of(3) - at)
    assert "the next member begins" in found.message
    assert found.data[BLOCK:].startswith(FILES[2][1])


def test_a_size_too_small_leaves_the_rest_as_damage_and_costs_no_other_member(read):
    at = offset_of(2)
    items = read(replaced(GOOD, at, header(FILES[2][0], 100)))
    assert files(items) == [*FILES[:2], (FILES[2][0], FILES[2][1][:100]), *FILES[3:]]
    assert reasons(items) == ["bad_header"]


@pytest.mark.parametrize("place", [3, 200, BLOCK + 5, BLOCK + 1000])
def test_a_lost_byte_costs_the_member_it_was_lost_from(read, place):
    at = offset_of(2) + place
    items = read(GOOD[:at] + GOOD[at + 1 :])
    assert files(items) == without(2)
    assert damage(items)[0].offset == offset_of(2)


@pytest.mark.parametrize("place", [3, 200, BLOCK + 5, BLOCK + 1000])
def test_an_added_byte_costs_the_member_it_was_added_to(read, place):
    at = offset_of(2) + place
    items = read(GOOD[:at] + b"x" + GOOD[at:])
    assert [file for file in files(items) if file[0] != FILES[2][0]] == without(2)
    assert damage(items)


def test_lost_bytes_that_draw_the_last_members_into_another_cost_that_one_alone(read):
    # The member with bytes lost reaches over all that follows, into the zeros at the end.
    big = ("./sa_9.jpg", random.Random(9).randbytes(9000))
    data = tar_bytes([*FILES[:2], big, *FILES[2:4]])
    at = data.index(big[1])
    items = read(data[: at + 1000] + data[at + 1000 + 8000 - 77 :])
    assert files(items) == FILES[:4]
    assert reasons(items)[0] == "bad_size"


def test_an_added_byte_in_front_of_everything_costs_nothing(read):
    items = read(b"x" + GOOD)
    assert files(items) == FILES
    assert [(d.reason, d.offset, d.length, d.data) for d in damage(items)] == [("bad_header", 0, 1, b"x")]


def test_a_long_damaged_stretch_is_kept_up_to_a_limit_and_measured_in_full(read):
    stretch = random.Random(0).randbytes(1 << 20) * 33
    items = read(tar_bytes(FILES[:2], end=b"") + stretch + tar_bytes(FILES[2:]))
    assert files(items) == FILES
    (found,) = damage(items)
    assert found.length == len(stretch)
    assert found.data == stretch[:MAX_KEPT_BYTES]


# Formats


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
        (b"5", "folder"),
        (b"6", "fifo"),
    ],
)
def test_what_is_no_file_has_no_content_whatever_size_it_claims(read, kind, what):
    items = read(
        header("sa_1.jpg", 4000, kind=kind, link="/etc/passwd") + member("sa_2.jpg", b"12345") + bytes(1024)
    )
    name = "sa_1.jpg/" if what == "folder" else "sa_1.jpg"
    assert items == [Member(name, what, 0, b""), Member("sa_2.jpg", "file", BLOCK, b"12345")]


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


# Every byte


def accounted(data, items):
    """Assert that items cover the archive: gaps hold only extended headers, or zeros at the end."""
    position = 0
    for item in items:
        position = skip_extended(data, position, item.offset)
        assert item.offset == position, (item, position)
        if isinstance(item, Member):
            length = BLOCK + len(item.data) + -len(item.data) % BLOCK
            if item.kind == "file":
                assert data[item.offset + BLOCK : item.offset + BLOCK + len(item.data)] == item.data
        else:
            length = item.length
            assert item.data == data[item.offset : item.offset + min(length, MAX_KEPT_BYTES)] or (
                item.reason == "zero_blocks" and not any(data[item.offset : item.offset + length])
            )
        position = min(position + length, len(data))
    rest = data[skip_extended(data, position, len(data)) :]
    assert not any(rest)


def skip_extended(data, position, stop):
    while position + BLOCK <= stop and data[position + 156 : position + 157] in (b"x", b"g", b"L", b"K"):
        size = int(data[position + 124 : position + 136].split(b"\0")[0] or b"0", 8)
        position += BLOCK + size + -size % BLOCK
    return min(position, len(data))


LONG = tar_bytes([("a/" * 60 + "sa_9.jpg", b"x" * 700)], end=b"") + GOOD


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_the_reader_never_raises_and_accounts_for_every_byte(read, data):
    archive = bytearray(LONG)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(archive) - 1)))
        length = data.draw(st.sampled_from([1, 7, BLOCK, 1300]))
        change = data.draw(st.sampled_from(["flip", "cut", "zero", "remove", "insert", "copy"]))
        if change == "flip" and archive:
            archive[at] ^= 1 << data.draw(st.integers(0, 7))
        elif change == "cut":
            del archive[at:]
        elif change == "zero":
            archive[at : at + length] = bytes(len(archive[at : at + length]))
        elif change == "remove":
            del archive[at : at + length]
        elif change == "insert":
            archive[at:at] = data.draw(st.binary(min_size=1, max_size=600))
        elif change == "copy":
            other = data.draw(st.integers(0, len(archive)))
            archive[at : at + length] = archive[other : other + length]
    assume(not archive.startswith(b"\x1f\x8b"))  # that is a gzip file, and a corrupt one
    accounted(bytes(archive), read(bytes(archive)))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from(["name", "size", "kind", "magic", "prefix"]), st.binary(max_size=12), max_size=5
    ),
    st.binary(max_size=1100),
)
def test_any_header_with_a_right_checksum_is_survived(read, changes, content):
    places = {"name": 0, "size": 124, "kind": 156, "magic": 257, "prefix": 345}
    block = bytearray(header("sa_1.jpg", len(content)))
    for field, change in changes.items():
        value = change[:1] if field == "kind" else change
        block[places[field] : places[field] + len(value)] = value
    items = read(member(*FILES[0]) + checksummed(bytes(block)) + content + tar_bytes(FILES[1:]))
    assert set(files(items)) >= {FILES[0], *FILES[2:]}
