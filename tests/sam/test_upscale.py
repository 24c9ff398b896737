"""The fused upscaling, and the fused features of earlier masks, equal the separate operators, in Triton's
interpreter and, if there is one, on a GPU.
"""

from unittest import mock

import pytest
import torch

from sa1b.sam.mask_decoder import MaskDecoder
from tests.masks.test_raster_triton import python, with_triton


@with_triton
def test_the_interpreter_gives_the_logits_of_torch():
    assert python("-m", "tests.sam.upscale_cases", TRITON_INTERPRET="1") == "4 cases of the upscaling\n"


@with_triton
def test_the_interpreter_gives_the_features_of_torch():
    printed = python("-m", "tests.sam.downscale_cases", TRITON_INTERPRET="1")
    assert printed == "8 cases of the features of masks\n"


@pytest.mark.gpu
def test_compiled_gives_the_features_of_torch():
    from tests.sam.downscale_cases import check, check_all  # needs triton

    assert check_all("cuda", torch.float32, torch.bfloat16, torch.float16) == 12
    check("cuda", 3, 64, torch.bfloat16)


@pytest.mark.gpu
def test_compiled_gives_the_logits_of_torch():
    from tests.sam.upscale_cases import check, check_all  # needs triton

    assert check_all("cuda", torch.bfloat16, torch.float16) == 8
    check("cuda", (256, 3, 3, 4096), torch.bfloat16)


@pytest.mark.gpu
def test_upscaling_is_fused_under_autocast(monkeypatch):
    from sa1b.sam.upscale_triton import Upscaling  # needs triton

    monkeypatch.setattr("sa1b.sam.image_tokens.IN_USE", {"upscale"})
    decoder = MaskDecoder(64).cuda()
    image, weights = (torch.randn(1, n, c, device="cuda") for n, c in ((16, 64), (3, 8)))
    with mock.patch.object(Upscaling, "apply", side_effect=Upscaling.apply) as fused:
        assert decoder.upscale(image, weights).dtype == torch.float32
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = decoder.upscale(image.bfloat16(), weights)
    assert (logits.dtype, fused.call_count) == (torch.bfloat16, 1)
    logits.sum().backward()
    assert decoder.output_upscaling[3].weight.grad.dtype == torch.float32
