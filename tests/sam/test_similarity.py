"""The term of the logits for the similarity of pixels to clicks."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sa1b.sam.mask_decoder import AMBIGUOUS, SINGLE
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.published import config_of, misfit, read_weights, write_weights
from sa1b.sam.similarity import ClickSimilarity

CONFIG = ModelConfig(
    image_size=64, width=32, depth=2, heads=2, global_blocks=(1,), window=2, channels=32, pixel_features=8
)
SIZE, SIDE = 64, 16  # pixels of the image and of the masks


def build(config: ModelConfig = CONFIG) -> Sam:
    torch.manual_seed(0)
    return Sam(config).eval()


def trained() -> ClickSimilarity:
    """A module whose terms differ between tokens, and whose features depend on the embedding."""
    torch.manual_seed(1)
    similarity = ClickSimilarity(patch_size=16, channels=32, features=8)
    for layer in (similarity.terms, similarity.pixels.last):
        torch.nn.init.normal_(layer.weight, std=0.1)
    return similarity


def squares() -> Tensor:
    """A red, a green and a second red square on grey: uint8 [1, 3, 64, 64]."""
    images = torch.full((1, 3, SIZE, SIZE), 90, dtype=torch.uint8)
    for left, colour in ((4, (220, 30, 30)), (24, (30, 220, 30)), (44, (220, 30, 30))):
        images[0, :, 20:36, left : left + 16] = torch.tensor(colour, dtype=torch.uint8)[:, None, None]
    return images


def term(similarity: ClickSimilarity, packed: Tensor, points: Tensor, labels: Tensor) -> Tensor:
    _, pixels = similarity.split(packed)
    image = torch.zeros(len(points), dtype=torch.int64)
    clicks = similarity.clicks(pixels, image, points, labels, SIZE)
    return similarity(clicks, [len(points)], torch.zeros(len(points), 1, 32))[:, 0]


@torch.no_grad()
def test_before_training_a_click_selects_the_pixels_of_its_colour_near_it() -> None:
    torch.manual_seed(0)
    similarity = ClickSimilarity(patch_size=16, channels=32, features=24)
    packed = similarity.with_features((squares().float() - 120) / 58, torch.randn(1, 32, 4, 4))
    found = term(similarity, packed, torch.tensor([[[12.0, 28.0]]]), torch.tensor([[1]]))[0]
    same, other, ground, far = found[7, 2], found[7, 8], found[1, 8], found[7, 13]
    assert same > max(other, ground, far)
    assert far > other  # the second red square has the clicked colour, but is far away


@torch.no_grad()
def test_the_term_is_the_formula_of_the_nearest_clicks() -> None:
    similarity = trained()
    torch.manual_seed(2)
    packed = similarity.with_features(torch.randn(1, 3, SIZE, SIZE), torch.randn(1, 32, 4, 4))
    embedding, pixels = similarity.split(packed)
    points = torch.rand(3, 4, 2) * (SIZE - 1)
    labels = torch.tensor([[1, -1, 0, 1], [1, -1, 1, 1], [0, 0, -1, 1]])
    tokens = torch.randn(3, 2, 32)
    clicks = similarity.clicks(pixels, torch.zeros(3, dtype=torch.int64), points, labels, SIZE)
    found = similarity(clicks, [3], tokens)
    assert embedding.shape == (1, 32, 4, 4)
    shown = packed[:, 32:].reshape(1, 8, 4, 4, 4, 4).permute(0, 1, 4, 2, 5, 3).reshape(8, SIDE, SIDE)
    for mask in range(3):
        for k in range(2):
            log_a, log_b, e, g = similarity.terms(tokens[mask, k]).tolist()
            for row, column in ((0, 0), (3, 9), (15, 4)):
                nearest = {0: 30.0, 1: 30.0}
                for (x, y), label in zip(points[mask].tolist(), labels[mask].tolist(), strict=True):
                    if label < 0:
                        continue
                    u, v = (x + 0.5) / SIZE, (y + 0.5) / SIZE
                    clicked = shown[:, int(v * SIDE), int(u * SIDE)]
                    unlike = float(((shown[:, row, column] - clicked) ** 2).sum())
                    away = ((column + 0.5) / SIDE - u) ** 2 + ((row + 0.5) / SIDE - v) ** 2
                    distance = torch.tensor([log_a, log_b]).exp() @ torch.tensor([unlike, away])
                    nearest[label] = min(nearest[label], float(distance))
                expected = e - nearest[1] - torch.nn.functional.softplus(torch.tensor(g - nearest[0]))
                assert float(found[mask, k, row, column]) == pytest.approx(
                    float(expected), rel=1e-3, abs=1e-3
                )


@torch.no_grad()
def test_a_box_counts_as_a_click_on_its_centre_and_no_click_as_nothing() -> None:
    similarity = trained()
    packed = similarity.with_features(torch.randn(1, 3, SIZE, SIZE), torch.randn(1, 32, 4, 4))
    box = term(similarity, packed, torch.tensor([[[8.0, 10.0], [30.0, 20.0]]]), torch.tensor([[2, 3]]))
    centre = term(similarity, packed, torch.tensor([[[19.0, 15.0]]]), torch.tensor([[1]]))
    assert torch.allclose(box, centre, atol=1e-4)
    nothing = term(similarity, packed, torch.zeros(1, 2, 2), torch.full((1, 2), -1))
    assert torch.equal(nothing, torch.zeros(1, SIDE, SIDE))
    assert torch.equal(term(similarity, packed, torch.zeros(1, 0, 2), torch.zeros(1, 0).long()), nothing)


@torch.no_grad()
def test_masks_are_the_same_whatever_they_are_decoded_with() -> None:
    model = build()
    model.similarity = trained()
    embeddings = model.embed(torch.randint(0, 256, (3, 3, SIZE, SIZE), dtype=torch.uint8))
    assert embeddings.shape == (3, 32 + 16 * 8, 4, 4)
    image = torch.tensor([0, 0, 0, 2])
    points, labels = torch.rand(4, 2, 2) * SIZE, torch.tensor([[1, -1], [2, 3], [1, 0], [1, 1]])
    together, _ = model.decode(embeddings, image, points, labels, counts=[3, 0, 1])
    for mask in range(4):
        one = slice(mask, mask + 1)
        alone, _ = model.decode(embeddings, image[one], points[one], labels[one])
        assert torch.allclose(alone, together[one], atol=1e-4)


@pytest.mark.parametrize("candidates", [SINGLE, AMBIGUOUS], ids=["single", "ambiguous"])
@pytest.mark.parametrize("masks", [0, 2])
def test_every_parameter_gets_a_gradient(candidates: slice, masks: int) -> None:
    model = build()
    embeddings = model.embed(squares()[: min(masks, 1)])
    image = torch.zeros(masks, dtype=torch.int64)
    points, labels = torch.rand(masks, 2, 2) * SIZE, torch.ones(masks, 2, dtype=torch.int64)
    logits, iou = model.decode(embeddings, image, points, labels, candidates=candidates)
    (logits.sum() + iou.sum()).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_weights_in_half_precision_give_finite_logits_of_their_own_number_format() -> None:
    model = build().to(torch.bfloat16)
    embeddings = model.embed(squares())
    points, labels = torch.tensor([[[12.0, 28.0]]]), torch.tensor([[1]])
    logits, _ = model.decode(embeddings, torch.tensor([0]), points, labels)
    assert logits.dtype == torch.bfloat16
    assert bool(logits.isfinite().all())


def test_files_of_weights_keep_the_number_of_features(tmp_path: Path) -> None:
    model = build()
    write_weights(tmp_path / "sam.safetensors", model.state_dict())
    assert config_of(read_weights(tmp_path / "sam.safetensors")).pixel_features == 8
    without = dataclasses.replace(CONFIG, pixel_features=0)
    assert not any("similarity" in name for name in build(without).state_dict())
    assert misfit(model.state_dict(), without) == (
        "weights of other sizes: --model.pixel-features is 0, the weights have 8: "
        "pass --model.pixel-features 8"
    )


def test_the_parameters_of_the_published_model_do_not_depend_on_the_addition() -> None:
    own, published = build().state_dict(), build(dataclasses.replace(CONFIG, pixel_features=0)).state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in published.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pixel_features": -1}, "--model.pixel-features -1: must be at least 0"),
        ({"patch_size": 2}, "--model.patch-size 2 must be a multiple of 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)
