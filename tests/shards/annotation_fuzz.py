"""Mutated annotation files: refused with a reason, or restored exactly as `json.loads` reads them.

The oracle is the standard library's parser and a slow reading of every mask: `python -m
tests.shards.annotation_fuzz --count 1000000` runs the full count.
"""

import argparse
import json
import random
import time
from collections import Counter
from typing import Any

from sa1b.errors import BadSample
from sa1b.shards import MAX_IMAGE_PIXELS, annotation, record
from tests.masks import oracle
from tests.shards import tiny

WORDS = [
    b"null",
    b"true",
    b"-1",
    b"0",
    b"1e400",
    b"NaN",
    b"1.0",
    b"[]",
    b"{}",
    b'""',
    b"99999999999999999999",
    b"-0.0",
]
TOKENS = [
    b'"',
    b",",
    b":",
    b"[",
    b"]",
    b"{",
    b"}",
    b"\\",
    b"0",
    b"9",
    b"-",
    b".",
    b"e",
    b"\xff",
    b"\x00",
    b"`",
    b"\\u0041",
]
IMAGE_ID = 5


def mutate(text: bytes, draw: random.Random) -> bytes:
    """Apply one to three changes: flip, remove, repeat or exchange bytes, or replace values by odd ones."""
    data = bytearray(text)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        at = draw.randrange(len(data) + 1)
        kind = draw.randrange(7)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at:at] = draw.choice(TOKENS)
        elif kind == 2:
            del data[at : at + draw.choice([1, 2, 5, 20])]
        elif kind == 3:
            to = draw.randrange(len(data) + 1)
            data[at:at] = data[to : to + draw.choice([1, 5, 40])]
        elif kind == 4 and draw.random() < 0.1:
            del data[at:]
        else:
            # A complete value, from a colon to the next comma or bracket.
            colon = data.find(b": ", at)
            if colon >= 0:
                end = min(
                    (e for e in (data.find(mark, colon + 2) for mark in b",]}") if e >= 0), default=len(data)
                )
                data[colon + 2 : end] = draw.choice(WORDS)
    return bytes(data)


def same(a: Any, b: Any) -> bool:
    """Whether values, types and order are equal; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def expected(text: bytes) -> bool:
    """Whether every mask of the file can be decoded, by a slow parser."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return False
    image = document.get("image") if isinstance(document, dict) else None
    if not isinstance(image, dict) or any(
        type(image.get(key)) is not int for key in ("image_id", "width", "height")
    ):
        return False
    height, width = image["height"], image["width"]
    if image["image_id"] != IMAGE_ID or not 0 < height * width <= MAX_IMAGE_PIXELS or height < 0:
        return False
    masks = document.get("annotations")
    if not isinstance(masks, list):
        return False
    for mask in masks:
        segmentation = mask.get("segmentation") if isinstance(mask, dict) else None
        if not isinstance(segmentation, dict) or not isinstance(segmentation.get("counts"), str):
            return False
        size = segmentation.get("size")
        if not isinstance(size, list) or [type(v) for v in size] != [int, int] or size != [height, width]:
            return False
        if not oracle_accepts(segmentation["counts"], height, width):
            return False
    return True


def oracle_accepts(counts: str, height: int, width: int) -> bool:
    try:
        oracle.decode(counts, height, width)
    except oracle.Refused:
        return False
    return True


def check(text: bytes) -> str:
    """The verdict on one file; raises AssertionError if it differs from the oracle's."""
    good = expected(text)
    try:
        parsed = annotation.parse_annotation(text, IMAGE_ID)
    except BadSample as error:
        refused = error.reason
    else:
        refused = None
    assert good == (refused is None), (text, refused)
    if refused is not None:
        return refused
    stored = record.decode(record.encode(parsed.annotations))
    assert same(stored.to_json(), json.loads(text)), text
    return "odd" if parsed.warnings else "valid"


def fuzz(count: int, seed: int) -> Counter[str]:
    """Check `count` mutations; returns the number of each verdict."""
    draw = random.Random(seed)
    originals = [
        tiny.encode(tiny.document(IMAGE_ID, seed, masks=masks)) for seed in range(8) for masks in (0, 1, 2)
    ]
    verdicts: Counter[str] = Counter()
    for _ in range(count):
        verdicts[check(mutate(draw.choice(originals), draw))] += 1
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    verdicts = fuzz(arguments.count, arguments.seed)
    print(
        f"{arguments.count:,} mutations, seed {arguments.seed}, {time.monotonic() - began:.0f} s: all as expected"
    )
    for verdict, number in verdicts.most_common():
        print(f"  {verdict:20s} {number:>9,}")


if __name__ == "__main__":
    main()
