"""Image encoders of timm: their tokens, their weights in files, and what is refused."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sa1b
from sa1b.errors import UsageError
from sa1b.recipes.conversion import convert
from sa1b.sam.model import PRESETS, ModelConfig, Sam
from sa1b.sam.published import config_of, fit_weights, misfit, preset_of, read_weights, write_weights
from sa1b.sam.recipe import encoder_flops
from tests.sam import timm_stand_in

SMALL = ModelConfig(
    image_size=64, width=32, depth=0, heads=1, global_blocks=(), channels=32, backbone="repvit_m1_0"
)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", timm_stand_in)


@pytest.fixture
def model() -> Sam:
    torch.manual_seed(0)
    return Sam(SMALL)


def trained(model: Sam) -> Sam:
    """The model after forward passes that change the statistics of its norms."""
    model.train()
    for seed in range(3):
        torch.manual_seed(seed)
        model.embed(torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8))
    return model.eval()


def test_tokens_are_the_sum_of_two_levels_and_a_position(model: Sam) -> None:
    encoder = model.eval().image_encoder
    pixels = torch.rand(2, 3, 64, 64)
    fine, coarse = encoder.get_submodule("patch_embed.repvit_m1_0")(pixels)
    assert fine.shape[2:] == (4, 4)
    assert coarse.shape[2:] == (2, 2)
    weights = encoder.state_dict()
    levels = [
        torch.einsum("bchw,dc->bhwd", one, weights[f"patch_embed.lateral.{i}.weight"][:, :, 0, 0])
        + weights[f"patch_embed.lateral.{i}.bias"]
        for i, one in enumerate((fine, coarse))
    ]
    expected = levels[0] + levels[1].repeat_interleave(2, 1).repeat_interleave(2, 2) + weights["pos_embed"]
    torch.testing.assert_close(encoder.tokens(pixels), expected)
    assert model.embed(torch.zeros(2, 3, 64, 64, dtype=torch.uint8)).shape == (2, 32, 4, 4)


@pytest.mark.parametrize("config", [SMALL, PRESETS["tiny_vit"], PRESETS["repvit"]], ids=str)
def test_the_sizes_follow_from_the_weights(config: ModelConfig) -> None:
    with torch.device("meta"):
        weights = Sam(config).state_dict()
    assert config_of(weights) == config
    assert preset_of(config) == next((name for name, one in PRESETS.items() if one == config), None)


@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_a_file_gives_the_same_masks(model: Sam, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"sam{ending}"
    write_weights(path, trained(model).state_dict())
    image = torch.randint(0, 256, (50, 60, 3), dtype=torch.uint8).numpy()
    one, other = (
        sa1b.predict(each, image, points=[[20, 30]]).logits for each in (model, sa1b.load_model(path))
    )
    assert (one == other).all()
    done = convert(path, tmp_path / "converted.safetensors")
    assert (done.image_size, done.model) == (64, None)
    again = read_weights(tmp_path / "converted.safetensors")
    assert {name: one.tolist() for name, one in again.items()} == {
        name: one.float().tolist() for name, one in model.state_dict().items()
    }


@pytest.mark.parametrize("to", ["segment-anything", "transformers"])
def test_forms_of_other_programs_are_refused(model: Sam, tmp_path: Path, to: str) -> None:
    write_weights(tmp_path / "sam.pth", model.state_dict())
    with pytest.raises(UsageError, match=rf"--to {to}: that package has no .*; pass --to safetensors"):
        convert(tmp_path / "sam.pth", tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


def test_weights_of_another_image_size_are_resized_and_of_another_encoder_refused(model: Sam) -> None:
    fitted, line = fit_weights(model.state_dict(), replace(SMALL, image_size=128))
    Sam(replace(SMALL, image_size=128)).load_state_dict(fitted)
    assert "resized: pos_embed, from 4 x 4 to 8 x 8 tokens" in line
    assert misfit(model.state_dict(), replace(SMALL, backbone="tiny_vit_5m_224")) == (
        "weights of other sizes: --model.backbone is tiny_vit_5m_224, the weights have repvit_m1_0: pass "
        "--model.backbone repvit_m1_0"
    )
    assert misfit(model.state_dict(), replace(SMALL, heads=2, window=3)) is None
    blocks = replace(SMALL, backbone="", depth=2, heads=2, global_blocks=(1,))
    assert (misfit(model.state_dict(), blocks) or "").endswith(
        "pass --model.depth 0 --model.backbone repvit_m1_0"
    )
    remedy = "pass --model.depth 2 --model.heads 2 --model.global-blocks 1 --model.backbone ''"
    assert (misfit(Sam(blocks).state_dict(), SMALL) or "").endswith(remedy)


def test_operations_are_those_of_its_convolutions() -> None:
    widths = [3, *timm_stand_in.CHANNELS.values()]
    sides, kernels = (16, 8, 4, 2), (16, 4, 4, 4)
    flops = sum(2 * side**2 * widths[i] * widths[i + 1] * kernels[i] for i, side in enumerate(sides))
    flops += 2 * (16 * 8 + 4 * 12) * 32 + 2 * 16 * (32 * 32 + 9 * 32 * 32)
    assert encoder_flops(SMALL) == flops


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone": ""}, "--model.depth 0: must be at least 1 without --model.backbone"),
        ({"patch_size": 8}, "--model.backbone repvit_m1_0: --model.patch-size 8 must be 16"),
        ({"image_size": 80}, "and --model.image-size 80 a multiple of 32"),
        ({"lora_rank": 4}, "--model.lora-rank 4: .* pass --model.lora-targets mask_decoder"),
        (
            {"backbone": "resnet"},
            r"--model.backbone resnet: timm gives no features .*Unknown model \(resnet\)",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Sam(replace(SMALL, **changes))


def test_without_timm_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(
        UsageError, match=r"--model.backbone: needs the package timm.*pip install 'sa1b\[timm\]'"
    ):
        Sam(SMALL)


def test_blocks_can_follow() -> None:
    config = replace(SMALL, depth=2, heads=2, global_blocks=(1,), window=2)
    torch.manual_seed(0)
    model = Sam(config)
    assert config_of(model.state_dict()) == config
    embeddings = model.embed(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
    assert embeddings.shape == (1, 32, 4, 4)


@pytest.mark.parametrize("name", ["tiny_vit", "repvit"])
def test_the_models_of_timm_itself(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delitem(sys.modules, "timm")
    try:
        import timm  # noqa: F401
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"timm cannot be imported: {error}")
    config = replace(PRESETS[name], image_size=64)
    torch.manual_seed(0)
    model = Sam(config)
    assert config_of(model.state_dict()) == config
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    model.embed(images).sum().backward()
    assert all(one.grad is not None for one in model.image_encoder.parameters())
    assert trained(model).embed(images).shape == (2, 256, 4, 4)
