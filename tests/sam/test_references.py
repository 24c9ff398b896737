"""Outputs and gradients against two independent implementations with the same random weights."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from sa1b.sam.mask_decoder import ALL, AMBIGUOUS, SINGLE
from sa1b.sam.model import ModelConfig, Sam
from tests.sam import huggingface, published
from tests.sam.random_weights import randomise

# A grid of 6 x 6 tokens in windows of 4: padded windows, a windowed block before and after a global one.
SMALL = ModelConfig(image_size=96, width=48, depth=3, heads=2, global_blocks=(1,), window=4, channels=64)
SIDE, MASKS = SMALL.side, 3
KINDS = ("points", "boxes", "points and boxes", "points and masks", "boxes and masks")


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """Random weights, none equal to zero or one."""
    torch.manual_seed(0)
    model = Sam(SMALL)
    randomise(model)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


class Inputs:
    """An image, and prompts of some kinds for three masks, in all three forms."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(1)
        self.images = torch.randint(0, 256, (1, 3, 96, 96), dtype=torch.uint8)
        self.points = torch.rand(MASKS, 2, 2) * 96 if "points" in kind else None
        self.labels = torch.tensor([[1, 0], [1, 1], [0, 1]]) if "points" in kind else None
        low, high = torch.rand(MASKS, 2) * 40, 48 + torch.rand(MASKS, 2) * 40
        self.boxes = torch.cat([low, high], dim=1) if "boxes" in kind else None
        # The same earlier mask for all: Hugging Face takes one for each image.
        masks = 3 * torch.randn(1, 1, 24, 24)
        self.masks = masks if "masks" in kind else None
        self.towards = torch.randn(MASKS, 4, 24, 24) / 24, torch.randn(MASKS, 4)

    def ours(self) -> tuple[Tensor, Tensor, Tensor | None]:
        points, labels = [], []
        if self.points is not None and self.labels is not None:
            points.append(self.points)
            labels.append(self.labels)
        if self.boxes is not None:
            points.append(self.boxes.view(MASKS, 2, 2))
            labels.append(torch.tensor([2, 3]).expand(MASKS, -1))
        else:
            points.append(torch.zeros(MASKS, 1, 2))
            labels.append(torch.full((MASKS, 1), -1))
        masks = None if self.masks is None else self.masks.expand(MASKS, -1, -1, -1)
        return torch.cat(points, dim=1), torch.cat(labels, dim=1), masks

    def loss(self, logits: Tensor, iou: Tensor, candidates: slice) -> Tensor:
        of_masks, of_iou = self.towards
        return (logits * of_masks[:, candidates]).sum() + (iou * of_iou[:, candidates]).sum()


class Found(NamedTuple):
    embeddings: Tensor
    logits: Tensor
    iou: Tensor
    gradients: dict[str, Tensor]  # zeros for parameters without a gradient


def ours(weights: dict[str, Tensor], inputs: Inputs, candidates: slice) -> Found:
    model = Sam(SMALL)
    model.load_state_dict(weights)
    embeddings = model.embed(inputs.images)
    points, labels, masks = inputs.ours()
    image = torch.zeros(MASKS, dtype=torch.int64)
    logits, iou = model.decode(
        embeddings, image, points, labels, masks, counts=(MASKS,), candidates=candidates
    )
    inputs.loss(logits, iou, candidates).backward()
    return Found(embeddings, logits, iou, gradients_of(model))


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }


def assert_alike(found: Tensor, expected: Tensor, name: str) -> None:
    found, expected = found.detach(), expected.detach()
    scale = float(expected.abs().max())
    torch.testing.assert_close(
        found, expected, rtol=0, atol=1e-5 * scale + 1e-6, msg=lambda text: f"{name}: {text}"
    )


def assert_gradients_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_alike(found[name], gradient, name)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_segment_anything(weights: dict[str, Tensor], kind: str) -> None:
    inputs = Inputs(kind)
    reference = published.build(SMALL)
    reference.load_state_dict(weights)
    pixels = reference.preprocess(inputs.images[0])[None]
    expected_embeddings = reference.image_encoder(pixels)
    sparse, dense = reference.prompt_encoder(
        points=None if inputs.points is None else (inputs.points, inputs.labels),
        boxes=inputs.boxes,
        masks=None if inputs.masks is None else inputs.masks.expand(MASKS, -1, -1, -1),
    )
    expected_logits, expected_iou = reference.mask_decoder.predict_masks(
        expected_embeddings, reference.prompt_encoder.get_dense_pe(), sparse, dense
    )
    inputs.loss(expected_logits, expected_iou, ALL).backward()
    found = ours(weights, inputs, ALL)
    assert_alike(found.embeddings, expected_embeddings, "embeddings")
    assert_alike(found.logits, expected_logits, "logits")
    assert_alike(found.iou, expected_iou, "IoU")
    assert_gradients_alike(found.gradients, gradients_of(reference))


@pytest.mark.parametrize("multimask", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_hugging_face(
    weights: dict[str, Tensor], kind: str, multimask: bool
) -> None:
    inputs, candidates = Inputs(kind), AMBIGUOUS if multimask else SINGLE
    reference = huggingface.build(SMALL, weights)
    model = Sam(SMALL)
    pixels = (inputs.images - model.pixel_mean) / model.pixel_std
    expected = reference(
        pixel_values=pixels,
        input_points=None if inputs.points is None else inputs.points[None],
        input_labels=None if inputs.labels is None else inputs.labels[None],
        input_boxes=None if inputs.boxes is None else inputs.boxes[None],
        input_masks=inputs.masks,
        multimask_output=multimask,
    )
    inputs.loss(expected.pred_masks[0], expected.iou_scores[0], candidates).backward()
    found = ours(weights, inputs, candidates)
    assert_alike(found.logits, expected.pred_masks[0], "logits")
    assert_alike(found.iou, expected.iou_scores[0], "IoU")
    assert_gradients_alike(found.gradients, huggingface.gradients(reference, list(found.gradients)))
