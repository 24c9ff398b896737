"""The account of a training step: what is counted, and what the project's kernels change."""

import json
from typing import Any

import pytest
import torch
from torch.nn import functional

from benchmarks import account
from benchmarks.account import KERNELS, Account
from tests.masks.test_raster_triton import with_triton


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
    with counted:
        torch.zeros(7).add_(torch.zeros(7))
        torch.zeros(7).copy_(torch.zeros(7))
    moved = {name: one.bytes for (_, name), one in counted.sums.items()}
    assert (moved["add_"], moved["copy_"]) == (3 * 4 * 7, 2 * 4 * 7)


def test_attention_has_two_products_forward_and_five_backward() -> None:
    q = torch.zeros(1, 2, 8, 16, requires_grad=True)
    counted = Account()
    with counted:
        functional.scaled_dot_product_attention(q, q, q).sum().backward()
    product = 2 * 2 * 8 * 8 * 16
    flop = {name: one.flop for (_, name), one in counted.sums.items() if one.flop}
    assert sorted(flop.values()) == [2 * product, 5 * product], flop


def test_the_cache_can_take_longer_than_memory_and_operations() -> None:
    counted = Account(bandwidth=1e3, flops=1e3, cache=1e3)
    counted.add("kernel", [torch.zeros(10)], flop=20, blocks=1, cached=100)
    counted.add("operator", [torch.zeros(10)])
    total = counted.total()
    assert (total.bytes, total.cached, total.seconds) == (80, 140, 0.14)


def test_a_launch_takes_time_of_its_own() -> None:
    counted = Account()
    counted.add("operator", [torch.zeros(1)])
    counted.add("operator", [torch.zeros(1)], blocks=1, cached=5.5e12)
    assert counted.total().seconds == 1 + 2e-6


MAIN, BACKWARD, GPU = (1, 1), (1, 2), (0, 7)


def event(
    cat: str, name: str, ts: float, dur: float, place: tuple[int, int], number: int = 0
) -> dict[str, Any]:
    """Of a trace; `number`: correlation of a launch and what it launches."""
    found = {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": number}}
    return found | dict(zip(("pid", "tid"), place, strict=True))


def operators(place: tuple[int, int], start: float, *names: str) -> list[dict[str, Any]]:
    """Operators that call each other and begin together, the innermost first."""
    count = len(names)
    return [event("cpu_op", name, start, 20 + count - i, place) for i, name in enumerate(names)][::-1]


TRACE = [
    *(event("user_annotation", f"ProfilerStep#{n}", 1000 * n, 1000, MAIN) for n in (1, 2)),
    event("gpu_user_annotation", "ProfilerStep#1", 0, 9000, GPU),
    event("cuda_runtime", "cudaLaunchKernel", 1103, 5, MAIN, 1),
    *operators(MAIN, 1100, "aten::contiguous", "aten::clone", "aten::copy_"),
    event("kernel", "void at::native::copy_kernel<float>", 1200, 100, GPU, 1),
    # Another thread at the same time; the kernel runs in the next step, beside another one.
    *operators(BACKWARD, 1100, "autograd::engine::evaluate_function: MmBackward0", "MmBackward0", "aten::mm"),
    event("cuda_driver", "cuLaunchKernelEx", 1103, 5, BACKWARD, 2),
    event("kernel", "cutlass_gemm", 2050, 110, GPU, 2),
    *operators(MAIN, 1200, "aten::to", "aten::_to_copy", "aten::copy_"),
    event("cuda_runtime", "cudaMemcpyAsync", 1200, 5, MAIN, 3),
    event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 2100, 60, GPU, 3),
    # Begins when the operator before ends.
    *operators(MAIN, 1223, "aten::outer", "custom::inner"),
    event("cuda_runtime", "cudaMemsetAsync", 1223, 5, MAIN, 5),
    event("gpu_memset", "Memset (Device)", 2310, 10, GPU, 5),
    # A kernel of the project has its own name, also within an operator.
    *operators(MAIN, 1400, "aten::add"),
    event("cuda_driver", "cuLaunchKernelEx", 1405, 5, MAIN, 6),
    event("kernel", "read_forward", 2320, 40, GPU, 6),
    *operators(MAIN, 1500, "aten::add"),
    event("cuda_runtime", "cudaGraphLaunch", 1505, 5, MAIN, 7),
    event("kernel", "replayed", 2400, 10, GPU, 7),
    event("kernel", "read_forward", 2410, 20, GPU, 7),
    # Not in the steps.
    event("kernel", "read_forward", 999, 10, GPU, 10),
    event("kernel", "read_forward", 3000, 10, GPU, 11),
]


def test_kernels_of_a_trace_count_for_the_operators_that_launched_them() -> None:
    counted = Account(bandwidth=1e6, launch=1e-5)
    for name in ("clone", "copy_", "mm", "_to_copy", "add"):
        counted.add(name, [])
    counted.inside = True
    counted.add("clone", [torch.zeros(10)])
    counted.add("read_forward", [], blocks=1)
    rows = account.compared(reversed(TRACE), counted)
    assert {row.name: (2 * row.launches, round(2000 * row.measured_ms)) for row in rows} == {
        "clone": (1, 100), "mm": (1, 110), "_to_copy": (1, 60), "copy_": (0, 0), "custom::inner": (1, 10),
        "read_forward": (2, 60), "replayed": (1, 10), "add": (0, 0),
    }  # fmt: skip
    overlaps = {row.name: round(2000 * row.busy_ms) for row in rows if row.busy_ms != row.measured_ms}
    assert overlaps == {"_to_copy": 0}
    expected = {row.name: (row.predicted_launches, round(1000 * row.predicted_ms)) for row in rows}
    assert expected["clone"] == (2, 10 + 40)
    assert {name for name, values in expected.items() if values == (0, 0)} == {"custom::inner", "replayed"}
    assert (rows[0].name, rows[0].ratio) == ("mm", pytest.approx(5.5))
    _, every, unknown, *some, busy = account.table_of(rows, 3).splitlines()
    assert [line.split()[0] for line in some] == [row.name.split()[0] for row in rows[:3]]
    assert every.split() == ["all", "7", "3.5", "0.10", "0.17", "+0.07", "1.75"]
    assert unknown.split()[-6:] == ["0", "1.0", "0.00", "0.01", "+0.01", "inf"]
    assert busy.split()[-1] == "0.15"


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
