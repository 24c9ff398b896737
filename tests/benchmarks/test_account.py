"""The account of a training step: what is counted, and what the project's kernels change."""

import json

import pytest
import torch
from torch.nn import functional

from benchmarks import account
from benchmarks.account import KERNELS, Account
from tests.masks.test_raster_triton import python, with_triton


def test_operators_are_counted_with_their_bytes_and_operations_and_views_are_not() -> None:
    a, b = torch.zeros(3, 4), torch.zeros(4, 5)
    counted = Account(bandwidth=1e3, flops=1e2)
    with counted:
        (a @ b).t().add(1.0)
        torch.zeros(7).expand(2, 7).add(torch.zeros(1))
    product = counted.sums[False, "mm"]
    assert (product.launches, product.bytes, product.flop) == (1, 4 * (12 + 20 + 15), 2 * 3 * 4 * 5)
    assert product.seconds == max(product.bytes / 1e3, product.flop / 1e2)
    added = counted.sums[False, "add"]
    assert (added.launches, added.bytes) == (2, 4 * (15 + 15) + 4 * (7 + 1 + 14))
    assert {name for _, name in counted.sums} == {"mm", "add", "zeros"}


def test_attention_has_two_products_forward_and_five_backward() -> None:
    q = torch.zeros(1, 2, 8, 16, requires_grad=True)
    counted = Account()
    with counted:
        functional.scaled_dot_product_attention(q, q, q).sum().backward()
    product = 2 * 2 * 8 * 8 * 16
    flop = {name: one.flop for (_, name), one in counted.sums.items() if one.flop}
    assert sorted(flop.values()) == [2 * product, 5 * product], flop


@with_triton
def test_programs_load_and_store_in_the_interpreter_what_the_account_says() -> None:
    assert python("-m", "tests.benchmarks.account_cases", TRITON_INTERPRET="1") == "9 kernels\n"


def test_the_cache_can_take_longer_than_memory_and_operations() -> None:
    counted = Account(bandwidth=1e3, flops=1e3, cache=1e3)
    counted.add("kernel", [torch.zeros(10)], flop=20, blocks=1, cached=100)
    counted.add("operator", [torch.zeros(10)])
    total = counted.total()
    assert (total.bytes, total.cached, total.seconds) == (80, 140, 0.14)


@with_triton
def test_the_kernels_are_counted_and_move_fewer_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    totals = []
    for without in ([], ["--without", *KERNELS]):
        assert account.main(["--images", "1", "--masks", "16", "--json", *without]) == 0
        totals.append(json.loads(capsys.readouterr().out))
    own, plain = totals
    assert own["blocks of kernels"] > 0 == plain["blocks of kernels"]
    assert own["GB through the cache"] > own["GB"]
    assert plain["GB through the cache"] == plain["GB"]
    name = "MB of a mask and iteration"
    assert own[name] < 0.7 * plain[name]
    assert own[f"{name}, neither products nor kernels"] < 0.4 * plain[f"{name}, neither products nor kernels"]
    assert own[f"{name}, kept for the backward pass"] < 0.3 * plain[f"{name}, kept for the backward pass"]
    assert own["launches of the host with CUDA graphs"] < own["launches"] / 2
    assert own["ms at least"] > own["ms at least, iterations"] > 0
