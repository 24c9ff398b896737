"""The number formats of a step: --parallel.precision is that of the matrix products, by autocast."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch.amp.grad_scaler import GradScaler

from sa1b.errors import UsageError

Precision = Literal["fp32", "tf32", "bf16", "fp16"]


def compute_dtype(precision: Precision) -> torch.dtype | None:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def set_float32(precision: Precision, device: torch.device) -> None:
    """Set the precision of float32 products: exact, or tf32, which is torch's default for convolutions."""
    if precision == "tf32" and device.type != "cuda":
        raise UsageError("--parallel.precision tf32: needs a GPU; pass fp32 or bf16")
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Context for every forward pass, also in evaluations; the backward pass runs outside of it."""
    dtype = compute_dtype(precision)
    return torch.autocast(device.type, dtype=dtype) if dtype else nullcontext()


def grad_scaler(precision: Precision, device: torch.device) -> GradScaler:
    """The scaler of losses for fp16; for other formats it does nothing."""
    return GradScaler(device.type, enabled=precision == "fp16")
