"""Shards in EfficientViT-SAM's training: the samples that its own dataset makes of exported files.

What its class `OnlineDataset` does is stated here. With its sources, samples are compared with that class:

    SA1B_EFFICIENTVIT=/path/to/efficientvit:/path/to/packages pytest tests/integrations/test_efficientvit.py
"""

import importlib
import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco

from sa1b.integrations.efficientvit import OnlineShards
from tests.integrations import project

SOURCES = "SA1B_EFFICIENTVIT"
Exported = Callable[[str], Path]


class Contract:
    """`OnlineDataset`: the images of a list of ids, masks chosen by numpy's global generator."""

    def __init__(self, root: Path, train: bool, num_masks: int, transform: Any = None) -> None:
        self.root, self.train, self.num_masks, self.transform = root, train, num_masks, transform
        ids = (root / "sa_images_ids.txt").read_text().split()
        border = int(len(ids) * 0.99)
        self.ids = ids[:border] if train else ids[border:]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        pixels = np.asarray(Image.open(self.root / "images" / f"sa_{self.ids[index]}.jpg"))
        document = json.loads((self.root / "masks" / f"sa_{self.ids[index]}.json").read_text())
        masks = document["annotations"]
        chosen = [*range(len(masks))] * (self.num_masks // len(masks))
        missing = self.num_masks - len(chosen)
        chosen.extend(np.random.choice(len(masks), missing, replace=False) if self.train else range(missing))
        found = [masks[i] for i in chosen]
        made = {
            "image": torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1),
            "masks": torch.from_numpy(np.stack([coco.decode(one["segmentation"]) for one in found])).float(),
            "points": torch.tensor([one["point_coords"][0] for one in found], dtype=torch.float32),
            "bboxs": torch.tensor([one["bbox"] for one in found], dtype=torch.float32),
            "shape": torch.tensor(pixels.shape[:2]),
        }
        return self.transform(made) if self.transform else made


def flipped(sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As those of `SAMDataProvider`: one random number of Python for all masks, then each mask alone."""
    if random.random() >= 0.5:
        sample = sample | {name: sample[name].flip(-1) for name in ("image", "masks")}
    size = [20, 20]
    return sample | {"masks": torch.nn.functional.interpolate(sample["masks"][:, None], size)[:, 0]}


def assert_equal(theirs: Any, ours: Any) -> None:
    assert len(ours) == len(theirs)
    for index in range(len(theirs)):
        found = []
        for dataset in (theirs, ours):
            random.seed(index)
            np.random.seed(index)
            found.append(dataset[index] | {"next": torch.tensor([random.random(), np.random.random()])})
        project.assert_same(*found)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("masks", [2, 6, 64])
def test_samples_are_those_of_the_exported_files(
    root: Path, exported: Exported, train: bool, masks: int
) -> None:
    theirs = Contract(exported("efficientvit"), train, masks)
    assert len(theirs) == (17 if train else 1)
    assert_equal(theirs, OnlineShards(str(root), train, masks, view="masks"))


def test_a_transform_of_a_few_masks_at_once_has_the_same_random_state(root: Path, exported: Exported) -> None:
    theirs = Contract(exported("efficientvit"), True, 64, flipped)
    ours = OnlineShards(str(root), True, 64, flipped, masks_at_once=5, view="masks")
    assert_equal(theirs, pickle.loads(pickle.dumps(ours)))


def test_an_image_without_masks_is_refused_with_the_view_to_make(root: Path) -> None:
    with pytest.raises(ValueError, match="has no mask; pass a view made with --images-where 'masks >= 1'"):
        [OnlineShards(str(root))[index] for index in range(18)]


@pytest.mark.slow
@pytest.mark.skipif(not project.folders(SOURCES), reason=f"{SOURCES} does not name the sources")
@pytest.mark.parametrize("train", [True, False])
def test_samples_are_those_of_the_projects_own_class(root: Path, exported: Exported, train: bool) -> None:
    with project.imported(SOURCES):
        module = importlib.import_module("efficientvit.samcore.data_provider.sam")
        transform = module.SAMDataProvider.build_train_transform(type("", (), {"image_size": (1024, 1024)}))
    theirs = module.OnlineDataset(str(exported("efficientvit")), train, 6, transform)
    assert_equal(theirs, OnlineShards(str(root), train, 6, transform, masks_at_once=4, view="masks"))
