"""What masks lose in the labels of ultralytics: IoU of the masks that it paints of exported polygons.

A label is one polygon, so holes and parts of a mask are joined by lines. Ultralytics resamples a polygon to at
least 1,000 points, drops decimals of pixels, and paints the inside and the lines with OpenCV's fillPoly.

    python -m tests.export.test_yolo_cost ROOT                    masks of a dataset directory
    python -m tests.export.test_yolo_cost sa_226381.json ...      masks of annotation files of SA-1B

With ultralytics in the folders of SA1B_ULTRALYTICS, its own functions are compared with the rules here.
"""

import importlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

import sa1b
import sa1b.masks
from sa1b import Sample
from sa1b.masks import coco, rasterize
from sa1b.programs.export.image_files import label_text
from sa1b.shards.annotation import parse_annotation
from tests.ingest.test_coco import FOLDER
from tests.integrations import project

SOURCES = "SA1B_ULTRALYTICS"


def painted(text: bytes, height: int, width: int) -> list[Any]:
    """The masks that ultralytics paints of the lines of a label file, uint8 [height, width] each."""
    words = [line.split() for line in text.decode().splitlines()]
    polygons = [np.array(one[1:], np.float32).reshape(-1, 2) for one in words]
    most = max([1000, *(len(one) + 1 for one in polygons if len(one) > 1000)])
    masks = []
    for polygon in polygons:
        closed = np.concatenate([polygon, polygon[:1]])
        places = np.arange(len(closed))
        at = np.linspace(0, len(closed) - 1, most - len(closed) if len(closed) < most else most)
        at = np.insert(at, np.searchsorted(at, places), places) if len(closed) < most else at
        points = [np.interp(at, places, column).astype(np.float32) for column in closed.T]
        pixels = np.stack(points, axis=1) * np.array([width, height], np.float32)
        masks.append(cv2.fillPoly(np.zeros((height, width), np.uint8), [pixels.astype(np.int32)], 1))
    return masks


def costs(samples: Iterable[Sample]) -> Iterator[tuple[float, int, int]]:
    """IoU of each mask with what is painted of it, its parts, and its holes; IoU 0: it has no polygon."""
    for sample in samples:
        found, runs = sample.annotations, sample.runs
        polygons = coco.polygons(runs)
        lines = iter(painted(label_text(sample), found.height, found.width))
        for parts, mask in zip(polygons, rasterize(runs), strict=True):
            if not parts:
                yield 0.0, 0, 0
                continue
            outlines = cv2.findContours(mask, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)[1][0]
            other = next(lines)
            iou = (mask & other).sum() / (mask | other).sum()
            yield float(iou), len(parts), int((outlines[:, 3] >= 0).sum())


def samples_of(names: list[str]) -> Iterator[Sample]:
    for name in map(Path, names):
        if name.suffix == ".json":
            image_id = json.loads(name.read_bytes())["image"]["image_id"]
            yield Sample(image_id, b"", parse_annotation(name.read_bytes(), image_id).annotations, "", 0)
        else:
            yield from sa1b.open(name)


def summary(names: list[str]) -> dict[str, float]:
    ious, parts, holes = map(np.array, zip(*costs(samples_of(names)), strict=True))
    kept = ious[parts > 0]
    boxes = [sa1b.masks.bbox(sample.runs) for sample in samples_of(names)]
    return {
        "masks": len(ious),
        "without a polygon": int((parts == 0).sum()),
        "several parts": int((parts > 1).sum()),
        "holes": int((holes > 0).sum()),
        "mean": round(float(kept.mean()), 3),
        "5th percentile": round(float(np.percentile(kept, 5)), 3),
        "worst": round(float(kept.min()), 3),
        "with the box of another mask": sum(len(one) - len(np.unique(one, axis=0)) for one in boxes),
        "mean, one part without holes": round(float(ious[(parts == 1) & (holes == 0)].mean()), 3),
        "mean, others": round(float(ious[(parts > 1) | (holes > 0)].mean()), 3),
    }


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """One image: a square, a square with a hole, two squares, one pixel, and no pixel."""
    masks = np.zeros((5, 60, 90), np.uint8)
    masks[0, 10:30, 20:50] = 1
    masks[1] = masks[0]
    masks[1, 15:25, 30:40] = 0
    masks[2, 5:15, 5:15] = masks[2, 40:50, 60:80] = 1
    masks[3, 7, 9] = 1
    runs = sa1b.masks.runs.Runs.from_pixels(masks)
    return [_sample(runs)]


def _sample(runs: Any) -> Sample:
    document = {
        "image": {"image_id": 1, "width": runs.width, "height": runs.height, "file_name": "sa_1.jpg"},
        "annotations": [
            {"bbox": [0.0, 0.0, 1.0, 1.0], "area": 1, "segmentation": mask, "predicted_iou": 1.0,
             "point_coords": [[0.0, 0.0]], "crop_box": [0.0, 0.0, 1.0, 1.0], "id": number, "stability_score": 1.0}
            for number, mask in enumerate(runs.to_coco(text=True))
        ],
    }  # fmt: skip
    return Sample(1, b"", parse_annotation(json.dumps(document).encode(), 1).annotations, "", 0)


def test_a_mask_gets_a_line_of_pixels_at_its_border_and_between_its_parts(samples: list[Sample]) -> None:
    ious, parts, holes = zip(*costs(samples), strict=True)
    assert parts == (1, 1, 2, 1, 0)
    assert holes == (0, 1, 0, 0, 0)
    assert ious[0] == pytest.approx(20 * 30 / (21 * 31))  # right of it and below it
    assert ious[0] > ious[1] > 0.8
    assert ious[1] > ious[2] > 0.7
    assert ious[3] == 0.25  # one pixel is painted as four
    assert ious[4] == 0.0


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.exists(), reason="without real annotation files")
def test_real_masks_lose_as_much_as_the_page_says() -> None:
    found = summary([str(path) for path in sorted(FOLDER.glob("sa_*.json"))])
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| real masks of SA-1B"))
    shown = [float(cell.replace(",", "")) for cell in row.split("|")[2:-1]]
    names = ("masks", "several parts", "holes", "mean", "5th percentile", "worst", "without a polygon")
    assert shown == [round(found[name], 3) for name in names]


@pytest.mark.slow
@pytest.mark.skipif(not project.folders(SOURCES), reason=f"{SOURCES} does not name the package")
def test_the_rules_are_those_of_ultralytics(samples: list[Sample]) -> None:
    with project.imported(SOURCES):
        ops = importlib.import_module("ultralytics.utils.ops")
        paint = importlib.import_module("ultralytics.data.utils").polygons2masks
    text, size = label_text(samples[0]), (60, 90)
    polygons = [np.array(line.split()[1:], np.float32).reshape(-1, 2) for line in text.decode().splitlines()]
    segments = np.stack(ops.resample_segments(polygons, n=1000))
    segments[..., 0] *= size[1]
    segments[..., 1] *= size[0]
    assert np.array_equal(paint(size, segments, 1), painted(text, *size))


if __name__ == "__main__":
    for name, value in summary(sys.argv[1:]).items():
        print(f"{name}: {value:,}")
