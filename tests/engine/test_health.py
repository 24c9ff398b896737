"""Steps that are not finite are skipped, logged, and tolerated up to a number of consecutive steps."""

import json
import math
from pathlib import Path

import pytest
import torch

from sa1b.engine.watch.control import Control, Health, HealthConfig, HealthError
from tests.engine.stream_root import place_of

IDS = [torch.tensor([7, 8]), torch.tensor([], dtype=torch.int64), torch.tensor([9])]


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf), (-math.inf, math.nan)])
def test_a_step_is_good_only_if_loss_and_gradient_of_all_ranks_are_finite(
    tmp_path: Path, loss: float, norm: float
) -> None:
    health = Health(HealthConfig(), tmp_path, place_of(), Control(place_of()))
    assert health.is_good(0, 1.0, 2.0, 1.0, IDS)
    assert not health.is_good(1, loss, norm, loss, IDS)
    assert health.skipped == 1


def test_only_the_rank_whose_own_loss_is_not_finite_writes_its_images_down(tmp_path: Path) -> None:
    for rank, own_loss in enumerate((3.0, math.inf)):
        place = place_of(rank, 2)
        health = Health(HealthConfig(), tmp_path, place, Control(place))
        assert not health.is_good(5, math.inf, 1.0, own_loss, IDS)
    lines = (tmp_path / "not-finite.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 5, "rank": 1, "loss": "inf", "image_ids": [7, 8, 9]}
    ]


@pytest.mark.parametrize("patience", [0, 1, 3])
def test_one_step_more_in_a_row_than_patience_allows_ends_the_run(tmp_path: Path, patience: int) -> None:
    health = Health(HealthConfig(patience), tmp_path, place_of(), Control(place_of()))
    for step in range(patience):
        assert not health.is_good(step, math.nan, 1.0, math.nan, IDS)
    assert health.is_good(patience, 1.0, 1.0, 1.0, IDS)  # resets the counter
    for step in range(patience):
        assert not health.is_good(step, math.nan, 1.0, math.nan, IDS)
    with pytest.raises(HealthError, match=str(tmp_path / "not-finite.jsonl")) as raised:
        health.is_good(99, math.nan, 1.0, math.nan, IDS)
    assert f"step 99: the last {patience + 1} steps had" in str(raised.value)


def test_what_was_trained_is_in_doubt_until_a_loss_is_finite_again(tmp_path: Path) -> None:
    health = Health(HealthConfig(), tmp_path, place_of(), Control(place_of()))
    health.end(0)
    for step in (1, 2):
        health.is_good(step, math.nan, 1.0, math.nan, IDS)
        assert health.lost == step
        with pytest.raises(HealthError, match=rf"step {step}: the last {step} steps had .* --optim.lr"):
            health.end(step)
    health.is_good(3, 1.0, math.inf, 1.0, IDS)  # a gradient overflow does not mean that the weights are bad
    assert (health.lost, health.skipped) == (0, 3)
    health.end(3)
