"""Annotations for given masks, in the form of a mask record."""

import numpy as np
import numpy.typing as npt

from sa1b.shards import annotation
from sa1b.shards.annotation import Annotations
from tests.shards import tiny


def annotations_of(masks: npt.NDArray[np.bool_], image_id: int = 5) -> Annotations:
    """The annotations of masks bool [N, H, W]; scores from 0.9 down."""
    _, height, width = masks.shape
    found = []
    for i, mask in enumerate(masks):
        ys, xs = np.nonzero(mask)
        bbox = [xs.min(), ys.min(), np.ptp(xs), np.ptp(ys)] if len(xs) else [0, 0, 0, 0]
        found.append(
            {
                "bbox": [float(v) for v in bbox],
                "area": int(mask.sum()),
                "segmentation": {"size": [height, width], "counts": tiny.counts_of(mask)},
                "predicted_iou": 0.9 - 0.01 * i,
                "point_coords": [[0.0, 0.0]],
                "crop_box": [0.0, 0.0, float(width), float(height)],
                "id": 1000 * image_id + i,
                "stability_score": 0.95,
            }
        )
    image = {"image_id": image_id, "width": width, "height": height, "file_name": f"sa_{image_id}.jpg"}
    text = tiny.encode({"image": image, "annotations": found})
    return annotation.parse_annotation(text, image_id).annotations
