"""A second campaign of damaged sources: archives that were copied, joined, mixed and cut wrongly.

`python -m tests.ingest.damage_campaign --count 2000 --seed 0` runs the whole campaign on all cores and prints a
JSON summary; the suite runs a part of it. Each case makes a small archive, damages it in one or two ways, ingests
it and verifies that every original member is exact in the output or listed in quarantine.

Containers: `plain` (a tar), `inner` (the tar is damaged, then compressed: the gzip stream is right), `stored`
(the compressed file is damaged). The damage models and what they damage are in `damage_models.py`.

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
import tempfile
import time
import zlib
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sa1b.errors import SourceError
from tests.ingest.damage_models import (
    ANYWHERE,
    ARCHIVE,
    BLOCK,
    BY_NAME,
    MODELS,
    OF_ARCHIVES,
    Archive,
    Bytes,
    Original,
    Random,
    build,
    concatenated,
    cut_points,
    foreign,
    interleaved,
    join,
)
from tests.shards import tiny

SLOW_SECONDS = 10.0
CONTAINERS = ("plain", "inner", "stored")
UNREPEATED = {"predicted_iou", "stability_score", "point_coords", "crop_box", "id"}


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
    began = time.process_time()  # which other work on the machine does not stretch
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
    outcome.seconds = time.process_time() - began
    if outcome.seconds > SLOW_SECONDS:
        outcome.failures.append(f"took {outcome.seconds:.1f} s of processor time")
    if outcome.ended not in ("traceback", "no source"):
        records = _Records(root, "sa_000007")
        outcome.records = len(records.refused)
        _check_records(made, records, counts, damage, samples, outcome, root)
        _check_samples(made, records, samples, outcome)
    return outcome


def _ingest(source: Path, root: Path, outcome: Outcome) -> Any:
    """Ingest, and where too many pairs have one problem, again with the flag that the message names."""
    accept: set[str] = set()
    while True:
        try:
            return tiny.ingest_tar(source, root, images_per_shard=6, accept=accept)
        except SourceError as error:
            flag = re.search(r"--accept (\w+)", str(error))
            if flag is None or flag[1] in accept:
                raise
            outcome.stops += 1
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
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
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
