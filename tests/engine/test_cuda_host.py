"""The host's part of training on a CUDA device: launches, copies, memory and waits, not values.

pytest -m cuda_host        these tests also run with stub libraries in place of a GPU
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend

from sa1b import Batch
from sa1b.engine.checkpoint.checkpoints import Checkpoints
from sa1b.engine.config import build
from sa1b.engine.planner import blank_batch
from sa1b.engine.ranks.process_group import start, stop
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import ParallelConfig
from sa1b.engine.step.gradients import TrainStep, clear
from sa1b.engine.step.optim import freeze
from sa1b.masks.proved import MASKS, RASTER_IN_USE
from sa1b.recipes.presets import PRESETS
from sa1b.sam import image_encoder, interactive
from sa1b.sam.image_encoder import HEAD_MULTIPLE
from sa1b.sam.image_tokens import IN_USE
from sa1b.sam.iteration import Graphs
from sa1b.sam.kernel_proof import KERNELS

pytestmark = [pytest.mark.gpu, pytest.mark.cuda_host]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """The setting of cuDNN's attention is that of before. All kernels are used, whatever their values are."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    if torch.cuda.get_device_name().endswith("(null)"):  # stub libraries have no attention of cuDNN
        torch.backends.cuda.enable_cudnn_sdp(False)
    with mock.patch.object(interactive, "use_kernels"):
        IN_USE.update(KERNELS)
        RASTER_IN_USE[MASKS] = True
        yield
    IN_USE.clear()
    RASTER_IN_USE.clear()
    torch.backends.cuda.enable_cudnn_sdp(enabled)


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


@pytest.mark.parametrize("mode", ["none", "ddp", "fsdp"])
def test_every_mode_trains_and_saves_twice(mode: str, tmp_path: Path) -> None:
    config = PRESETS["tiny"]
    recipe = replace(config.recipe, clicks=1, unprompted=0)
    parallel = replace(config.parallel, mode=mode, precision="bf16", device="cuda", cudnn_attention=False)
    config = replace(config, recipe=recipe, parallel=parallel)
    rank_info = start(parallel)
    try:
        step = TrainStep(build(config, None), config, rank_info)
        checkpoints = Checkpoints(tmp_path, replace(config.checkpoint, asynchronous=True))
        for number in range(1, 5):
            sums = step.forward_backward(batch_of(256, 4))
            step.finish(sums["count"])
            step.scaler.step(step.optimizer)
            clear(step.module, step.optimizer)
            if number % 2 == 0:
                checkpoints.save(number, step.module, step.optimizer, {})
        checkpoints.close()
        assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == [
            "step-00000002",
            "step-00000004",
        ]
    finally:
        stop()


@pytest.mark.parametrize("cudnn", [True, False])
def test_the_attention_of_every_preset_has_a_fused_kernel(cudnn: bool) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    start(ParallelConfig(device="cuda", cudnn_attention=cudnn))
    shapes = set()
    for config in PRESETS.values():
        model = config.model
        if model.heads == 1:  # an encoder of timm
            continue
        side, length = model.image_size // 16, model.width // model.heads
        lengths = [(n, length + 2 * n) for n in (side, model.window)]
        shapes |= {(model.heads, n * n, size + -size % HEAD_MULTIPLE, length) for n, size in lengths}
    assert (12, 4096, 192, 64) in shapes
    found = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        chosen = SDPBackend(torch._fused_sdp_choice(q, k, v, None, 0.0, False, scale=scale))
        found.append((chosen, v.shape[-1]))
        return v

    with mock.patch.object(image_encoder.F, "scaled_dot_product_attention", attention):
        for heads, tokens, length, own in sorted(shapes):
            for gradient in (False, True):
                sizes = ((2, heads, tokens, size) for size in (length, own))
                q, v = (torch.empty(size, device="cuda", dtype=torch.bfloat16) for size in sizes)
                q.requires_grad_(gradient)
                assert image_encoder.attended(q, q, v).shape == v.shape
                fused = (SDPBackend.CUDNN_ATTENTION, own) if cudnn else (SDPBackend.FLASH_ATTENTION, length)
                assert found.pop() == fused, (heads, tokens, length, gradient)


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
