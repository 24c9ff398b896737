"""The decoder's kernels are compared with torch's operators, and left out where they differ."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sa1b.errors import Sa1bError
from sa1b.sam import kernel_check
from sa1b.sam.image_tokens import LEFT_OUT, kernels_of
from sa1b.sam.kernel_check import KERNELS, check_kernels, leave_out_different
from sa1b.sam.model import PRESETS, ModelConfig, Sam
from tests.masks.test_raster_triton import python, with_triton
from tests.sam.sketch import SMALL


@pytest.fixture(autouse=True)
def _all_kernels():
    """A test leaves no kernel out of the process, and no comparison done."""
    with mock.patch.object(kernel_check, "_checked", set()):
        yield
    LEFT_OUT.clear()


def model_on_a_gpu(**settings):
    """What `check_kernels` reads of a model on a GPU."""
    weight = SimpleNamespace(is_cuda=True, dtype=torch.float32, device="cuda:0")
    decoder = SimpleNamespace(mask_tokens=SimpleNamespace(weight=weight))
    parameters = [weight]
    return SimpleNamespace(
        config=ModelConfig(**settings), mask_decoder=decoder, parameters=lambda: iter(parameters)
    )


@with_triton
def test_in_the_interpreter_wrong_and_failing_kernels_are_left_out_and_no_others():
    printed = python("-m", "tests.sam.kernel_check_cases", "upscale", TRITON_INTERPRET="1")
    assert printed == "3 comparisons\n"


@with_triton
def test_a_kernel_that_is_left_out_is_not_used():
    x = SimpleNamespace(is_cuda=True)
    assert kernels_of("norm", x) is not None
    LEFT_OUT.add("norm")
    assert kernels_of("norm", x) is None
    assert kernels_of("upscale", x) is not None


def test_a_gpu_is_checked_once_for_each_size_and_number_format(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the GPU {device}")
    compare = mock.Mock(return_value={"norm": "wrong"})
    monkeypatch.setattr(kernel_check, "leave_out_different", compare)
    for settings in ({}, {}, {"width": 192, "heads": 3}, {"image_size": 512}):
        check_kernels(model_on_a_gpu(**settings))
    assert compare.call_count == 2
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    check_kernels(model_on_a_gpu())
    assert compare.call_count == 3
    with torch.no_grad():
        check_kernels(model_on_a_gpu())
        check_kernels(model_on_a_gpu())
    assert compare.call_count == 4
    said = (
        "kernel sa1b.sam.norm_triton is not used on the GPU cuda:0: wrong; torch's operators take its place"
    )
    assert caplog.messages == 4 * [said]


def test_no_kernels_leaves_all_out_without_a_comparison(monkeypatch):
    monkeypatch.setattr(kernel_check, "leave_out_different", mock.Mock(side_effect=AssertionError))
    check_kernels(model_on_a_gpu(kernels=False))
    assert set(KERNELS) == LEFT_OUT


def test_a_cpu_is_not_checked(monkeypatch):
    monkeypatch.setattr(kernel_check, "leave_out_different", mock.Mock(side_effect=AssertionError))
    check_kernels(Sam(replace(SMALL, kernels=False)))
    assert not LEFT_OUT


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_operators_equal_themselves_with_gradients_or_without(mode):
    model = Sam(SMALL)
    with mode():
        assert leave_out_different(model) == {}
        names = kernel_check._results(model)
    assert any(name.startswith("gradient of ") for name in names) == (mode is torch.enable_grad)


def test_a_device_that_a_kernel_has_made_useless_is_named_with_the_way_out(monkeypatch):
    results = mock.Mock(side_effect=RuntimeError("an illegal memory access"))
    monkeypatch.setattr(kernel_check, "_results", results)
    exact = {"logits": mock.Mock(norm=mock.Mock(side_effect=RuntimeError("useless")))}
    with pytest.raises(Sa1bError, match=r"an illegal memory access; pass --model\.no-kernels"):
        kernel_check._difference(None, exact, {})


def test_too_little_memory_is_no_fault_of_a_kernel(monkeypatch):
    monkeypatch.setattr(kernel_check, "_results", mock.Mock(side_effect=torch.OutOfMemoryError("4 GB")))
    with pytest.raises(torch.OutOfMemoryError):
        kernel_check._difference(None, {"logits": torch.ones(1)}, {})


def test_a_comparison_that_fails_leaves_no_kernel_out(monkeypatch):
    monkeypatch.setattr(kernel_check, "_results", mock.Mock(side_effect=torch.OutOfMemoryError("4 GB")))
    with pytest.raises(torch.OutOfMemoryError):
        leave_out_different(Sam(SMALL))
    assert not LEFT_OUT


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["tiny", "vit_b"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_kernel_is_left_out_on_this_gpu(preset, dtype):
    torch.manual_seed(0)
    model = Sam(replace(PRESETS[preset], width=64, depth=1, heads=1, global_blocks=())).cuda()
    with torch.autocast("cuda", dtype, dtype != torch.float32):
        assert leave_out_different(model) == {}
