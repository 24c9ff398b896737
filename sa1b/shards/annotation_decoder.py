"""A typed decoder for the usual form of an annotation file; other forms are left to `json`.

`json.loads` reads every document that this decoder accepts to the same values and types, with each of the
usual keys once and in the usual order. For every other document the decoder returns None: other keys,
repeated or reordered keys, numbers of another type, escapes in keys, NaN, or values that columns cannot hold.

A file of 63 kB with 100 masks takes 0.37 ms; `json.loads` and the checks of annotation_columns take 0.75 ms.
"""

from itertools import chain
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sa1b.names import member_name
from sa1b.shards.annotation_columns import BBOX_IS_INT, CROP_BOX_IS_INT, EXACT_INT

_Number = int | float  # 1 is decoded as an int, 1.0 as a float
_Four = tuple[_Number, _Number, _Number, _Number]


class _Image(msgspec.Struct, gc=False):
    image_id: _Number
    width: _Number
    height: _Number
    file_name: str


class _Segmentation(msgspec.Struct, gc=False):
    size: tuple[_Number, _Number]
    counts: str


class _Mask(msgspec.Struct, gc=False):
    bbox: _Four
    area: _Number
    segmentation: _Segmentation
    predicted_iou: _Number
    point_coords: tuple[tuple[_Number, _Number]]
    crop_box: _Four
    id: _Number
    stability_score: _Number


class _Document(msgspec.Struct, gc=False):
    image: _Image
    annotations: list[_Mask]


_DECODER = msgspec.json.Decoder(_Document)
_QUOTE = ord('"')


def _signature(strings: list[str]) -> npt.NDArray[np.int64]:
    """Length and first byte of each string, [N, 2]: enough to distinguish the usual keys."""
    return np.array([(len(string), ord(string[0])) for string in strings], np.int64)


_FILE_NAME = 5  # position of file_name's value among the strings before the first mask
_COUNTS = 5  # position of the COCO string among the strings of a mask
_HEAD = _signature(["image", "image_id", "width", "height", "file_name", "annotations"])
_KEYS = _signature(
    [
        *("bbox", "area", "segmentation", "size", "counts"),
        *("predicted_iou", "point_coords", "crop_box", "id", "stability_score"),
    ]
)


def decode_usual(text: bytes, image_id: int, max_pixels: int) -> tuple[int, int, dict[str, Any]] | None:
    """Height, width and the columns of `usual_columns` for a file in the usual form, else None.

    Args:
        max_pixels: limit of the image; a larger one returns None.
    """
    try:
        document = _DECODER.decode(text)
    except (ValueError, RecursionError):  # ValueError: not in the usual form, or not UTF-8
        return None
    image, masks = document.image, document.annotations
    height, width = image.height, image.width
    if {type(image.image_id), type(height), type(width)} != {int}:
        return None
    if image.image_id != image_id or image.file_name != member_name(image_id, "jpg"):
        return None
    if not (isinstance(height, int) and isinstance(width, int) and height > 0 and width > 0):
        return None
    if height * width > max_pixels or not _in_usual_order(text, len(masks)):
        return None
    columns = _columns(masks, (height, width))
    return None if columns is None else (height, width, columns)


def _in_usual_order(text: bytes, masks: int) -> bool:
    """Whether a document with all usual keys has them in order, each once, and no other strings."""
    data = np.frombuffer(text, np.uint8)
    quotes = np.flatnonzero(data == _QUOTE)
    # All usual keys are present, so additional quotes are other keys, repeated keys or quotes in a string.
    if len(quotes) != 14 + 22 * masks:
        return False
    starts = quotes[::2] + 1
    found = np.stack([quotes[1::2] - starts, data[starts]], axis=1)
    head, rest = np.delete(found[:7], _FILE_NAME, axis=0), found[7:].reshape(masks, 11, 2)
    before, after = rest[:, :_COUNTS], rest[:, _COUNTS + 1 :]
    return bool(
        (head == _HEAD).all() and (before == _KEYS[:_COUNTS]).all() and (after == _KEYS[_COUNTS:]).all()
    )


def _columns(masks: list[_Mask], size: tuple[int, int]) -> dict[str, Any] | None:
    sizes = [mask.segmentation.size for mask in masks]
    areas, ids = [mask.area for mask in masks], [mask.id for mask in masks]
    if not set(map(type, chain(areas, ids, *sizes))) <= {int} or set(sizes) - {size}:
        return None
    scores = [*[mask.predicted_iou for mask in masks], *[mask.stability_score for mask in masks]]
    points = list(chain.from_iterable([mask.point_coords[0] for mask in masks]))
    if not set(map(type, chain(scores, points))) <= {float}:
        return None
    count = len(masks)
    number_types = np.zeros(count, np.uint8)
    boxes = {}
    try:
        for name, bit, values in (
            ("bbox", BBOX_IS_INT, [mask.bbox for mask in masks]),
            ("crop_box", CROP_BOX_IS_INT, [mask.crop_box for mask in masks]),
        ):
            flat = list(chain.from_iterable(values))
            box = boxes[name] = np.array(flat, np.float64).reshape(count, 4)
            kinds = list(map(type, flat))
            if int in kinds:
                integer = np.fromiter((kind is int for kind in kinds), np.bool_, len(kinds)).reshape(count, 4)
                whole = integer.all(axis=1)
                if (integer.any(axis=1) != whole).any() or not (np.abs(box[whole]) < EXACT_INT).all():
                    return None
                number_types[whole] |= bit
        area, mask_id = np.array(areas, np.int64), np.array(ids, np.int64)
    except OverflowError:
        return None
    return {
        **boxes,
        "point_coords": np.array(points, np.float64).reshape(count, 2),
        "predicted_iou": np.array(scores[:count], np.float64),
        "stability_score": np.array(scores[count:], np.float64),
        "area": area,
        "mask_id": mask_id,
        "number_types": number_types,
        "strings": [mask.segmentation.counts for mask in masks],
    }
