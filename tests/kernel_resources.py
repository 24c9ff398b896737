"""Registers, spills and shared memory of the Triton kernels, compiled ahead of time for several GPUs.

    python -m tests.kernel_resources           writes tests/kernel_resources.json

A training step of a decoder with the sizes of ViT-B, and the rasteriser, run on the CPU with the operators of
a CUDA device. Each launch compiles its kernel for each GPU and starts nothing. Triton's `ptxas` assigns the
registers, so figures are compared only with those of the same version of Triton.
"""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.account import as_on_a_gpu
from sa1b.engine.config import build
from sa1b.engine.planner.fake_step import blank_batch
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.step.run import TrainStep
from sa1b.masks import raster_triton
from sa1b.recipes.presets import PRESETS
from sa1b.sam import image_to_tokens_triton, tokens_to_image_triton

# The default changes with Triton 3.10, which warns of it.
_FUSION = {"TRITON_DEFAULT_FP_FUSION": "1"}
RECORDED = Path(__file__).with_suffix(".json")
# Compute capability -> bytes of shared memory that a block can have: A100, RTX 4090, H100, B200.
GPUS = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}
PRECISIONS = ("bf16", "fp16", "fp32")
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_RUN = JITFunction.run
Resources = dict[str, list[int]]  # kernel with its sizes -> see `FIGURES`
FIGURES = "registers", "bytes of stack", "bytes of shared memory", "threads"


class _NoDevice:
    """A driver of Triton without a device: kernels are compiled for `capability`."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def of_gpu(capability: int, precisions: Iterable[str] = PRECISIONS) -> Resources:
    """The resources of all kernels on a GPU of this compute capability."""
    found: Resources = {}

    def launch(kernel: Any, *arguments: Any, **options: Any) -> None:
        compiled = _RUN(kernel, *arguments, warmup=True, **options)
        formats = {str(x.dtype).removeprefix("torch.") for x in arguments if isinstance(x, torch.Tensor)}
        sizes = {name: x for name, x in options.items() if name != "grid"}
        constants = [
            f"{x:g}" if isinstance(x, float) else x for x in arguments if isinstance(x, int | float | str)
        ]
        words = [kernel.__name__, *sorted(formats), *constants, *(f"{name}={x}" for name, x in sizes.items())]
        found[" ".join(map(str, words))] = _resources(compiled)

    driver.set_active(_NoDevice(capability))
    modules = tokens_to_image_triton, image_to_tokens_triton
    with mock.patch.dict(os.environ, _FUSION), as_on_a_gpu(launch), ExitStack() as stack:
        for module in modules:
            patch = mock.patch.object(module, "shared_memory", return_value=GPUS[capability])
            stack.enter_context(patch)
        for precision in precisions:
            _train(precision)
        _rasterize()
    return found


def _train(precision: str) -> None:
    config = PRESETS["vit_b"]
    model = replace(config.model, width=64, depth=1, heads=1, global_blocks=(), cuda_graphs=False)
    recipe = replace(config.recipe, clicks=3, unprompted=0)  # 7 to 10 tokens: two numbers of rows
    parallel = replace(config.parallel, precision=precision)
    config = replace(config, model=model, recipe=recipe, parallel=parallel)
    step = TrainStep(build(config, None), config, RankInfo(0, 1, 0, torch.device("cpu")))
    step.forward_backward(blank_batch(1, 2, config.image_size, config.image_size // 4))


def _rasterize() -> None:
    runs, offsets = torch.tensor([3, 9], dtype=torch.int32), torch.tensor([0, 2])
    with mock.patch.object(raster_triton, "COMPILED", False):
        for dtype in (torch.uint8, torch.bfloat16, torch.float32):
            raster_triton.rasterize_frame(runs, offsets, 3, 4, 1024, 1024, dtype=dtype)


def _resources(compiled: Any) -> list[int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [_TOOLS / "cuobjdump", "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", printed)}
    return [usage["REG"], usage["STACK"], compiled.metadata.shared, 32 * compiled.metadata.num_warps]


if __name__ == "__main__":
    document = {
        "triton": triton.__version__,
        "figures": FIGURES,
        "gpus": {f"sm_{one}": of_gpu(one) for one in GPUS},
    }
    text = json.dumps(document, indent=1)
    RECORDED.write_text(re.sub(r"\n\s+(\d+)(,?)(?:\n\s+(?=\]))?", r"\1\2", text) + "\n")  # a kernel, a line
    print(f"Written: {RECORDED}")
