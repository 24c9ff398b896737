"""Annotation files of any form: refused with a reason, or restored exactly as `json.loads` reads them.

The oracle is the standard library's parser and a slow reading of every mask: `python -m
tests.shards.annotation_fuzz --count 1000000` runs the full count of mutated files.
"""

import argparse
import json
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import sa1b
from sa1b.shards.annotation import Annotations
from tests.directories import reshard
from tests.masks import oracle
from tests.shards import tiny

WORDS = [b"null", b"true", b"-1", b"0", b"1e400", b"NaN", b"1.0", b"[]", b"{}", b'""', b"9" * 20, b"-0.0"]
TOKENS = [*(bytes([one]) for one in b'",:[]{}\\09-.e\xff\0`'), b"\\u0041"]
WIDTHS = {"bbox": 4, "crop_box": 4, "point_coords": 2, "predicted_iou": 0, "stability_score": 0}
REASONS = (  # refused or warned about; ingest stops where one of them is frequent and not accepted
    *("absurd_size", "bad_rle", "invalid_json", "missing_key", "nested_too_deep", "wrong_type", "file_name"),
    *("image_id_mismatch", "mask_size", "image_size", "area", "empty_mask", "keys", *WIDTHS),
    *(f"type_{key}" for key in ("area", "id", *WIDTHS)),
)
BATCH = 2000  # files in one source


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


def expected(text: bytes, image_id: int) -> Any:
    """The document of a file that can be stored: all its masks can be decoded, by a slow parser."""
    try:
        document = json.loads(text) if b"\0" not in text else None  # UTF-16 is refused
    except (ValueError, RecursionError):
        return None
    image = document.get("image") if isinstance(document, dict) else None
    if not isinstance(image, dict):
        return None
    numbers = [image.get(key) for key in ("image_id", "height", "width")]
    if [type(one) for one in numbers] != [int] * 3 or numbers != [image_id, *tiny.SIZE]:
        return None
    masks = document.get("annotations")
    if not isinstance(masks, list):
        return None
    for mask in masks:
        segmentation = mask.get("segmentation") if isinstance(mask, dict) else None
        if not isinstance(segmentation, dict) or not isinstance(segmentation.get("counts"), str):
            return None
        size = segmentation.get("size")
        if not isinstance(size, list) or [type(v) for v in size] != [int, int] or size != [*tiny.SIZE]:
            return None
        try:
            oracle.decode(segmentation["counts"], *tiny.SIZE)
        except oracle.Refused:
            return None
    return document


def column(mask: dict[str, Any], key: str) -> Any:
    """The value of a mask as columns have it: NaN or -1 where the file has none of the usual type."""
    value, width = mask.get(key), WIDTHS.get(key, 0)
    if key not in WIDTHS:
        return value if type(value) is int and -(2**63) <= value < 2**63 else -1
    if key == "point_coords":
        value = value[0] if isinstance(value, list) and len(value) == 1 else None
    values = value if width else [value]
    try:
        if isinstance(values, list) and len(values) == max(1, width) and {*map(type, values)} <= {int, float}:
            return list(map(float, values)) if width else float(values[0])
    except OverflowError:
        pass
    return [math.nan] * width if width else math.nan


def stored(texts: Mapping[int, bytes]) -> dict[int, Annotations | str]:
    """What becomes of annotation files, by the id of their image: annotations, or the reason of a refusal."""
    found: dict[int, Annotations | str] = {}
    jpeg = tiny.pair(5)[0]
    members = [one for image_id, text in texts.items() for one in tiny.pair_members(image_id, jpeg, text)]
    with tempfile.TemporaryDirectory() as folder:
        source, root = (
            tiny.write_tar(Path(folder, "sa_000001.tar"), members, gzip=False),
            Path(folder, "root"),
        )
        made = reshard(root, source, images_per_shard=BATCH, annotations_only=True, accept=REASONS)
        assert not made.failed, made.text
        for line in tiny.lines(root, "sa_000001"):
            found[int("".join(filter(str.isdigit, line["name"])))] = line["reason"]
        dataset = sa1b.open(root)
        every = list(dataset.masks(range(len(dataset))))
    assert not found.keys() & {one.image_id for one in every}
    return found | {one.image_id: one for one in every}


def check(texts: Mapping[int, bytes]) -> Iterator[str]:
    """The verdict on each file; raises AssertionError if one differs from the oracle's."""
    found = stored(texts)
    for image_id, text in texts.items():
        document, one = expected(text, image_id), found[image_id]
        assert (document is None) == isinstance(one, str), (text, one)
        if isinstance(one, str):
            yield one
            continue
        assert same(one.to_json(), document), text
        for key in ("area", "id", *WIDTHS):
            values = getattr(one, "mask_id" if key == "id" else key).tolist()
            assert repr(values) == repr([column(mask, key) for mask in document["annotations"]]), (key, text)
        yield "columns" if one.text is None else "text"


def fuzz(count: int, seed: int) -> Counter[str]:
    """Check `count` mutations; returns the number of each verdict."""
    draw, verdicts = random.Random(seed), Counter[str]()
    kinds = [(seed, masks) for seed in range(8) for masks in (0, 1, 2)]
    for first in range(0, count, BATCH):
        texts = {}
        for image_id in range(1, min(BATCH, count - first) + 1):
            seed, masks = draw.choice(kinds)
            texts[image_id] = mutate(tiny.encode(tiny.document(image_id, seed, masks=masks)), draw)
        verdicts.update(check(texts))
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
