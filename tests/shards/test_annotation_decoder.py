"""The typed decoder returns the same result as `json` and the slow checks, or None."""

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sa1b import shards
from sa1b.errors import BadSample
from sa1b.shards import annotation
from sa1b.shards.annotation_columns import decode_usual, usual_columns
from tests.shards import annotation_fuzz, tiny

IMAGE_ID = annotation_fuzz.IMAGE_ID
PIXELS = shards.MAX_IMAGE_PIXELS


def slow(text):
    """The result of the path with `json.loads`: columns, or None if they cannot express the file."""
    found = json.loads(text)
    size = found["image"]["height"], found["image"]["width"]
    columns = usual_columns(found["annotations"], *size)
    return None if columns is None else (*size, columns)


def same(one, other):
    assert one[:2] == other[:2]
    assert one[2].keys() == other[2].keys()
    for name, values in other[2].items():
        found = one[2][name]
        if name == "strings":
            assert found == values
        else:
            assert (found.dtype, found.shape) == (values.dtype, values.shape), name
            assert found.tobytes() == values.tobytes(), name


def document(masks=3):
    return tiny.document(IMAGE_ID, masks=masks)


def changed(number=1, **values):
    found = document()
    found["annotations"][number] |= values
    return tiny.encode(found)


@pytest.mark.parametrize("masks", [0, 1, 2, 50])
def test_usual_files_are_read_to_the_same_columns(masks):
    text = tiny.encode(document(masks))
    same(decode_usual(text, IMAGE_ID, PIXELS), slow(text))


@pytest.mark.parametrize("indent", [None, 2])
def test_white_space_does_not_matter(indent):
    text = json.dumps(document(), indent=indent, separators=None if indent else (",", ":")).encode()
    same(decode_usual(b" \n" + text + b"\n", IMAGE_ID, PIXELS), slow(text))


numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**70), 2**70)
spelled = numbers.map(json.dumps) | st.from_regex(
    r"-?(0|[1-9][0-9]{0,30})(\\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?", fullmatch=True
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["bbox", "crop_box", "point_coords", "predicted_iou", "area", "id"]),
    st.lists(spelled, min_size=4, max_size=4),
)
def test_any_spelling_of_a_number_is_read_as_json_does_or_left_to_it(key, values):
    value = {"bbox": "[%s, %s, %s, %s]", "crop_box": "[%s, %s, %s, %s]", "point_coords": "[[%s, %s]]"}.get(
        key, "%s"
    )
    text = changed(**{key: "@"}).replace(b'"@"', (value % tuple(values[: value.count("%s")])).encode())
    found = decode_usual(text, IMAGE_ID, PIXELS)
    if found is not None:
        same(found, slow(text))


LEFT = {
    "another key": changed(note=1),
    "a key less": tiny.encode(
        {
            **document(),
            "annotations": [{k: v for k, v in m.items() if k != "area"} for m in document()["annotations"]],
        }
    ),
    "masks in another order": tiny.encode(
        {**document(), "annotations": [dict(reversed(m.items())) for m in document()["annotations"]]}
    ),
    "another order of two keys of one length": tiny.encode(document())
    .replace(b'"bbox"', b'"@"', 1)
    .replace(b'"area"', b'"bbox"', 1)
    .replace(b'"@"', b'"area"', 1),
    "document in another order": tiny.encode(dict(reversed(document().items()))),
    "image in another order": tiny.encode(
        {**document(), "image": dict(reversed(document()["image"].items()))}
    ),
    "a key twice": tiny.encode(document()).replace(b'"area": ', b'"area": 5, "area": ', 1),
    "an escaped key": tiny.encode(document()).replace(b'"area"', b'"\\u0061rea"', 1),
    "an escaped quote": changed(segmentation={"size": list(tiny.SIZE), "counts": '"'}),
    "another file name": tiny.encode({**document(), "image": document()["image"] | {"file_name": "x"}}),
    "another image": tiny.encode(
        {**document(), "image": document()["image"] | {"image_id": 6, "file_name": "sa_6.jpg"}}
    ),
    "a width that is no integer": tiny.encode({**document(), "image": document()["image"] | {"width": 64.0}}),
    "no height": tiny.encode({**document(), "image": document()["image"] | {"height": 0}}),
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
    "NaN": changed(predicted_iou=math.nan),
    "infinity": changed(stability_score=math.inf),
    "three numbers": changed(bbox=[1.0, 2.0, 3.0]),
    "no UTF-8": tiny.encode(document()).replace(b"sa_", b"sa_\xff", 1),
    "UTF-16": tiny.encode(document()).decode().encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + tiny.encode(document()),
    "a lone surrogate": changed(segmentation={"size": list(tiny.SIZE), "counts": "\ud800"}),
    "cut off": tiny.encode(document())[:-1],
    "two documents": tiny.encode(document()) * 2,
    "nested deeply": b"[" * 100_000,
    "nothing": b"",
}


@pytest.mark.parametrize("name", LEFT)
def test_whatever_columns_may_not_express_is_left_to_json(name):
    assert decode_usual(LEFT[name], IMAGE_ID, PIXELS) is None


def test_an_image_over_the_limit_is_left_to_the_path_that_names_it():
    text = tiny.encode(document())
    assert decode_usual(text, IMAGE_ID, tiny.SIZE[0] * tiny.SIZE[1] - 1) is None


@pytest.mark.parametrize("count", [5_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_both_paths_give_the_same_verdict_on_mutated_files(monkeypatch, count):
    """Mutations of small files: reason, columns and warnings with the decoder and without it."""
    draw = random.Random(0)
    originals = [tiny.encode(tiny.document(IMAGE_ID, seed, masks=seed % 3)) for seed in range(9)]
    texts = [annotation_fuzz.mutate(draw.choice(originals), draw) for _ in range(count)]

    def verdict(text):
        try:
            parsed = annotation.parse_annotation(text, IMAGE_ID)
        except BadSample as error:
            return error.reason
        fields = [getattr(parsed.annotations, name) for name in parsed.annotations.__slots__]
        values = [value.tobytes() if isinstance(value, np.ndarray) else value for value in fields]
        return values, dict(parsed.warnings)

    fast = [verdict(text) for text in texts]
    monkeypatch.setattr(annotation, "decode_usual", lambda *arguments: None)
    for text, found in zip(texts, fast, strict=True):
        assert verdict(text) == found, text
    assert sum(not isinstance(found, str) for found in fast) > count / 10
