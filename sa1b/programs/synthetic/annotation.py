"""Annotation files of synthetic scenes: SA-1B's keys, order, number types and bounding boxes."""

from typing import TypedDict

import cv2
import numpy as np
import numpy.typing as npt

from sa1b.masks import coco
from sa1b.masks.runs import Runs
from sa1b.names import member_name
from sa1b.programs.synthetic.scene import Mask, Shape


class Segmentation(TypedDict):
    size: list[int]
    counts: str


class Annotation(TypedDict):
    bbox: list[float] | list[int]
    area: int
    segmentation: Segmentation
    predicted_iou: float
    point_coords: list[list[float]]
    crop_box: list[float] | list[int]
    id: int
    stability_score: float


class ImageInfo(TypedDict):
    image_id: int
    width: int
    height: int
    file_name: str


class AnnotationFile(TypedDict):
    image: ImageInfo
    annotations: list[Annotation]


def annotate(
    rng: np.random.Generator, image_id: int, height: int, width: int, shapes: list[Shape]
) -> tuple[AnnotationFile, int, list[Shape]]:
    """The annotation file of a scene, the number of runs of its masks, and its objects in random order."""
    shapes = [shapes[i] for i in rng.permutation(len(shapes))]
    pieces = [mask_runs(shape.mask, shape.x, shape.y, height, width) for shape in shapes]
    offsets = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    runs = np.concatenate([np.zeros(0, np.uint32), *pieces])
    strings = coco.encode(Runs(runs, offsets, height, width))
    first_id = image_id * 2_654_435_761 % 2**22 * 512  # ids below 2^31 that differ between images
    integers = len(shapes) - int(rng.integers(1, 6))  # from this mask on, SA-1B's files have int numbers
    annotations: list[Annotation] = []
    for index, (shape, counts) in enumerate(zip(shapes, strings, strict=True)):
        rows, columns = np.flatnonzero(shape.mask.any(1)), np.flatnonzero(shape.mask.any(0))
        x, y = shape.x + int(columns[0]), shape.y + int(rows[0])
        # As in SA-1B, width and height are one pixel less than the extent of the mask.
        box = [x, y, int(columns[-1] - columns[0]), int(rows[-1] - rows[0])]
        crop = _crop_box(rng, box, height, width)
        whole = index >= integers
        annotations.append(
            {
                "bbox": box if whole else [float(v) for v in box],
                "area": int(np.count_nonzero(shape.mask)),
                "segmentation": {"size": [height, width], "counts": counts.decode("ascii")},
                "predicted_iou": float(np.float32(0.88 + 0.145 * rng.beta(3.0, 2.0))),
                "point_coords": [_point(rng, shape)],
                "crop_box": crop if whole and rng.random() < 0.5 else [float(v) for v in crop],
                "id": first_id + index,
                "stability_score": float(np.float32(0.95 + 0.05 * rng.beta(2.0, 2.0))),
            }
        )
    name = member_name(image_id, "jpg")
    image: ImageInfo = {"image_id": image_id, "width": width, "height": height, "file_name": name}
    return {"image": image, "annotations": annotations}, len(runs), shapes


def mask_runs(mask: Mask, x: int, y: int, height: int, width: int) -> npt.NDArray[np.uint32]:
    """Runs uint32 [R] of one mask, uint8 [h, w] of 0 and 1, whose top left pixel is at x, y of the image."""
    columns = np.zeros((mask.shape[1], mask.shape[0] + 2), np.int8)
    columns[:, 1:-1] = mask.T
    column, row = np.nonzero(np.diff(columns, axis=1))
    edges = (column + x) * height + row + y
    # A run that ends at the bottom of a column continues at the top of the next one: join the two.
    joined = np.flatnonzero(edges[1:-1:2] == edges[2::2]) * 2 + 1
    edges = np.delete(edges, np.concatenate([joined, joined + 1]))
    runs = np.diff(edges, prepend=0, append=height * width)
    return (runs if runs[-1] or len(runs) == 1 else runs[:-1]).astype(np.uint32)


def _point(rng: np.random.Generator, shape: Shape) -> list[float]:
    """A prompt inside the mask, [x, y] in steps of 1/16 pixel, away from the outline if possible."""
    inner = cv2.erode(shape.mask, np.ones((3, 3), np.uint8), borderType=cv2.BORDER_CONSTANT, borderValue=0)
    choice = np.flatnonzero(inner if inner.any() else shape.mask)
    row, column = divmod(int(rng.choice(choice)), shape.mask.shape[1])
    return [shape.x + column + int(rng.integers(16)) / 16, shape.y + row + int(rng.integers(16)) / 16]


def _crop_box(rng: np.random.Generator, box: list[int], height: int, width: int) -> list[int]:
    """[x, y, width, height] of one of SAM's overlapping crops that contains the box."""
    fits = []
    for side in (1, 2, 4):
        overlap = int(512 / 1500 * min(height, width) * 2 / side) if side > 1 else 0
        w, h = -(-(overlap * (side - 1) + width) // side), -(-(overlap * (side - 1) + height) // side)
        for i in range(side):
            for j in range(side):
                x, y = (w - overlap) * i, (h - overlap) * j
                if x <= box[0] and y <= box[1] and box[0] + box[2] < x + w and box[1] + box[3] < y + h:
                    fits.append([x, y, min(w, width - x), min(h, height - y)])
    return fits[int(rng.integers(len(fits)))]
