"""The image of a step with the highest loss, over micro-batches and ranks."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sa1b.engine.model import worst_image
from sa1b.engine.settings import ParallelConfig
from sa1b.engine.watch.control import Control
from sa1b.engine.watch.metrics import figures_of
from sa1b.engine.watch.watchdog import Phases
from tests.engine.launch import group, launch
from tests.engine.stream_root import place_of

NAMES = ("loss", "iou_last", "count")
LARGE = (1 << 63) - 2  # float64 does not represent it
Part = tuple[Tensor, Tensor, Tensor]


def part(first: int, *images: tuple[float, float, int]) -> Part:
    """A micro-batch: sum of the losses, count and id of each image; positions from `first` on."""
    sums = torch.tensor([(loss, 0.0, count) for loss, count, _ in images]).reshape(-1, 3)
    ids = torch.tensor([number for *_, number in images], dtype=torch.int64)
    return sums, ids, torch.arange(first, first + len(images))


def recorded(*parts: Part) -> Any:
    with group(ParallelConfig(mode="ddp")) as rank_info:
        return worst(Control(rank_info), rank_info.rank, *parts[rank_info.rank :: rank_info.world_size])


def worst(control: Control, rank: int, *parts: Part) -> Any:
    totals = {"loss": torch.ones(()), "count": torch.ones(())}
    numbers = dict.fromkeys(("data_wait", "data", "compute", "update", "peak_memory"), 0.0)
    figures = control.exchange(totals, torch.ones(()), 1, numbers, worst_image(parts, NAMES))
    return figures_of(figures, Phases(), 0.1, None).get("worst_image")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (
            [part(5, (8.0, 4, 1), (3.0, 1, 7)), part(7, (2.5, 1, LARGE))],
            {"id": 7, "position": 6, "loss": 3.0},
        ),
        ([part(5, (8.0, 4, 1)), part(6, (2.5, 1, LARGE))], {"id": LARGE, "position": 6, "loss": 2.5}),
        (
            [part(5, (9.0, 1, 1)), part(6, (math.nan, 2, 9), (1.0, 1, 4))],
            {"id": 9, "position": 6, "loss": None},
        ),
        ([part(5), part(5, (0.0, 0, 3), (-1.0, 2, 8))], {"id": 8, "position": 6, "loss": -0.5}),
        ([part(5), part(5, (0.0, 0, 3))], None),
    ],
    ids=["mean of masks", "large id", "not finite", "without masks", "none"],
)
def test_the_worst_image_has_the_highest_mean_loss(parts: list[Part], expected: Any) -> None:
    assert worst(Control(place_of()), 0, *parts) == expected


def test_ranks_agree_on_the_worst_image_and_a_model_without_sums_of_images_has_none() -> None:
    parts = part(5, (1.0, 1, LARGE)), part(6, (9.0, 3, 70)), part(7)
    assert launch(recorded, 3, *parts) == [{"id": 70, "position": 6, "loss": 3.0}] * 3
    assert worst(Control(place_of()), 0) is None
