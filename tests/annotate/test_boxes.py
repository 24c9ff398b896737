"""The boxes that `sa1b annotate` writes are those of SA-1B: from the first to the last pixel of a mask."""

import json
from pathlib import Path

import numpy as np
from PIL import Image
from pycocotools import mask as coco

from tests import kit
from tests.train.command import make_root, train_to_end


def test_boxes_end_at_the_last_pixel_of_their_masks(tmp_path: Path) -> None:
    weights = train_to_end(
        make_root(tmp_path / "made", 4), tmp_path / "run", "--optim.steps", "1", "--optim.warmup", "0"
    )
    pixels = np.random.default_rng(7).integers(0, 256, (48, 64, 3), np.uint8)
    Image.fromarray(pixels).resize((320, 240)).save(tmp_path / "sa_77.jpg")
    flags = ("--points-per-side", 3, "--min-predicted-iou", 0, "--min-stability", 0, "--device", "cpu")
    kit.run("annotate", tmp_path / "sa_77.jpg", "--weights", weights, "--out", tmp_path / "out", *flags)
    document = json.loads(next((tmp_path / "out").rglob("sa_*.json")).read_bytes())
    assert document["annotations"]
    for mask in document["annotations"]:
        rows, columns = coco.decode(mask["segmentation"]).nonzero()
        box = [columns.min(), rows.min(), np.ptp(columns), np.ptp(rows)]
        assert mask["bbox"] == box, mask["id"]
