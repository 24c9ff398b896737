"""The stored bytes of a source: complete and damaged gzip streams, and changes during the read."""

import gzip as gzip_file
import random

import pytest

from tests.shards.tiny import gzip_bytes, tar_bytes
from tests.sources.archives import FILES, GOOD, damage, files, offset_of, reasons
from tests.sources.items import BLOCK, Member


@pytest.mark.parametrize("form", [bytes, gzip_bytes], ids=["plain", "gzip"])
def test_a_good_archive_gives_its_members_in_order_and_no_damage(read, form):
    assert read(form(GOOD)) == [
        Member(name, "file", offset_of(number), data) for number, (name, data) in enumerate(FILES)
    ]


@pytest.mark.parametrize("cut", [0, 1, BLOCK, 700, 1500, len(GOOD) - 1, len(GOOD)])
def test_gzip_of_several_members_is_one_stream(read, cut):
    assert read(gzip_bytes(GOOD[:cut]) + gzip_bytes(GOOD[cut:])) == read(GOOD)


def test_gzip_members_may_meet_anywhere_in_what_is_read_at_a_time(read):
    # The file is read 64 KB at a time, and its last 8 bytes separately, so the next member's magic can be
    # split.
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
