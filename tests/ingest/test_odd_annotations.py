"""An annotation file that is odd but readable is kept exactly, and listed."""

import json
import math

import pytest

from tests.ingest.bad_pairs import ALL, BAD, HEIGHT, WIDTH, changed, mask_changed, with_counts
from tests.shards.tiny import SIZE, counts_from, document, encode, pair


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (mask_changed(area=7), "area"),
        (mask_changed(area=-7), "area"),
        (mask_changed(bbox=[1.0, 2.0, 3.5, 4.0]), "bbox"),
        (mask_changed(bbox=[math.nan] * 4), "bbox"),
        (mask_changed(bbox=[-1.0, 1e308, math.inf, -0.0]), "bbox"),
        (mask_changed(predicted_iou=-0.5), "predicted_iou"),
        (mask_changed(predicted_iou=math.nan), "predicted_iou"),
        (mask_changed(stability_score=1e9), "stability_score"),
        (mask_changed(point_coords=[[-1.0, 5.0]]), "point_coords"),
        (mask_changed(crop_box=[0.0, 0.0, 10_000.0, 1.0]), "crop_box"),
        (mask_changed(crop_box=[0.0, 0.0, 0.0, 1.0]), "crop_box"),
        (mask_changed(crop_box=[2**60, 0, 1, 1]), "crop_box"),
    ],
    ids=range(12),
)
def test_numbers_that_disagree_with_mask_or_image_are_kept_and_listed(kept, text, reason):
    found = kept(text=text)
    assert set(found) == {reason}
    assert found[reason].startswith("mask 1: ")


def test_an_odd_number_names_what_it_should_be(kept):
    area = document(BAD)["annotations"][1]["area"]
    assert kept(text=mask_changed(area=7)) == {"area": f"mask 1: area 7, the mask says {area}"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"area": 12.0}, "type_area"),
        ({"area": True}, "type_area"),
        ({"area": None}, "type_area"),
        ({"area": 2**63}, "type_area"),
        ({"area": 10**400}, "type_area"),
        ({"id": 2**63}, "type_id"),
        ({"id": "5"}, "type_id"),
        ({"id": 5.0}, "type_id"),
        ({"bbox": [1.0, 2.0, 3.0]}, "type_bbox"),
        ({"bbox": []}, "type_bbox"),
        ({"bbox": "1234"}, "type_bbox"),
        ({"bbox": {"a": 1, "b": 2, "c": 3, "d": 4}}, "type_bbox"),
        ({"bbox": [True, False, True, False]}, "type_bbox"),
        ({"bbox": [10**400] * 4}, "type_bbox"),
        ({"predicted_iou": "0.9"}, "type_predicted_iou"),
        ({"predicted_iou": [0.9]}, "type_predicted_iou"),
        ({"stability_score": False}, "type_stability_score"),
        ({"point_coords": [5.0, 5.0]}, "type_point_coords"),
        ({"point_coords": []}, "type_point_coords"),
        ({"point_coords": [[5.0, 5.0], [6.0, 6.0]]}, "type_point_coords"),
        ({"point_coords": [["a", "b"]]}, "type_point_coords"),
        ({"crop_box": [0.0, 0.0, 64.0, 48.0, 5.0], "point_coords": [[5.0]]}, "type_crop_box"),
        ({"crop_box": [0.0, 0.0, 64.0], "point_coords": [[5.0, 5.0, 5.0]]}, "type_crop_box"),
        ({"crop_box": None}, "type_crop_box"),
    ],
    ids=range(24),
)
def test_values_of_a_wrong_type_are_kept_and_listed(kept, change, reason):
    assert reason in kept(text=mask_changed(**change))


@pytest.mark.parametrize(
    "change",
    [
        {"id": -1},
        {"id": -(2**63)},
        {"id": 2**63 - 1},
        {"predicted_iou": 1.0195},
        {"predicted_iou": 0.1},
        {"predicted_iou": 5e-324},
        {"stability_score": -0.0},
    ],
    ids=range(7),
)
def test_unusual_values_of_the_right_type_are_nothing_to_list(kept, change):
    assert kept(text=mask_changed(**change)) == {}


def integers(values):
    return [int(value) for value in values]


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: {"bbox": integers(mask["bbox"])},
        lambda mask: {"bbox": [*integers(mask["bbox"][:2]), *mask["bbox"][2:]]},
        lambda mask: {"crop_box": integers(mask["crop_box"])},
        lambda mask: {"crop_box": [*integers(mask["crop_box"][:1]), *mask["crop_box"][1:]]},
        lambda mask: {"predicted_iou": 1},
        lambda mask: {"stability_score": 1},
        lambda mask: {"point_coords": [integers(mask["point_coords"][0])]},
    ],
    ids=["bbox", "bbox in part", "crop_box", "crop_box in part", "iou", "stability", "point"],
)
def test_integers_and_floats_may_mix_and_come_back_as_they_were(kept, change):
    mask = document(BAD)["annotations"][1]
    assert kept(text=mask_changed(**change(mask))) == {}


def respelled(old, new):
    text = pair(BAD)[1]
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    "text",
    [
        encode(dict(reversed(document(BAD).items()))),
        changed(note="héé 😀"),
        mask_changed(uncertain_iou=0.9),
        encode(document(BAD) | {"info": {"list": [1, 2.0, None, True, {"a": []}]}}),
        encode(
            document(BAD) | {"annotations": [dict(reversed(m.items())) for m in document(BAD)["annotations"]]}
        ),
        encode(
            document(BAD)
            | {
                "annotations": [
                    {k: v for k, v in m.items() if k != "area"} for m in document(BAD)["annotations"]
                ]
            }
        ),
        encode(
            document(BAD)
            | {"annotations": [{"segmentation": m["segmentation"]} for m in document(BAD)["annotations"]]}
        ),
    ],
    ids=["order", "image key", "mask key", "top key", "mask order", "no area", "segmentation only"],
)
def test_unknown_missing_and_reordered_keys_are_kept_and_listed(kept, text):
    assert "keys" in kept(text=text)


@pytest.mark.parametrize("name", ["sa_501.jpg", "../../etc/passwd", "", None, 5, ["a"]], ids=repr)
def test_another_file_name_in_the_annotation_is_kept_and_listed(kept, name):
    assert set(kept(text=changed(file_name=name))) == {"file_name"}


@pytest.mark.parametrize(
    "text",
    [respelled(b'"area": ', b'"area": 5, "area": '), respelled(b'"width": ', b'"width": 9999, "width": ')],
)
def test_a_key_that_stands_twice_is_read_as_json_does_and_listed(kept, text):
    assert set(kept(text=text)) == {"duplicate_key"}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(document(BAD), indent=2).encode(),
        json.dumps(document(BAD), separators=(",", ":")).encode() + b"\n",
        respelled(b'"area"', b'"\\u0061rea"'),
        b"\xef\xbb\xbf" + pair(BAD)[1],
    ],
    ids=["indented", "compact", "escaped", "byte order mark"],
)
def test_another_spelling_of_the_same_json_is_nothing_to_list(kept, text):
    assert kept(text=text) == {}


def test_a_coco_string_that_is_not_canonical_is_kept_verbatim(kept):
    mask = document(BAD)["annotations"][1]
    counts = mask["segmentation"]["counts"]
    last = ord(counts[-1]) - 48
    longer = counts[:-1] + chr(48 + last % 32 + 32) + ("O" if last & 16 else "0")  # one character more
    assert kept(text=with_counts(longer)) == {}


def test_runs_of_length_zero_are_kept_verbatim(kept):
    found = document(BAD)
    runs = [0, 0, 0, HEIGHT, ALL - HEIGHT]
    found["annotations"] = [
        found["annotations"][0]
        | {
            "segmentation": {"size": list(SIZE), "counts": counts_from(runs, *SIZE)},
            "area": HEIGHT,
            "bbox": [0.0, 0.0, 0.0, HEIGHT - 1.0],
        }
    ]
    assert kept(text=encode(found)) == {}


def test_an_image_without_masks_is_kept(kept):
    assert kept(text=encode(document(BAD, masks=0))) == {}


def test_an_empty_mask_is_kept_and_listed(kept):
    empty = counts_from([ALL], *SIZE)
    text = mask_changed(segmentation={"size": list(SIZE), "counts": empty}, area=0, bbox=[0.0, 0.0, 0.0, 0.0])
    assert set(kept(text=text)) == {"empty_mask"}


def test_a_full_mask_is_kept(kept):
    text = mask_changed(
        segmentation={"size": list(SIZE), "counts": counts_from([0, ALL], *SIZE)},
        area=ALL,
        bbox=[0.0, 0.0, WIDTH - 1.0, HEIGHT - 1.0],
    )
    assert kept(text=text) == {}


def test_what_a_file_says_cannot_forge_lines_or_drive_a_terminal(bad_pair):
    nasty = "\x1b[2J\r\nFAILED sa_000021: \ud800" + "x" * 100_000
    outcome = bad_pair(text=mask_changed(predicted_iou=nasty))
    (line,) = [line for line in outcome.warnings if line["reason"] == "type_predicted_iou"]
    assert line["message"].isprintable()
    assert len(line["message"]) < 600
