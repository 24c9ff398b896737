"""Cases of the norm of few channels: `TRITON_INTERPRET=1 python -m tests.sam.norm_cases` runs them on a CPU."""

import itertools

import torch
from torch.nn import functional as F

from sa1b.sam import norm_triton
from sa1b.sam.norm_triton import BACKWARD, FORWARD, FewChannelNorm

EPS = 1e-6
# Relative to the largest number, of the result and of each gradient.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.01}


def check(device: str, channels: int, rows: int, dtype: torch.dtype, *, gelu: bool) -> None:
    """Result and gradients equal those of torch in float64."""
    generator = torch.Generator().manual_seed(channels + rows)
    x = torch.randn(rows, channels, generator=generator) * 3 + 1
    gradient = torch.randn(rows, channels, generator=generator)
    weight, bias = torch.randn(2, channels, generator=generator)
    given = [one.to(device).requires_grad_() for one in (x.to(dtype), weight, bias)]
    found = FewChannelNorm.apply(*given, EPS, gelu)
    assert (found.dtype, found.shape) == (dtype, x.shape)
    gradients = torch.autograd.grad(found, given, gradient.to(device, dtype))
    exact = [one.detach().double().requires_grad_() for one in given]
    expected = F.layer_norm(exact[0], (channels,), *exact[1:], EPS)
    expected = F.gelu(expected) if gelu else expected
    wanted = torch.autograd.grad(expected, exact, gradient.to(device, dtype).double())
    for one, other in zip((found, *gradients), (expected, *wanted), strict=True):
        if other.numel():
            error = float((one - other).detach().abs().max() / other.detach().abs().max().clamp(min=1))
            assert error <= TOLERANCE[dtype], (channels, rows, dtype, gelu, error)


def check_all(device: str, *, largest: int) -> int:
    """All cases; the number of rows is at most `largest` times that of a tile."""
    cases = list(itertools.product((4, 16, 64, 256), (False, True)))
    for channels, gelu in cases:
        block = FORWARD.numbers // channels
        for rows, dtype in ((0, torch.float32), (3, torch.float32), (largest * block + 1, torch.bfloat16)):
            check(device, channels, rows, dtype, gelu=gelu)
    return len(cases)


if __name__ == "__main__":
    # With three tiles, a program of the backward pass has two of them.
    norm_triton.BACKWARD = BACKWARD._replace(programs=2)
    check("cpu", 16, 3 * BACKWARD.numbers // 16, torch.float32, gelu=False)
    print(f"{check_all('cpu', largest=2)} kinds of norm")
