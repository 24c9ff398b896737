"""Cases of the features of earlier masks: `TRITON_INTERPRET=1 python -m tests.sam.downscale_cases`."""

import copy
from unittest import mock

import torch
from torch import Tensor

from sa1b.sam import downscale_triton, mask_decoder
from sa1b.sam.downscale_triton import Downscaling
from sa1b.sam.mask_decoder import PromptEncoder

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}  # relative, as in upscale_cases
CASES = ((0, 4), (1, 4), (3, 12), (2, 16))  # masks, tokens of a side: 144 are two tiles and a part of one


def results(encoder: PromptEncoder, low_res: Tensor, gradient: Tensor) -> list[Tensor]:
    """The features, and the gradients of the parameters."""
    features = encoder.mask_features(low_res)
    parameters = list(encoder.mask_downscaling[:5].parameters())
    return [features.detach(), *torch.autograd.grad(features, parameters, gradient.to(features))]


def check(device: str, masks: int, side: int, dtype: torch.dtype) -> None:
    """Features and gradients equal those of the convolutions in float64."""
    torch.manual_seed(masks)
    encoder = PromptEncoder(32, 16 * side, side).to(device)
    with torch.no_grad():  # weight 1 and bias 0 of the norms would hide errors
        for parameter in encoder.mask_downscaling[:5].parameters():
            parameter.normal_()
    low_res = (5 * torch.randn(masks, 1, 4 * side, 4 * side)).to(device, dtype)
    gradient = torch.randn(masks, 16, side * side).to(device, dtype)
    with (
        mock.patch.object(mask_decoder, "kernels_of", return_value=downscale_triton),
        mock.patch.object(Downscaling, "apply", side_effect=Downscaling.apply) as fused,
    ):
        found = results(encoder, low_res, gradient)
    assert (fused.call_count, found[0].dtype) == (1, dtype)
    expected = results(copy.deepcopy(encoder).double(), low_res.double(), gradient)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.shape == other.shape
        if other.numel():
            error = float((one - other).abs().max() / other.abs().max().clamp(min=1))
            assert error <= TOLERANCE[dtype], (masks, side, dtype, number, error)


def check_all(device: str, *formats: torch.dtype) -> int:
    """All cases in all formats; their number."""
    for dtype in formats:
        for masks, side in CASES:
            check(device, masks, side, dtype)
    return len(CASES) * len(formats)


if __name__ == "__main__":
    print(f"{check_all('cpu', torch.float32, torch.float16)} cases of the features of masks")
