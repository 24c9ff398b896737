"""Shards in SAM 2's training: the images and masks that its own dataset reads from exported files.

With SAM 2's sources, of which the exported files are read by `SA1BRawDataset`:

    SA1B_SAM2=/path/to/sam2:/path/to/packages pytest tests/integrations/test_sam2.py
"""

import importlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco

import sa1b
from sa1b.integrations.sam2 import ShardRawDataset
from tests.integrations import peers, project

Exported = Callable[[str], Path]


pytestmark = pytest.mark.usefixtures("modules")


def image_of(video: Any) -> Image.Image:
    """As `load_images` of SAM 2 opens it."""
    manager = importlib.import_module("iopath.common.file_io").g_pathmgr
    with manager.open(video.frames[0].image_path, "rb") as file:
        return Image.open(file).convert("RGB")


def exported_masks(exported: Path, image_id: int) -> dict[int, torch.Tensor]:
    """As `SA1BSegmentLoader` reads them."""
    file = exported / "gt_folder" / f"sa_{image_id}.json"
    if not file.exists():
        return {}
    if project.folders(peers.SAM2):
        segments = (
            importlib.import_module("training.dataset.vos_segment_loader").SA1BSegmentLoader(file).load(0)
        )
        return {number: segments[number] for number in list(segments.keys())}
    kept = [one["segmentation"] for one in json.loads(file.read_text())["annotations"] if one["area"] > 0]
    return {number: torch.from_numpy(coco.decode(one)) for number, one in enumerate(kept)}


def test_images_and_masks_are_those_of_the_exported_files(root: Path, exported: Exported) -> None:
    files, dataset, masks = exported("sam2"), ShardRawDataset(str(root)), 0
    kind = importlib.import_module("training.dataset.vos_segment_loader").LazySegments
    assert len(dataset) == 19
    for position in range(len(dataset)):
        video, loader = dataset.get_video(position)
        expected = Image.open(files / "img_folder" / f"sa_{video.video_name}.jpg").convert("RGB")
        assert np.array_equal(np.asarray(image_of(video)), np.asarray(expected))
        segments, theirs = loader.load(video.frames[0].frame_idx), exported_masks(files, video.video_id)
        assert isinstance(segments, kind)
        assert segments.keys() == theirs.keys()
        assert segments.cache == {}  # nothing is decoded before it is used
        for number, mask in theirs.items():
            assert segments[number].dtype == torch.uint8
            assert torch.equal(segments[number], mask)
            masks += 1
    assert masks > 50


def test_a_view_its_condition_and_large_masks(root: Path) -> None:
    found = {sample.image_id: sample.annotations for sample in sa1b.open(root)}
    areas = {image_id: of.area / (of.width * of.height) for image_id, of in found.items()}
    view = ShardRawDataset(str(root), view="large", mask_area_frac_thresh=0.2, num_frames=2)
    assert 0 < len(view) < len(areas)
    for position in range(len(view)):
        video, loader = view.get_video(position)
        of_image = areas[video.video_id]
        assert len(loader.load(0)) == ((of_image > 0.02) & (of_image < 0.2)).sum()
        assert [frame.frame_idx for frame in video.frames] == [0, 1]
        assert len({frame.image_path for frame in video.frames}) == 1


def test_a_worker_gets_it_by_pickle_and_reads_its_own_images(root: Path) -> None:
    dataset = pickle.loads(pickle.dumps(ShardRawDataset(str(root))))
    video, _ = dataset.get_video(0)
    list(map(dataset.get_video, range(1, 9)))  # a process keeps a few images
    with pytest.raises(KeyError, match="sa1b-shard://"):
        image_of(video)
    assert image_of(dataset.get_video(0)[0]).size
