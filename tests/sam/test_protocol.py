"""The protocol sam, compared with brute force and, click by click, with the published model."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from sa1b.masks.grid import framed_size
from sa1b.masks.raster import logit_axis, runs_of_logits
from sa1b.masks.runs import Runs
from sa1b.sam.clicks import BACKGROUND, FOREGROUND, NOTHING
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.prediction import at_source
from sa1b.sam.protocol import (
    PROMPTS,
    BoxMasks,
    ImageTruth,
    SamProtocol,
    _dense,
    _overlaps,
    centre,
    next_click,
)
from tests.sam import published

SMALL = ModelConfig(image_size=64, width=32, depth=2, heads=2, global_blocks=(1,), window=2, channels=32)


def distances(region: np.ndarray) -> np.ndarray:
    """Squared distance of each pixel of the region from the nearest pixel outside, int64.

    The ring around the array is outside.
    """
    padded = np.pad(region, 1)
    outside = np.argwhere(~padded)
    found = np.zeros(region.shape, np.int64)
    for y, x in np.argwhere(region):
        found[y, x] = ((outside - (y + 1, x + 1)) ** 2).sum(axis=1).min()
    return found


def cited(predicted: np.ndarray, truth: np.ndarray, clicked: np.ndarray) -> tuple[int, int, int] | None:
    """The next click by the rules of the code that the paper cites; None if it has nothing left to click."""
    missing, surplus = (distances(region) * ~clicked for region in (truth & ~predicted, predicted & ~truth))
    positive = missing.max() > surplus.max()
    error = missing if positive else surplus
    if not error.max():
        return None
    y, x = np.argwhere(error == error.max())[0]
    return int(x), int(y), int(positive)


@pytest.mark.parametrize("seed", range(30))
def test_the_next_click_is_that_of_the_cited_code(seed: int) -> None:
    random = np.random.default_rng(seed)
    height, width = random.integers(1, 24, 2)
    truth, predicted = random.random((2, height, width)) < random.choice(
        [0.1, 0.5, 0.9, 0.97, 1.0], (2, 1, 1)
    )
    clicked = np.zeros_like(truth)
    for _ in range(12):
        expected = cited(predicted, truth, clicked)
        click = next_click(predicted, truth, [(x, y) for y, x in np.argwhere(clicked).tolist()])
        assert click == ((0, 0, NOTHING) if expected is None else expected)
        if expected is not None:
            clicked[expected[1], expected[0]] = True


def test_squared_distances_are_exact_at_the_size_of_source_images() -> None:
    square = np.ones((2999, 2999), bool)
    assert centre(square) == (1499, 1499, 1500**2)
    square[1000, 1300] = False  # of the rest, the largest disc touches this pixel and two sides
    x, y, distance = centre(square)
    reach = min(x + 1, y + 1, 2999 - x, 2999 - y)
    assert distance == min(reach**2, (x - 1300) ** 2 + (y - 1000) ** 2)


def test_the_next_click_is_in_the_middle_of_the_largest_error() -> None:
    truth, predicted = np.zeros((2, 40, 50), bool)
    truth[10:20, 10:30] = True
    predicted[10:20, 10:23] = True  # 10 x 7 missing pixels
    assert next_click(predicted, truth)[1:] == (13, FOREGROUND)
    predicted[30:39, 1:10] = True  # 9 x 9 surplus pixels
    assert next_click(predicted, truth) == (5, 34, BACKGROUND)
    predicted[:] = truth
    assert next_click(predicted, truth)[2] == NOTHING


class Published:
    """The published modules on one image: uint8 [3, 64, 64] of the padded square, size in source pixels."""

    @torch.no_grad()
    def __init__(self, theirs: Any, image: torch.Tensor, source: tuple[int, int]) -> None:
        self.theirs, self.source, self.taken = theirs, source, framed_size(*source, 64)
        pixels = image[:, : self.taken[0], : self.taken[1]].float()
        self.embeddings = theirs.image_encoder(theirs.preprocess(pixels[None]))

    def framed(self, at: np.ndarray) -> torch.Tensor:
        scale = np.array(self.taken[::-1]) / self.source[::-1]
        return torch.from_numpy((at + 0.5) * scale - 0.5).float()

    def box(self, corners: np.ndarray) -> torch.Tensor:
        return self.framed(corners.reshape(2, 2)).reshape(1, 4)

    @torch.no_grad()
    def answer(self, points: Any, boxes: Any, low: Any, *, best: bool) -> tuple[list[np.ndarray], Any, int]:
        sparse, dense = self.theirs.prompt_encoder(points=points, boxes=boxes, masks=low)
        logits, iou = self.theirs.mask_decoder(
            image_embeddings=self.embeddings,
            image_pe=self.theirs.prompt_encoder.get_dense_pe(),
            sparse_prompt_embeddings=sparse,
            dense_prompt_embeddings=dense,
            multimask_output=best,
        )
        large = functional.interpolate(logits, (64, 64), mode="bilinear", align_corners=False)
        part = large[..., : self.taken[0], : self.taken[1]]
        masks = functional.interpolate(part, self.source, mode="bilinear", align_corners=False)
        return list(masks[0].numpy() > 0), logits, int(iou[0].argmax())


def by_published(theirs: Any, image: torch.Tensor, truth: np.ndarray, box: np.ndarray) -> dict[str, float]:
    """IoU of one mask, click by click, with the published modules."""
    model = Published(theirs, image, truth.shape)

    def iou_of(mask: np.ndarray) -> float:
        return (mask & truth).sum() / (mask | truth).sum()

    found = {}
    masks, low, chosen = model.answer(None, model.box(box), None, best=True)
    found["box"], found["box_oracle"] = iou_of(masks[chosen]), max(map(iou_of, masks))
    clicked = np.zeros_like(truth)
    at, labels, low = [], [], None
    click = cited(clicked, truth, clicked)
    for number in range(1, 6):
        x, y, label = click or (0, 0, -1)
        clicked[y, x] |= label >= 0
        at.append((x, y))
        labels.append(label)
        points = (model.framed(np.array(at))[None], torch.tensor(labels)[None])
        masks, logits, chosen = model.answer(points, None, low, best=number == 1)
        if number == 1:
            found["1_click_oracle"] = max(map(iou_of, masks))
        found[f"{number}_click{'s' if number > 1 else ''}"] = iou_of(masks[chosen])
        low = logits[:, chosen : chosen + 1]
        click = cited(masks[chosen], truth, clicked)
    return found


def test_scores_are_those_of_the_published_model_click_by_click() -> None:
    theirs = published.build(SMALL)
    model = Sam(SMALL)
    model.load_state_dict(theirs.state_dict())
    sizes = [(45, 61), (30, 20), (50, 50)]
    random = np.random.default_rng(0)
    images = torch.from_numpy(random.integers(0, 256, (3, 3, 64, 64), np.uint8))
    truth, taken = [], []
    for number, (height, width) in enumerate(sizes):
        masks = np.zeros((number, height, width), bool)  # the first image has no masks
        for i in range(number):
            masks[i, 3 + i : 20 + i, 2 : 17 - 4 * i] = True
        boxes = np.array([[2.0, 3.0 + i, 16.0 - 4 * i, 19.0 + i] for i in range(number)]).reshape(-1, 4)
        truth.append(ImageTruth(masks, boxes))
        taken.append(framed_size(height, width, 64))
        rows, columns = taken[-1]
        images[number, :, rows:] = 0
        images[number, :, :, columns:] = 0
    with torch.no_grad():
        found = SamProtocol(truth)(model, images, torch.tensor(taken))
    ious = (found["intersections"] / found["unions"]).numpy()
    row = 0
    for image, of_image in zip(images, truth, strict=True):
        for mask, box in zip(of_image.masks, of_image.boxes, strict=True):
            reference = by_published(theirs, image, mask, box)
            expected = [reference[prompt] for prompt in PROMPTS]
            assert ious[row] == pytest.approx(expected, abs=2 / mask.sum())
            row += 1
    assert row == len(ious) == 3
    assert (found["logits"].shape, found["points"].shape) == ((3, 16, 16), (3, 2))


@pytest.mark.parametrize("source", [(45, 61), (90, 41)])
def test_masks_of_boxes_are_those_of_the_published_model_for_the_box_and_its_best_candidate(
    source: tuple[int, int],
) -> None:
    theirs = published.build(SMALL, seed=15)  # best candidates and masks differ between boxes
    model = Sam(SMALL)
    model.load_state_dict(theirs.state_dict())
    random, (rows, columns) = np.random.default_rng(1), framed_size(*source, 64)
    images = torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    images[..., :rows, :columns] = torch.from_numpy(random.integers(0, 256, (rows, columns), np.uint8))
    corners = np.sort(random.uniform(0, 1, (33, 2, 2)), axis=1) * (source[1] - 1, source[0] - 1)
    boxes = corners.reshape(-1, 4)  # more than are decoded together
    with torch.no_grad():
        found = BoxMasks(boxes, source)(model, images, torch.tensor([[rows, columns]]))["masks"].numpy()
    reference, chosen = Published(theirs, images[0], source), set()
    for mask, box in zip(found, boxes, strict=True):
        _, logits, best = reference.answer(None, reference.box(box), None, best=True)
        low = logits[:, best : best + 1]
        (expected,), _, _ = reference.answer(None, reference.box(box), low, best=False)
        assert (mask != expected).sum() <= 4  # rounding
        chosen.add(best)
    assert len(chosen) > 1
    with torch.no_grad():
        none = BoxMasks(boxes[:0], source)(model, images[:0], torch.zeros(0, 2))["masks"]
    assert (none.dtype, none.shape) == (torch.bool, (0, *source))


def test_images_without_masks_are_embedded_and_score_nothing() -> None:
    torch.manual_seed(0)
    model = Sam(SMALL)
    calls: list[int] = []
    model.image_encoder.register_forward_hook(lambda *_: calls.append(1))
    none = ImageTruth(np.zeros((0, 5, 5), bool), np.zeros((0, 4)))
    for count in (0, 2):
        images = torch.zeros(count, 3, 64, 64, dtype=torch.uint8)
        sizes = torch.full((count, 2), 64)
        with torch.no_grad():
            found = SamProtocol([none] * count)(model, images, sizes)
        assert found["intersections"].shape == (0, len(PROMPTS))
    assert len(calls) == 2


@pytest.mark.parametrize("source", [(60, 90), (90, 41)])
def test_masks_as_runs_have_the_pixels_and_overlaps_of_enlarged_logits(source: tuple[int, int]) -> None:
    torch.manual_seed(0)
    logits = torch.nn.functional.interpolate(torch.randn(5, 3, 4, 4), (16, 16), mode="bilinear")
    taken = framed_size(*source, 64)
    dense = at_source(logits.flatten(0, 1), source, taken, 64)
    rows, columns = (logit_axis(*of_axis, 64, 16) for of_axis in zip(source, taken, strict=True))
    runs = runs_of_logits(logits.flatten(0, 1).numpy(), np.arange(15), rows, columns)
    some, best = torch.tensor([2, 0, 7, 7, 14]), torch.tensor([2, 0, 1, 1, 0])
    assert torch.equal(_dense(runs, some), dense[some])
    truth = torch.randn(5, *source) > 0
    for chosen in (best, None):
        found = _overlaps(runs, Runs.from_pixels(truth.numpy()), chosen)
        for one, other in zip(found, _overlaps(dense, truth, chosen), strict=True):
            assert torch.equal(one, other)
    masks = dense.view(5, 3, *source)[torch.arange(5), best]
    both, either = _overlaps(dense, truth, best)
    assert torch.equal(both, (masks & truth).sum((1, 2)))
    assert torch.equal(either, (masks | truth).sum((1, 2)))
