"""Memory of a step on fake tensors: compared with real steps, with sizes, and on ranks that do not exist."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sa1b.engine.planner.fake_step import LiveMemory, StepMemory, measure
from sa1b.errors import UsageError
from sa1b.recipes.presets import PRESETS
from tests.engine import reconstruction
from tests.engine.launch import launch
from tests.engine.real_step import MICRO_BATCH, MICRO_BATCHES, peaks_of, settings

PREFETCHED = PRESETS["tiny"].data.prefetch + 1  # batches that the real steps do not have


def compare(kinds: list[dict[str, Any]], world_size: int, *, separate: bool = True) -> None:
    """Measure in processes of their own; this one may hold garbage of other tests."""
    configs = [settings(world_size, **kind) for kind in kinds]
    measured = launch(peaks_of, world_size, configs) if separate else [peaks_of(configs)]
    for number, config in enumerate(configs):
        memory = measure(config, world_size)
        estimate = memory.peak - memory.batches * PREFETCHED // (PREFETCHED + 1)
        for rank in range(world_size):
            assert estimate == pytest.approx(measured[rank][number], rel=0.1), (kinds[number], memory)


def test_the_peak_is_that_of_a_real_step_within_10_percent() -> None:
    compare([{"mode": "none", "precision": "fp32"}], 1, separate=False)


@pytest.mark.slow  # quick: one rank, below
def test_the_peak_of_two_ranks_is_that_of_real_ranks_within_10_percent() -> None:
    compare([{"mode": "fsdp", "precision": "bf16"}], 2)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_peak_is_that_of_real_steps_within_10_percent_in_all_modes(world_size: int) -> None:
    kinds = [
        {"mode": mode, "precision": precision, **more}
        for precision in ("fp32", "bf16")
        for mode, more in (("ddp", {}), ("zero1", {}), ("fsdp", {}), ("fsdp", {"shard": "grad_op"}))
    ]
    if world_size == 1:
        kinds += [{"mode": "none", "precision": precision} for precision in ("fp32", "bf16", "fp16")]
    compare(kinds, world_size)


def plain(world_size: int, **parallel: Any) -> reconstruction.ReconstructionConfig:
    """Settings of the second model, whose step has few operations."""
    config = reconstruction.PRESETS["small"]
    images = MICRO_BATCH * MICRO_BATCHES * world_size
    return replace(
        config,
        data=replace(config.data, global_batch=images, micro_batch=MICRO_BATCH),
        parallel=replace(config.parallel, device="cpu", **parallel),
    )


@pytest.fixture(scope="module")
def of_ddp() -> StepMemory:
    return measure(plain(16, mode="ddp"), 16)


def test_parts_of_a_replicated_model_have_the_sizes_of_its_parameters(of_ddp: StepMemory) -> None:
    config = plain(16)
    parameters = sum(parameter.numel() for parameter in config.build().parameters())
    assert of_ddp.parameters == pytest.approx(4 * parameters, rel=0.001)  # and a few buffers
    assert of_ddp.optimizer == pytest.approx(8 * parameters, rel=0.001)
    # All micro-batches accumulate in the buckets that are sent.
    assert of_ddp.gradients == pytest.approx(4 * parameters, rel=0.01)


def test_sixteen_ranks_share_the_parameters_of_a_sharded_model(of_ddp: StepMemory) -> None:
    found = measure(plain(16, mode="fsdp"), 16)
    shapes = [parameter.shape for parameter in plain(16).build().parameters()]
    rows = sum(-(-shape[0] // 16) * shape[1:].numel() for shape in shapes)  # the last rank has padding
    assert found.parameters == pytest.approx(4 * rows, rel=0.02)  # and a few buffers
    assert found.optimizer == pytest.approx(8 * rows, rel=0.02)
    assert found.optimizer < of_ddp.optimizer / 10
    assert found.communication > 0
    assert not dist.is_initialized()


def test_recomputed_blocks_take_less_memory() -> None:
    config = settings(16, mode="ddp")
    config = replace(config, recipe=replace(config.recipe, clicks=0))  # half of the decoder's operations
    all_kept = measure(config, 16)
    less = measure(replace(config, model=replace(config.model, checkpoint_blocks="all")), 16)
    assert less.activations < all_kept.activations
    assert less.parameters == all_kept.parameters


def test_offloaded_parts_are_not_on_the_device() -> None:
    found = measure(plain(4, mode="fsdp", offload="pinned"), 4)
    assert found.offloaded == found.parameters + found.gradients + found.optimizer
    assert found.peak == found.batches + found.communication + found.activations


@pytest.mark.parametrize(
    ("world_size", "parallel", "complaint"),
    [
        (8, {"mode": "none"}, "--parallel.mode none: is for one process, this run has 8"),
        (8, {"mode": "ddp", "shard": "grad_op"}, "--parallel.shard: is for --parallel.mode fsdp, not ddp"),
    ],
)
def test_settings_that_do_not_fit_the_ranks_are_refused(
    world_size: int, parallel: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        measure(settings(world_size, **parallel), world_size)
    assert not dist.is_initialized()


def test_a_global_batch_with_fewer_images_than_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="--data.global-batch 4: has 4 samples for 8 ranks"):
        measure(settings(1, mode="ddp"), 8)
    assert not dist.is_initialized()


def test_live_memory_counts_each_storage_until_it_is_freed() -> None:
    with LiveMemory() as memory:
        first = torch.zeros(100)
        memory.begin()
        second = first[10:] + 1  # 90 numbers; the slice has no memory of its own
        assert memory.bytes == 760
        del second
        assert memory.bytes == 400
        kept = torch.zeros(10)
    assert memory.peak == 760
    memory.mark([first], "parameters")
    assert memory.at_peak() == {"parameters": 400, "activations": 360}
    assert kept.sum() == 0


def test_live_memory_follows_storages_that_are_resized() -> None:
    with LiveMemory() as memory:
        gathered = torch.zeros(100)
        memory.begin()
        gathered.untyped_storage().resize_(0)
        assert memory.bytes == 0
        gathered.untyped_storage().resize_(800)
    assert memory.at_peak() == {"communication": 800}
    resize = torch.UntypedStorage.resize_
    with LiveMemory():
        pass
    assert torch.UntypedStorage.resize_ == resize


def test_live_memory_counts_what_autograd_keeps() -> None:
    weight = torch.zeros(100, requires_grad=True)
    with LiveMemory() as memory:
        loss = (weight.exp() + 1).sum()  # the backward pass of exp needs its result
        assert memory.bytes == 404
        loss.backward()
        assert memory.bytes == 404  # the gradient instead
        memory.mark([weight.grad], "gradients")
        memory.begin()
    assert memory.at_peak() == {"gradients": 400, "activations": 4}
