"""Shards in torch_em's dataset: patches of images and labels equal those of files that hold the same pixels.

With the package torch_em, and with micro-sam's sources for its checks of a DataLoader and its inputs of SAM:

    SA1B_MICRO_SAM=/path/to/micro-sam:/path/to/packages pytest tests/integrations/test_torch_em.py
"""

import importlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco

import sa1b
from sa1b.integrations.torch_em import image_collection
from tests.integrations import project

SOURCES = "SA1B_MICRO_SAM"


def labelled(root: Path, above: float = 0) -> list[tuple[Any, Any, bool]]:
    """Samples with masks, their masks above a part of the image, painted from the largest to the smallest
    with pycocotools, and whether masks overlap.
    """
    found = []
    for sample in sa1b.open(root):
        masks = [coco.decode(one["segmentation"]) for one in sample.annotations.to_json()["annotations"]]
        out = np.zeros((sample.annotations.height, sample.annotations.width), np.int32)
        kept = [
            mask for mask in sorted(masks, key=lambda one: -int(one.sum())) if mask.sum() > above * mask.size
        ]
        for number, mask in enumerate(kept, 1):
            out[mask > 0] = number
        found += [(sample, out, sum(map(np.sum, kept)) > (out > 0).sum())] * bool(masks)
    return found


def test_images_and_labels_are_those_of_decoded_masks(root: Path, modules: None) -> None:
    for view, above in (("masks", 0), ("large", 0.02)):
        dataset, expected = image_collection(str(root), None, view=view), labelled(root, above)
        assert len(dataset.raw_images) == len(dataset.label_images) == len(expected) == 18
        assert sum(overlaps for *_, overlaps in expected) > 5
        for position, (sample, labels, _) in enumerate(expected):
            assert dataset.label_images[position].dtype == np.int32
            assert np.array_equal(dataset.label_images[position], labels)
            assert np.array_equal(dataset.raw_images[position], sample.image)


def packages() -> Any:
    with project.imported(SOURCES):
        return pytest.importorskip("torch_em.data", reason="the package torch_em is not installed")


@pytest.mark.slow  # torch_em imports for seconds
@pytest.mark.parametrize("patch", [None, (24, 40), (64, 96)])
def test_patches_are_those_of_files(root: Path, tmp_path: Path, patch: Any) -> None:
    data, raws, labels = packages(), list[str](), list[str]()
    for number, (sample, label, _) in enumerate(labelled(root)):
        raws.append(str(tmp_path / f"{number}.jpg"))
        labels.append(str(tmp_path / f"{number}.tif"))
        Path(raws[-1]).write_bytes(sample.jpeg)
        Image.fromarray(label).save(labels[-1])
    theirs = data.ImageCollectionDataset(raws, labels, patch)
    ours = pickle.loads(pickle.dumps(image_collection(str(root), patch, view="masks")))
    assert len(ours) == len(theirs) == 18
    for index in range(len(theirs)):
        found = []
        for dataset in (theirs, ours):
            np.random.seed(index)
            found.append(dataset[index])
        for theirs_of, ours_of in zip(*found, strict=True):
            assert theirs_of.dtype == ours_of.dtype
            assert torch.equal(theirs_of, ours_of)


@pytest.mark.slow
@pytest.mark.skipif(not project.folders(SOURCES), reason=f"{SOURCES} does not name the sources")
def test_micro_sam_takes_its_loader(root: Path) -> None:
    packages()
    names = ("micro_sam.training.training", "micro_sam.training.util", "torch_em.segmentation")
    with project.imported(SOURCES):
        training, util, segmentation = map(importlib.import_module, names)
    dataset = image_collection(str(root), (48, 64), view="masks", raw_transform=util.identity)
    loader = segmentation.get_data_loader(dataset, batch_size=3, shuffle=True, pin_memory=False)
    training._check_loader(loader, with_segmentation_decoder=False, name="train", verify_n_labels_in_loader=4)
    convert = util.ConvertToSamInputs(util.ResizeLongestSide(1024))
    inputs, ids = convert(*next(iter(loader)), 1, 1, get_boxes=True, n_samples=2)
    assert len(inputs) == len(ids) == 3
    assert all(len(one["boxes"]) == len(found) for one, found in zip(inputs, ids, strict=True))
