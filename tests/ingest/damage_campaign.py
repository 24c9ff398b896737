"""A second campaign of damaged sources: archives that were copied, joined, mixed and cut wrongly.

`python -m tests.ingest.damage_campaign --count 2000 --seed 0` runs the whole campaign on all cores and prints a
JSON summary; the suite runs a part of it. Each case makes a small archive, damages it in one or two ways, ingests
it and verifies that every original member is exact in the output or listed in quarantine.

Containers: `plain` (a tar), `inner` (the tar is damaged, then compressed: the gzip stream is right), `stored`
(the compressed file is damaged). Every byte of a damaged tar carries its origin: its position in the archives it
was made from, or -1. So what happened to each original member is known, whatever was done.

Known limits of an archive without checksums (plain and inner), counted and not failures: changed bytes inside a
JPEG, changed digits of numbers that nothing else in the file repeats (scores, points, crop boxes, mask ids), and
an archive that was cut exactly between two members and padded with zeros, which is a legal archive.
"""

import argparse
import faulthandler
import gzip
import itertools
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from sa1b.errors import SourceError, SystematicError
from sa1b.shards.manifest import Task
from tests.shards import tiny

BLOCK = 512
ARCHIVE = 1 << 40  # origin of a byte: archive * ARCHIVE + offset
SLOW_SECONDS = 10.0
CONTAINERS = ("plain", "inner", "stored")
SIZES = ((48, 64), (48, 64), (48, 64), (40, 56), (64, 48))
UNREPEATED = {"predicted_iou", "stability_score", "point_coords", "crop_box", "id"}
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


@dataclass(slots=True)
class Case:
    """One damaged file and what it was made from."""

    number: int
    model: str
    container: str
    members: list[Original]
    file: bytes  # as stored
    tar: Bytes | None  # the damaged tar where it is known byte by byte
    changed: bool
    readable: int = 0  # bytes of the tar in a compressed file that was cut, and nothing else


def compress(rng: Random, data: bytes) -> bytes:
    """One gzip member, or several."""
    if rng.random() < 0.7:
        return gzip.compress(data, int(rng.choice([1, 6, 9])), mtime=0)
    cuts = [0, *cut_points(rng, len(data), 3), len(data)]
    return b"".join(gzip.compress(data[a:b], 6, mtime=0) for a, b in itertools.pairwise(cuts))


def case(seed: int, number: int) -> Case:
    """The damaged file of a case."""
    rng = np.random.default_rng([seed, number])
    model = MODELS[number % len(MODELS)]
    container = CONTAINERS[int(rng.integers(len(CONTAINERS)))]
    style = (
        str(rng.choice(["gnu", "pax", "long"]))
        if model != "extended_corrupt"
        else str(rng.choice(["pax", "long"]))
    )
    count = int(rng.integers(4, 20))
    one = build(rng, 0, range(1, 1 + count), style)
    members = list(one.members)
    two = None
    if model in ("interleaved", "concatenated"):
        first = int(rng.choice([1, 1 + count // 2, 1000]))  # the same archive again, half of it, another one
        two = build(rng, 1, range(first, first + int(rng.integers(2, 16))), style)
        members += two.members
    if container == "stored" and (model not in BY_NAME or BY_NAME[model] in ANYWHERE):
        return stored_case(rng, number, model, members, one, two)
    container = "inner" if container == "stored" else container
    if two is not None:
        tar = (
            interleaved(rng, one.content, two.content)
            if model == "interleaved"
            else concatenated(rng, one, two)
        )
    elif model == "two_of_them":
        tar = OF_ARCHIVES[int(rng.integers(len(OF_ARCHIVES)))](rng, one)
        tar = ANYWHERE[int(rng.integers(len(ANYWHERE)))](rng, tar)
    else:
        argument = one if BY_NAME[model] in OF_ARCHIVES else one.content
        tar = BY_NAME[model](rng, argument)
    plain = tar.data.tobytes()
    changed = plain != one.content.data.tobytes()
    file = compress(rng, plain) if container == "inner" else plain
    return Case(number, model, container, members, file, tar, changed)


def stored_case(
    rng: Random, number: int, model: str, members: list[Original], one: Archive, two: Archive | None
) -> Case:
    """Damage to the compressed file."""
    undamaged = compress(rng, one.content.data.tobytes())
    stored = foreign(undamaged)
    if two is not None:
        other = foreign(compress(rng, two.content.data.tobytes()))
        if model == "interleaved":
            stored = interleaved(rng, stored, other)
        else:
            cut = int(rng.integers(1, 2000)) if rng.random() < 0.3 else 0
            stored = join(stored[: len(stored) - cut], other)
    elif model == "two_of_them":
        for _ in range(2):
            stored = ANYWHERE[int(rng.integers(len(ANYWHERE)))](rng, stored)
    else:
        stored = BY_NAME[model](rng, stored)
    file = stored.data.tobytes()
    readable = inflated(file) if undamaged.startswith(file) else 0
    return Case(number, model, "stored", members, file, None, file != undamaged, readable)


def inflated(stored: bytes) -> int:
    """How many bytes another reader gets out of a gzip file that is cut."""
    count = 0
    while stored:
        stream = zlib.decompressobj(31)
        count += len(stream.decompress(stored))
        stored = stream.unused_data
    return count


# What came of it.


@dataclass(slots=True)
class Outcome:
    """What a case led to; `failures` is empty if the invariant holds."""

    number: int
    model: str
    container: str
    ended: str = ""
    seconds: float = 0.0
    pairs: int = 0
    exact: int = 0
    records: int = 0
    collateral: int = 0
    stops: int = 0
    limits: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class _Records:
    """What quarantine and the task file say."""

    def __init__(self, root: Path, name: str) -> None:
        self.refused = tiny.lines(root, name)
        self.members = [line for line in self.refused if line["name"] is not None]
        self.damage = [line for line in self.refused if line["name"] is None]
        self.by_id: dict[int, set[str]] = {}
        for line in self.members:
            named = re.search(r"sa_(\d+)\.(jpg|json)$", line["name"])
            if named is not None:
                self.by_id.setdefault(int(named[1]), set()).add(named[2])
        self.warned = {line["image_id"] for line in tiny.lines(root, name, "warnings.jsonl")}
        self.spans = [(line["offset"], line["offset"] + line["bytes"]) for line in self.damage]
        self.gzip = [line for line in self.damage if line["reason"].startswith("gzip")]
        for line in self.members:  # a header and the content; extended headers stand before the offset
            self.spans.append((line["offset"], line["offset"] + BLOCK + line["bytes"]))


def run(seed: int, number: int, folder: Path) -> Outcome:
    """Make a case, ingest it, verify what came of it."""
    made = case(seed, number)
    outcome = Outcome(number, made.model, made.container)
    shutil.rmtree(folder, ignore_errors=True)
    source = folder / "in" / "sa_000007.tar"
    source.parent.mkdir(parents=True)
    source.write_bytes(made.file)
    root = folder / "root"
    began = time.monotonic()
    samples: dict[int, tuple[bytes, Any]] = {}
    counts: dict[str, Any] | None = None
    damage: list[dict[str, Any]] = []
    try:
        task = _ingest(source, root, outcome)
        counts, damage = task.counts, task.damage
        samples = tiny.read_back(root)
        outcome.ended = "ingested"
    except SourceError as error:
        outcome.ended = "no usable pair"
        if not (root / "quarantine").exists() and "neither a gzip file nor a tar" in str(error):
            outcome.ended = "no source"
    except Exception as error:
        outcome.ended = "traceback"
        outcome.failures.append(f"{type(error).__name__}: {error}")
    outcome.seconds = time.monotonic() - began
    if outcome.seconds > SLOW_SECONDS:
        outcome.failures.append(f"took {outcome.seconds:.1f} s")
    if outcome.ended not in ("traceback", "no source"):
        records = _Records(root, "sa_000007")
        outcome.records = len(records.refused)
        _check_records(made, records, counts, damage, samples, outcome, root)
        _check_samples(made, records, samples, outcome)
    return outcome


def _ingest(source: Path, root: Path, outcome: Outcome) -> Task:
    """Ingest, and where too many pairs have one problem, again with the flag that the message names."""
    accept: set[str] = set()
    while True:
        try:
            return tiny.ingest_tar(source, root, images_per_shard=6, accept=frozenset(accept))
        except SystematicError as error:
            outcome.stops += 1
            flag = re.search(r"--accept (\w+)", str(error))
            if flag is None or flag[1] in accept:
                raise
            accept.add(flag[1])


def _check_records(
    made: Case,
    records: _Records,
    counts: dict[str, Any] | None,
    damage: list[dict[str, Any]],
    samples: dict[int, Any],
    outcome: Outcome,
    root: Path,
) -> None:
    if counts is not None:
        if counts["members"] != 2 * counts["images"] + counts["refused_members"]:
            outcome.failures.append(f"counts do not add up: {counts}")
        if counts["refused_members"] != len(records.members) or counts["images"] != len(samples):
            outcome.failures.append("the task file and quarantine or the output differ in number")
        if [line["offset"] for line in damage] != [line["offset"] for line in records.damage]:
            outcome.failures.append("the task file and quarantine list other damage")
    for line in records.refused:
        if not line["reason"] or type(line["offset"]) is not int or line["offset"] < 0:
            outcome.failures.append(f"a record without reason or offset: {line}")
        if line["file"] is None:
            continue
        kept = tiny.quarantined(root, "sa_000007", line)
        if made.tar is not None and line["name"] is None:
            stop = line["offset"] + len(kept)
            if kept != made.tar.data[line["offset"] : stop].tobytes():
                outcome.failures.append(f"damage at {line['offset']} keeps other bytes than lie there")
    if not made.changed and records.refused:
        outcome.failures.append("an undamaged archive has records")


def _check_samples(
    made: Case, records: _Records, samples: dict[int, tuple[bytes, Any]], outcome: Outcome
) -> None:
    originals: dict[int, dict[str, Original]] = {}
    for member in made.members:
        originals.setdefault(member.image_id, {})[member.ending] = member
    outcome.pairs = len(originals)
    images = {pair["jpg"].data: image_id for image_id, pair in originals.items()}
    used = set()  # originals whose bytes are in the output under another id, which is listed
    for image_id, (jpeg, document) in samples.items():
        pair = originals.get(image_id)
        if pair is None:
            outcome.failures.append(f"image {image_id} was never there")
            continue
        same_text = document == json.loads(pair["json"].data)
        if jpeg == pair["jpg"].data and same_text:
            outcome.exact += 1
            continue
        listed = image_id in records.by_id or image_id in records.warned or bool(records.gzip)
        if listed:
            outcome.limits["wrong and listed"] += 1
            used |= {other for one, other in images.items() if jpeg.rstrip(b"\0") in (one, one.rstrip(b"\0"))}
        elif made.container == "stored":
            outcome.failures.append(f"image {image_id} is wrong, and nothing is said of the gzip stream")
        elif not same_text:
            fields = _changed_fields(document, json.loads(pair["json"].data))
            if fields <= UNREPEATED:
                outcome.limits["number changed"] += 1
            else:
                outcome.failures.append(f"image {image_id}: {sorted(fields)} changed silently")
        elif jpeg in images:
            outcome.failures.append(f"image {image_id} has the JPEG of {images[jpeg]} silently")
        else:
            outcome.limits["jpeg changed"] += 1
    file = made.tar.data.tobytes() if made.tar is not None else b""
    for image_id, pair in originals.items():
        if image_id in samples:
            continue
        if made.tar is not None and all(member.stored in file for member in pair.values()):
            outcome.collateral += 1
        if all(member.stop <= made.readable for member in pair.values()):
            outcome.failures.append(f"image {image_id} lies before the cut and is lost")
        for ending, member in pair.items():
            copies = [one for one in made.members if (one.image_id, one.ending) == (image_id, ending)]
            accounted = (
                ending in records.by_id.get(image_id, set())
                or image_id in used
                or (bool(records.gzip) if made.tar is None else False)
                or (
                    made.tar is not None
                    and all(_is_listed(made.tar, one, records, outcome) for one in copies)
                )
                or (made.tar is None and _is_spanned_gzip(records))
            )
            if not accounted:
                outcome.failures.append(
                    f"sa_{image_id}.{ending} at {member.start % ARCHIVE} is lost silently"
                )


def _is_spanned_gzip(records: _Records) -> bool:
    """A gzip stream that is right in itself but whose parts were exchanged: damage to the tar is listed."""
    return bool(records.damage)


def _is_listed(tar: Bytes, member: Original, records: _Records, outcome: Outcome) -> bool:
    """Whether a record covers some of the member, or the end of the archive where all of it is cut off."""
    left = np.flatnonzero((tar.origin >= member.start) & (tar.origin < member.stop))
    if any(np.searchsorted(left, start) < np.searchsorted(left, stop) for start, stop in records.spans):
        return True
    filled = np.flatnonzero(tar.data)
    end = int(filled[-1]) + 1 if len(filled) else 0
    if not len(left) and any(stop >= end for _, stop in records.spans):
        return True
    if not len(left) or left[0] >= end:  # nothing but zeros follow the members before it
        outcome.limits["ends before this member, zeros follow"] += 1
        return True
    return False


def _changed_fields(found: Any, expected: Any) -> set[str]:
    if found.get("image") != expected["image"] or len(found["annotations"]) != len(expected["annotations"]):
        return {"image"}
    return {
        name
        for one, other in zip(found["annotations"], expected["annotations"], strict=True)
        for name in one.keys() | other.keys()
        if one.get(name) != other.get(name)
    }


def run_all(seed: int, numbers: list[int]) -> list[Outcome]:
    """Many cases in this process, which ends by itself if one of them hangs in compiled code."""
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for number in numbers:
            faulthandler.dump_traceback_later(6 * SLOW_SECONDS, exit=True)
            found.append(run(seed, number, Path(folder) / "case"))
            faulthandler.cancel_dump_traceback_later()
        return found


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Figures of a campaign, and each failure with the number of its case."""
    limits: Counter[str] = Counter()
    for one in outcomes:
        limits.update(one.limits)
    by_model: dict[str, Counter[str]] = {}
    for one in outcomes:
        by_model.setdefault(one.model, Counter()).update(
            cases=1, pairs=one.pairs, exact=one.exact, failures=len(one.failures), collateral=one.collateral
        )
    return {
        "cases": len(outcomes),
        "ended": dict(Counter(one.ended for one in outcomes).most_common()),
        "containers": dict(Counter(one.container for one in outcomes).most_common()),
        "pairs": sum(one.pairs for one in outcomes),
        "exact": sum(one.exact for one in outcomes),
        "records": sum(one.records for one in outcomes),
        "systematic_stops": sum(one.stops for one in outcomes),
        "intact_but_refused": sum(one.collateral for one in outcomes),
        "known_limits": dict(limits),
        "slowest_seconds": round(max(one.seconds for one in outcomes), 2),
        "models": {name: dict(counts) for name, counts in by_model.items()},
        "failed_cases": sum(bool(one.failures) for one in outcomes),
        "failures": [
            {"case": one.number, "model": one.model, "container": one.container, "failures": one.failures[:5]}
            for one in outcomes
            if one.failures
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--case", type=int, help="run only this case, in this process")
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    if arguments.case is not None:
        outcomes = run_all(arguments.seed, [arguments.case])
    else:
        chunks = [list(range(at, min(at + 10, arguments.count))) for at in range(0, arguments.count, 10)]
        with (
            ProcessPoolExecutor(arguments.workers) as pool,
            tqdm(total=arguments.count, desc="damaged archives", unit="case", dynamic_ncols=True) as bar,
        ):
            try:
                for done in as_completed([pool.submit(run_all, arguments.seed, chunk) for chunk in chunks]):
                    outcomes += done.result()
                    bar.update(len(done.result()))
            except BrokenProcessPool:
                print("a case crashed or hung; the stack is above", file=sys.stderr)
                return 1
    outcomes.sort(key=lambda one: one.number)
    found = summary(outcomes)
    print(json.dumps(found, indent=1))
    return 1 if found["failed_cases"] else 0


if __name__ == "__main__":
    sys.exit(main())
