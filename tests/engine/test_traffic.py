"""Each mode sends what it should: gradients once a step, in the chosen format, in groups of the chosen size."""

from functools import cache

import pytest

from sa1b.engine.settings import ParallelConfig
from tests.engine import traffic
from tests.engine.launch import launch
from tests.engine.training import build_second

CASES = {
    "ddp": ParallelConfig(mode="ddp"),
    "rounded": ParallelConfig(mode="ddp", compress="bf16"),
    "fsdp": ParallelConfig(mode="fsdp"),
    "grad_op": ParallelConfig(mode="fsdp", shard="grad_op"),
    "bf16": ParallelConfig(mode="fsdp", reduce="bf16"),
    "size": ParallelConfig(mode="fsdp", wrap="size:20K"),
    "one group": ParallelConfig(mode="fsdp", wrap="none"),
}
MODEL = sum(4 * parameter.numel() for parameter in build_second().parameters())  # bytes
UNITS = [
    sum(4 * p.numel() for part in unit for p in part.parameters()) for unit in build_second().fsdp_units()
]
GRADIENTS = ("allreduce", "reduce_scatter")

Sent = dict[str, list[int]]


@cache
def sent() -> dict[str, dict[int, Sent]]:
    """What rank 0 of two sends in a step of 1 and, in modes with a path of their own, of 3 micro-batches."""
    counts = {name: (1,) if name in ("bf16", "rounded", "size", "one group") else (1, 3) for name in CASES}
    configs = {f"{name} {count}": (CASES[name], count) for name in CASES for count in counts[name]}
    found = launch(traffic.of_steps, 2, configs)[0]
    return {name: {count: found[f"{name} {count}"] for count in counts[name]} for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_sent_once_a_step_for_any_number_of_micro_batches(name: str) -> None:
    for step in sent()[name].values():
        gradients = sum(sum(step.get(kind, [])) for kind in GRADIENTS)
        # FSDP pads shards to equal lengths.
        assert gradients == pytest.approx(MODEL / (2 if name in ("bf16", "rounded") else 1), rel=0.01)


def test_grad_op_gathers_each_group_once_in_a_micro_batch_and_full_twice() -> None:
    inside = [size for size in sent()["fsdp"][1]["allgather"] if size < min(MODEL - sum(UNITS), MODEL / 2)]
    kept = [size for size in sent()["grad_op"][1]["allgather"] if size < min(MODEL - sum(UNITS), MODEL / 2)]
    assert (len(inside), len(kept)) == (2 * len(UNITS), len(UNITS))


def test_groups_of_a_size_are_gathered_together() -> None:
    joined = [size for size in sent()["size"][1]["allgather"] if size < MODEL / 2]
    assert joined == [pytest.approx(sum(UNITS), rel=0.01)] * 2  # forward and backward
    assert sent()["one group"][1]["allgather"] == [pytest.approx(MODEL, rel=0.01)]
