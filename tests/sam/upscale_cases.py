"""Cases of the upscaling: `TRITON_INTERPRET=1 python -m tests.sam.upscale_cases` runs them on a CPU."""

import copy
from collections.abc import Iterable
from unittest import mock

import torch
from torch import Tensor

from sa1b.sam import mask_decoder, upscale_triton
from sa1b.sam.mask_decoder import MaskDecoder
from sa1b.sam.upscale_triton import Upscaling

# Relative to the largest number, of the logits and of each gradient. The separate operators in bfloat16 have
# errors up to 0.015.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}
# Channels of the decoder, masks, candidates, tokens. 36 tokens are two tiles of 64 rows and a part of one.
CASES = ((64, 1, 1, 4), (64, 2, 3, 36), (128, 0, 1, 4), (256, 1, 4, 36))


def results(decoder: MaskDecoder, inputs: Iterable[Tensor], gradient: Tensor) -> list[Tensor]:
    """Logits, and the gradients of inputs and parameters."""
    given = [one.detach().requires_grad_() for one in inputs]
    logits = decoder.upscale(*given)
    given += list(decoder.output_upscaling.parameters())
    return [logits.detach(), *torch.autograd.grad(logits, given, gradient.to(logits))]


def check(device: str, case: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Logits and gradients equal those of the separate operators in float64."""
    channels, masks, candidates, tokens = case
    torch.manual_seed(channels)
    decoder = MaskDecoder(channels).to(device)
    with torch.no_grad():  # weight 1 and bias 0 of the norm would hide errors
        for parameter in decoder.output_upscaling[1].parameters():
            parameter.normal_()
    inputs = [torch.randn(masks, tokens, channels), torch.randn(masks, candidates, channels // 8)]
    inputs = [(3 * one).to(device, dtype) for one in inputs]
    side = 4 * int(tokens**0.5)
    gradient = torch.randn(masks, candidates, side, side).to(device, dtype)
    with (
        mock.patch.object(mask_decoder, "kernels_of", return_value=upscale_triton),
        mock.patch.object(upscale_triton, "FORMATS", tuple(TOLERANCE)),
        mock.patch.object(Upscaling, "apply", side_effect=Upscaling.apply) as fused,
    ):
        found = results(decoder, inputs, gradient)
    assert (fused.call_count, found[0].dtype) == (1, dtype)
    expected = results(copy.deepcopy(decoder).double(), [one.double() for one in inputs], gradient)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        if other.numel():
            error = float((one - other).abs().max() / other.abs().max().clamp(min=1))
            assert error <= TOLERANCE[dtype], (case, dtype, other.shape, error)


def check_all(device: str, *formats: torch.dtype) -> int:
    """All cases in all formats; their number."""
    for dtype in formats:
        for case in CASES:
            check(device, case, dtype)
    return len(CASES) * len(formats)


if __name__ == "__main__":
    upscale_triton.SPLITS = 2  # of three tiles, a program has two
    check("cpu", CASES[0], torch.float16)  # the interpreter has no products in bfloat16
    print(f"{check_all('cpu', torch.float32)} cases of the upscaling")
