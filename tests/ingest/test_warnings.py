"""Images that are kept although something is odd: each is listed, with every mask concerned."""

import itertools
import json
import math
import os
import stat
from pathlib import Path

import pytest

from sa1b.shards import annotation
from sa1b.shards.annotation_columns import MAX_LISTED_MASKS
from tests.ingest import inside
from tests.ingest.bad_pairs import BAD, GOOD, mask_changed, typed
from tests.shards import tiny
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
        assert line["masks"] == list(range(MAX_LISTED_MASKS))
        assert len(line["message"]) < 600


@pytest.mark.parametrize("wrong", [None, "x", [], {}, True, [[]], [None] * 4, {"a": 1}, [10**300] * 4])
@pytest.mark.parametrize("key", [key for key in document(BAD)["annotations"][0] if key != "segmentation"])
def test_two_hundred_masks_of_a_wrong_type_are_a_warning(key, wrong):
    found = document(BAD)
    found["annotations"] = [found["annotations"][0] | {key: wrong}] * 200
    warnings = annotation.parse_annotation(encode(found), BAD).warnings
    assert any(warning.mask_count == 200 for warning in warnings.values())


@pytest.mark.parametrize("wrong", [None, 1, "x", [], {}, True, [[]]])
def test_two_hundred_masks_without_pixels_are_refused_at_the_first(wrong):
    found = document(BAD)
    found["annotations"] = [found["annotations"][0] | {"segmentation": wrong}] * 200
    with pytest.raises(annotation.BadSample, match="^mask 0"):
        annotation.parse_annotation(encode(found), BAD)


def test_a_message_is_made_for_the_first_mask_only(monkeypatch):
    """A value of 2 kB in each of 2,000 masks must not be written out 2,000 times."""
    made = []
    describe = annotation.unusual_columns.__globals__["_describe_value"]
    monkeypatch.setitem(
        annotation.unusual_columns.__globals__,
        "_describe_value",
        lambda *arguments: made.append(arguments[0]) or describe(*arguments),
    )
    found = document(BAD)
    found["annotations"] = [found["annotations"][0] | {"area": [0] * 500}] * 1900
    annotation.parse_annotation(encode(found), BAD)
    assert made == [0]


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
    assert annotation.parse_annotation(text, BAD).annotations.text == text


def test_json_nested_beyond_the_reader_says_how_deep():
    text = pair(BAD)[1].replace(b'"bbox"', b'"note": %s, "bbox"' % (b"[" * 50_000 + b"]" * 50_000), 1)
    with pytest.raises(annotation.BadSample, match="nested 50,003 deep, cap 100"):
        annotation.parse_annotation(text, BAD)


def test_quarantine_is_flushed_before_the_task_that_relies_on_it(tmp_path, monkeypatch):
    """Every file of it, then the folder, once for a source."""
    flushed = []
    fsync = os.fsync

    def watched(descriptor):
        kind = os.fstat(descriptor).st_mode
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if "quarantine" in path.parts:
            flushed.append((path.name, stat.S_ISDIR(kind), task_files()))
        fsync(descriptor)

    def task_files():
        return len(list(tmp_path.rglob("tasks/*.json")))

    monkeypatch.setattr(os, "fsync", watched)
    members = [*tiny.pairs(range(3)), *tiny.pair_members(BAD, jpeg=b"x")]
    members += tiny.pair_members(501, text=odd(501, 3, 0))
    task = inside.ingest_tar(tiny.write_tar(tmp_path / "sa_000020.tar", members), tmp_path / "root")
    files = {path.name for path in (tmp_path / "root" / "quarantine" / task.name).iterdir()}
    assert len(files) == 4
    assert {name for name, is_folder, _ in flushed if not is_folder} == files
    last_file = max(i for i, (_, is_folder, _) in enumerate(flushed) if not is_folder)
    assert any(is_folder for _, is_folder, _ in flushed[last_file + 1 :])
    assert all(tasks == 0 for _, _, tasks in flushed)
