"""Registers, spills, shared memory and machine code of the Triton kernels, compiled ahead of time for several GPUs.

    python -m tests.kernel_resources           writes tests/kernel_resources.json

A training step of a decoder with the sizes of ViT-B, and the rasteriser, run on the CPU with the operators of
a CUDA device. Each launch compiles its kernel for each GPU and starts nothing. Triton's `ptxas` assigns the
registers, so figures are compared only with those of the same version of Triton.

`lost_values` reads machine code. ptxas 12.8, of Triton 3.6 and 3.7, miscompiles products of sm_90 some of whose
operands have rows of 32 numbers: the descriptor of an operand comes from uniform registers that nothing writes,
or the stack pointer serves as a zero. PTX is right; results are wrong, or the process ends.
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
from sa1b.engine.planner import blank_batch
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.step.gradients import TrainStep
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
FIGURES = "registers", "bytes of stack", "bytes of shared memory", "threads"
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*(\S+)\s*([^;]*?)\s*;")
# Their results lie in uniform registers, as those of all instructions whose names start with U.
_TO_UNIFORM = "U", "R2UR", "S2UR", "LDCU", "REDUX", "CREDUX", "VOTEU"
# They set the stack pointer at the start. LLVM has PRMT take undefined bytes, for which any register will do.
_OF_STACK = re.compile(r"(?:LDC|MOV|IMAD\.MOV|IADD3|VIADD)\S* R1,|PRMT")


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


def of_gpu(capability: int, precisions: Iterable[str] = PRECISIONS) -> dict[str, tuple[list[int], str]]:
    """What `FIGURES` names and the machine code of all kernels on a GPU of this compute capability, by name and
    sizes.
    """
    found: dict[str, tuple[list[int], str]] = {}

    def launch(kernel: Any, *arguments: Any, **options: Any) -> None:
        compiled = _RUN(kernel, *arguments, warmup=True, **options)
        formats = {str(x.dtype).removeprefix("torch.") for x in arguments if isinstance(x, torch.Tensor)}
        sizes = {name: x for name, x in options.items() if name != "grid"}
        constants = [
            f"{x:g}" if isinstance(x, float) else x for x in arguments if isinstance(x, int | float | str)
        ]
        words = [kernel.__name__, *sorted(formats), *constants, *(f"{name}={x}" for name, x in sizes.items())]
        if (key := " ".join(map(str, words))) not in found:
            found[key] = _read(compiled)

    driver.set_active(_NoDevice(capability))
    modules = tokens_to_image_triton, image_to_tokens_triton
    with mock.patch.dict(os.environ, _FUSION), as_on_a_gpu(launch), ExitStack() as stack:
        for module in modules:
            patch = mock.patch.object(module, "shared_memory", return_value=GPUS[capability])
            stack.enter_context(patch)
        for precision in precisions:
            _train(precision)
            with mock.patch.object(image_to_tokens_triton, "gcd", return_value=1):
                _train(precision)  # programs of one tile, as for images of 640 pixels
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
        sizes, flip = torch.tensor([[3], [4]]), torch.tensor([True])
        raster_triton.rasterize_frame(runs, offsets, *sizes, 1024, 1024, flip=flip)


def _read(compiled: Any) -> tuple[list[int], str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [_TOOLS / "cuobjdump", "-res-usage", "-sass", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", printed)}
    return [usage["REG"], usage["STACK"], compiled.metadata.shared, 32 * compiled.metadata.num_warps], printed


def lost_values(code: str) -> list[str]:
    """The instructions of machine code that read a uniform register which no instruction before them writes, or
    the stack pointer outside of an address.
    """
    written, lost = set[int](), []
    for name, operands in _INSTRUCTION.findall(code):
        kind, *forms = name.split(".")
        read, results = set[int](), set[int]()
        wide = 4 if "128" in forms else 2 if {"64", "WIDE"} & {*forms} else 1
        for index, operand in enumerate(operands.split(",")):
            first, size = 0, 2 if re.search(r"\bg?desc\[", operand) else wide if kind == "UIADD3" else 1
            if kind == "HGMMA" and "gdesc[" in operand:  # of both operands; one in registers has none
                first, size = (2, 2) if index > 1 else (0, 4)
            result = index == 0 and kind.startswith(_TO_UNIFORM) and "[" not in operand
            for register in map(int, re.findall(r"\bUR(\d+)", operand)):
                if result:
                    results.update(range(register, register + wide))
                else:
                    read.update(range(register + first, register + first + size))
        outside = re.search(r"\bR1\b", re.sub(r"\[[^]]*]", "", operands))
        if not read <= written or (outside and not _OF_STACK.match(f"{name} {operands}")):
            lost.append(f"{name} {operands}")
        written |= results
    return lost


if __name__ == "__main__":
    document = {
        "triton": triton.__version__,
        "figures": FIGURES,
        "gpus": {f"sm_{one}": {name: x for name, (x, _) in of_gpu(one).items()} for one in GPUS},
    }
    text = json.dumps(document, indent=1)
    RECORDED.write_text(re.sub(r"\n\s+(\d+)(,?)(?:\n\s+(?=\]))?", r"\1\2", text) + "\n")  # a kernel, a line
    print(f"Written: {RECORDED}")
