"""The annotations of one image in COCO's format as an annotation file of SA-1B, with their origin.

    {"image": ..., "annotations": [...], "provenance": {...}}

The masks are runs, as in every annotation file. Polygons become the pixels that pycocotools gives. Fields
that COCO's format lacks have default values: the scores are 1, the prompt point is the middle one of the
foreground pixels in the order of the runs, and the crop is the image. Annotations without a mask are returned
with the reason.
"""

import datetime
import json
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np

from sa1b.arguments import BadType
from sa1b.masks import coco, geometry
from sa1b.masks.coco import encode_polygons
from sa1b.masks.geometry import nth_foreground
from sa1b.masks.runs import MaskError, Runs
from sa1b.names import ID_END, member_name

_LARGEST = 1e300
_DROPPED = ("segmentation", "image_id")  # keys of an annotation that the pair has in another form


@dataclass(slots=True)
class _Mask:
    """An annotation that may become a mask."""

    annotation: dict[str, Any]
    form: str
    text: str = ""


@dataclass(slots=True)
class CocoPair:
    """The annotation file of one image."""

    text: bytes = b""  # its bytes, JSON
    refused: dict[str, list[Any]] = field(default_factory=dict)  # reason -> what is not in it
    messages: dict[str, str] = field(default_factory=dict)  # reason -> message about the first of them

    def refuse(self, reason: str, annotation: Any, message: str) -> None:
        """Leave an annotation out."""
        self.refused.setdefault(reason, []).append(annotation)
        self.messages.setdefault(reason, f"annotation {_name(annotation)}: {message}")


def json_text(value: Any, *, ensure_ascii: bool = True) -> str:
    """JSON with null for NaN and infinite numbers, and ISO text for dates; TypeError: no form in JSON."""
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii, allow_nan=False, default=_iso)
    except ValueError:
        finite = json.loads(json.dumps(value, default=_iso), parse_constant=lambda _: None)
        return json.dumps(finite, ensure_ascii=ensure_ascii)


def _iso(value: Any) -> str:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    raise BadType(f"{type(value).__name__} has no form in JSON")


def image_entry(image_id: int, height: int, width: int) -> dict[str, Any]:
    """The object `image` of an annotation file of SA-1B."""
    file_name = member_name(image_id, "jpg")
    return {"image_id": image_id, "width": width, "height": height, "file_name": file_name}


def coco_pair(
    image_id: int,
    height: int,
    width: int,
    annotations: list[Any],
    categories: dict[int | str, str],
    provenance: dict[str, Any],
) -> CocoPair:
    """Convert the annotations of an image, given by its id in the dataset directory and its pixels.

    `annotations` are objects of the COCO file, `categories` id -> name, and `provenance` the keys of this
    object beside `masks`.
    """
    pair = CocoPair()
    masks = [
        mask for annotation in annotations if (mask := _mask(pair, annotation, height, width)) is not None
    ]
    _rasterize(pair, masks, height, width)
    masks = [mask for mask in masks if mask.text]
    _check_strings(pair, masks, height, width)
    masks = [mask for mask in masks if mask.text]
    runs = coco.decode([mask.text for mask in masks], height, width)
    area = geometry.area(runs)
    for mask in (mask for mask, pixels in zip(masks, area.tolist(), strict=True) if not pixels):
        pair.refuse("empty_mask", mask.annotation, "the mask has no pixel")
    stored = np.flatnonzero(area)
    runs, area = runs.select(stored), area[stored]
    masks = [masks[index] for index in stored.tolist()]
    boxes = geometry.bbox_sa1b(runs).astype(np.float64)
    points = nth_foreground(runs, area // 2) + 0.5
    defaults: set[str] = set()
    document = {
        "image": image_entry(image_id, height, width),
        "annotations": [
            {
                "bbox": box,
                "area": pixels,
                "segmentation": {"size": [height, width], "counts": mask.text},
                "predicted_iou": _score(mask, "predicted_iou", defaults),
                "point_coords": [_numbers(mask, "point_coords", [point], 2, defaults)],
                "crop_box": _numbers(
                    mask, "crop_box", [[0.0, 0.0, float(width), float(height)]], 4, defaults
                ),
                "id": _mask_id(mask),
                "stability_score": _score(mask, "stability_score", defaults),
            }
            for mask, box, pixels, point in zip(
                masks, boxes.tolist(), area.tolist(), points.tolist(), strict=True
            )
        ],
        "provenance": {
            **provenance,
            "defaults": sorted(defaults),
            "masks": [_origin(mask, categories) for mask in masks],
        },
    }
    pair.text = json_text(document).encode()
    return pair


def _mask(pair: CocoPair, annotation: Any, height: int, width: int) -> _Mask | None:
    """The annotation with its string if it has one; None if it is refused."""
    if not isinstance(annotation, dict):
        pair.refuse("bad_annotation", annotation, "not an object")
        return None
    for key in ("predicted_iou", "stability_score"):
        if (score := _stated(annotation, key)) is not None and not _is_number(score):
            message = f"a score is {str(score)[:60]!r}, not a number; write a number, or remove it to have 1"
            pair.refuse("bad_score", annotation, message)
            return None
    segmentation = annotation.get("segmentation")
    if not segmentation:
        pair.refuse("no_segmentation", annotation, "no segmentation; a box alone is not a mask")
        return None
    if isinstance(segmentation, list):
        return _Mask(annotation, "polygons")
    if not isinstance(segmentation, dict) or not isinstance(segmentation.get("counts"), str | list):
        message = "segmentation is neither a list of polygons nor an object with size and counts"
        pair.refuse("bad_segmentation", annotation, message)
        return None
    if segmentation.get("size") != [height, width]:
        message = (
            f"segmentation size is {str(segmentation.get('size'))[:60]}, the image has {[height, width]}"
        )
        pair.refuse("mask_size", annotation, message)
        return None
    counts = segmentation["counts"]
    mask = _Mask(annotation, "rle" if isinstance(counts, str) else "counts")
    if isinstance(counts, str):
        mask.text = counts or " "  # refused later, like a string that does not decode
        return mask
    numbers = set(map(type, counts)) <= {int} and min(counts, default=-1) >= 0
    if not numbers or sum(counts) != height * width:
        message = f"counts are not {height * width:,} pixels in integers from 0"
        pair.refuse("bad_rle", annotation, message)
        return None
    runs = Runs(np.array(counts, np.uint32), np.array([0, len(counts)]), height, width)
    mask.text = coco.encode(runs)[0].decode("ascii")
    return mask


def _rasterize(pair: CocoPair, masks: list[_Mask], height: int, width: int) -> None:
    """Set the strings of the masks of polygons; a refused one keeps an empty string."""
    for mask in masks:
        if mask.form != "polygons":
            continue
        parts = mask.annotation["segmentation"]
        polygons = [part for part in parts if not (isinstance(part, list) and len(part) < 6)]
        if short := len(parts) - len(polygons):
            what = f"{short:,} of {len(parts):,} polygons" if polygons else "every polygon"
            pair.refuse("short_polygon", mask.annotation, f"{what} with fewer than three vertices left out")
        if polygons:
            try:
                mask.text = encode_polygons(polygons, height, width).decode("ascii")
            except MaskError as error:
                pair.refuse(error.reason, mask.annotation, str(error).partition(": ")[2])


def _check_strings(pair: CocoPair, masks: list[_Mask], height: int, width: int) -> None:
    verdicts = coco.reasons([mask.text for mask in masks], height, width)
    for mask, verdict in zip(masks, verdicts, strict=True):
        if verdict != "valid":
            pair.refuse("bad_rle", mask.annotation, f"the string of its segmentation: {verdict}")
            mask.text = ""


def _score(mask: _Mask, key: str, defaults: set[str]) -> float:
    score = _stated(mask.annotation, key)
    if score is None:
        defaults.add(key)
        return 1.0
    return float(score)


def _stated(annotation: dict[str, Any], key: str) -> Any:
    """The annotation's own value of a score of SA-1B, or a detector's `score` for predicted_iou, or None."""
    score = annotation.get(key)
    return annotation.get("score") if score is None and key == "predicted_iou" else score


def _numbers(
    mask: _Mask, key: str, default: list[list[float]], length: int, defaults: set[str]
) -> list[float]:
    """The annotation's own value of a row of numbers, or the default."""
    numbers = mask.annotation.get(key)
    if length == 2 and isinstance(numbers, list) and len(numbers) == 1:
        numbers = numbers[0]
    if isinstance(numbers, list) and len(numbers) == length and all(map(_is_number, numbers)):
        return [float(value) for value in numbers]
    defaults.add(key)
    return default[0]


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and abs(value) <= _LARGEST  # larger integers do not fit a float


def _mask_id(mask: _Mask) -> int:
    for key in ("mask_id", "id"):  # mask_id: in files that sa1b export writes
        if type(mask_id := mask.annotation.get(key)) is int and -ID_END <= mask_id < ID_END:
            return mask_id
    return -1


def _origin(mask: _Mask, categories: dict[int | str, str]) -> dict[str, Any]:
    """The fields of an annotation in the COCO file besides its mask."""
    origin = {key: value for key, value in mask.annotation.items() if key not in _DROPPED}
    key = origin.get("category_id")
    if isinstance(key, int | str) and key in categories:
        origin["category"] = categories[key]
    return {**origin, "segmentation": mask.form}


def _name(annotation: Any) -> str:
    annotation_id = annotation.get("id") if isinstance(annotation, dict) else annotation
    return "without an id" if annotation_id is None else str(annotation_id)[:60]
