"""Pipelines of two and three stages take the steps of one process; their checkpoints fit all modes."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from sa1b.engine.ranks.pipeline import divide
from sa1b.engine.settings import ParallelConfig
from sa1b.errors import UsageError
from tests.engine import pipeline_ranks
from tests.engine.launch import launch

PIPELINE = ParallelConfig(mode="pipeline", device="cpu")
CASES = {
    "1f1b": PIPELINE,
    "gpipe": ParallelConfig(mode="pipeline", schedule="gpipe", device="cpu"),
    "1f1b, bf16": ParallelConfig(mode="pipeline", precision="bf16", device="cpu"),
    "gpipe, bf16": ParallelConfig(mode="pipeline", schedule="gpipe", precision="bf16", device="cpu"),
}


@cache
def alone() -> dict[str, Any]:
    configs = {"fp32": ParallelConfig(device="cpu"), "bf16": ParallelConfig(precision="bf16", device="cpu")}
    return pipeline_ranks.traces(configs)


QUICK = {2: ("1f1b", "gpipe", "1f1b, bf16"), 3: ("1f1b",)}


@cache
def stages(world_size: int, quick: bool = True) -> list[dict[str, Any]]:
    cases = {name: case for name, case in CASES.items() if (name in QUICK[world_size]) == quick}
    return launch(pipeline_ranks.traces, world_size, cases)


@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        pytest.param(size, name, marks=() if name in QUICK[size] else pytest.mark.slow)
        for size in QUICK
        for name in CASES
    ],
)
def test_a_pipeline_takes_the_steps_of_one_process(world_size: int, name: str) -> None:
    ranks = [one[name] for one in stages(world_size, name in QUICK[world_size])]
    expected = alone()["bf16" if "bf16" in name else "fp32"]
    tolerance = 2e-2 if "bf16" in name else 1e-5
    assert ranks[-1]["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert all(rank["losses"] == [0.0] * len(expected["losses"]) for rank in ranks[:-1])
    for rank in ranks:
        assert rank["norms"] == pytest.approx(expected["norms"], rel=10 * tolerance)
        assert rank["norms"] == ranks[0]["norms"]
    gradients = {key: one for rank in ranks for key, one in rank["gradients"].items()}
    assert sum(len(rank["gradients"]) for rank in ranks) == len(gradients)  # each on one rank
    assert gradients.keys() == expected["gradients"].keys()
    for key, one in expected["gradients"].items():
        torch.testing.assert_close(gradients[key], one, rtol=tolerance, atol=tolerance / 10, msg=key)


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_tensor_is_on_one_rank_and_all_ranks_know_all_names(world_size: int) -> None:
    whole, ranks = alone()["fp32"], [one["1f1b"] for one in stages(world_size)]
    assert {rank["parameters"] for rank in ranks} == {whole["parameters"]}
    assert sum(len(rank["tensors"]) for rank in ranks) == len(whole["tensors"])
    assert {name for rank in ranks for name in rank["tensors"]} == whole["tensors"].keys()
    first, last = set(ranks[0]["tensors"]), set(ranks[-1]["tensors"])
    assert {"model.image_encoder.pos_embed", "optimizer.image_encoder.pos_embed.exp_avg"} < first
    assert {"model.image_encoder.neck.0.weight", "model.mask_decoder.iou_token.weight"} < last


def test_both_schedules_have_the_same_bits() -> None:
    for rank in stages(2):
        assert rank["1f1b"]["norms"] == rank["gpipe"]["norms"]


def test_what_is_not_possible_is_refused_on_all_ranks() -> None:
    for frozen, other, unequal, after in launch(pipeline_ranks.refusals, 2, PIPELINE):
        assert frozen.startswith("--optim.freeze: leaves nothing to train on stage 0")
        assert other.startswith("--parallel.mode pipeline: Interactive cannot be divided into stages")
        assert "pass a --data.micro-batch that divides --data.global-batch" in unequal
        assert float(after.strip("[]")) > 0
    with pytest.raises(UsageError, match="4 ranks for 3 blocks leave some without a block; start at most 3"):
        divide(pipeline_ranks.model(), 4)


OTHERS = {
    "ddp": ParallelConfig(mode="ddp", device="cpu"),
    "fsdp": ParallelConfig(mode="fsdp", device="cpu"),
    "pipeline": PIPELINE,
}


def together(ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: one for rank in ranks for name, one in rank.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_of_a_pipeline_loads_in_all_modes_and_back(tmp_path: Path) -> None:
    saved = together(launch(pipeline_ranks.save, 3, tmp_path / "pipeline", PIPELINE))
    assert same(
        pipeline_ranks.load(tmp_path / "pipeline", {"none": ParallelConfig(device="cpu")})["none"], saved
    )
    loaded = launch(pipeline_ranks.load, 2, tmp_path / "pipeline", OTHERS)
    for mode in OTHERS:
        assert same(together([rank[mode] for rank in loaded]), saved), mode
    saved = together(launch(pipeline_ranks.save, 2, tmp_path / "fsdp", OTHERS["ddp"]))
    loaded = launch(pipeline_ranks.load, 3, tmp_path / "fsdp", {"pipeline": PIPELINE})
    assert same(together([rank["pipeline"] for rank in loaded]), saved)


def test_1f1b_keeps_a_micro_batch_for_each_later_stage_and_gpipe_keeps_all() -> None:
    ranks = launch(
        pipeline_ranks.waiting, 3, {name: CASES[name] for name in ("1f1b", "gpipe")}, [2, 5], 0.0, 1
    )
    for rank, found in enumerate(ranks):
        kept = {case: most for case, (_, most) in found.items()}
        # With fewer micro-batches than stages, 1f1b has the schedule of gpipe.
        assert kept == {("1f1b", 5): 3 - rank, ("gpipe", 5): 5, ("1f1b", 2): 2, ("gpipe", 2): 2}
