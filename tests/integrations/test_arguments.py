"""What the datasets for other projects have in common: positions, a fixed seed, tables of other masks."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sa1b.integrations.edgesam import SplitShards
from sa1b.integrations.efficientvit import OnlineShards
from sa1b.integrations.sam2 import ShardRawDataset
from sa1b.integrations.sam3 import PhraseLoader
from sa1b.integrations.transformers import SamShards

pytestmark = pytest.mark.usefixtures("modules")


def test_an_index_is_that_of_a_list(root: Path) -> None:
    view: dict[str, Any] = {"view": "masks"}
    reads: list[tuple[int, Any]] = [
        (2, SplitShards(str(root), num_samples=2, img_size=64, **view).__getitem__),
        (17, OnlineShards(str(root), num_masks=1, **view).__getitem__),
        (18, ShardRawDataset(str(root), **view).get_video),
        (18, SamShards(str(root), None, **view).__getitem__),
        (18, PhraseLoader(str(root), **view).loadImagesFromDatapoint),
    ]
    for count, read in reads:
        with pytest.raises(TypeError):
            read("1")
        for beyond in (count, -count - 1):
            with pytest.raises(IndexError):
                read(beyond)
    videos = reads[2][1]
    assert videos(torch.tensor(2))[0].video_id == videos(2)[0].video_id != videos(-1)[0].video_id
    assert videos(17)[0].video_id == videos(-1)[0].video_id
    with pytest.raises(TypeError, match="num_frame.*did you mean|num_frame=.*no such argument"):
        ShardRawDataset(str(root), num_frame=2)


def test_the_fixed_seed_is_the_position(root: Path) -> None:
    samples = SplitShards(str(root), view="masks", fix_seed=True, max_allowed_prompts=2, img_size=64)
    for position in range(len(samples)):
        first, second = (samples[index][1] for index in (position, position - len(samples)))
        assert torch.equal(first["prompt_box"], second["prompt_box"])
        assert torch.equal(first["prompt_point"], second["prompt_point"])


def test_phrases_of_other_masks_are_reported(root: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"mask_id": [10**12], "text": ["a cat"]}), tmp_path / "other.parquet")
    loader = PhraseLoader(str(root), view="masks", phrases=str(tmp_path / "other.parquet"))
    expected = r"other.parquet has no text for any of the first 1,\d+ ids; are its mask_ids those of"
    with pytest.warns(UserWarning, match=expected) as caught:
        list(map(loader.loadQueriesAndAnnotationsFromDatapoint, [*loader.getDatapointIds()] * 20))
    assert len(caught) == 1
