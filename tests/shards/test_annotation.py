"""The annotation file as columns: exact for any input; a seeded part of the mutations (annotation_fuzz.py)."""

import json
import math
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest

from tests.shards import annotation_fuzz, tiny

Document = dict[str, Any]


@pytest.mark.parametrize("mutations", [1_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_mutated_files_are_refused_or_given_back_exactly(mutations: int) -> None:
    verdicts = annotation_fuzz.fuzz(mutations, seed=1)
    # The mutations reach every kind of verdict.
    reasons = {"invalid_json", "bad_rle", "missing_key", "wrong_type", "mask_size"}
    assert {"columns", "text", *reasons} <= set(verdicts)
    assert min(verdicts["columns"], verdicts["text"], verdicts["bad_rle"]) > mutations / 50


def changed(**values: Any) -> Callable[[Document], Any]:
    """A form in which one of three masks has other values."""

    def change(document: Document) -> Document:
        document["annotations"][1] |= values
        return document

    return change


def masks(change: Callable[[Document], Document]) -> Callable[[Document], Document]:
    return lambda one: {**one, "annotations": [change(mask) for mask in one["annotations"]]}


def image(**values: Any) -> Callable[[Document], Document]:
    return lambda one: {**one, "image": one["image"] | values}


def replaced(*pairs: tuple[bytes, bytes]) -> Callable[[Document], bytes]:
    def change(document: Document) -> bytes:
        text = tiny.encode(document)
        for old, new in pairs:
            text = text.replace(old, new, 1)
        return text

    return change


SIZE = list(tiny.SIZE)
IN_COLUMNS = {
    "usual": lambda one: one,
    "no masks": lambda one: one | {"annotations": []},
    "one mask": lambda one: one | {"annotations": one["annotations"][:1]},
    "many masks": lambda one: tiny.document(one["image"]["image_id"], masks=50),
    "indented": lambda one: b" \n" + json.dumps(one, indent=2).encode() + b"\n",
    "compact": lambda one: json.dumps(one, separators=(",", ":")).encode(),
    "an escaped key": replaced((b'"area"', b'"\\u0061rea"')),
    "NaN": changed(predicted_iou=math.nan),
    "infinity": changed(stability_score=math.inf),
    "a byte order mark": lambda one: b"\xef\xbb\xbf" + tiny.encode(one),
}
OTHERS = {
    "another key": changed(note=1),
    "a key twice": replaced((b'"area": ', b'"area": 5, "area": ')),
    "a key less": masks(lambda mask: {key: value for key, value in mask.items() if key != "area"}),
    "masks in another order": masks(lambda mask: dict(reversed(mask.items()))),
    "another order of two keys of one length": replaced(
        (b'"bbox"', b'"@"'), (b'"area"', b'"bbox"'), (b'"@"', b'"area"')
    ),
    "document in another order": lambda one: dict(reversed(one.items())),
    "image in another order": lambda one: {**one, "image": dict(reversed(one["image"].items()))},
    "an escaped quote": changed(segmentation={"size": SIZE, "counts": '"'}),
    "another file name": image(file_name="x"),
    "another image": image(image_id=6, file_name="sa_6.jpg"),
    "a width that is no integer": image(width=64.0),
    "no height": image(height=0),
    "another size": changed(segmentation={"size": [64, 48], "counts": ""}),
    "a size that is no integer": changed(segmentation={"size": [48.0, 64.0], "counts": ""}),
    "integers and floats in one box": changed(bbox=[1, 2.0, 3.0, 4.0]),
    "an integer score": changed(predicted_iou=1),
    "an integer point": changed(point_coords=[[1, 2.0]]),
    "two points": changed(point_coords=[[1.0, 2.0], [3.0, 4.0]]),
    "a float area": changed(area=12.0),
    "a true area": changed(area=True),
    "a null id": changed(id=None),
    "an id beyond int64": changed(id=2**63),
    "an integer beyond float64": changed(bbox=[2**53 + 1, 1, 2, 3]),
    "a huge integer": changed(crop_box=[10**400, 1, 2, 3]),
    "three numbers": changed(bbox=[1.0, 2.0, 3.0]),
    "no UTF-8": replaced((b"sa_", b"sa_\xff")),
    "UTF-16": lambda one: json.dumps(one).encode("utf-16"),
    "a lone surrogate": changed(segmentation={"size": SIZE, "counts": "\ud800"}),
    "cut off": lambda one: tiny.encode(one)[:-1],
    "two documents": lambda one: tiny.encode(one) * 2,
    "nested deeply": lambda one: b"[" * 100_000,
    "nothing": lambda one: b"",
}


def text_of(change: Callable[[Document], Any], image_id: int) -> bytes:
    found = change(tiny.document(image_id))
    return found if isinstance(found, bytes) else tiny.encode(found)


def test_whatever_columns_may_not_express_is_kept_as_text_or_refused() -> None:
    forms = {**IN_COLUMNS, **OTHERS}
    texts = {image_id: text_of(change, image_id) for image_id, change in enumerate(forms.values(), 10)}
    verdicts = dict(zip(forms, annotation_fuzz.check(texts), strict=True))
    assert {name for name, verdict in verdicts.items() if verdict == "columns"} == set(IN_COLUMNS)
    assert list(verdicts.values()).count("text") > 15


def number(draw: random.Random) -> str:
    digits = str(draw.randrange(10 ** draw.randrange(1, 31)))
    fraction = draw.choice(["", f".{draw.randrange(10 ** draw.randrange(1, 31))}"])
    exponent = draw.choice(["", "", f"{draw.choice('eE')}{draw.choice(['', '+', '-'])}{draw.randrange(400)}"])
    (real,) = struct.unpack("<d", draw.randbytes(8))
    kinds = (str(draw.randrange(-(2**70), 2**70)), f"{draw.choice(['', '-'])}{digits}{fraction}{exponent}")
    return draw.choice([*kinds, json.dumps(real), json.dumps(draw.randrange(300) / 4)])


def test_any_spelling_of_a_number_is_read_as_json_does() -> None:
    draw, texts = random.Random(3), {}
    for image_id in range(10, 410):
        key = draw.choice(["bbox", "crop_box", "point_coords", "predicted_iou", "area", "id"])
        values = ", ".join(number(draw) for _ in range(max(1, annotation_fuzz.WIDTHS.get(key, 1))))
        value = {"bbox": f"[{values}]", "crop_box": f"[{values}]", "point_coords": f"[[{values}]]"}
        text = text_of(changed(**{key: "@"}), image_id)
        texts[image_id] = text.replace(b'"@"', value.get(key, values).encode())
    verdicts = list(annotation_fuzz.check(texts))
    assert {*verdicts} == {"columns", "text"}
