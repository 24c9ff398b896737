"""The grounding model: its losses, its regions, and its gradient on several ranks."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from sa1b.engine.model import Model
from sa1b.errors import UsageError
from sa1b.grounding.alignment import contrastive_loss, region_features
from sa1b.sam.model import ModelConfig, Sam
from tests.engine.launch import launch
from tests.grounding.small import BATCH, MODEL, build, gradient, gradients_of_cases, samples

CASES: dict[str, Any] = {
    "ddp": {"mode": "ddp", "shares": (3, 3)},
    "fsdp": {"mode": "fsdp", "shares": (3, 3)},
    "ddp, unequal shares": {"mode": "ddp", "shares": (4, 2)},
    "fsdp, a rank without images": {"mode": "fsdp", "shares": (6, 0)},
    "ddp, a rank without masks": {"mode": "ddp", "shares": (2, 4)},
    "fsdp, precomputed embeddings": {"mode": "fsdp", "shares": (3, 3), "vectors": 5},
}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, dict[str, Any]]]:
    return launch(
        gradients_of_cases, 2, {**CASES, "two micro-batches": {"mode": "ddp", "shares": (3, 3), "cuts": 2}}
    )


@pytest.fixture(scope="module")
def alone() -> dict[int, dict[str, Any]]:
    """The step of one process, by numbers of an embedding."""
    return {vectors: gradient("none", (BATCH,), vectors=vectors) for vectors in (0, 5)}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_gradient_of_one_process(
    two_ranks: list[dict[str, dict[str, Any]]], alone: dict[int, dict[str, Any]], case: str
) -> None:
    expected = alone[CASES[case].get("vectors", 0)]
    assert expected["missing"] == []
    assert len(expected["gradients"]) > 30
    for found in (rank[case] for rank in two_ranks):
        assert found["missing"] == []
        assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        for name, gradient_of_one in expected["gradients"].items():
            scale = max(float(gradient_of_one.abs().max()), 1e-3)
            assert float((found["gradients"][name] - gradient_of_one).abs().max()) < 1e-5 * scale, name
    for name, total in expected["sums"].items():
        assert sum(rank[case]["sums"][name] for rank in two_ranks) == pytest.approx(total, rel=1e-5), name


def test_micro_batches_change_the_negatives(
    two_ranks: list[dict[str, dict[str, Any]]], alone: dict[int, dict[str, Any]]
) -> None:
    found = [rank["two micro-batches"]["sums"] for rank in two_ranks]
    assert sum(sums["count"] for sums in found) == alone[0]["sums"]["count"]
    assert sum(sums["mask_loss"] for sums in found) == pytest.approx(alone[0]["sums"]["mask_loss"], rel=1e-5)
    assert sum(sums["contrastive_loss"] for sums in found) < 0.95 * alone[0]["sums"]["contrastive_loss"]


def test_the_contrastive_loss_is_the_mean_of_two_cross_entropies_without_repeated_phrases() -> None:
    generator = torch.Generator().manual_seed(0)
    regions, texts = (functional.normalize(torch.randn(5, 3, generator=generator), dim=1) for _ in range(2))
    keys, counted = torch.tensor([7, 8, 7, 9, 5]), torch.tensor([True, True, True, True, False])
    losses, hits = contrastive_loss(regions, texts, keys, counted, torch.tensor([4.0]), capacity=5)
    for pair, others in enumerate([[0, 1, 3], [0, 1, 2, 3], [1, 2, 3], [0, 1, 2, 3]]):
        expected = 0.0
        for rows, columns in ((regions, texts), (texts, regions)):
            logits = 4 * rows[pair] @ columns[others].T
            expected += float(logits.logsumexp(0) - 4 * rows[pair] @ columns[pair]) / 2
        assert float(losses[pair]) == pytest.approx(expected, rel=1e-5)
    assert float(losses[4]) == float(hits[4]) == 0
    with pytest.raises(ValueError, match="capacity=4 must be at least the 5 pairs"):
        contrastive_loss(regions, texts, keys, counted, torch.tensor([4.0]), capacity=4)


def test_a_region_is_the_mean_of_the_embedding_over_its_mask() -> None:
    embeddings = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    masks = torch.zeros(3, 4, 4, dtype=torch.uint8)
    masks[0, 1:3, 2] = masks[2, 0, 0] = 1
    points = torch.tensor([[1.0, 1.0], [25.0, 17.0], [1.0, 1.0]])  # the second mask has no pixel
    found = region_features(embeddings, masks, points, (2, 1), image_size=32)
    assert torch.allclose(found[0], embeddings[0, :, 1:3, 2].mean(dim=1))
    assert torch.equal(found[1], embeddings[0, :, 2, 3])
    assert torch.equal(found[2], embeddings[1, :, 0, 0])


def test_it_fulfils_the_contract_and_learns() -> None:
    model = build()
    assert isinstance(model, Model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(25):
        sums = model(*samples(range(2, 6)))
        optimizer.zero_grad()
        (sums["loss"] / sums["count"]).backward()
        optimizer.step()
        losses.append(float(sums["loss"].detach() / sums["count"]))
    assert losses[-1] < 0.8 * losses[0]
    assert {*model.figures, "count"} == set(sums)
    assert float(sums["temperature"] / sums["count"]) != pytest.approx(0.07, rel=1e-3)
    assert [name for name, one in model.named_parameters() if not model.decays(name, one) and one.ndim > 1] == [
        "image_encoder.pos_embed", "image_encoder.blocks.0.attn.rel_pos_h",
        "image_encoder.blocks.0.attn.rel_pos_w", "image_encoder.blocks.1.attn.rel_pos_h",
        "image_encoder.blocks.1.attn.rel_pos_w", "text_encoder.position",
    ]  # fmt: skip


def test_the_temperature_has_a_limit() -> None:
    model = build(temperature=0.02, least_temperature=0.02)
    with torch.no_grad():
        model.log_scale.fill_(10.0)
    found = model.eval()(*samples(range(3)), evaluate=True)
    assert float(found["scale"].detach()) == pytest.approx(1 / 0.02)
    assert float(build().log_scale.detach()) == pytest.approx(-math.log(0.07))


def test_the_temperature_has_a_gradient_beyond_its_limit() -> None:
    model = build(temperature=0.02, least_temperature=0.02)
    with torch.no_grad():
        model.log_scale.fill_(10.0)
    model.train()(*samples(range(3)))["loss"].backward()
    assert float(model.log_scale.grad) != 0


def test_an_empty_micro_batch_has_zero_sums_and_a_gradient_for_each_parameter() -> None:
    for positions in (range(0), range(1)):  # no image; an image without masks
        model = build()
        sums = model(*samples(positions))
        sums["loss"].backward()
        assert {name: float(value.detach()) for name, value in sums.items()} == dict.fromkeys(sums, 0.0)
        assert all(one.grad is not None and not one.grad.any() for one in model.parameters())


def test_masks_of_an_image_do_not_depend_on_other_images() -> None:
    model = build().eval()
    both, one = (model(*samples(positions), evaluate=True) for positions in (range(2, 4), range(3, 4)))
    for name in ("regions", "texts", "logits"):
        assert torch.allclose(both[name][2:], one[name], atol=1e-5), name


def test_weights_of_a_sam_are_those_of_the_image_encoder() -> None:
    sam = Sam(MODEL)
    model = build()
    line = model.load_weights(sam.state_dict())
    assert (
        "37 tensors for the image encoder; initial values: similarity_gain, background, log_scale, text_enc"
        in line
    )
    assert torch.equal(model.image_encoder.pos_embed, sam.image_encoder.pos_embed)
    other = build()
    other.load_weights(model.state_dict())
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(UsageError, match=r"weights of other sizes: --model.width is 16, .*have 32"):
        model.load_weights(Sam(ModelConfig(**{**_sizes(), "width": 32})).state_dict())
    with pytest.raises(UsageError, match="weights of other sizes"):
        build(vectors=5).load_weights(model.state_dict())


def _sizes() -> dict[str, Any]:
    return {name: getattr(MODEL, name) for name in MODEL.__slots__}
