"""Compressed gradients: bytes, loss curves, and the state of PowerSGD around skipped steps."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from sa1b.engine.ranks.compression import compression_rank
from sa1b.errors import UsageError
from tests.engine import compressed_ranks
from tests.engine.compressed_ranks import CURVES
from tests.engine.launch import launch
from tests.engine.training import build_second

QKV = "blocks.0.qkv.weight"
MODEL = sum(4 * parameter.numel() for parameter in build_second().parameters())  # bytes


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


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_number_of_buckets_changes_nothing(world_size: int) -> None:
    """Gloo aborts if the ranks start the collectives of several buckets in different orders."""
    ranks = launch(compressed_ranks.buckets, world_size)
    assert [one["buckets"] for one in ranks[0].values()] == [1, 2, 8, 8]
    for mode, size in ranks[0]:
        weights = [rank[mode, size]["weights"] for rank in ranks]
        assert all(torch.equal(weight, weights[-1][name]) for name, weight in weights[0].items())
        for rank in ranks:
            one, other = rank["ddp", 1], rank[mode, size]
            assert one["state"][f"error.{QKV}"].abs().max() > 0
            assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)
            assert other["state"].keys() == one["state"].keys()
            for name, tensor in other["state"].items():
                torch.testing.assert_close(tensor, one["state"][name], rtol=1e-3, atol=1e-3)


def test_the_warm_up_and_a_skipped_step_change_no_state() -> None:
    for rank in interrupted():
        settings, tensors = rank["fresh"]
        assert (settings["steps"], tensors) == (0, {})
        assert rank["before"][0]["steps"] == 4
        assert {f"error.{QKV}", f"q.{QKV}"} < set(rank["before"][1])
        assert rank["before"][1][f"error.{QKV}"].abs().max() > 0
        assert rank["spoiled"][1][f"error.{QKV}"].isnan().any()
        assert rank["after"][0] == rank["before"][0]
        assert rank["after"][1].keys() == rank["before"][1].keys()
        for name, tensor in rank["after"][1].items():
            assert torch.equal(tensor, rank["before"][1][name])
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
