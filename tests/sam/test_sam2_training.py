"""The recipe of the preset sam2 compared with SAM 2's own training code, from a checkout of its sources.

git clone https://github.com/facebookresearch/sam2
SA1B_SAM2_SOURCES=sam2 pytest -m slow tests/sam/test_sam2_training.py
"""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sa1b
from sa1b.hashing import Purpose
from sa1b.masks.raster_torch import PIXEL_MEAN, PIXEL_STD, normalised
from sa1b.recipes.presets import SAM_PRESETS
from sa1b.sam import clicks
from sa1b.sam.clicks import random_words, uniforms
from sa1b.sam.iteration import Scene, iterate
from sa1b.sam.protocol import next_click
from tests.train.command import make_root

SOURCES = os.environ.get("SA1B_SAM2_SOURCES", "")
CASES, SIDE = 1000, 16
RECIPE = SAM_PRESETS["sam2"].recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SOURCES, reason="SA1B_SAM2_SOURCES is not set: a checkout of SAM 2's sources"),
]


@pytest.fixture(scope="module")
def theirs() -> Iterator[SimpleNamespace]:
    """SAM 2's functions, without the modules of its trainer, which need more packages."""
    before = set(sys.modules)
    for name in ("sam2", "sam2.utils", "sam2.modeling", "training", "training.utils", "training.dataset"):
        package = ModuleType(name)
        package.__path__ = [str(Path(SOURCES, *name.split(".")))]
        sys.modules[name] = package
    trainer = ModuleType("training.trainer")
    trainer.CORE_LOSS_KEY = "core_loss"
    sys.modules["training.trainer"] = trainer
    sys.modules["tensordict"] = ModuleType("tensordict")
    sys.modules["tensordict"].tensorclass = lambda found: found  # of batches, which are not compared
    yield SimpleNamespace(
        utils=importlib.import_module("sam2.modeling.sam2_utils"),
        losses=importlib.import_module("training.loss_fns"),
    )
    for name in set(sys.modules) - before:
        del sys.modules[name]


def masks(seed: int, count: int = CASES, side: int = SIDE) -> Tensor:
    """Rectangles with noise, bool [count, side, side]; every tenth one has a pixel only."""
    random = np.random.default_rng(seed)
    made = np.zeros((count, side, side), bool)
    for mask in made:
        (top, bottom), (left, right) = np.sort(random.integers(0, side + 1, (2, 2)))
        mask[top:bottom, left:right] = True
    made ^= random.random(made.shape) < random.choice([0, 0.02, 0.2], (count, 1, 1))
    made[::10] = False
    made[np.arange(count), random.integers(0, side, count), random.integers(0, side, count)] = True
    return torch.from_numpy(made)


def test_losses_and_their_gradients_are_theirs(theirs: SimpleNamespace) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(CASES, 4, SIDE, SIDE, generator=generator)
    predicted, truth = torch.rand(CASES, 4, generator=generator), masks(0)
    boxed = torch.rand(CASES, generator=generator) < 0.5
    corner, point = torch.tensor([clicks.TOP_LEFT, clicks.BOTTOM_RIGHT]), torch.tensor([1, clicks.NOTHING])
    labels = torch.where(boxed[:, None], corner, point)
    function = theirs.losses.MultiStepMultiMasksAndIous(
        {"loss_mask": 20, "loss_dice": 1, "loss_iou": 1}, supervise_all_iou=True, iou_use_l1_loss=True
    )
    for feedback, candidates in ((None, None), (torch.zeros(CASES, 1, SIDE, SIDE), slice(0, 1))):
        own = [logits.clone().requires_grad_(), predicted.clone().requires_grad_()]

        def decode(*_: Any, candidates: slice, own: Any = own, **__: Any) -> tuple[Tensor, Tensor]:
            return own[0][:, candidates], own[1][:, candidates]

        everything = torch.ones_like(truth)
        scene = Scene(torch.zeros(1), torch.zeros(CASES, dtype=torch.int64), None, truth, everything)
        model: Any = SimpleNamespace(decode=decode)
        losses, *_ = iterate(model, RECIPE, scene, torch.zeros(CASES, 2, 2), labels, feedback)
        weights = torch.tensor([RECIPE.focal_weight, RECIPE.dice_weight, RECIPE.iou_weight])
        (losses * weights[:, None]).sum().backward()
        other = [logits.clone().requires_grad_(), predicted.clone().requires_grad_()]
        expected = []
        for i in range(CASES):
            used = candidates or (slice(0, 1) if boxed[i] else slice(1, 4))
            outputs = {
                "multistep_pred_multimasks_high_res": [other[0][i : i + 1, used]],
                "multistep_pred_ious": [other[1][i : i + 1, used]],
                "multistep_object_score_logits": [torch.zeros(1, 1)],
            }
            found = function([outputs], truth[None, i : i + 1])
            expected.append(torch.stack([found[name] for name in ("loss_mask", "loss_dice", "loss_iou")]))
            found["core_loss"].backward()
        torch.testing.assert_close(losses, torch.stack(expected, dim=1), rtol=1e-5, atol=1e-6)
        for one, another in zip(own, other, strict=True):
            torch.testing.assert_close(one.grad, another.grad, rtol=1e-4, atol=1e-6)


def test_the_noise_of_boxes_is_theirs(theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    truth, keys = masks(1, side=64), torch.arange(CASES)
    sides = torch.arange(4)
    values = uniforms(random_words(keys[:, None], Purpose.BOX_NOISE, sides))
    monkeypatch.setattr(torch, "rand", lambda *_, **__: values[:, None])
    expected, labels = theirs.utils.sample_box_points(truth[:, None])
    monkeypatch.undo()
    # Their box ends at the centres of its last pixels: the same noise needs a box without the last half pixels.
    boxes = theirs.utils.mask_to_box(truth[:, None])[:, 0].float()
    sizes = torch.full((CASES, 2), 63)
    found = clicks.noised_boxes(
        boxes,
        keys,
        sizes,
        RECIPE.box_noise,
        RECIPE.box_noise_limit,
        uniform=RECIPE.box_noise_kind == "uniform",
    )
    crossed = (expected[:, 0] > expected[:, 1]).any(dim=1)  # ours are sorted
    assert crossed.sum() < 0.01 * CASES
    torch.testing.assert_close(found.reshape(-1, 2, 2)[~crossed], expected[~crossed])
    assert labels.tolist() == [[clicks.TOP_LEFT, clicks.BOTTOM_RIGHT]] * CASES


def test_corrective_clicks_are_on_the_pixels_of_theirs(theirs: SimpleNamespace) -> None:
    truth, predicted = masks(2, 2 * CASES), masks(3, 2 * CASES)
    wrong = (truth ^ predicted).flatten(1).any(dim=1).nonzero().flatten()[:CASES]
    truth, predicted = truth[wrong], predicted[wrong]
    torch.manual_seed(0)
    points, labels = theirs.utils.sample_random_points_from_errors(truth[:, None], predicted[:, None])
    own, own_labels = clicks.corrective_clicks(predicted, truth, torch.arange(CASES), 0, SIDE)
    each = torch.arange(CASES)
    for at, label in ((points[:, 0], labels[:, 0]), (own, own_labels)):
        x, y = at.long().T
        assert (truth ^ predicted)[each, y, x].all()
        assert torch.equal(label.long(), truth[each, y, x].long())
    # Both are uniform over the error: the mean positions and the shares of foreground clicks agree.
    assert (points[:, 0] - own).mean(dim=0).abs().max() < 4 * SIDE / CASES**0.5 / 2
    assert abs(float(labels.float().mean() - own_labels.float().mean())) < 0.06


def test_the_centre_of_an_error_is_theirs(theirs: SimpleNamespace) -> None:
    truth, predicted = masks(4), masks(5)
    points, labels = theirs.utils.sample_one_point_from_error_center(truth[:, None], predicted[:, None])
    for i in range(CASES):
        click = next_click(predicted[i].numpy(), truth[i].numpy())
        assert click == (int(points[i, 0, 0]), int(points[i, 0, 1]), int(labels[i, 0]))


def test_flips_and_normalised_pixels_are_theirs(theirs: SimpleNamespace, tmp_path: Path) -> None:
    """The images are not scaled: SAM 2 stretches them to the square, which docs/recipes.md lists."""
    pytest.importorskip("torchvision")
    transforms = importlib.import_module("training.dataset.transforms")
    data = importlib.import_module("training.utils.data_utils")
    to_pil = importlib.import_module("torchvision.transforms.functional").to_pil_image
    root, masks = make_root(tmp_path, images=100), 0
    plain, flipped = (
        sa1b.Stream(root, global_batch=1, image_size=160, masks=40, flip=share, seed=7)
        for share in (0.0, 1.0)
    )
    for before, after in zip(plain, flipped, strict=True):
        height, width = before.framed_sizes[0].tolist()
        image, dense = before.images[0, :, :height, :width], before.masks.dense()[:, :height, :width]
        objects = [data.Object(number, 0, one) for number, one in enumerate(dense)]
        frame = data.Frame(to_pil(image), objects)
        point = transforms.hflip(data.VideoDatapoint([frame], 0, (height, width)), 0)
        own = after.images[0, :, :height, :width]
        for mine, other in zip(after.masks.dense()[:, :height, :width], objects, strict=True):
            assert torch.equal(mine, other.segment)
            masks += 1
        point = transforms.ToTensorAPI()(point)
        assert torch.equal((frame.data * 255).round().to(torch.uint8), own)
        transforms.NormalizeAPI([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])(point)
        pixels = normalised(
            after.images,
            None,
            torch.tensor(PIXEL_MEAN)[:, None, None],
            torch.tensor(PIXEL_STD)[:, None, None],
        )
        torch.testing.assert_close(pixels[0, :, :height, :width], frame.data, rtol=1e-4, atol=1e-4)
    assert masks >= CASES
