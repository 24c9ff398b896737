"""The score compared with numpy; it does not depend on the order of the sum."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sa1b.sam.protocol import LARGE, MEDIUM, QUICK_PROMPTS, SIZES, Score
from tests.engine.launch import launch


def case(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    unions = torch.randint(1, 65536, (count, 4))
    intersections = (unions * torch.rand(count, 4)).long()
    areas = torch.randint(1, 2 * LARGE, (count,))
    return intersections, unions, areas, (torch.rand(count) < 0.8).float()


def scored(*batches) -> Score:
    score = Score()
    for batch in batches:
        score.add(*batch)
    return score


def test_the_result_is_the_mean_iou_overall_and_by_size():
    intersections, unions, areas, weights = case(500)
    ious = intersections.numpy() / unions.numpy()
    counts = weights.numpy() > 0
    small, large = areas.numpy() < MEDIUM, areas.numpy() >= LARGE
    found = scored(case(500)).result()
    chosen = {
        "": counts,
        "_small": counts & small,
        "_medium": counts & ~small & ~large,
        "_large": counts & large,
    }
    for suffix, masks in chosen.items():
        assert found[f"masks{suffix}"] == masks.sum() > 0
        for column, prompt in enumerate(QUICK_PROMPTS):
            assert found[f"miou_{prompt}{suffix}"] == pytest.approx(ious[masks, column].mean(), abs=1e-9)


def test_the_limits_of_sizes_are_those_of_coco():
    areas = torch.tensor([1023, 1024, 9215, 9216])
    ones = torch.ones(4, 4, dtype=torch.int64)
    found = scored((ones, ones, areas, torch.ones(4))).result()
    assert [found[f"masks_{size}"] for size in SIZES] == [1, 2, 1]


def test_sums_are_the_same_in_any_order_and_batches():
    whole = case(300)
    order = torch.randperm(300)
    parts = [tuple(tensor[piece] for tensor in whole) for piece in order.split(37)]
    together = scored(whole)
    merged = scored(*parts[:3])
    merged.sums += scored(*parts[3:]).sums
    assert torch.equal(scored(*parts).sums, together.sums)
    assert torch.equal(merged.sums, together.sums)
    assert merged.result() == together.result()


def test_a_perfect_mask_counts_exactly_1_and_an_empty_union_0():
    ones, nothing = torch.full((3, 4), 65536), torch.zeros(3, 4, dtype=torch.int64)
    assert scored((ones, ones, torch.ones(3), torch.ones(3))).result()["miou_box"] == 1
    assert scored((nothing, nothing, torch.ones(3), torch.ones(3))).result()["miou_box"] == 0


def test_a_size_without_masks_has_no_mean():
    found = Score().result()
    assert found == {"masks": 0, "masks_small": 0, "masks_medium": 0, "masks_large": 0}


def test_a_batch_without_masks_adds_nothing():
    score = scored(case(0))
    assert not score.sums.any()


def reduce_part(folder: str) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    score = scored(tuple(tensor[rank::world_size] for tensor in case(100)))
    dist.all_reduce(score.sums)
    np.save(f"{folder}/{rank}.npy", score.sums.numpy())
    dist.destroy_process_group()


def test_ranks_agree_on_the_score_of_one_process(tmp_path):
    launch(reduce_part, 2, str(tmp_path))
    for rank in range(2):
        np.testing.assert_array_equal(np.load(tmp_path / f"{rank}.npy"), scored(case(100)).sums)


def test_a_score_of_other_prompts_and_without_sizes():
    score = Score(prompts=("a", "b"), by_size=False)
    pixels = torch.tensor([[3, 4], [1, 4]])
    score.add(pixels, torch.full((2, 2), 4), torch.tensor([5, 50_000]), torch.ones(2))
    assert score.result() == {"masks": 2, "miou_a": 0.5, "miou_b": 1.0}
