"""Triton kernels fit the GPUs that people have: shared memory, registers and spills, compiled ahead of time."""

import json

import pytest

from tests.masks.test_raster_triton import with_triton

pytestmark = with_triton


def check(capability: int, precisions: tuple[str, ...]) -> None:
    """All kernels fit this GPU and have the recorded resources, if Triton has the recorded version."""
    import triton

    from tests import kernel_resources

    found = kernel_resources.of_gpu(capability, precisions)
    assert {name.split()[0] for name in found} >= {
        *("norm_forward", "norm_backward", "upscale_forward", "upscale_backward", "measure_masks", "fill"),
        *("compare", "finish", "gradient", "downscale_forward", "downscale_backward", "read_of_own"),
    }
    limit = kernel_resources.GPUS[capability]
    for name, (registers, _, shared, threads) in found.items():
        assert shared <= limit, name
        assert registers * threads <= 65536, name
    recorded = json.loads(kernel_resources.RECORDED.read_bytes())
    if recorded["triton"] == triton.__version__:
        expected = recorded["gpus"][f"sm_{capability}"]
        different = {
            name: (one, expected.get(name)) for name, one in found.items() if one != expected.get(name)
        }
        assert different == {}, "python -m tests.kernel_resources writes the file anew"


@pytest.mark.parametrize("capability", [90])
def test_kernels_in_bfloat16_have_the_recorded_resources(capability: int) -> None:
    check(capability, ("bf16",))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_kernels_in_all_formats_have_the_recorded_resources(capability: int) -> None:
    check(capability, ("bf16", "fp16", "fp32"))
