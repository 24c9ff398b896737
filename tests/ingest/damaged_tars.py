"""Source tars damaged at random, and the oracle that says whether ingest accounted for every sample.

    python tests/ingest/damaged_tars.py --count 2000 --seed 0

Each damaged tar is ingested. Every image of the original must then be exact in the output, or its members
listed in refused.jsonl or warnings.jsonl, or lie in a reported stretch of damage, or the whole source must
be reported as damaged by its gzip stream. An image whose two members stand intact in the damaged archive
must never be lost. What went in must be what came out plus what is refused.

A byte changed inside a member's content shows only by the checksum of a gzip stream: plain tars are damaged
in their structure only.
"""

import argparse
import io
import json
import random
import re
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from sa1b.errors import SourceError
from tests.shards import tiny
from tests.shards.tiny import checksummed, member, pair, pair_members, pairs

BLOCK = 512
# JPEGs of twelve different lengths: two of one length can change places without a trace in a plain tar.
IDS = sorted({len(pair(image_id)[0]): image_id for image_id in range(100, 120)}.values())[:12]
FORMATS = {"gnu": tarfile.GNU_FORMAT, "ustar": tarfile.USTAR_FORMAT, "pax": tarfile.PAX_FORMAT}


@dataclass(frozen=True)
class Original:
    """An archive and where each of its members lies: header, content and padding."""

    data: bytes
    places: list[tuple[int, int]]  # start, stop

    def place(self, draw: random.Random) -> tuple[int, int]:
        return draw.choice(self.places)


@cache
def original(form: str, seed: int) -> Original:
    """Twelve images in random order, in one of tar's formats."""
    buffer = io.BytesIO()
    places = []
    with tarfile.open(fileobj=buffer, mode="w", format=FORMATS[form]) as tar:
        for name, data in pairs(IDS, seed):
            start = buffer.tell()
            info = tarfile.TarInfo("folder/" * 20 + name[2:] if form == "pax" else name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
            places.append((start, buffer.tell()))
    return Original(buffer.getvalue(), places)


# Damage to a plain archive: (original, draw) -> bytes


def header_at(start: int, stop: int, data: bytes) -> int:
    """The member's own header: behind the extended one, if it has one."""
    return start + 2 * BLOCK if data[start + 156 : start + 157] == b"x" else start


def replaced(data: bytes, start: int, new: bytes) -> bytes:
    return data[:start] + new + data[start + len(new) :]


def flip_in_header(archive: Original, draw: random.Random) -> bytes:
    data = bytearray(archive.data)
    at = header_at(*archive.place(draw), archive.data)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        data[at + draw.randrange(BLOCK)] ^= 1 << draw.randrange(8)
    return bytes(data)


def noise_in_header(archive: Original, draw: random.Random) -> bytes:
    start, _ = archive.place(draw)
    length = draw.randrange(1, BLOCK + 1)
    return replaced(archive.data, start + draw.randrange(BLOCK + 1 - length), draw.randbytes(length))


def zeroed_blocks(archive: Original, draw: random.Random) -> bytes:
    # Not up to the end: zeros there are what ends an archive.
    start, _ = draw.choice(archive.places[:-1])
    blocks = min(draw.randrange(1, 12), (archive.places[-1][0] - start) // BLOCK)
    return replaced(archive.data, start, bytes(BLOCK * blocks))


def inserted_zero_blocks(archive: Original, draw: random.Random) -> bytes:
    start, _ = archive.place(draw)
    return archive.data[:start] + bytes(BLOCK * draw.randrange(1, 12)) + archive.data[start:]


def cut_anywhere(archive: Original, draw: random.Random) -> bytes:
    return archive.data[: draw.randrange(archive.places[-1][1])]


def cut_in_header(archive: Original, draw: random.Random) -> bytes:
    return archive.data[: archive.place(draw)[0] + draw.randrange(1, BLOCK)]


def cut_between_members(archive: Original, draw: random.Random) -> bytes:
    return archive.data[: archive.place(draw)[0]]


def missing_bytes(archive: Original, draw: random.Random) -> bytes:
    at = draw.randrange(archive.places[-1][1])
    return archive.data[:at] + archive.data[at + draw.choice([1, 2, 17, 511, 512, 513, 5000]) :]


def added_bytes(archive: Original, draw: random.Random) -> bytes:
    at = draw.randrange(archive.places[-1][1])
    return (
        archive.data[:at] + draw.randbytes(draw.choice([1, 2, 17, 511, 512, 513, 5000])) + archive.data[at:]
    )


def other_header(archive: Original, draw: random.Random, start: int, new: bytes) -> bytes:
    """A header with some bytes replaced and its checksum made right again."""
    at = header_at(*archive.place(draw), archive.data)
    return replaced(archive.data, at, checksummed(replaced(archive.data[at : at + BLOCK], start, new)))


def lying_size(archive: Original, draw: random.Random) -> bytes:
    at = header_at(*archive.place(draw), archive.data)
    size = int(archive.data[at + 124 : at + 135], 8)
    lie = draw.choice(
        [
            0,
            draw.randrange(size),
            size - 1,
            size + 1,
            size + draw.randrange(1, 3000),
            size + draw.randrange(3000, 100_000),
            draw.randrange(1 << 33),
            -draw.randrange(1, 1 << 40),
            draw.randrange(1 << 87),
        ]
    )
    octal = b"%011o\0" % lie if 0 <= lie < 8**11 else None
    new = octal or (b"\xff" if lie < 0 else b"\x80") + (lie % (1 << 88)).to_bytes(11, "big")
    return replaced(archive.data, at, checksummed(replaced(archive.data[at : at + BLOCK], 124, new)))


def other_type(archive: Original, draw: random.Random) -> bytes:
    return other_header(
        archive, draw, 156, draw.choice([b"1", b"2", b"3", b"5", b"6", b"L", b"K", b"x", b"g", b"S"])
    )


NAMES = [
    b"../../sa_5.jpg",
    b"/etc/passwd",
    b"./sa_%d.jpg" % IDS[0],
    b"./sa_%d.json" % IDS[-1],
    b"./sa_900.jpg",
    b"sa_\xff.jpg",
    b"",
    b"x" * 100,
    b"./sa_100.jpg/",
    b"sa_" + b"9" * 60 + b".json",
]


def other_name(archive: Original, draw: random.Random) -> bytes:
    return other_header(archive, draw, 0, draw.choice(NAMES).ljust(100, b"\0"))


def duplicate(archive: Original, draw: random.Random) -> bytes:
    start, stop = archive.place(draw)
    at, _ = archive.place(draw)
    copy = archive.data[start:stop]
    if draw.random() < 0.5:  # the same name with other bytes
        image_id = draw.choice(IDS)
        which = draw.randrange(2)
        copy = member(pair_members(image_id)[which][0], pair(image_id, seed=1)[which])
    return archive.data[:at] + copy + archive.data[at:]


def lost_member(archive: Original, draw: random.Random) -> bytes:
    start, stop = archive.place(draw)
    return archive.data[:start] + archive.data[stop:]


def swapped(data: bytes, a: tuple[int, int], b: tuple[int, int]) -> bytes:
    (a, b) = sorted((a, b))
    return data[: a[0]] + data[b[0] : b[1]] + data[a[1] : b[0]] + data[a[0] : a[1]] + data[b[1] :]


def swapped_members(archive: Original, draw: random.Random) -> bytes:
    return swapped(archive.data, *draw.sample(archive.places, 2))


def swapped_headers(archive: Original, draw: random.Random) -> bytes:
    a, b = (header_at(*place, archive.data) for place in draw.sample(archive.places, 2))
    return swapped(archive.data, (a, a + BLOCK), (b, b + BLOCK))


def swapped_blocks(archive: Original, draw: random.Random) -> bytes:
    """A header and some blocks behind it change places with as many blocks anywhere.

    Neither a whole pax header nor all that it describes: where those change places, two members are renamed
    without a trace.
    """
    while True:
        start = header_at(*archive.place(draw), archive.data)
        length = BLOCK * draw.randrange(1, 6)
        other = BLOCK * draw.randrange((archive.places[-1][1] - length) // BLOCK)
        if abs(start - other) >= length and start + length <= archive.places[-1][1]:
            return swapped(archive.data, (start, start + length), (other, other + length))


def garbage_behind(archive: Original, draw: random.Random) -> bytes:
    return archive.data + draw.randbytes(draw.randrange(1, 5000))


STRUCTURE: list[Callable[[Original, random.Random], bytes]] = [
    flip_in_header,
    noise_in_header,
    zeroed_blocks,
    inserted_zero_blocks,
    cut_anywhere,
    cut_in_header,
    cut_between_members,
    missing_bytes,
    added_bytes,
    lying_size,
    other_type,
    other_name,
    duplicate,
    lost_member,
    swapped_members,
    swapped_headers,
    swapped_blocks,
    garbage_behind,
]


# Damage to a gzip stream: (stored, draw) -> bytes


def flip(stored: bytes, draw: random.Random) -> bytes:
    data = bytearray(stored)
    for _ in range(draw.choice([1, 1, 1, 3, 10])):
        data[draw.randrange(2, len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def cut(stored: bytes, draw: random.Random) -> bytes:
    return stored[: draw.choice([draw.randrange(2, len(stored)), len(stored) - draw.randrange(1, 20)])]


def zeroed(stored: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(10, len(stored))
    return replaced(stored, at, bytes(draw.choice([1, 100, 4096])))[: len(stored)]


def missing(stored: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(10, len(stored))
    return stored[:at] + stored[at + draw.choice([1, 100, 4096]) :]


def added(stored: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(10, len(stored) + 1)
    return stored[:at] + draw.randbytes(draw.choice([1, 100, 4096])) + stored[at:]


def swapped_ranges(stored: bytes, draw: random.Random) -> bytes:
    a, b = sorted(draw.sample(range(10, len(stored) - 64), 2))
    length = min(b - a, draw.choice([1, 16, 64]))
    return swapped(stored, (a, a + length), (b, b + length))


STREAM: list[Callable[[bytes, random.Random], bytes]] = [flip, cut, zeroed, missing, added, swapped_ranges]

KINDS = [f"plain {damage.__name__}" for damage in STRUCTURE]
KINDS += [f"gzip of {damage.__name__}" for damage in STRUCTURE]
KINDS += [f"gzip {damage.__name__}" for damage in STREAM]


@dataclass(frozen=True)
class Damaged:
    """A damaged source: its bytes as stored, and the archive in it where that is known."""

    original: Original
    stored: bytes
    archive: bytes | None


def damaged(kind: str, seed: int) -> Damaged:
    """The source tar of a kind of damage and a seed."""
    draw = random.Random(f"{kind} {seed}")
    archive = original(draw.choice(list(FORMATS)), draw.randrange(4))
    for change in STRUCTURE:
        if kind in (f"plain {change.__name__}", f"gzip of {change.__name__}"):
            data = change(archive, draw)
            return Damaged(archive, data if kind.startswith("plain") else tiny.gzip_bytes(data), data)
    (damage_stream,) = (change for change in STREAM if kind == f"gzip {change.__name__}")
    stored = tiny.gzip_bytes(archive.data)
    if draw.random() < 0.3:
        split = draw.randrange(len(archive.data))
        stored = tiny.gzip_bytes(archive.data[:split]) + tiny.gzip_bytes(archive.data[split:])
    return Damaged(archive, damage_stream(stored, draw), None)


@dataclass
class Account:
    """Where the images of damaged sources went."""

    tars: Counter[str] = field(default_factory=Counter)  # kind, and how the source ended
    images: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Account") -> None:
        self.tars.update(other.tars)
        self.images.update(other.images)


def listed_ids(root: Path, source: str) -> set[int]:
    """Images with a line of their own in quarantine."""
    names = [str(line["name"]) for line in tiny.lines(root, source)]
    ids = {int(found[1]) for name in names if (found := re.search(r"sa_(\d+)\.", name))}
    return ids | {line["image_id"] for line in tiny.lines(root, source, "warnings.jsonl")}


def intact_ids(source: Damaged) -> set[int]:
    """Images whose two members stand whole in the damaged archive."""
    assert source.archive is not None
    pieces = [source.original.data[start:stop] for start, stop in source.original.places]
    ids = [int(found[1]) for piece in pieces if (found := re.search(rb"sa_(\d+)\.", piece))]
    whole = Counter(image_id for image_id, piece in zip(ids, pieces, strict=True) if piece in source.archive)
    return {image_id for image_id, count in whole.items() if count == 2}


def check_refusal(source: Damaged, path: Path, message: str) -> None:
    """A source may be refused as a whole only where no pair is; the message names it and says why."""
    assert re.fullmatch(rf"{path}: (no usable pair; .{{5,}}|neither a gzip file nor a tar; .*)", message)
    assert source.archive is None or not intact_ids(source), message


def check(kind: str, seed: int, folder: Path) -> Account:
    """Ingest one damaged source below `folder` and assert that every sample is accounted for."""
    source = damaged(kind, seed)
    account = Account()
    path, root = folder / "sa_000020.tar", folder / "root"
    path.write_bytes(source.stored)
    try:
        task = tiny.ingest_tar(path, root)
    except SourceError as error:
        check_refusal(source, path, str(error))
        account.tars[f"{kind}: refused as a whole"] += 1
        account.images["of sources refused as a whole"] += len(IDS)
        return account
    counts = task.counts
    assert counts["members"] == 2 * counts["images"] + counts["refused_members"]
    samples = tiny.read_back(root)
    assert counts["images"] == len(samples)
    for line in tiny.lines(root, task.name):
        assert line["reason"]
        assert line["message"]
        assert line["offset"] >= 0
        assert line["file"] is None or tiny.quarantined(root, task.name, line) is not None
    listed = listed_ids(root, task.name)
    flagged = any(damage["reason"].startswith("gzip_") for damage in task.damage)
    intact = set() if source.archive is None else intact_ids(source)
    for image_id in IDS:
        jpeg, text = pair(image_id)
        if samples.get(image_id) == (jpeg, json.loads(text)):
            account.images["exact"] += 1
        elif image_id in listed:
            account.images["listed by name"] += 1
        elif flagged:
            account.images["of sources flagged by their gzip stream"] += 1
        else:
            assert image_id not in samples, f"image {image_id} is wrong and nothing says so"
            assert task.damage, f"image {image_id} is gone and nothing says so"
            assert image_id not in intact, f"image {image_id} is whole in the archive and lost"
            account.images["both members in reported damage"] += 1
    assert not set(samples) - set(IDS) or set(samples) - set(IDS) <= listed
    account.images["intact, yet refused"] += sum(
        image_id not in samples and image_id in listed for image_id in intact
    )
    account.tars[
        f"{kind}: {'damage or refusals reported' if task.damage or listed else 'nothing to report'}"
    ] += 1
    return account


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000, help="damaged tars, at least")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    account = Account()
    failures = 0
    rounds = -(-arguments.count // len(KINDS))
    for seed in range(arguments.seed * rounds, (arguments.seed + 1) * rounds):
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    account.add(check(kind, seed, Path(folder)))
                except Exception as error:
                    failures += 1
                    print(f"FAILED {kind!r}, seed {seed}: {type(error).__name__}: {error}")
    for name, count in sorted(account.tars.items()):
        print(f"  {count:6,} {name}")
    for name, count in account.images.most_common():
        print(f"{count:8,} images {name}")
    print(f"{rounds * len(KINDS):,} damaged tars, {failures} failures")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
