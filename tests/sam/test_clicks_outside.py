"""Prompts and losses of interactive training for a model whose answers are given, against numpy."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sa1b
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.recipe import Recipe
from tests.shards.tiny_source import pairs, write_source

SIZE, LOW = 64, 16  # pixels of the square and of the model's masks
CONFIG = ModelConfig(image_size=SIZE, width=16, depth=1, heads=2, global_blocks=(0,), channels=32)


class Given(Sam):
    """A model that answers call k with `logits[k]`, [M, 4, R, R], and `predicted[k]`, [M, 4]; it notes its prompts."""

    def __init__(self, masks: int, calls: int = 20) -> None:
        super().__init__(CONFIG)
        random = torch.Generator().manual_seed(masks)
        coarse = torch.randn(calls * masks, 4, 5, 5, generator=random)
        logits = (
            3 * functional.interpolate(coarse, (LOW, LOW), mode="bilinear").view(calls, masks, 4, LOW, LOW)
            - 1
        )
        self.logits, self.predicted = logits, torch.rand(calls, masks, 4, generator=random)
        self.bias = nn.Parameter(torch.zeros(()))
        self.asked: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def decode(
        self, embeddings, image, points, labels, low_res=None, has_low_res=None, *, counts=None, candidates
    ):  # type: ignore[override]
        call = len(self.asked)
        self.asked.append((points, labels, low_res))
        return self.logits[call][:, candidates] + self.bias, self.predicted[call][
            :, candidates
        ] + 0 * self.bias


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clicks")
    tar = write_source(folder / "sa_000001.tar", pairs(range(100, 112)))
    sa1b.reshard([tar], folder / "root", images_per_shard=12, workers=1, quiet=True)
    return folder / "root"


@pytest.fixture(params=[LOW, 2 * LOW], ids=["masks as large as the answers", "larger masks"])
def case(request: pytest.FixtureRequest, root: Path) -> Iterator[tuple[Tensor, Any, Tensor]]:
    """Images, targets and keys of a micro-batch; the lower quarter of each square is outside of its image."""
    stream = sa1b.Stream(root, global_batch=12, image_size=SIZE, masks=4)
    batch = next(iter(sa1b.Loader(stream, threads=1, dense=request.param, quiet=True)))
    images, targets, keys = Interactive(Sam(CONFIG), Recipe()).inputs(batch, 7)
    assert len(targets.keys) > 20
    return images, targets, keys


def passed(case: Any, recipe: Recipe, **options: Any) -> tuple[Given, dict[str, Tensor]]:
    """The model after a pass without gradient, and the result with its prompts."""
    interactive = Interactive(Given(len(case[1].keys)), recipe)
    interactive.traced = not options
    interactive.train(not options)
    with torch.no_grad():
        return interactive.model, interactive(*case, **options)


def at_targets(logits: Tensor, targets: Any) -> np.ndarray:
    """Logits [M, K, R, R] at the size of the targets."""
    size = targets.masks.shape[-1]
    return functional.interpolate(logits, (size, size), mode="bilinear", align_corners=False).double().numpy()


def inside(targets: Any) -> np.ndarray:
    """Pixels whose centre is in the image: bool [M, R, R]."""
    size = targets.masks.shape[-1]
    centres = (np.arange(size) + 0.5) * (SIZE / size)
    rows, columns = targets.sizes[targets.image].numpy().T
    return (centres[:, None] < rows[:, None, None]) & (centres < columns[:, None, None])


def chosen(
    model: Given, call: int, targets: Any, boxed: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Of each mask the candidate with the highest predicted IoU, and its pixels in the image."""
    kind = (
        1 + model.predicted[call][:, 1:].argmax(dim=1).numpy()
        if call == 0
        else np.zeros(len(targets.keys), int)
    )
    if call == 0 and boxed is not None:
        kind = np.where(boxed, 0, kind)
    each = np.arange(len(kind))
    return kind, (at_targets(model.logits[call], targets)[each, kind] > 0) & inside(targets)


def check_clicks(
    points: np.ndarray, labels: np.ndarray, masks: np.ndarray, targets: Any
) -> tuple[np.ndarray, ...]:
    """Clicks are centres of wrong pixels, 1 on missing and 0 on surplus ones; their rows and columns."""
    true, size = targets.masks.numpy() == 1, targets.masks.shape[-1]
    at = (points + 0.5) * (size / SIZE) - 0.5
    columns, rows = np.rint(at).astype(int).T
    np.testing.assert_allclose(at, np.stack((columns, rows), 1), atol=1e-4)
    for one, (row, column, label) in enumerate(zip(rows, columns, labels, strict=True)):
        missing, surplus = true[one] & ~masks[one], masks[one] & ~true[one]
        if label == -1:
            continue
        if not (missing | surplus).any():  # nothing is wrong: a click on the mask
            missing = true[one]
        assert (missing if label == 1 else surplus)[row, column], one
    return rows, columns


@pytest.mark.parametrize(("clicks", "unprompted"), [(8, 2), (4, 0), (3, 1)])
def test_clicks_are_on_wrong_pixels_with_the_label_of_the_target(
    case: Any, clicks: int, unprompted: int
) -> None:
    targets = case[1]
    model, found = passed(case, Recipe(clicks=clicks, unprompted=unprompted, box_probability=0.0))
    count, last = len(targets.keys), clicks + max(unprompted - 1, 0)
    points, labels = found["points"].numpy(), found["labels"].numpy()
    assert points.shape == (count, 2 + last, 2)
    assert len(model.asked) == 1 + clicks + unprompted
    rests = (labels[:, 2:] == -1).sum(axis=1)
    assert (rests == max(unprompted - 1, 0)).all()
    if unprompted > 1:
        assert len({tuple(row) for row in (labels[:, 2:] == -1).tolist()}) > 4  # at random places
    pixels, seen = [], set()
    for number in range(last):
        kind, masks = chosen(model, number, targets)
        rows, columns = check_clicks(points[:, 2 + number], labels[:, 2 + number], masks, targets)
        seen |= set(labels[:, 2 + number].tolist())
        pixels.append(np.stack((rows, columns), 1)[labels[:, 2 + number] != -1])
        asked, tags, low = model.asked[number + 1]
        assert torch.equal(asked, found["points"][:, : 3 + number])
        assert torch.equal(tags, found["labels"][:, : 3 + number])
        assert torch.equal(low[:, 0], model.logits[number][range(count), kind])
    if unprompted:
        assert model.asked[-1][0].shape[1] == 2 + last  # the last pass has no new click
    assert seen >= {0, 1}
    assert len(np.unique(np.concatenate(pixels), axis=0)) > 0.3 * len(np.concatenate(pixels))


def test_clicks_are_uniform_over_the_error_and_new_in_each_iteration(case: Any) -> None:
    images, targets, keys = case
    interactive = Interactive(Given(len(targets.keys)), Recipe(clicks=12, unprompted=0, box_probability=0.0))
    interactive.traced, model = True, interactive.model
    size = targets.masks.shape[-1]
    masks = torch.zeros_like(targets.masks)
    masks[:, :2, :4] = 1  # what is predicted lacks these 8 pixels, and nothing else is wrong
    model.logits[:] = -9
    with torch.no_grad():
        found = interactive(images, replace(targets, masks=masks), keys)
    at = ((found["points"][:, 2:] + 0.5) * (size / SIZE) - 0.5).round().long()
    assert (found["labels"][:, 2:] == 1).all()
    where = at[..., 0] + 4 * at[..., 1]
    counts = torch.bincount(where.flatten(), minlength=8)
    assert len(counts) == 8
    mean = where.numel() / 8
    assert float(((counts - mean) ** 2 / mean).sum()) < 30  # chi-squared with 7 degrees: once in 10,000
    assert all(len(set(one)) > 2 for one in where.tolist())


@pytest.mark.parametrize("label", [1, -1])
def test_without_an_error_the_click_is_on_the_mask_and_without_a_mask_there_is_none(
    case: Any, label: int
) -> None:
    images, targets, keys = case
    masks = torch.zeros_like(targets.masks)
    if label == 1:
        masks[:, 2:6, 4:8] = 1
    model = Given(len(targets.keys))
    model.logits[:] = -9 + 18 * functional.interpolate(masks[:, None].float(), (LOW, LOW))
    if masks.shape[-1] > LOW:  # the enlarged logits decide which pixels are true
        masks = torch.from_numpy(at_targets(model.logits[0], targets)[:, 0] > 0).to(masks.dtype)
    interactive = Interactive(model, Recipe(clicks=3, unprompted=0, box_probability=0.0))
    interactive.traced = True
    with torch.no_grad():
        found = interactive(images, replace(targets, masks=masks), keys)
    assert (found["labels"][:, 2:] == label).all()
    for number in range(3 if label == 1 else 0):
        predicted = masks.numpy() == 1
        check_clicks(
            found["points"][:, 2 + number].numpy(),
            np.ones(len(masks)),
            predicted,
            replace(targets, masks=masks),
        )


@pytest.mark.parametrize(("kind", "noise"), [("normal", 0.1), ("uniform", 0.1), ("normal", 0.0)])
def test_the_first_prompt_is_a_point_of_the_mask_or_its_box_with_noise(
    case: Any, kind: Any, noise: float
) -> None:
    targets = case[1]
    recipe = Recipe(clicks=0, unprompted=0, box_noise=noise, box_noise_kind=kind)
    found = passed(case, recipe)[1]
    points, labels = found["points"].numpy(), found["labels"].numpy()
    boxed = labels[:, 0] == 2
    assert 0.2 < boxed.mean() < 0.8
    assert (labels == np.where(boxed[:, None], [2, 3], [1, -1])).all()
    np.testing.assert_allclose(points[~boxed, 0], targets.points.numpy()[~boxed] - 0.5)
    boxes, sizes = targets.boxes.numpy()[boxed], targets.sizes[targets.image].numpy()[boxed][:, ::-1]
    corners = boxes.reshape(-1, 2, 2)
    lengths = corners[:, 1] - corners[:, 0]
    limit = 20 * SIZE / 1024
    most = np.full_like(lengths, limit) if kind == "normal" else np.minimum(limit, noise * lengths)
    moved = np.abs(points[boxed] + 0.5 - np.clip(corners, 0, sizes[:, None]))
    assert (moved <= (most * (noise > 0))[:, None] + 1e-4).all()
    assert noise == 0 or moved.max() > 0.3 * most.max()
    for probability, first in ((0.0, 1), (1.0, 2)):
        assert (passed(case, replace(recipe, box_probability=probability))[1]["labels"][:, 0] == first).all()


def test_an_evaluation_counts_pixels_after_clicks_on_errors_and_for_the_exact_box(case: Any) -> None:
    targets = case[1]
    model, found = passed(case, Recipe(), evaluate=True)
    true = (targets.masks.numpy() == 1) & inside(targets)
    assert len(model.asked) == 6
    points, labels, _ = model.asked[4]
    np.testing.assert_allclose(points[:, 0], targets.points - 0.5)
    assert (labels[:, :2] == torch.tensor([1, -1])).all()
    for number in range(4):
        kind, masks = chosen(model, number, targets)
        assert torch.equal(model.asked[number + 1][2][:, 0], model.logits[number][range(len(kind)), kind])
        check_clicks(points[:, 2 + number].numpy(), labels[:, 2 + number].numpy(), masks, targets)
    corners, tags, low = model.asked[5]
    assert low is None
    assert (tags == torch.tensor([2, 3])).all()
    np.testing.assert_allclose(corners.reshape(-1, 4), targets.boxes - 0.5)
    for column, call in enumerate((0, 2, 4, 5)):
        if call == 5:
            model.logits[0], model.predicted[0] = model.logits[5], model.predicted[5]
        _, masks = chosen(model, 0 if call == 5 else call, targets)
        assert found["intersections"][:, column].tolist() == (masks & true).sum((1, 2)).tolist()
        assert found["unions"][:, column].tolist() == (masks | true).sum((1, 2)).tolist()


# Losses


def parts(
    logits: np.ndarray, true: np.ndarray, predicted: float, within: np.ndarray, recipe: Recipe
) -> np.ndarray:
    """Focal loss, dice loss, error of the IoU, and the IoU of one predicted mask."""
    probability = 1 / (1 + np.exp(-logits))
    wrong = np.where(true, 1 - probability, probability)
    surprise = np.logaddexp(0, np.where(true, -logits, logits))
    weight = np.where(true, recipe.focal_alpha, 1 - recipe.focal_alpha)
    focal = (weight * wrong**recipe.focal_gamma * surprise).mean()
    dice = 1 - (2 * (probability * true).sum() + 1) / (probability.sum() + true.sum() + 1)
    mask = (logits > 0) & within
    iou = (mask & true).sum() / max((mask | true).sum(), 1)
    error = predicted - iou
    return np.array([focal, dice, error**2 if recipe.iou_loss == "squared" else abs(error), iou])


def expected(model: Given, labels: np.ndarray, targets: Any, recipe: Recipe) -> np.ndarray:
    """Of each mask: focal, dice and IoU loss over all iterations, first and last IoU."""
    passes, within, true = 1 + recipe.clicks + recipe.unprompted, inside(targets), targets.masks.numpy() == 1
    rows = []
    for mask in range(len(targets.keys)):
        losses, ious = [], []
        for call in range(passes):
            one = recipe.box_masks == "one" and labels[mask, 0] == 2
            kinds = [1, 2, 3] if call == 0 and not one else [0]
            large = at_targets(model.logits[call][mask : mask + 1], targets)[0]
            predicted = model.predicted[call][mask].double().numpy()
            of_kinds = [
                parts(large[kind], true[mask], predicted[kind], within[mask], recipe) for kind in kinds
            ]
            best = min(of_kinds, key=lambda row: recipe.focal_weight * row[0] + recipe.dice_weight * row[1])
            mean, share = np.mean(of_kinds, axis=0), recipe.all_masks_share
            quality = best[2] if recipe.iou_masks == "best" else mean[2]
            losses.append([*((1 - share) * best[:2] + share * mean[:2]), quality])
            ious.append(of_kinds[int(np.argmax(predicted[kinds]))][3])
        total = np.mean(losses, axis=0) if recipe.iteration_loss == "mean" else np.sum(losses, axis=0)
        rows.append([*total, ious[0], ious[-1]])
    return np.array(rows)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"iteration_loss": "sum", "focal_alpha": 0.75, "focal_gamma": 0.0},
        {"iou_masks": "all", "all_masks_share": 0.25, "iou_loss": "absolute"},
        {"box_masks": "one", "iou_masks": "all", "clicks": 0, "unprompted": 0},
        {"focal_gamma": 3.0, "clicks": 1, "unprompted": 0, "all_masks_share": 0.5},
    ],
    ids=str,
)
def test_the_sums_are_those_of_numpy_weighted_by_mask(case: Any, changed: dict[str, Any]) -> None:
    recipe = Recipe(
        **{
            "clicks": 2,
            "unprompted": 1,
            "focal_weight": 7.0,
            "dice_weight": 2.0,
            "iou_weight": 3.0,
            **changed,
        }
    )
    images, targets, keys = case
    weights = torch.tensor([1.0, 0.0, 0.5, 2.0]).repeat(len(targets.keys))[: len(targets.keys)]
    targets = replace(targets, weights=weights)
    model, found = passed((images, targets, keys), recipe)
    rows = expected(model, found["labels"].numpy(), targets, recipe)
    names = ("focal", "dice", "iou_loss", "iou_first", "iou_last")
    sums = weights.double().numpy() @ rows
    np.testing.assert_allclose([found[name].item() for name in names], sums, rtol=2e-5)
    losses = weights.double().numpy() * (rows[:, :3] @ [7, 2, 3])
    assert found["loss"].item() == pytest.approx(losses.sum(), rel=2e-5)
    assert found["count"].item() == weights.sum().item()
    np.testing.assert_allclose(found["losses"], losses, rtol=1e-4, atol=1e-6)
    of_images = np.zeros((len(images), 3))
    np.add.at(
        of_images, targets.image.numpy(), np.stack((losses, weights.numpy() * rows[:, 4], weights.numpy()), 1)
    )
    np.testing.assert_allclose(found["of_images"], of_images, rtol=1e-4, atol=1e-6)


def test_the_gradient_is_the_slope_of_the_loss(case: Any) -> None:
    recipe = Recipe(clicks=2, unprompted=1, iou_weight=0.0)  # the IoU has steps

    def loss(bias: float, grad: bool) -> Tensor:
        interactive = Interactive(Given(len(case[1].keys)), recipe)
        interactive.model.bias.data.fill_(bias)
        with torch.set_grad_enabled(grad):
            result = interactive(*case)["loss"]
        if grad:
            result.backward()
            return interactive.model.bias.grad
        return result

    slope = (loss(0.01, False) - loss(-0.01, False)) / 0.02
    assert float(loss(0.0, True)) == pytest.approx(float(slope), rel=2e-3)
