"""Initial weights: a plain ViT for the encoder, and a SAM of another image size."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sa1b.errors import UsageError
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import PRESETS, ModelConfig, Sam
from sa1b.sam.published import WeightsError, fit_weights, read_tensors
from sa1b.sam.recipe import Recipe

SMALL = ModelConfig(image_size=96, width=48, depth=3, heads=2, global_blocks=(1,), window=4, channels=64)


def vit(width: int = 48, depth: int = 3, side: int = 4, patch: int = 16) -> dict[str, Tensor]:
    """The encoder of MAE in its published form."""
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, 1 + side**2, width),
        "patch_embed.proj.weight": (width, 3, patch, patch),
        "patch_embed.proj.bias": (width,),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    for block in range(depth):
        for name, out, into in (
            ("attn.qkv", 3 * width, width),
            ("attn.proj", width, width),
            ("mlp.fc1", 4 * width, width),
            ("mlp.fc2", width, 4 * width),
        ):
            shapes |= {f"blocks.{block}.{name}.weight": (out, into), f"blocks.{block}.{name}.bias": (out,)}
        for norm in ("norm1", "norm2"):
            shapes |= {f"blocks.{block}.{norm}.{kind}": (width,) for kind in ("weight", "bias")}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("entry", [True, False])
def test_a_published_mae_fills_the_encoder_and_nothing_else(tmp_path: Path, entry: bool) -> None:
    weights = vit()
    torch.save({"model": weights} if entry else weights, tmp_path / "mae.pth")
    interactive = Interactive(Sam(SMALL), Recipe())
    before = {name: tensor.clone() for name, tensor in interactive.model.state_dict().items()}
    line = interactive.load_weights(interactive.read_weights(tmp_path / "mae.pth"))
    found = interactive.model.state_dict()
    for name, tensor in weights.items():
        ours = "image_encoder." + name.replace("fc1", "lin1").replace("fc2", "lin2")
        if name not in ("cls_token", "norm.weight", "norm.bias", "pos_embed"):
            assert torch.equal(found[ours], tensor), name
    changed = {name for name in before if not torch.equal(before[name], found[name])}
    assert len(changed) == len(weights) - 3
    assert all(name.startswith("image_encoder.") for name in changed)
    assert not any("rel_pos" in name or "neck" in name for name in changed)
    assert line == (
        "39 tensors of a ViT for the image encoder; resized: pos_embed, from 4 x 4 to 6 x 6 tokens; "
        "left out: cls_token, norm.bias, norm.weight; initial values: relative positions, "
        "image_encoder.neck, prompt_encoder, mask_decoder"
    )


def test_kernels_of_another_patch_size_are_resized() -> None:
    weights = vit(patch=14)
    fitted, line = fit_weights(weights, replace(SMALL, image_size=64))
    kernel = weights["patch_embed.proj.weight"]
    expected = F.interpolate(kernel, (16, 16), mode="bicubic", align_corners=False)
    torch.testing.assert_close(fitted["image_encoder.patch_embed.proj.weight"], expected)
    assert "resized: patch_embed.proj.weight, from 14 to 16 pixels; left" in line


def test_positions_of_a_vit_are_resized_without_the_class_token() -> None:
    weights = vit()
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    ramp = torch.stack([rows, columns], dim=-1).repeat(1, 1, 24)
    weights["pos_embed"] = torch.cat([torch.full((1, 48), 99.0), ramp.flatten(0, 1)])[None]
    found = fit_weights(weights, SMALL)[0]["image_encoder.pos_embed"]
    assert found.shape == (1, 6, 6, 48)
    expected = F.interpolate(ramp.permute(2, 0, 1)[None], (6, 6), mode="bicubic", align_corners=False)
    torch.testing.assert_close(found, expected.permute(0, 2, 3, 1))
    # Tables of the model's size are unchanged, row by row.
    same, line = fit_weights(weights, replace(SMALL, image_size=64))
    assert torch.equal(same["image_encoder.pos_embed"][0], ramp)
    assert "resized" not in line


@pytest.mark.parametrize(
    ("name", "width", "depth"), [("vit_b", 768, 12), ("vit_l", 1024, 24), ("vit_h", 1280, 32)]
)
def test_the_sizes_of_the_published_mae_are_those_of_the_presets(name: str, width: int, depth: int) -> None:
    patch = {"vit_h": 14}.get(name, 16)
    with torch.device("meta"):
        weights = vit(width, depth, side=14 if patch == 16 else 16, patch=patch)
    fitted, _ = fit_weights(weights, PRESETS[name])
    assert fitted["image_encoder.pos_embed"].shape == (1, 64, 64, width)
    assert fitted["image_encoder.patch_embed.proj.weight"].shape == (width, 3, 16, 16)


@pytest.mark.parametrize(
    ("weights", "complaint"),
    [
        (vit(depth=4), "width 48 and depth 4: the image encoder has width 48 and depth 3; .*--model.depth"),
        (vit() | {"pos_embed": torch.zeros(1, 12, 48)}, r"pos_embed \[1, 12, 48\]"),
        (vit() | {"pos_embed": torch.zeros(1, 17, 32)}, r"pos_embed \[1, 17, 32\]"),
        (vit() | {"blocks.1.mlp.fc1.weight": torch.zeros(3, 48)}, r"blocks.1.mlp.fc1.weight \[3, 48\]"),
        ({k: v for k, v in vit().items() if k != "blocks.2.norm1.bias"}, "blocks.2.norm1.bias missing"),
    ],
)  # fmt: skip
def test_a_vit_that_does_not_fit_is_refused_in_one_sentence(
    weights: dict[str, Tensor], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint) as raised:
        fit_weights(weights, SMALL)
    assert len(str(raised.value)) < 250


def test_a_file_that_is_neither_a_sam_nor_a_vit_is_refused(tmp_path: Path) -> None:
    torch.save({"pos_embed": torch.zeros(3)}, tmp_path / "foreign.pth")
    with pytest.raises(UsageError, match="not a SAM"):
        fit_weights(read_tensors(tmp_path / "foreign.pth"), SMALL)
    torch.save(vit() | {"cls_token": torch.zeros(1, 1, 48, dtype=torch.int64)}, tmp_path / "odd.pth")
    with pytest.raises(WeightsError, match=r"cls_token is torch.int64"):
        read_tensors(tmp_path / "odd.pth")


def test_a_sam_of_another_image_size_gets_its_positions_resized() -> None:
    torch.manual_seed(1)
    small, large = Sam(SMALL), replace(SMALL, image_size=160)
    with torch.no_grad():
        for name, parameter in small.named_parameters():
            if "rel_pos" in name:
                parameter.normal_()
    weights = small.state_dict()
    fitted, line = fit_weights(weights, large)
    Sam(large).load_state_dict(fitted)
    assert line == f"{len(weights)} tensors of a SAM; resized: pos_embed, from 6 x 6 to 10 x 10 tokens"
    for name, tensor in fitted.items():
        if name.endswith("pos_embed"):
            assert tensor.shape == (1, 10, 10, 48)
        elif ".blocks.1." in name and ".rel_pos_" in name:
            expected = F.interpolate(weights[name].T[None], 19, mode="linear")[0].T
            torch.testing.assert_close(tensor, expected)
        else:
            assert torch.equal(tensor, weights[name])


def test_a_sam_of_the_same_sizes_is_taken_as_it_is() -> None:
    weights = Sam(SMALL).state_dict()
    fitted, line = fit_weights(weights, SMALL)
    assert all(torch.equal(fitted[name], tensor) for name, tensor in weights.items())
    assert line == f"{len(weights)} tensors of a SAM"


def test_a_sam_of_other_sizes_is_refused_in_one_sentence() -> None:
    with torch.device("meta"):
        weights = Sam(PRESETS["vit_b"]).state_dict()
    with pytest.raises(
        UsageError, match="vit_b weights of other sizes: --model.width is 1024, .*pass --preset vit_b"
    ):
        fit_weights(weights, replace(PRESETS["vit_l"], image_size=512))
