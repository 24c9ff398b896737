"""Kernels of the model equal formulas of torch, in Triton's interpreter and, if there is one, on a GPU."""

from importlib import import_module

import pytest
import torch

from sa1b.sam.transformer import layer_norm
from tests.masks.test_raster_triton import python, with_triton


@with_triton
def test_the_interpreter_gives_the_numbers_of_torch():
    assert python("-m", "tests.sam.norm_cases", TRITON_INTERPRET="1") == "8 kinds of norm\n"


@with_triton
def test_the_interpreter_gives_the_attention_of_torch():
    printed = python("-m", "tests.sam.attention_cases", TRITON_INTERPRET="1")
    assert printed == "16 kinds of attention\n39 kinds of reading\n"


@with_triton
def test_in_the_interpreter_a_step_with_all_kernels_has_the_losses_and_gradients_of_torch():
    assert python("-m", "tests.sam.decoder_cases", TRITON_INTERPRET="1") == "334 sums and gradients\n"


# Products of 256 channels in float32, which training does not use, take minutes to compile.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("check", "sizes", "formats", "count"),
    [
        ("check_all", (1, 32, 256), (torch.float32, torch.float16), 8),
        ("check_all", (8, 256, 4096), (torch.bfloat16,), 8),
        *(("check_reads", (4096, 256), (one,), 13) for one in (torch.bfloat16, torch.float16)),
    ],
)
def test_compiled_gives_the_attention_of_torch(check, sizes, formats, count):
    assert getattr(import_module("tests.sam.attention_cases"), check)("cuda", sizes, formats=formats) == count


@pytest.mark.gpu
def test_compiled_gives_the_numbers_of_torch():
    from tests.sam.norm_cases import check_all  # needs triton

    assert check_all("cuda", largest=1100) == 8


@pytest.mark.gpu
def test_a_norm_keeps_the_number_format_under_autocast(monkeypatch):
    monkeypatch.setattr("sa1b.sam.image_tokens.IN_USE", {"norm"})
    x = torch.randn(8, 4, 64, device="cuda", dtype=torch.bfloat16)
    weight, bias = torch.ones(2, 64, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert layer_norm(x, weight, bias, 1e-6, gelu=True).dtype == torch.bfloat16
