"""Arguments of the datasets for other projects that do not fit: an error that names them, at construction."""

import sys
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sa1b.errors import Sa1bError, UsageError
from sa1b.integrations.edgesam import SplitShards
from sa1b.integrations.efficientvit import OnlineShards
from sa1b.integrations.sam2 import ShardRawDataset
from sa1b.integrations.sam3 import PhraseLoader
from sa1b.integrations.torch_em import image_collection
from sa1b.integrations.transformers import SamShards

pytestmark = pytest.mark.usefixtures("modules")


@pytest.mark.parametrize(
    ("make", "arguments", "text"),
    [
        (OnlineShards, {"num_masks": 0}, "num_masks=0 must be at least 1"),
        (OnlineShards, {"masks_at_once": 0}, "masks_at_once=0 must be at least 1"),
        (SplitShards, {"img_size": 0}, "img_size=0 must be at least 1"),
        (ShardRawDataset, {"num_frames": "a"}, "num_frames='a' must be a whole number"),
        (SamShards, {"processor": None, "masks": 0}, "masks=0 must be at least 1"),
        (SamShards, {"processor": None, "prompt": "bx"}, "prompt='bx': no such prompt"),
        (PhraseLoader, {"category_chunk_size": 0}, "category_chunk_size=0 must be at least 1"),
        (SamShards, {"processor": None, "view": 3}, "view=3: not a name"),
        (SamShards, {"processor": print}, "processor=<.*print>: no processor; pass a SamProcessor"),
        (SplitShards, {"pixel_mean": (1, 2)}, r"pixel_mean=\(1, 2\) must be 3 finite numbers$"),
        (SplitShards, {"pixel_mean": 1.0}, "pixel_mean=1.0 must be 3 finite numbers$"),
        (SplitShards, {"pixel_mean": (1, 2, nan)}, r"pixel_mean=\(1, 2, nan\) must be 3 finite"),
        (SplitShards, {"pixel_mean": ["1", "2", "3"]}, r"pixel_mean=\['1', '2', '3'\] must be 3 finite"),
        (SplitShards, {"pixel_std": (1, 0, 1)}, r"pixel_std=\(1, 0, 1\) must be 3 .* each above 0$"),
        (SplitShards, {"filter_by_area": (1,)}, r"filter_by_area=\(1,\): must be the least and the largest"),
        (SplitShards, {"filter_by_area": (nan, 1)}, "filter_by_area=nan must be a number, at least 0"),
        (SplitShards, {"filter_by_area": "12"}, "filter_by_area='12': must be the least and the largest"),
        (SplitShards, {"filter_by_area": (2, 1)}, r"filter_by_area=\(2, 1\): .* exchange them"),
        (SplitShards, {"mask_nms_thresh": nan}, "mask_nms_thresh=nan must be a number$"),
        (SplitShards, {"max_allowed_prompts": 1.5}, "max_allowed_prompts=1.5 must be a whole number$"),
        (SplitShards, {"num_samples": "2"}, "num_samples='2' must be a whole number$"),
        (SplitShards, {"load_gt_mask": "False"}, "load_gt_mask='False' must be bool"),
        (ShardRawDataset, {"mask_area_frac_thresh": nan}, "mask_area_frac_thresh=nan must be a number"),
        (OnlineShards, {"train": "val"}, "train='val' must be bool"),
        (OnlineShards, {"transform": 3}, "transform=3: not a function"),
        (PhraseLoader, {"categories": "no"}, "categories='no' must be bool"),
        (PhraseLoader, {"phrases": 3}, "phrases: int is not a source; pass a path"),
        (PhraseLoader, {"phrases": "no.parquet"}, "phrases: .*no.parquet does not exist"),
        (PhraseLoader, {"phrases": "no.xml"}, "phrases: no.xml is no table"),
        (PhraseLoader, {"phrases": "no.parquet", "column": 3}, "column=3: not the name of a column"),
        (image_collection, {"patch_shape": 5}, "patch_shape=5: must be height and width, or None"),
        (image_collection, {"patch_shape": (5, 0)}, "patch_shape=0 must be at least 1"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(
    root: Path, make: Callable[..., Any], arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(Sa1bError, match=text):
        make(str(root), **{"view": "masks"} | arguments)


def test_a_project_that_is_missing_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_em.data", None)
    with pytest.raises(
        UsageError, match="torch_em: cannot be imported .*; install it, or add it to PYTHONPATH"
    ):
        image_collection(str(root), (64, 64), view="masks")


def test_the_first_images_are_all_of_a_split_with_a_number_of_samples(root: Path) -> None:
    samples = SplitShards(str(root), view="masks", num_samples=2, img_size=64)
    assert len(samples) == len(list(samples)) == 2
    with pytest.raises(IndexError):
        samples[2]
    assert samples[-1][1]["info"]["image_id"] == samples[1][1]["info"]["image_id"]


class Processor:
    image_processor = None


def by_position(root: str, name: str) -> tuple[int, Callable[[Any], Any]]:
    """The number of items of a dataset, and the access to one."""
    view: dict[str, Any] = {"view": "masks"}
    if name == "edgesam":
        return 2, SplitShards(root, num_samples=2, img_size=64, **view).__getitem__
    if name == "efficientvit":
        return 17, OnlineShards(root, num_masks=1, **view).__getitem__
    if name == "sam2":
        return 18, ShardRawDataset(root, **view).get_video
    if name == "transformers":
        return 18, SamShards(root, Processor(), **view).__getitem__
    loader = PhraseLoader(root, **view)
    queries = loader.loadQueriesAndAnnotationsFromDatapoint
    return 18, queries if name == "queries of sam3" else loader.loadImagesFromDatapoint


@pytest.mark.parametrize(
    "name", ["edgesam", "efficientvit", "sam2", "sam3", "queries of sam3", "transformers"]
)
def test_an_index_is_that_of_a_list(root: Path, name: str) -> None:
    count, read = by_position(str(root), name)
    for wrong in ("1", 1.0, np.float32(1), slice(0, 2), True, np.True_, None, torch.tensor([0, 1])):
        with pytest.raises(TypeError, match="^index .*: must be an integer, not"):
            read(wrong)
    for beyond in (count, np.int64(count), -count - 1):
        with pytest.raises(IndexError, match=f"^index .*{abs(beyond)}.*: out of range; there are {count}$"):
            read(beyond)


def test_integers_of_numpy_and_negative_ones_are_positions(root: Path) -> None:
    dataset = ShardRawDataset(str(root), view="masks")
    ids = [dataset.get_video(position)[0].video_id for position in range(len(dataset))]
    cases: list[Any] = [(np.int64(3), 3), (np.uint8(3), 3), (-1, 17), (-18, 0), (torch.tensor(2), 2)]
    for index, position in cases:
        assert dataset.get_video(index)[0].video_id == ids[position]


def test_the_fixed_seed_is_the_position(root: Path) -> None:
    samples = SplitShards(str(root), view="masks", fix_seed=True, max_allowed_prompts=2, img_size=64)
    for position in range(len(samples)):
        first, second = (samples[index][1] for index in (position, position - len(samples)))
        assert torch.equal(first["prompt_box"], second["prompt_box"])
        assert torch.equal(first["prompt_point"], second["prompt_point"])


def test_phrases_of_other_masks_are_reported(root: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"mask_id": [10**12], "text": ["a cat"]}), tmp_path / "other.parquet")
    loader = PhraseLoader(str(root), view="masks", phrases=str(tmp_path / "other.parquet"))
    expected = (
        r"other.parquet has no text for any of the first 1,\d+ ids; are its mask_ids those of the dataset"
    )
    often = [*loader.getDatapointIds()] * 20
    with pytest.warns(UserWarning, match=expected) as caught:
        list(map(loader.loadQueriesAndAnnotationsFromDatapoint, often))
    assert len(caught) == 1
