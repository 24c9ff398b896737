"""Precision and placeholders of the prompt encoder; test_model compares its values with the published ones."""

import math

import pytest
import torch
from torch import Tensor

from sa1b.sam.mask_decoder import PromptEncoder
from tests.sam import published

SIZE, SIDE, CHANNELS = 1024, 8, 32


@pytest.fixture
def encoder() -> PromptEncoder:
    torch.manual_seed(0)
    return PromptEncoder(CHANNELS, SIZE, SIDE)


def random_prompts() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    points = torch.rand(6, 3, 2, generator=generator) * SIZE
    labels = torch.randint(-1, 4, (6, 3), generator=generator)
    return points, labels, torch.randn(6, 1, 4 * SIDE, 4 * SIDE, generator=generator)


@torch.no_grad()
def test_autocast_changes_no_bit(encoder: PromptEncoder) -> None:
    def embed() -> tuple[Tensor, ...]:
        sparse, dense = encoder(*random_prompts())
        assert dense.features is not None
        return sparse, dense.constant, dense.features, dense.basis, encoder.image_position()

    expected = embed()
    with torch.autocast("cpu", torch.bfloat16):
        found = embed()
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


@torch.no_grad()
def test_coordinates_of_bfloat16_would_have_been_another_embedding(encoder: PromptEncoder) -> None:
    points, labels, _ = random_prompts()
    rounded = encoder(points.bfloat16(), labels)[0]
    assert (encoder(points, labels)[0] - rounded).abs().max() > 1e-3


@torch.no_grad()
def test_no_matrix_product_touches_coordinates(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Tensor:
        raise AssertionError("TF32 would round the coordinates here")

    for name in ("matmul", "__matmul__", "mm", "bmm"):
        monkeypatch.setattr(Tensor, name, refuse)
    monkeypatch.setattr(torch, "matmul", refuse)
    points, labels, _ = random_prompts()
    encoder(points, labels)


@torch.no_grad()
def test_a_point_is_sine_and_cosine_of_its_position_plus_its_kind(encoder: PromptEncoder) -> None:
    matrix = encoder.pe_layer.positional_encoding_gaussian_matrix.double()
    kinds = [encoder.not_a_point_embed.weight, *(kind.weight for kind in encoder.point_embeddings)]
    points = torch.tensor([[[10.0, 700.0]]])
    angle = 2 * math.pi * (2 * (points[0, 0].double() + 0.5) / SIZE - 1) @ matrix
    position = torch.cat([angle.sin(), angle.cos()])
    for label in (0, 1, 2, 3):
        found = encoder(points, torch.tensor([[label]]))[0][0, 0]
        torch.testing.assert_close(found.double(), position + kinds[label + 1][0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_coordinates_of_nothing_do_not_count(encoder: PromptEncoder) -> None:
    points = torch.tensor([[[3.0, 5.0], [900.0, math.nan]]])
    sparse = encoder(points, torch.tensor([[-1, -1]]))[0]
    assert torch.equal(sparse[0], encoder.not_a_point_embed.weight.expand(2, -1))


@torch.no_grad()
def test_a_mask_that_is_missing_does_not_count_whatever_its_pixels(encoder: PromptEncoder) -> None:
    points, labels, low_res = random_prompts()
    has = torch.tensor([True, False, True, False, False, True])
    low_res[~has] = torch.nan
    dense = published.dense(encoder(points, labels, low_res, has)[1], 6, SIDE)
    without = published.dense(encoder(points, labels)[1], 6, SIDE)
    with_masks = published.dense(encoder(points, labels, low_res.nan_to_num())[1], 6, SIDE)
    assert torch.equal(dense[~has], without[~has])
    torch.testing.assert_close(dense[has], with_masks[has])


def test_an_unknown_label_is_refused(encoder: PromptEncoder) -> None:
    for label in (-2, 4):
        with pytest.raises(IndexError):
            encoder(torch.zeros(1, 1, 2), torch.tensor([[label]]))
