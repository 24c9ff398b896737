"""The archive reader and damage: it yields members, and damage with offset, length and content."""

import random

import pytest

from tests.shards.tiny import checksummed, header, tar_bytes
from tests.sources.archives import FILES, GOOD, damage, files, offset_of, reasons, replaced, without
from tests.sources.items import BLOCK, MAX_KEPT_BYTES, MAX_MEMBER_BYTES, Damage


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
    # A partial download into a preallocated file.
    start = offset_of(3)
    items = read(GOOD[:start] + bytes(1 << 20))
    assert files(items) == FILES[:3]
    assert [(d.reason, d.offset, d.length) for d in damage(items)] == [("zero_tail", start, 1 << 20)]
    assert "is the file complete?" in items[-1].message


def test_more_zeros_than_the_largest_record_has_are_reported(read):
    # 16 MiB in all is a whole number of records of any size up to 8 MiB.
    items = read(GOOD + bytes((16 << 20) - len(GOOD)))
    assert files(items) == FILES
    assert reasons(items) == ["zero_tail"]


def test_zeros_up_to_a_record_that_nobody_uses_are_reported(read):
    items = read(GOOD + bytes(512 * 1237 - len(GOOD)))
    assert files(items) == FILES
    assert reasons(items) == ["zero_tail"]


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
    assert [(d.reason, d.offset) for d in damage(items)] == [("zero_blocks", at), ("bad_header", at + BLOCK)]


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
    # The size of the shortened member includes all later members, up to the zeros at the end.
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
