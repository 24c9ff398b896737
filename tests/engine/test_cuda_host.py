"""The host's part of training on a CUDA device: launches, copies, memory and waits, not values.

pytest -m cuda_host        these tests also run with stub libraries in place of a GPU
"""

from dataclasses import replace

import pytest
import torch

from sa1b.engine.config import build
from sa1b.engine.planner import check_memory
from sa1b.engine.planner.fake_step import blank_batch
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.step.optim import freeze
from sa1b.engine.step.run import TrainStep
from sa1b.errors import UsageError
from sa1b.recipes.presets import PRESETS
from sa1b.sam.iteration import Graphs
from sa1b.stream.batch import Batch

pytestmark = [pytest.mark.gpu, pytest.mark.cuda_host]


def batch_of(image_size: int, masks: int) -> Batch:
    """A batch of two images on the device, copied from pinned memory."""
    pinned = blank_batch(2, masks, image_size, image_size // 4).pin_memory()
    assert pinned.images.is_pinned()
    return pinned.to("cuda")


@pytest.mark.parametrize("preset", ["tiny", "vit_b"])
@pytest.mark.parametrize(
    ("precision", "low_rank"), [("fp32", 0), ("tf32", 0), ("bf16", 0), ("fp16", 0), ("fp32", 4), ("bf16", 4)]
)
def test_steps_after_the_second_neither_wait_nor_allocate(preset: str, precision: str, low_rank: int) -> None:
    config = PRESETS[preset]
    model = replace(config.model, image_size=256, depth=2, global_blocks=(1,), lora_rank=low_rank)
    recipe = replace(config.recipe, clicks=2, unprompted=1)
    parallel = replace(config.parallel, precision=precision, device="cuda")
    config = replace(config, model=model, recipe=recipe, parallel=parallel)
    module = build(config, None).cuda().train()
    freeze(module, config.optim)
    step = TrainStep(module, config, RankInfo(0, 1, 0, torch.device("cuda", 0)))
    batches = [batch_of(256, masks) for masks in (8, 7)]
    allocated = []
    for number in range(6):
        torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")
        try:
            sums = step.forward_backward(batches[number % 2])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        step.finish(sums["count"])
        step.scaler.step(step.optimizer)
        step.scaler.update()
        step.optimizer.zero_grad(set_to_none=True)
        allocated.append(torch.cuda.memory_stats()["num_device_alloc"])
    (graphs,) = [x for one in module.modules() for x in vars(one).values() if isinstance(x, Graphs)]
    recorded = [one for one in graphs._found.values() if one is not None]
    assert len(recorded) == (0 if precision == "fp16" else 2)
    assert allocated[-1] == allocated[-2]


def test_a_step_beyond_the_free_memory_is_refused_before_it() -> None:
    config = PRESETS["vit_b"]
    rank_info = RankInfo(0, 1, 0, torch.device("cuda", 0))
    with torch.device("meta"):
        module = build(config, None)
    with pytest.raises(
        UsageError, match=r"of 128 images needs [\d,]+ bytes, and [\d,]+ are free on cuda:0; pass"
    ):
        check_memory(config, module, rank_info)


def test_a_model_of_each_preset_is_built_and_trained_in_bf16() -> None:
    for name in ("vit_t", "vit_l", "vit_h"):
        config = PRESETS[name]
        model = replace(config.model, image_size=128, depth=1, global_blocks=())
        recipe = replace(config.recipe, clicks=1, unprompted=0)
        parallel = replace(config.parallel, precision="bf16", device="cuda")
        config = replace(config, model=model, recipe=recipe, parallel=parallel)
        step = TrainStep(
            build(config, None).cuda().train(), config, RankInfo(0, 1, 0, torch.device("cuda", 0))
        )
        sums = step.forward_backward(batch_of(128, 3))
        step.finish(sums["count"])
        assert all(one.grad is not None for one in step.module.parameters() if one.requires_grad), name
