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


def label_image(annotations: list[dict[str, Any]]) -> Any:
    """Masks painted from the largest to the smallest, with pycocotools."""
    decoded = [coco.decode(one["segmentation"]) for one in annotations]
    out = np.zeros(decoded[0].shape, np.int32)
    ranked = sorted(decoded, key=lambda mask: -int(mask.sum()))
    for number, mask in enumerate((mask for mask in ranked if mask.any()), 1):
        out[mask > 0] = number
    return out


def read(root: Path) -> list[Any]:
    """The samples of the view, and their annotation files."""
    found = [sample for sample in sa1b.open(root) if len(sample.annotations)]
    return [(sample, sample.annotations.to_json()["annotations"]) for sample in found]


@pytest.fixture(scope="module")
def files(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """Images and labels as files that torch_em reads."""
    folder = tmp_path_factory.mktemp("files")
    raws, labels = ([str(folder / f"{n}.{end}") for n in range(len(read(root)))] for end in ("jpg", "tif"))
    for (sample, annotations), raw, label in zip(read(root), raws, labels, strict=True):
        Path(raw).write_bytes(sample.jpeg)
        Image.fromarray(label_image(annotations)).save(label)
    return raws, labels


def test_images_and_labels_are_those_of_decoded_masks(root: Path, modules: None) -> None:
    dataset, overlaps = image_collection(str(root), None, view="masks"), 0
    assert len(dataset.raw_images) == len(dataset.label_images) == 18
    for position, (sample, annotations) in enumerate(read(root)):
        found = dataset.label_images[position]
        assert found.dtype == np.int32
        assert np.array_equal(found, label_image(annotations))
        assert np.array_equal(dataset.raw_images[position], sample.image)
        overlaps += sum(one["area"] for one in annotations) > (found > 0).sum()
    assert overlaps > 5


def test_the_condition_of_the_view_applies(root: Path, modules: None) -> None:
    labels = image_collection(str(root), None, view="large").label_images
    shares = [
        sample.annotations.area / (sample.annotations.width * sample.annotations.height)
        for sample, _ in read(root)
    ]
    counts = [((share > 0.02).sum(), len(share)) for share in shares]
    assert len(labels) == len(counts)
    assert all(labels[position].max() <= large for position, (large, _) in enumerate(counts))
    assert any(large < whole for large, whole in counts)
    assert labels[0].max() > 0


def packages() -> Any:
    with project.imported(SOURCES):
        return pytest.importorskip("torch_em.data", reason="the package torch_em is not installed")


@pytest.mark.slow  # torch_em imports for seconds
@pytest.mark.parametrize("patch", [None, (24, 40), (64, 96)])
def test_patches_are_those_of_files(root: Path, files: tuple[list[str], list[str]], patch: Any) -> None:
    ours = image_collection(str(root), patch, view="masks") if packages() else None
    theirs = packages().ImageCollectionDataset(*files, patch)
    assert len(ours) == len(theirs) == 18
    ours = pickle.loads(pickle.dumps(ours))
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
    with project.imported(SOURCES):
        training = importlib.import_module("micro_sam.training.training")
        util = importlib.import_module("micro_sam.training.util")
        segmentation = importlib.import_module("torch_em.segmentation")
    dataset = image_collection(str(root), (48, 64), view="masks", raw_transform=util.identity)
    loader = segmentation.get_data_loader(dataset, batch_size=3, shuffle=True, pin_memory=False)
    training._check_loader(loader, with_segmentation_decoder=False, name="train", verify_n_labels_in_loader=4)
    inputs, ids = util.ConvertToSamInputs(util.ResizeLongestSide(1024))(
        *next(iter(loader)), 1, 1, get_boxes=True, n_samples=2
    )
    assert len(inputs) == len(ids) == 3
    assert all(len(one["boxes"]) == len(found) for one, found in zip(inputs, ids, strict=True))
