"""The annotation file of an image, in SA-1B's usual form, and the ids in it."""

import hashlib
import json

import numpy as np
import numpy.typing as npt

from sa1b.errors import BadSample
from sa1b.hashing import Purpose, random_words
from sa1b.masks import coco, geometry
from sa1b.sam.mask_generator import GeneratedMasks
from sa1b.shards.annotation import MAX_JSON_BYTES, Annotations

_ID_BITS = 52


def content_id(data: bytes) -> int:
    """An image id from the bytes of its file: 2**52 plus the first 52 bits of their SHA-256.

    The ids of SA-1B are far smaller, and float64 represents all ids exactly. Two of a million different
    images have the same id with a probability of 1 in 9,000.
    """
    first = int.from_bytes(hashlib.sha256(data).digest()[:8]) >> (64 - _ID_BITS)
    return (1 << _ID_BITS) + first


def mask_ids(image_id: int, count: int) -> npt.NDArray[np.int64]:
    """Ids of the masks of an image: int64 [count], hashes of image id and index, below 2**63."""
    words = random_words(0, Purpose.MASK_ID, image_id, np.arange(count, dtype=np.int64))
    return (words >> np.uint64(1)).astype(np.int64)


def annotation_file(image_id: int, masks: GeneratedMasks) -> bytes:
    """The JSON file of an image in SA-1B's form; BadSample if it is larger than `sa1b reshard` accepts."""
    runs, count = masks.runs, len(masks)
    text, lengths = coco.encode_joined(runs)
    columns = Annotations(
        image_id=image_id,
        width=runs.width,
        height=runs.height,
        mask_id=mask_ids(image_id, count),
        area=geometry.area(runs),
        bbox=geometry.bbox_sa1b(runs).astype(np.float64),
        predicted_iou=masks.predicted_iou.astype(np.float64),
        stability_score=masks.stability_score.astype(np.float64),
        point_coords=masks.points,
        crop_box=masks.crop_boxes.astype(np.float64),
        number_types=np.zeros(count, np.uint8),
        rle=text,
        rle_bytes=lengths.astype(np.uint32),
        runs_count=np.diff(runs.offsets).astype(np.uint32),
    )
    document = json.dumps(columns.to_json()).encode()
    if len(document) > MAX_JSON_BYTES:
        raise BadSample(
            "json_too_large",
            f"{count:,} masks make an annotation file of {len(document):,} bytes, cap {MAX_JSON_BYTES:,}; "
            "raise --min-predicted-iou or --min-stability",
        )
    return document
