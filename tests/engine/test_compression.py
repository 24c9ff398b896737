"""Compressed gradients: bytes, loss curves, and the state of PowerSGD around skipped steps."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from sa1b.engine.compression import compression_rank
from sa1b.errors import UsageError
from tests.engine import compressed_ranks
from tests.engine.compressed_ranks import CURVES
from tests.engine.launch import launch
from tests.engine.training import build

MODEL = sum(4 * parameter.numel() for parameter in build().parameters())  # bytes


@cache
def curves(world_size: int) -> list[dict[str, dict[str, Any]]]:
    return launch(compressed_ranks.curves, world_size)


@cache
def interrupted() -> list[dict[str, Any]]:
    return launch(compressed_ranks.interrupted, 2)


def total(world_size: int, name: str) -> Tensor:
    """The losses of the steps over all ranks."""
    return torch.tensor([rank[name]["losses"] for rank in curves(world_size)]).sum(dim=0)


@pytest.mark.parametrize("name", [name for name in CURVES if name != "none"])
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_loss_follows_that_of_uncompressed_gradients(world_size: int, name: str) -> None:
    expected, found = total(world_size, "none"), total(world_size, name)
    assert not torch.equal(found, expected)
    tolerance = 0.2 if "powersgd" in name else 0.02
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)
    weights = [rank[name]["weights"] for rank in curves(world_size)]
    assert all(torch.equal(tensor, weights[-1][key]) for key, tensor in weights[0].items())


def test_the_bytes_are_halved_or_those_of_two_narrow_matrices() -> None:
    sent = {name: one["sent"] for name, one in curves(2)[0].items()}
    assert sent["none"] == MODEL
    assert sent["fp16"] == sent["bf16"] == sent["bf16, zero1, 3 micro-batches"] == MODEL / 2
    assert sent["powersgd:2"] < MODEL / 3


def test_the_warm_up_and_a_skipped_step_change_no_state() -> None:
    for rank in interrupted():
        settings, tensors = rank["fresh"]
        assert (settings["steps"], tensors) == (0, {})
        assert rank["before"][0]["steps"] == 4
        assert set(rank["before"][1]) == {"error.0", "p.0", "q.0"}
        assert rank["before"][1]["error.0"].abs().max() > 0
        assert rank["spoiled"][1]["error.0"].isnan().any()
        assert rank["after"][0] == rank["before"][0]
        for name in ("error.0", "q.0"):
            assert torch.equal(rank["after"][1][name], rank["before"][1][name])
        assert all(torch.equal(tensor, rank["straight"][name]) for name, tensor in rank["end"].items())


def test_a_weight_without_a_gradient_in_one_step_is_trained_in_later_ones() -> None:
    for norms in launch(compressed_ranks.without_gradient_for_a_step, 2):
        assert norms[3] == 0
        assert norms[4] > 0
        assert norms[5] > 0


@pytest.mark.parametrize(
    "compress", ["", "fp8", "powersgd", "powersgd:", "powersgd:0", "powersgd:-1", "powersgd:a"]
)
def test_other_values_are_refused(compress: str) -> None:
    with pytest.raises(UsageError, match=f"--parallel.compress {compress}: no such compression"):
        compression_rank(compress)
