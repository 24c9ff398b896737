"""What a model draws beside the true masks: read from a file that training writes.

One line of JSON an image: {"image_id": 7, "masks": [{"mask_id": ..., "point": [x, y], "iou": ...,
"predicted_iou": ..., "segmentation": {"size": [height, width], "counts": "..."}}, ...]}; masks as strings
of COCO at source resolution, the point that asked for the mask in source pixels.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.errors import UsageError
from sa1b.masks import coco
from sa1b.masks.runs import Runs


@dataclass(frozen=True, slots=True, eq=False)
class Predicted:
    """The masks that a model drew for some masks of an image, N of them.

    Attributes:
        mask_id: int64 [N], of the true masks.
        points: float64 [N, 2], x and y in source pixels.
        iou: float64 [N], with the true mask; predicted_iou: what the model expects of it.
        runs: at source resolution.
    """

    mask_id: npt.NDArray[np.int64]
    points: npt.NDArray[np.float64]
    iou: npt.NDArray[np.float64]
    predicted_iou: npt.NDArray[np.float64]
    runs: Runs

    def line(self, image_id: int) -> str:
        """The line of the file."""
        size = [self.runs.height, self.runs.width]
        masks = [
            {
                "mask_id": mask_id,
                "point": [round(x, 2) for x in point],
                "iou": round(iou, 4),
                "predicted_iou": round(predicted, 4),
                "segmentation": {"size": size, "counts": counts.decode("ascii")},
            }
            for mask_id, point, iou, predicted, counts in zip(
                self.mask_id.tolist(),
                self.points.tolist(),
                self.iou.tolist(),
                self.predicted_iou.tolist(),
                coco.encode(self.runs),
                strict=True,
            )
        ]
        return json.dumps({"image_id": image_id, "masks": masks}) + "\n"


def read_predictions(path: Path) -> dict[int, Predicted]:
    """Image id -> what was drawn for it, in the order of the file.

    Raises:
        UsageError: not such a file; the message names the line.
        OSError: it cannot be read.
    """
    found: dict[int, Predicted] = {}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                document = json.loads(line)
                found[int(document["image_id"])] = _parse(document["masks"])
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise UsageError(
                    f"{path}: line {number} is no prediction ({error!r}); "
                    "`sa1b train` writes predictions.jsonl into its --out folder"
                ) from None
    if not found:
        raise UsageError(f"{path}: holds no prediction")
    return found


def _parse(masks: list[dict[str, Any]]) -> Predicted:
    height, width = masks[0]["segmentation"]["size"]
    if any(mask["segmentation"]["size"] != [height, width] for mask in masks):
        raise ValueError("masks of different sizes")
    return Predicted(
        mask_id=np.array([mask["mask_id"] for mask in masks], np.int64),
        points=np.array([mask["point"] for mask in masks], np.float64).reshape(-1, 2),
        iou=np.array([mask["iou"] for mask in masks], np.float64),
        predicted_iou=np.array([mask["predicted_iou"] for mask in masks], np.float64),
        runs=coco.decode([mask["segmentation"]["counts"] for mask in masks], height, width),
    )
