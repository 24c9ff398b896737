"""Checksums of a range: one crc32c of the range, or one crc32c of each of its parts."""

from collections.abc import Iterator
from dataclasses import dataclass

import google_crc32c


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a range and its crc32c.

    Attributes:
        start: first byte, counted from the start of the range.
        length: bytes.
        crc: crc32c of these bytes.
    """

    start: int
    length: int
    crc: int


Crc = int | tuple[Part, ...] | None


def parts_of(crc: Crc, length: int) -> tuple[Part, ...]:
    """The parts of a range of `length` bytes that are verified."""
    if crc is None:
        return ()
    return (Part(0, length, crc),) if isinstance(crc, int) else crc


def wrong_parts(data: bytes, parts: tuple[Part, ...]) -> Iterator[tuple[Part, int]]:
    """Parts whose crc32c is wrong, each with the value found."""
    for part in parts:
        # The checksum function accepts bytes only: a part is copied, the complete range is not.
        whole = part.length == len(data)
        found = google_crc32c.value(data if whole else data[part.start : part.start + part.length])
        if found != part.crc:
            yield part, int(found)
