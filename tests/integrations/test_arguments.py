"""Arguments of the datasets for other projects that do not fit: an error that names them, at construction."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sa1b.errors import UsageError
from sa1b.integrations.edgesam import SplitShards
from sa1b.integrations.efficientvit import OnlineShards
from sa1b.integrations.sam2 import ShardRawDataset
from sa1b.integrations.sam3 import PhraseLoader
from sa1b.integrations.torch_em import image_collection
from sa1b.integrations.transformers import SamShards


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
    ],
)
def test_an_argument_that_does_not_fit_is_named(
    root: Path, make: Callable[..., Any], arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
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
