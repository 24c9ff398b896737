"""Shards in SAM 2's training: the images and masks that its own dataset reads from exported files.

With SAM 2's sources, of which the exported files are read by `SA1BRawDataset`:

    SA1B_SAM2=/path/to/sam2:/path/to/packages pytest tests/integrations/test_sam2.py
"""

import importlib
import json
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco

from sa1b.errors import UsageError
from sa1b.integrations import sam2
from sa1b.programs.export.export import export
from sa1b.programs.export.image_files import Sam2
from sa1b.views.selection import Selection, select
from tests.integrations import sam2_contract
from tests.shards.tiny_source import ROOTS, make_root, two_sources


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sam2")
    made: Path = make_root(folder / "root", two_sources(folder), ROOTS["plain"])
    return made


@pytest.fixture(scope="module")
def exported(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "sam2"
    export(root, folder, Sam2(), quiet=True)
    return folder


@pytest.fixture(autouse=True)
def project() -> Iterator[None]:
    with sam2_contract.installed():
        yield
    sam2._lazy_segments.cache_clear()
    sam2._register.cache_clear()


def image_of(video: Any) -> Image.Image:
    """As `load_images` of SAM 2 opens it."""
    manager = importlib.import_module("iopath.common.file_io").g_pathmgr
    with manager.open(video.frames[0].image_path, "rb") as file:
        return Image.open(file).convert("RGB")


def exported_masks(exported: Path, image_id: int) -> dict[int, torch.Tensor]:
    """As `SA1BSegmentLoader` reads them."""
    document = json.loads((exported / "gt_folder" / f"sa_{image_id}.json").read_text())
    if sam2_contract.SOURCES:
        loader = importlib.import_module("training.dataset.vos_segment_loader")
        segments = loader.SA1BSegmentLoader(exported / "gt_folder" / f"sa_{image_id}.json").load(0)
        return {number: segments[number] for number in list(segments.keys())}
    kept = [one["segmentation"] for one in document["annotations"] if one["area"] > 0]
    return {number: torch.from_numpy(coco.decode(one)) for number, one in enumerate(kept)}


def test_images_and_masks_are_those_of_the_exported_files(root: Path, exported: Path) -> None:
    dataset, masks = sam2.ShardRawDataset(str(root)), 0
    assert len(dataset) == 19
    for position in range(len(dataset)):
        video, loader = dataset.get_video(position)
        name = f"sa_{video.video_id}"
        assert video.video_name == str(video.video_id)
        expected = Image.open(exported / "img_folder" / f"{name}.jpg").convert("RGB")
        assert np.array_equal(np.asarray(image_of(video)), np.asarray(expected))
        segments = loader.load(video.frames[0].frame_idx)
        assert isinstance(
            segments, importlib.import_module("training.dataset.vos_segment_loader").LazySegments
        )
        if not (exported / "gt_folder" / f"{name}.json").exists():
            assert len(segments) == 0
            continue
        theirs = exported_masks(exported, video.video_id)
        assert segments.keys() == theirs.keys()
        assert segments.cache == {}  # nothing is decoded before it is used
        for number, mask in theirs.items():
            assert segments[number].dtype == torch.uint8
            assert torch.equal(segments[number], mask)
            masks += 1
    assert masks > 50


def test_a_view_its_condition_and_large_masks(root: Path) -> None:
    whole = sam2.ShardRawDataset(str(root))
    areas = {}
    for position in range(len(whole)):
        video, loader = whole.get_video(position)
        found = loader.sample.annotations
        areas[video.video_id] = found.area / (found.width * found.height)
    chosen = Selection(masks_where="area_fraction > 0.02", images_where="masks >= 1")
    select(root, chosen, name="large", quiet=True)
    view = sam2.ShardRawDataset(str(root), view="large", mask_area_frac_thresh=0.2, num_frames=2)
    assert 0 < len(view) < len(whole)
    for position in range(len(view)):
        video, loader = view.get_video(position)
        of_image = areas[video.video_id]
        assert len(loader.load(0)) == ((of_image > 0.02) & (of_image < 0.2)).sum()
        assert [frame.frame_idx for frame in video.frames] == [0, 1]
        assert len({frame.image_path for frame in video.frames}) == 1


def test_a_worker_gets_it_by_pickle_and_reads_its_own_images(root: Path) -> None:
    dataset = pickle.loads(pickle.dumps(sam2.ShardRawDataset(str(root))))
    video, _ = dataset.get_video(0)
    sam2._read.clear()
    with pytest.raises(UsageError, match="not read in this process; call get_video before the image"):
        image_of(video)
    assert image_of(dataset.get_video(0)[0]).size


def main(root: str, exported: str, count: int = 40, objects: int = 64) -> None:
    """Print images/s of both datasets with SAM 2's sources, first pass and second: python -m, see above."""
    with sam2_contract.installed():
        raw = importlib.import_module("training.dataset.vos_raw_dataset")
        theirs = raw.SA1BRawDataset(
            f"{exported}/img_folder", f"{exported}/gt_folder", f"{exported}/file_list.txt"
        )
        for _ in range(2):
            for name, dataset in (("SA1BRawDataset", theirs), ("shards", sam2.ShardRawDataset(root))):
                began, cpu = time.perf_counter(), time.process_time()
                for position in range(min(count, len(dataset))):
                    video, loader = dataset.get_video(position)
                    image_of(video)
                    segments = loader.load(0)
                    for number in list(segments.keys())[:objects]:
                        segments[number].to(torch.uint8)
                done = min(count, len(dataset))
                print(
                    f"{name}: {done / (time.perf_counter() - began):.2f} images/s, "
                    f"{done / (time.process_time() - cpu):.2f} per CPU second"
                )


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:3])
