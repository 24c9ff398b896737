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

from sa1b.integrations import ViewSamples
from sa1b.integrations.torch_em import Images, Labels, image_collection
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


def documents(samples: ViewSamples) -> list[Any]:
    return [samples.sample(position).annotations.to_json() for position in range(len(samples))]


@pytest.fixture(scope="module")
def files(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """Images and labels as files that torch_em reads."""
    folder, samples = tmp_path_factory.mktemp("files"), ViewSamples(str(root), view="masks")
    pairs = []
    for position, document in enumerate(documents(samples)):
        raw, labels = folder / f"{position}.jpg", folder / f"{position}.tif"
        raw.write_bytes(samples.sample(position).jpeg)
        Image.fromarray(label_image(document["annotations"])).save(labels)
        pairs.append((str(raw), str(labels)))
    raws, labelled = zip(*pairs, strict=True)
    return list(raws), list(labelled)


def test_images_and_labels_are_those_of_decoded_masks(root: Path) -> None:
    samples = ViewSamples(str(root), view="masks")
    images, labels = Images(samples), Labels(samples)
    assert len(images) == len(labels) == 18
    overlaps = 0
    for position, document in enumerate(documents(samples)):
        found = labels[position]
        assert found.dtype == np.int32
        assert np.array_equal(found, label_image(document["annotations"]))
        assert images[position].shape == (*found.shape, 3)
        overlaps += sum(one["area"] for one in document["annotations"]) > (found > 0).sum()
    assert overlaps > 5


def test_the_condition_of_the_view_applies(root: Path) -> None:
    whole, large = (Labels(ViewSamples(str(root), view=view)) for view in ("masks", "large"))
    ids = [labels.samples.image_ids.tolist() for labels in (whole, large)]
    numbers = [(large[n].max(), whole[ids[0].index(i)].max()) for n, i in enumerate(ids[1])]
    assert all(fewer <= more for fewer, more in numbers)
    assert any(fewer < more for fewer, more in numbers)


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


def of_files(root: str, exported: str) -> tuple[int, project.Read]:
    """Of a folder with NAME.jpg and NAME.tif, as `files` writes them."""
    names = [sorted(map(str, Path(exported).glob(f"*.{ending}"))) for ending in ("jpg", "tif")]
    dataset = packages().ImageCollectionDataset(*names, (512, 512))
    return len(dataset), dataset.__getitem__


def of_shards(root: str, exported: str) -> tuple[int, project.Read]:
    packages()
    dataset = image_collection(root, (512, 512))
    return len(dataset), dataset.__getitem__


if __name__ == "__main__":
    project.compare(of_files, of_shards)
