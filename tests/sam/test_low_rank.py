"""Low-rank adaptation of the attention: merged weights, what is trained, what starts from published names."""

from dataclasses import replace

import pytest
import torch

from sa1b.sam.interactive import Interactive
from sa1b.sam.low_rank import is_low_rank, merged
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.recipe import Recipe, step_flops

SMALL = ModelConfig(image_size=64, width=16, depth=2, heads=2, global_blocks=(1,), window=2, channels=32)
ADAPTED = replace(SMALL, lora_rank=3)


def adapted(config: ModelConfig = ADAPTED) -> Sam:
    """A model whose changes are not zero."""
    torch.manual_seed(1)
    model = Sam(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.normal_(std=0.2)
    return model.eval()


def answer(model: Sam) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    points, image = torch.rand(3, 4, 2) * 64, torch.tensor([0, 0, 1])
    labels = torch.tensor([[1, 0, 2, 3], [1, 1, -1, -1], [2, 3, -1, -1]])
    return model.decode(model.embed(images), image, points, labels, torch.randn(3, 1, 16, 16))


def test_merged_weights_have_the_published_names_and_give_the_same_masks() -> None:
    model, whole = adapted(), Sam(SMALL).eval()
    before = whole.state_dict()
    whole.load_state_dict(merged(model.state_dict()))
    for found, expected in zip(answer(whole), answer(model), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    base = {name: one for name, one in model.state_dict().items() if not is_low_rank(name)}
    assert base.keys() == before.keys()
    whole.load_state_dict(base)
    assert not torch.allclose(answer(whole)[0], answer(model)[0], atol=1e-3)


def test_every_matrix_changes_the_masks() -> None:
    model = adapted()
    logits, iou = answer(model)
    (logits.square().sum() + iou.sum()).backward()
    matrices = {name: one for name, one in model.named_parameters() if is_low_rank(name)}
    # Two layers of each encoder block; in the decoder seven attentions with four projections.
    assert len(matrices) == 2 * (2 * SMALL.depth + 7 * 4)
    assert [name for name, one in matrices.items() if one.grad is None or not one.grad.any()] == []


@pytest.mark.parametrize(
    ("targets", "whole"),
    [("both", set()), ("image_encoder", {"mask_decoder"}), ("mask_decoder", {"image_encoder"})],
)
def test_parts_that_are_not_adapted_are_trained_and_nothing_else(targets: str, whole: set[str]) -> None:
    model = Sam(replace(ADAPTED, lora_targets=targets))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (is_low_rank(name) or name.partition(".")[0] in whole), name
    parts = {name.partition(".")[0] for name, _ in model.named_parameters() if is_low_rank(name)}
    assert parts == {"image_encoder", "mask_decoder"} - whole


def test_the_start_is_the_model_that_is_adapted() -> None:
    torch.manual_seed(1)
    whole = Sam(SMALL).eval()
    other = adapted()
    module = Interactive(Sam(ADAPTED).eval(), Recipe())
    assert module.load_weights(whole.state_dict()) == f"{len(whole.state_dict())} tensors of a SAM"
    for found, expected in zip(answer(module.model), answer(whole), strict=True):
        assert torch.equal(found, expected)
    module.load_weights(other.state_dict())  # of another adapted model: merged
    for found, expected in zip(answer(module.model), answer(other), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_step_has_no_operations_for_the_gradients_of_frozen_weights() -> None:
    recipe = Recipe()
    whole, low = (step_flops(config, recipe, 2, 0) for config in (SMALL, ADAPTED))
    assert 2 / 3 * whole < low < whole
    assert step_flops(replace(ADAPTED, lora_targets="mask_decoder"), recipe, 2, 0) == whole
