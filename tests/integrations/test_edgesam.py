"""Shards in EdgeSAM's training: the samples that its own dataset makes of exported files.

What its class `SA1BDataset` does is stated here. With its sources, samples are compared with that class:

    SA1B_EDGESAM=/path/to/EdgeSAM:/path/to/packages pytest tests/integrations/test_edgesam.py
"""

import importlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco
from torch.nn.functional import interpolate, pad

from sa1b.integrations.edgesam import SplitShards
from tests.integrations import project

SOURCES = "SA1B_EDGESAM"
Exported = Callable[[str], Path]
CASES: list[dict[str, Any]] = [
    {},
    {"max_allowed_prompts": 2, "img_size": 100},
    {"load_gt_mask": True, "mask_nms_thresh": 1.0, "max_allowed_prompts": 3, "img_size": 57},
    {"load_gt_mask": True, "mask_nms_thresh": 0.4, "sort_by_area": True, "img_size": 70},
    {"load_gt_mask": True, "box_jitter": True, "filter_by_area": [300, None], "fix_seed": True, "max_allowed_prompts": 2},
    {"box_jitter": True, "filter_by_area": [None, 2e5], "sort_by_area": True, "num_samples": 5},
]  # fmt: skip


class Contract:
    """`SA1BDataset`: every image of a split that has annotations, with the prompts of its masks."""

    def __init__(self, data_root: Path, names: list[str], img_size: int = 1024, **options: Any) -> None:
        self.root, self.names, self.size = data_root, names, img_size
        self.options: dict[str, Any] = {"mask_nms_thresh": -1, "max_allowed_prompts": -1} | options

    def __getitem__(self, index: int) -> Any:
        given, side, name = self.options.get, self.size, self.names[index]
        document = json.loads((self.root / "annotations/train" / f"{name}.json").read_text())
        masks, (height, width) = document["annotations"], (document["image"][k] for k in ("height", "width"))
        dense = [coco.decode(one["segmentation"]) for one in masks]
        kept = list(range(len(masks)))
        if given("load_gt_mask") and self.options["mask_nms_thresh"] > 0:
            covered, kept = np.zeros((height, width), bool), []
            for number in np.argsort(-np.array([one["area"] for one in masks])).tolist():
                pixels = dense[number] > 0
                if (pixels & covered).sum() / pixels.sum() <= self.options["mask_nms_thresh"]:
                    covered |= pixels
                    kept.append(number)
        boxes, points = (
            torch.from_numpy(np.stack([np.asarray(masks[number][key]) for number in kept]))
            for key in ("bbox", "point_coords")
        )
        order = torch.tensor(kept)
        if given("box_jitter"):
            moved = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)
            for axis, limit in ((0, width), (1, height)):
                by = boxes[:, 2 + axis, None] * 0.1 * torch.randn(len(order), 2)
                moved[:, axis::2] = (moved[:, axis::2] + by.clip(-20, 20)).clip(0, limit)
            boxes = torch.cat([moved[:, :2], moved[:, 2:] - moved[:, :2]], 1)

        def take(chosen: torch.Tensor) -> None:
            nonlocal boxes, points, order
            boxes, points, order = boxes[chosen], points[chosen], order[chosen]

        if given("sort_by_area"):
            take(torch.argsort(boxes[:, 2] * boxes[:, 3], descending=True))
        low = [int(length * side / max(height, width) + 0.5) for length in (height, width)]
        boxes, points = boxes.float(), points.float()
        for numbers in (boxes.view(-1, 2, 2), points):
            numbers[..., 0] *= low[1] / width
            numbers[..., 1] *= low[0] / height
        area, (least, most) = boxes[:, 2] * boxes[:, 3], given("filter_by_area", [None, None])
        inside = (area >= (least or -np.inf)) & (area <= (most or np.inf))
        if inside.any():
            take(inside)
        if len(order) > self.options["max_allowed_prompts"] > 0:
            if given("fix_seed"):
                torch.manual_seed(index)
            take(torch.randint(0, len(order), (self.options["max_allowed_prompts"],)))
        file = np.array(Image.open(self.root / "images/train" / f"{name}.jpg").convert("RGB"))
        pixels = torch.from_numpy(file).permute(2, 0, 1)[None].float()
        image = interpolate(pixels, low, mode="bilinear", antialias=True)[0]
        means, deviations = torch.tensor([[123.675, 116.28, 103.53], [58.395, 57.12, 57.375]])[
            ..., None, None
        ]
        found: dict[str, Any] = {"info": document["image"], "img_size_before_pad": torch.tensor(image.shape)}
        found["prompt_box"] = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)
        found["prompt_point"] = points
        if given("load_gt_mask"):
            stack = torch.from_numpy(np.stack([dense[number] for number in order.tolist()]))
            found["gt_mask"] = self._padded(interpolate(stack[:, None], low, mode="nearest")[:, 0])
        return self._padded((image - means) / deviations), found

    def _padded(self, pixels: torch.Tensor) -> torch.Tensor:
        return pad(pixels, (0, self.size - pixels.shape[2], 0, self.size - pixels.shape[1]))


def split(exported: Path) -> Path:
    """The folders `images/train` and `annotations/train` of an export for SAM 2."""
    folder = Path(tempfile.mkdtemp(dir=exported.parent))
    for name, own in (("images", "img_folder"), ("annotations", "gt_folder")):
        (folder / name).mkdir()
        (folder / name / "train").symlink_to(exported.absolute() / own)
    return folder


def assert_equal(theirs: Any, position: int, ours: Any, index: int) -> None:
    found = []
    for dataset, place in ((theirs, position), (ours, index)):
        torch.manual_seed(index)
        image, annotation = dataset[place]
        found.append(annotation | {"image": image, "next": torch.rand(1)})
    project.assert_same(*found)


@pytest.mark.parametrize("options", CASES)
def test_samples_are_those_of_the_exported_files(
    root: Path, exported: Exported, options: dict[str, Any]
) -> None:
    ours = SplitShards(str(root), view="masks", **options)
    assert len(ours) == options.get("num_samples", 18)
    theirs = Contract(split(exported("sam2")), ours.get_keys(), **options)
    for index in range(len(ours)):
        assert_equal(theirs, index, ours, index)


def test_the_split_is_the_view_unless_another_one_is_named(root: Path) -> None:
    names = SplitShards(str(root), split="large").get_keys()
    assert 0 < len(names) <= 18
    assert names[0].startswith("sa_")
    assert len(SplitShards(str(root), view=None)) == 19


@pytest.mark.slow
@pytest.mark.skipif(not project.folders(SOURCES), reason=f"{SOURCES} does not name the sources")
@pytest.mark.parametrize("options", CASES)
def test_samples_are_those_of_the_projects_own_class(
    root: Path, exported: Exported, options: dict[str, Any]
) -> None:
    options = options | {"fix_seed": False, "num_samples": -1}  # these depend on its order of files
    with project.imported(SOURCES, edge_sam="edge_sam", data="training/data"):
        module = importlib.import_module("data.sa1b_dataset")
    theirs = module.SA1BDataset(str(split(exported("sam2"))), **options)
    ours = SplitShards(str(root), view="masks", **options)
    places = {name: position for position, name in enumerate(theirs.get_keys())}
    for index, name in enumerate(ours.get_keys()):
        assert_equal(theirs, places[name], ours, index)
