"""The distillation of an image encoder: its loss, its frozen parts, and batches without images."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sa1b.sam.distillation import Distillation
from sa1b.sam.embedding_cache import EmbeddingCache
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.recipe import Recipe, encoder_flops
from sa1b.sam.targets import Targets

TEACHER = ModelConfig(image_size=64, width=32, depth=2, heads=2, global_blocks=(1,), window=2, channels=32)
STUDENT = replace(TEACHER, width=16, heads=1, pixel_features=0, drop_path=0.5)
SIZES = torch.tensor([[64, 40], [17, 64], [64, 64]])  # rows and columns of each image


@pytest.fixture
def distillation() -> Distillation:
    torch.manual_seed(0)
    return Distillation(Sam(STUDENT), Recipe(clicks=1, unprompted=0), Sam(TEACHER))


def inputs(images: int = 3) -> tuple[Tensor, Targets, Tensor]:
    torch.manual_seed(1)
    none = torch.zeros(0)
    targets = Targets(none, none, none, none, none, none, sizes=SIZES[:images])
    return torch.randint(0, 256, (images, 3, 64, 64), dtype=torch.uint8), targets, torch.arange(images)


def test_the_loss_is_the_mean_over_the_tokens_of_the_image(distillation: Distillation) -> None:
    distillation.eval()
    images, targets, keys = inputs()
    sums = distillation(images, targets, keys)
    with torch.no_grad():
        own, wanted = (
            model.embed(images, None, SIZES) for model in (distillation.model, distillation.teacher)
        )
    expected = 0.0
    for number, (rows, columns) in enumerate(((4, 3), (2, 4), (4, 4))):  # tokens of 16 pixels
        part = (number, slice(None), slice(rows), slice(columns))
        expected += float((own[part] - wanted[part]).square().mean())
    assert sums["loss"].detach().item() == pytest.approx(expected, rel=1e-5)
    assert sums["count"].item() == 3
    assert -3 <= sums["cosine"].detach().item() <= 3
    same = Distillation(distillation.teacher, Recipe(), distillation.teacher).eval()(images, targets, keys)
    assert same["loss"].detach().item() == 0
    assert same["cosine"].detach().item() == pytest.approx(3)


def test_only_the_encoder_of_the_student_is_trained(distillation: Distillation) -> None:
    theirs = {name: tensor.clone() for name, tensor in distillation.teacher.state_dict().items()}
    for name, tensor in distillation.model.state_dict().items():
        assert name.startswith("image_encoder.") or torch.equal(tensor, theirs[name])
    trained = [one for one in distillation.parameters() if one.requires_grad]
    assert len(trained) == len(list(distillation.model.image_encoder.parameters()))
    assert not any(name.startswith("teacher") for name in distillation.state_dict())
    optimizer = torch.optim.AdamW(trained, 1e-3)
    distillation.train()
    for _ in range(2):
        distillation(*inputs())["loss"].backward()
        assert all(one.grad is not None for one in trained)
        optimizer.step()
    assert not distillation.teacher.training
    assert all(
        torch.equal(tensor, theirs[name]) for name, tensor in distillation.teacher.state_dict().items()
    )


def test_a_batch_without_images_has_a_gradient_of_zero(distillation: Distillation) -> None:
    sums = distillation(*inputs(0))
    assert {name: value.detach().item() for name, value in sums.items()} == {
        "loss": 0,
        "cosine": 0,
        "count": 0,
    }
    sums["loss"].backward()
    for one in distillation.model.image_encoder.parameters():
        assert one.grad is not None
        assert not one.grad.any()


def test_the_teacher_is_moved_and_counted_with_the_student(
    distillation: Distillation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert distillation.flops(2, 100) == 2 * (3 * encoder_flops(STUDENT) + encoder_flops(TEACHER))
    with monkeypatch.context() as patch:
        patch.setattr(distillation, "_cache", EmbeddingCache(tmp_path, 1 << 20))
        assert distillation.flops(2, 100) == 2 * 3 * encoder_flops(STUDENT)
    distillation.to("meta")
    assert distillation.teacher.pixel_mean.is_meta
