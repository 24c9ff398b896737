"""Triton kernels fit the GPUs that people have, and their machine code reads what it wrote, compiled ahead of time."""

import json
import re

import pytest

from tests.masks.test_raster_triton import with_triton

pytestmark = with_triton


def check(capability: int, precisions: tuple[str, ...]) -> None:
    """All kernels fit this GPU, lose no value, and with the recorded version of Triton have the recorded resources."""
    import triton

    from tests import kernel_resources

    found = kernel_resources.of_gpu(capability, precisions)
    assert {name.split()[0] for name in found} >= {
        *("norm_forward", "norm_backward", "upscale_forward", "upscale_backward", "measure_masks", "fill"),
        *("compare", "finish", "gradient", "downscale_forward", "downscale_backward", "read_of_own"),
        *("image_to_tokens_forward", "image_to_tokens_backward", "image_to_tokens_rows", "read_forward"),
    }
    lost = [f"{name}: {x}" for name, (_, code) in found.items() for x in kernel_resources.lost_values(code)]
    assert not lost, "\n".join(lost)
    assert ("HGMMA" in "".join(code for _, code in found.values())) == (capability == 90)
    for name, ((registers, _, shared, threads), code) in found.items():
        assert shared <= kernel_resources.GPUS[capability], name
        assert registers * threads <= 65536, name
        stores = set(re.findall(r"STG\S+", code)) if name.startswith("fill") else {"STG.E.128"}
        assert stores == {"STG.E.128"}, "a thread stores 16 bytes at a time"
    recorded = json.loads(kernel_resources.RECORDED.read_bytes())
    if recorded["triton"] != triton.__version__:
        pytest.skip(f"Triton {recorded['triton']}, whose figures are recorded, is not installed")
    expected, figures = recorded["gpus"][f"sm_{capability}"], {name: one for name, (one, _) in found.items()}
    anew = "python -m tests.kernel_resources writes the file anew"
    assert figures == {name: expected.get(name) for name in figures}, anew


def test_what_machine_code_does_when_an_assembler_has_lost_a_value() -> None:
    from tests.kernel_resources import lost_values

    product = "ULDC.64 UR6, c[0x0][0x208] ;\n/*0010*/ HGMMA.64x64x16.F32.BF16 R24, {}gdesc[UR4], R24 ;"
    lost = "UIADD3 UR5, UP0, UR5, 0x40, URZ ;", "IADD3.X R7, R1, -0x7fffffe0, RZ, P5, !PT ;"
    assert [len(lost_values(f"/*0000*/ {one}")) for one in (*lost, product.format(""))] == [1, 1, 1]
    kept = "IADD3 R1, R1, -0x40, RZ ;", "@P0 STL.64 [R1+0x8], R2 ;", product.format("R16, ")
    assert [lost_values(f"/*0000*/ {one}") for one in kept] == [[], [], []]


@pytest.mark.parametrize("capability", [90])
def test_kernels_in_bfloat16_have_the_recorded_resources(capability: int) -> None:
    check(capability, ("bf16",))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_kernels_in_all_formats_have_the_recorded_resources(capability: int) -> None:
    check(capability, ("bf16", "fp16", "fp32"))
