"""Images that are kept although something is odd: each is listed, with every mask concerned."""

import itertools
import json
import math

import pytest

from tests.ingest.bad_pairs import BAD, GOOD, mask_changed, typed
from tests.shards.tiny import document, encode, pair, pair_members, pairs


def odd(image_id, masks, *numbers):
    """An annotation file of `masks` masks, of which these have a wrong area."""
    found = document(image_id, masks=masks)
    for number in numbers:
        found["annotations"][number]["area"] += 1
    return encode(found)


def test_every_mask_concerned_is_listed(bad_pair):
    outcome = bad_pair(text=odd(BAD, 6, 1, 3, 5))
    (line,) = outcome.warnings
    assert (line["image_id"], line["reason"]) == (BAD, "area")
    assert (line["masks"], line["mask_count"]) == ([1, 3, 5], 3)
    assert line["message"].startswith("mask 1: area ")


def test_a_warning_about_the_image_lists_no_mask(bad_pair):
    outcome = bad_pair(jpeg=pair(BAD)[0] + b"tail")
    (line,) = outcome.warnings
    assert (line["reason"], line["masks"], line["mask_count"]) == ("jpeg_trailing_bytes", [], 0)


def test_thousands_of_wrong_masks_are_counted_and_the_first_thousand_listed(bad_pair):
    text = odd(BAD, 3)
    found = json.loads(text)
    found["annotations"] = [found["annotations"][0] | {"area": None, "bbox": "x"}] * 2000
    outcome = bad_pair(text=encode(found))
    lines = {line["reason"]: line for line in outcome.warnings}
    assert set(lines) == {"type_area", "type_bbox", "area", "bbox"}
    for line in lines.values():
        assert line["mask_count"] == 2000
        assert line["masks"] == list(range(1000))
        assert len(line["message"]) < 600


def two_hundred(image_id, **values):
    """An annotation file of 200 masks that have these values."""
    found = document(image_id)
    found["annotations"] = [found["annotations"][0] | values] * 200
    return pair_members(image_id, text=encode(found))


def test_two_hundred_masks_of_a_wrong_type_are_a_warning(ingest):
    wrong = [None, "x", [], {}, True, [[]], [None] * 4, {"a": 1}, [10**300] * 4]
    keys = [key for key in document(BAD)["annotations"][0] if key != "segmentation"]
    cases = dict(enumerate(itertools.product(keys, wrong), BAD))
    members = [
        one for image_id, (key, value) in cases.items() for one in two_hundred(image_id, **{key: value})
    ]
    outcome = ingest([*pairs(GOOD), *members], accept={"type_" + key for key in keys} | {*keys, "id_twice"})
    assert outcome.refused == []
    assert {line["image_id"] for line in outcome.warnings if line["mask_count"] == 200} == cases.keys()


def test_two_hundred_masks_without_pixels_are_refused_at_the_first(ingest):
    cases = dict(enumerate((None, 1, "x", [], {}, True, [[]]), BAD))
    members = [one for image_id, value in cases.items() for one in two_hundred(image_id, segmentation=value)]
    outcome = ingest([*pairs(GOOD), *members])
    assert sorted(outcome.samples) == list(GOOD)
    assert len(outcome.refused) == 2 * len(cases)
    assert all(line["message"].startswith("mask 0") for line in outcome.refused)


NUMBERS = [math.nan, math.inf, -math.inf, 2**53, 2**53 + 1, -(2**53) - 1, 2**63, 1e308]
FIELDS = ["area", "id", "predicted_iou", "stability_score", "bbox", "crop_box", "point_coords"]


# Of each kind one, and the rest in the long run: not a number, infinite, beyond float64's integers, beyond int64.
SOME = [math.nan, -math.inf, 2**53 + 1, 2**63]


@pytest.mark.parametrize(
    "value", [pytest.param(one, marks=() if one in SOME else pytest.mark.slow) for one in NUMBERS], ids=repr
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_any_number_in_any_field_comes_back_exactly(ingest, value):
    texts = {}
    for field, integers in itertools.product(FIELDS, (False, True)):  # floats or integers beside it
        for place in range(4) if field in ("bbox", "crop_box") else (0,):
            mask = document(BAD + len(texts))["annotations"][1]
            if integers:
                mask |= {key: [int(v) for v in mask[key]] for key in ("bbox", "crop_box")}
            if field in ("bbox", "crop_box"):
                mask[field][place] = value
            elif field == "point_coords":
                mask[field][0][1] = value
            else:
                mask[field] = value
            texts[BAD + len(texts)] = mask_changed(image_id=BAD + len(texts), **mask)
    members = [member for image_id, text in texts.items() for member in pair_members(image_id, text=text)]
    outcome = ingest([*pairs(GOOD), *members])
    assert outcome.refused == []
    for image_id, text in texts.items():
        jpeg, stored = outcome.samples[image_id]
        assert (jpeg, typed(stored)) == (pair(image_id)[0], typed(json.loads(text)))
    assert {line["image_id"] for line in outcome.warnings} <= texts.keys()


@pytest.mark.parametrize("beside", ["bbox", "crop_box"])
def test_not_a_number_does_not_hide_an_integer_beyond_float64(kept, beside):
    """Comparisons with NaN are false: the largest of [2^53 + 1, NaN] is not larger than 2^53."""
    other = "crop_box" if beside == "bbox" else "bbox"
    text = mask_changed(**{other: [2**53 + 1, 1, 2, 3], beside: [math.nan] * 4})
    kept(text=text)
