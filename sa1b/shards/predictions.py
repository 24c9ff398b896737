"""Masks that a model predicted, from the file predictions.jsonl that training writes.

The file has one line of JSON per image: {"image_id": 7, "masks": [{"mask_id": ..., "point": [x, y],
"iou": ..., "predicted_iou": ..., "segmentation": {"size": [height, width], "counts": "..."}}, ...]}.
Masks are COCO strings at source resolution. `point` is the prompt, in source pixels. If the prompt is
a phrase, it is in "phrase", the point is in the true mask, and "predicted_iou" is the probability of the
region.
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
from sa1b.names import ID_END


@dataclass(frozen=True, slots=True, eq=False)
class Predicted:
    """The masks that a model predicted for N masks of an image."""

    mask_id: npt.NDArray[np.int64]  # of the true mask
    points: npt.NDArray[np.float64]  # the prompts, x and y in source pixels
    iou: npt.NDArray[np.float64]  # with the true masks
    predicted_iou: npt.NDArray[np.float64]  # the model's estimate
    runs: Runs  # at source resolution
    phrases: tuple[str, ...] = ()  # empty if points were the prompts

    def line(self, image_id: int) -> str:
        size = [self.runs.height, self.runs.width]
        masks: list[dict[str, Any]] = [
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
        for mask, phrase in zip(masks, self.phrases, strict=False):
            mask["phrase"] = phrase
        return json.dumps({"image_id": image_id, "masks": masks}) + "\n"


def read_predictions(path: Path) -> dict[int, Predicted]:
    """Image id -> predicted masks, in the order of the file; UsageError names the line of another format."""
    predictions: dict[int, Predicted] = {}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                document = json.loads(line)
                image_id = int(document["image_id"])
                if not 0 <= image_id < ID_END:
                    raise ValueError("image_id must be from 0 to 2**63 - 1")
                predictions[image_id] = _parse(document["masks"])
            except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
                raise UsageError(
                    f"{path}: line {number} is no prediction ({type(error).__name__}: {error}); pass the "
                    "predictions.jsonl that `sa1b train` writes to its --out folder"
                ) from None
    if not predictions:
        raise UsageError(
            f"{path}: has no predictions; pass the predictions.jsonl that `sa1b train` writes to its --out "
            "folder"
        )
    return predictions


def _parse(masks: list[dict[str, Any]]) -> Predicted:
    height, width = masks[0]["segmentation"]["size"]
    if any(mask["segmentation"]["size"] != [height, width] for mask in masks):
        raise ValueError("masks of different sizes")
    phrases = tuple(str(mask["phrase"]) for mask in masks if "phrase" in mask)
    if len(phrases) not in (0, len(masks)):
        raise ValueError("masks with and without a phrase")
    return Predicted(
        mask_id=np.array([mask["mask_id"] for mask in masks], np.int64),
        points=np.array([mask["point"] for mask in masks], np.float64).reshape(len(masks), 2),
        iou=np.array([mask["iou"] for mask in masks], np.float64),
        predicted_iou=np.array([mask["predicted_iou"] for mask in masks], np.float64),
        runs=coco.decode([mask["segmentation"]["counts"] for mask in masks], height, width),
        phrases=phrases,
    )
