"""Damage models of the second campaign: archives that were copied, joined, mixed and cut wrongly.

Every byte of a damaged tar carries its origin: its position in the archives it was made from, or -1. So what
happened to each original member is known, whatever was done.
"""

import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.shards import tiny

BLOCK = 512
ARCHIVE = 1 << 40  # origin of a byte: archive * ARCHIVE + offset
SIZES = ((48, 64), (48, 64), (48, 64), (40, 56), (64, 48))
Random = np.random.Generator


@dataclass(frozen=True, slots=True)
class Original:
    """A member of an undamaged archive: its bytes from the first header to the end of its content, by origin."""

    image_id: int
    ending: str
    start: int
    stop: int
    stored: bytes  # headers and content
    data: bytes


@dataclass(slots=True)
class Bytes:
    """Bytes and the origin of each."""

    data: npt.NDArray[np.uint8]
    origin: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, part: slice) -> "Bytes":
        return Bytes(self.data[part], self.origin[part])

    def copy(self) -> "Bytes":
        return Bytes(self.data.copy(), self.origin.copy())


def join(*parts: Bytes) -> Bytes:
    return Bytes(np.concatenate([p.data for p in parts]), np.concatenate([p.origin for p in parts]))


def foreign(data: bytes) -> Bytes:
    """Bytes from nowhere."""
    return Bytes(np.frombuffer(data, np.uint8).copy(), np.full(len(data), -1, np.int64))


@dataclass(slots=True)
class Archive:
    """An undamaged archive: `end` is where its end marker begins, `headers` where member headers do."""

    content: Bytes
    members: list[Original]
    end: int
    headers: list[int] = field(default_factory=list)
    extended: list[tuple[int, int]] = field(default_factory=list)  # content of pax and long-name headers


def member_bytes(rng: Random, name: str, data: bytes, style: str) -> bytes:
    """All headers of one member."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    if style == "gnu" or rng.random() < 0.4:
        return info.tobuf(tarfile.GNU_FORMAT)
    if style == "long":
        info.name = f"./{'folder' * 20}/{name.removeprefix('./')}"
        return info.tobuf(tarfile.GNU_FORMAT)
    info.pax_headers = {"comment": "x" * int(rng.integers(1, 900)), "mtime": f"{rng.random() * 1e9:.6f}"}
    if rng.random() < 0.5:
        info.pax_headers["path"] = name
    if rng.random() < 0.3:
        info.pax_headers["size"] = str(len(data))
    return info.tobuf(tarfile.PAX_FORMAT)


def build(rng: Random, number: int, ids: range, style: str) -> Archive:
    """A tar of the pairs of `ids` in random order."""
    names = [(i, ending) for i in ids for ending in ("jpg", "json")]
    rng.shuffle(names)
    pieces: list[bytes] = []
    archive = Archive(foreign(b""), [], 0)
    position = 0
    for image_id, ending in ((int(i), str(e)) for i, e in names):
        jpeg, text = tiny.pair(image_id, 0, SIZES[image_id % len(SIZES)])
        data = jpeg if ending == "jpg" else text
        headers = member_bytes(rng, f"./sa_{image_id}.{ending}", data, style)
        begin = number * ARCHIVE + position
        stored = headers + data
        archive.members.append(Original(image_id, ending, begin, begin + len(stored), stored, data))
        archive.headers.append(position + len(headers) - BLOCK)
        if len(headers) > BLOCK:
            archive.extended.append((position + BLOCK, position + len(headers) - BLOCK))
        piece = stored + bytes(-len(data) % BLOCK)
        pieces.append(piece)
        position += len(piece)
    archive.end = position
    data = b"".join(pieces) + bytes(int(rng.choice([1024, 10240])))
    whole = foreign(data)
    whole.origin[:] = number * ARCHIVE + np.arange(len(data))
    archive.content = whole
    return archive


# Damage. Each takes the bytes (of the tar, or of the compressed file) and gives other ones.


def cut_points(rng: Random, size: int, count: int) -> list[int]:
    """Sorted positions, most of them at blocks."""
    step = BLOCK if rng.random() < 0.8 and size > BLOCK * count else 1
    return sorted(int(x) * step for x in rng.integers(0, size // step + 1, count))


def block_duplication(rng: Random, stored: Bytes) -> Bytes:
    start = int(rng.integers(0, len(stored) // BLOCK)) * BLOCK
    run = stored[start : start + BLOCK * int(rng.integers(1, 24))]
    at = start + len(run) if rng.random() < 0.5 else cut_points(rng, len(stored), 1)[0]
    return join(stored[:at], run, stored[at:])


def block_swap(rng: Random, stored: Bytes) -> Bytes:
    size = BLOCK * int(rng.integers(1, 24))
    if len(stored) < 2 * size + BLOCK:
        size = BLOCK
    a, b = cut_points(rng, len(stored) - size, 2)
    b = min(max(b, a + size), len(stored) - size)
    if b < a + size:
        return stored
    return join(
        stored[:a], stored[b : b + size], stored[a + size : b], stored[a : a + size], stored[b + size :]
    )


def bit_flips(rng: Random, stored: Bytes) -> Bytes:
    rate = 10 ** rng.uniform(-6, -3)
    found = stored.copy()
    bits = rng.integers(0, 8 * len(found), rng.binomial(8 * len(found), rate))
    np.bitwise_xor.at(found.data, bits // 8, (1 << (bits % 8)).astype(np.uint8))
    return found


def cut_and_padded(rng: Random, stored: Bytes) -> Bytes:
    at = cut_points(rng, len(stored), 1)[0]
    padding = int(rng.choice([0, 100, 512, 1024, 5000, 10240, 80000]))
    return join(stored[:at], foreign(bytes(padding)))


def appended_garbage(rng: Random, stored: Bytes) -> Bytes:
    garbage = rng.bytes(int(rng.integers(1, 20000)))
    kind = rng.integers(0, 4)
    if kind == 1:
        garbage = b"<html><body>502 Bad Gateway</body></html>\n" * int(rng.integers(1, 60))
    elif kind == 2:
        garbage = bytes(int(rng.integers(1, 4)) * BLOCK) + garbage
    elif kind == 3:
        return join(stored, stored[cut_points(rng, len(stored), 1)[0] :])  # a download resumed too early
    return join(stored, foreign(garbage))


def zeroed(rng: Random, stored: Bytes) -> Bytes:
    """A hole, as a lost write leaves."""
    found = stored.copy()
    a, b = cut_points(rng, len(stored), 2)
    b = min(b, a + 40 * BLOCK)
    found.data[a:b] = 0
    return found


ANYWHERE: list[Callable[[Random, Bytes], Bytes]] = [
    block_duplication,
    block_swap,
    bit_flips,
    bit_flips,
    cut_and_padded,
    appended_garbage,
    zeroed,
]


def interleaved(rng: Random, one: Bytes, two: Bytes) -> Bytes:
    """Two writers on one file."""
    chunk = BLOCK * int(rng.choice([1, 2, 5, 20, 64, 200]))
    parts: list[Bytes] = []
    for at in range(0, max(len(one), len(two)), chunk):
        parts += [one[at : at + chunk], two[at : at + chunk]]
    return join(*parts)


def concatenated(rng: Random, one: Archive, two: Archive) -> Bytes:
    kind = rng.integers(0, 4)
    first = one.content if kind else one.content[: one.end]
    if kind == 2:
        first = join(first, foreign(bytes(int(rng.integers(1, 3000)))))  # and not at a block any more
    if kind == 3:
        first = first[: len(first) - int(rng.integers(1, 2000))]
    return join(first, two.content)


def reordered(rng: Random, archive: Archive) -> Bytes:
    """Legal: the members in another order."""
    starts = [member.start % ARCHIVE for member in archive.members]
    spans = list(zip(starts, [*starts[1:], archive.end], strict=True))
    rng.shuffle(spans)
    return join(*(archive.content[a:b] for a, b in spans), archive.content[archive.end :])


def header_copied(rng: Random, archive: Archive) -> Bytes:
    found = archive.content.copy()
    for _ in range(int(rng.integers(1, 5))):
        a, b = rng.choice(archive.headers, 2)
        found.data[b : b + BLOCK] = archive.content.data[a : a + BLOCK]
    return found


def extended_corrupt(rng: Random, archive: Archive) -> Bytes:
    """Pax and long-name headers with other bytes, lengths, names and sizes."""
    found = archive.content.copy()
    for _ in range(int(rng.integers(1, 4))):
        if not archive.extended:
            break
        start, stop = archive.extended[int(rng.integers(len(archive.extended)))]
        kind = rng.integers(0, 5)
        data = found.data[start:stop].tobytes()
        if kind == 0:
            found.data[int(rng.integers(start, stop))] ^= 1 << int(rng.integers(0, 8))
        elif kind == 1:
            found.data[start : start + 3] = np.frombuffer(b"999", np.uint8)
        elif kind == 2 and b"size=" in data:
            at = start + data.index(b"size=") + 5
            found.data[at] = rng.integers(48, 58)
        elif kind == 3 and b"sa_" in data:
            at = start + data.index(b"sa_") + 3
            found.data[at] = rng.integers(48, 58)
        else:  # the header of the extended header
            at = start - BLOCK
            found.data[at + int(rng.integers(0, BLOCK))] ^= 1 << int(rng.integers(0, 8))
    return found


def sparse(rng: Random, archive: Archive) -> Bytes:
    """Members said to be sparse, or of another type, with a right checksum."""
    found = archive.content.copy()
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.choice(archive.headers))
        block = bytearray(found.data[at : at + BLOCK].tobytes())
        block[156] = int(rng.choice(list(b"SS7VMNDxgKL12345Z\0")))
        if rng.random() < 0.5:
            block[386 : 386 + 24] = b"00000000000\x0000000000100\0"
        found.data[at : at + BLOCK] = np.frombuffer(tiny.checksummed(bytes(block)), np.uint8)
    return found


OF_ARCHIVES: list[Callable[[Random, Archive], Bytes]] = [reordered, header_copied, extended_corrupt, sparse]
MODELS = [
    *dict.fromkeys(model.__name__ for model in (*ANYWHERE, *OF_ARCHIVES)),
    "interleaved",
    "concatenated",
    "two_of_them",
]
BY_NAME: dict[str, Any] = {model.__name__: model for model in (*ANYWHERE, *OF_ARCHIVES)}
