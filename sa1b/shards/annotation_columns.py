"""The list of masks of an annotation file as columns, with a fast path for files in the usual form."""

from functools import partial
from typing import Any

import numpy as np

from sa1b.errors import BadSample
from sa1b.shards.image_warnings import ImageWarnings

MASK_KEYS = (
    "bbox",
    "area",
    "segmentation",
    "predicted_iou",
    "point_coords",
    "crop_box",
    "id",
    "stability_score",
)
BBOX_IS_INT, CROP_BOX_IS_INT = 1, 2
EXACT_INT = 2**53  # smaller integers are exact in float64; 2**53 + 1 is rounded to this number


def usual_columns(masks: list[Any], height: int, width: int) -> dict[str, Any] | None:
    """Columns of a list if every annotation has the usual keys and types; otherwise None."""
    signatures = _SIGNATURES
    size = [height, width]
    rows = []
    kinds = []
    try:
        for mask in masks:
            if tuple(mask) != MASK_KEYS:
                return None
            bbox, area, segmentation, predicted_iou, points, crop_box, mask_id, stability = mask.values()
            if len(points) != 1 or tuple(segmentation) != ("size", "counts") or segmentation["size"] != size:
                return None
            row = (
                *bbox,
                *crop_box,
                *points[0],
                predicted_iou,
                stability,
                area,
                mask_id,
                segmentation["counts"],
            )
            kind = signatures.get((len(bbox), len(crop_box), *map(type, (*segmentation["size"], *row))))
            if kind is None:
                return None
            rows.append(row)
            kinds.append(kind)
        numbers = np.array([row[:12] for row in rows], np.float64).reshape(-1, 12)
        area_and_id = np.array([row[12:14] for row in rows], np.int64).reshape(-1, 2)
    except (TypeError, ValueError, OverflowError, AttributeError, KeyError):
        return None
    number_types = np.array(kinds, np.uint8)
    # The comparison is also False if a neighbouring number is NaN or infinite.
    if not (np.abs(numbers[number_types > 0, :8]) < EXACT_INT).all():
        return None
    return {
        "bbox": numbers[:, :4].copy(),
        "crop_box": numbers[:, 4:8].copy(),
        "point_coords": numbers[:, 8:10].copy(),
        "predicted_iou": numbers[:, 10].copy(),
        "stability_score": numbers[:, 11].copy(),
        "area": area_and_id[:, 0].copy(),
        "mask_id": area_and_id[:, 1].copy(),
        "number_types": number_types,
        "strings": [row[14] for row in rows],
    }


def _signatures() -> dict[tuple[object, ...], int]:
    """Types of a flattened annotation -> its number_types; lengths distinguish bbox, crop_box and point."""
    signatures: dict[tuple[object, ...], int] = {}
    for kind in range(4):
        bbox = (int if kind & BBOX_IS_INT else float,) * 4
        crop_box = (int if kind & CROP_BOX_IS_INT else float,) * 4
        signatures[(4, 4, int, int, *bbox, *crop_box, *(float,) * 4, int, int, str)] = kind
    return signatures


_SIGNATURES = _signatures()


def unusual_columns(masks: list[Any], height: int, width: int, warnings: ImageWarnings) -> dict[str, Any]:
    """Columns of a list with odd values: values that cannot be read become NaN or -1."""
    count = len(masks)
    columns: dict[str, Any] = {
        "bbox": np.full((count, 4), np.nan),
        "crop_box": np.full((count, 4), np.nan),
        "point_coords": np.full((count, 2), np.nan),
        "predicted_iou": np.full(count, np.nan),
        "stability_score": np.full(count, np.nan),
        "area": np.full(count, -1, np.int64),
        "mask_id": np.full(count, -1, np.int64),
        "number_types": np.zeros(count, np.uint8),
        "strings": [],
    }
    for i, mask in enumerate(masks):
        columns["strings"].append(_counts(mask, i, height, width))
        if tuple(mask) != MASK_KEYS:
            warnings.add_masks("keys", [i], partial(_describe_keys, i, mask))
        for key in MASK_KEYS:
            if key == "segmentation" or key not in mask:
                continue
            name = "mask_id" if key == "id" else key
            try:
                value = _number(mask[key], columns[name][i])
            except (TypeError, ValueError, OverflowError):
                warnings.add_masks(
                    f"type_{key}",
                    [i],
                    partial(_describe_value, i, key, mask),
                )
            else:
                columns[name][i] = value
    return columns


def _describe_keys(i: int, mask: dict[str, Any]) -> str:
    return f"mask {i}: keys {list(mask)}"


def _describe_value(i: int, key: str, mask: dict[str, Any]) -> str:
    return f"mask {i}: {key} is {str(mask[key])[:80]}"


def _counts(mask: Any, i: int, height: int, width: int) -> str:
    """The COCO string of one annotation, after a check of its size."""
    if not isinstance(mask, dict):
        raise BadSample("wrong_type", f"mask {i} is {name_of(mask)}, not an object")
    segmentation = mask.get("segmentation")
    if not isinstance(segmentation, dict) or "size" not in segmentation or "counts" not in segmentation:
        raise BadSample("missing_key", f"mask {i} has no segmentation with size and counts")
    size, counts = segmentation["size"], segmentation["counts"]
    if not isinstance(counts, str):
        raise BadSample("wrong_type", f"mask {i}: segmentation counts is {name_of(counts)}, not a string")
    if not isinstance(size, list) or [type(v) for v in size] != [int, int] or size != [height, width]:
        raise BadSample(
            "mask_size", f"mask {i}: segmentation size is {size}, the image has {[height, width]}"
        )
    return counts


def _number(value: Any, like: Any) -> Any:
    """`value` with the shape of `like`, a scalar or a row; the outer list of point_coords is removed."""
    row = isinstance(like, np.ndarray)
    if row and len(like) == 2:
        (value,) = value
    items = value if row else [value]
    if not isinstance(items, list) or any(type(v) not in (int, float) for v in items):
        raise TypeError
    if isinstance(like, np.integer) and type(value) is not int:
        raise TypeError
    array = np.array(items, like.dtype)
    if row and array.shape != like.shape:
        raise ValueError
    return array if row else array[0]


def name_of(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
