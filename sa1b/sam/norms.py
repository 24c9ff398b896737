"""Layer norms over the last dimension in the number format of their input, with GELU after them if asked."""

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, gelu: bool = False) -> Tensor:
    """x [..., C] -> the same shape and number format, also under autocast, which would give float32.

    On a CUDA device with few channels by `sa1b.sam.norm_triton`, except in a compiled graph, where torch
    generates such a kernel.
    """
    if x.is_cuda and not torch.compiler.is_compiling() and (kernels := _kernels()) is not None:
        channels = x.shape[-1]
        if channels <= kernels.MOST_CHANNELS and channels & (channels - 1) == 0:
            out: Tensor = kernels.FewChannelNorm.apply(x.contiguous(), weight, bias, eps, gelu)
            return out
    with torch.autocast(x.device.type, enabled=False):
        x = F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), eps)
        return F.gelu(x) if gelu else x


@cache
def _kernels() -> ModuleType | None:
    """The kernels; None without triton."""
    try:
        return import_module("sa1b.sam.norm_triton")
    except ImportError:
        return None
