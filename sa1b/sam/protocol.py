"""The evaluation of "Segment Anything" (2023): clicks at the centres of errors, IoU at source resolution.

The first click is the pixel of the mask that is farthest from the mask's border. Each further click is the
wrong pixel that is farthest from the border of its region, where missing and surplus pixels are separate
regions. Clicks are those of the code of Sofiiuk et al., "Reviving Iterative Training with Mask Guidance for
Interactive Segmentation" (2021), which the paper cites: the border of the image counts as a border of
regions, a clicked pixel is not clicked again, and of equally large errors the surplus is clicked. For a
single click or a box the model predicts three candidates, for later clicks the single mask. Two candidates
are scored: the one with the highest predicted IoU, and the one with the highest IoU, the oracle's choice.

Clicks are computed on the CPU, mask by mask, with exact distances in the bounding box of each region: 1 ms
for a disc of 600 pixels in an image of 1500 x 2250, at most 80 ms for a region of this size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from sa1b.masks.geometry import area, intersection
from sa1b.masks.pixel_kernels import farthest
from sa1b.masks.raster import logit_axis, rasterize, runs_of_logits
from sa1b.masks.runs import Runs
from sa1b.sam.clicks import BACKGROUND, BOTTOM_RIGHT, FOREGROUND, NOTHING, TOP_LEFT
from sa1b.sam.mask_decoder import AMBIGUOUS, SINGLE
from sa1b.sam.model import Sam
from sa1b.sam.prediction import at_source, decoded
from sa1b.shards.predictions import Predicted

CLICKS = (1, 3, 5)
_AT_ONCE = 32  # largest number of masks that are decoded together
PROMPTS = ("1_click", "3_clicks", "5_clicks", "box", "1_click_oracle", "box_oracle")

Mask = npt.NDArray[np.bool_]
Size = tuple[int, int]  # rows and columns


@dataclass(frozen=True, slots=True, eq=False)
class ImageTruth:
    """The annotated masks of one image at source resolution, each with a pixel, and their boxes."""

    masks: Mask
    boxes: npt.NDArray[np.float64]

    def parts(self) -> Iterator["ImageTruth"]:
        """The masks in groups that are decoded together."""
        for start in range(0, len(self.masks), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            yield ImageTruth(self.masks[part], self.boxes[part])


class Click(NamedTuple):
    """A click in source pixels; the centre of a pixel has integer coordinates."""

    x: int
    y: int
    label: int


class SamProtocol:
    """Scores a model against the annotated masks of a micro-batch's images; a protocol of `Interactive`."""

    def __init__(self, truth: Sequence[ImageTruth]) -> None:
        self.truth = truth

    def __call__(self, model: Sam, images: Tensor, sizes: Tensor) -> dict[str, Tensor]:
        """Scores of all masks of the micro-batch.

        "intersections" and "unions" are int64 [M, 6], source pixels, a column for each of PROMPTS. For the
        first click: "logits", float32 [M, R, R] of the padded square with R = S / 4, "predicted_iou", float32
        [M], and "points", float32 [M, 2], the position of the click in the padded square, where the centre of
        a pixel is its index plus 0.5.
        """
        embeddings = model.embed(images, sizes=sizes)  # called once on every rank, even if there are no masks
        scores = [
            _score(model, embeddings[i : i + 1], part, (int(size[0]), int(size[1])))
            for i, (truth, size) in enumerate(zip(self.truth, sizes.tolist(), strict=True))
            for part in truth.parts()
        ]
        if not scores:
            scores = [_nothing(4 * model.config.side, images.device)]
        return {name: torch.cat([score[name] for score in scores]) for name in scores[0]}


class BoxMasks:
    """Masks for boxes float64 [m, 4] of one image, x0, y0, x1, y1 in source pixels; m may be 0."""

    def __init__(self, boxes: npt.NDArray[np.float64], source: Size) -> None:
        self.boxes, self.source = boxes, source

    def __call__(self, model: Sam, images: Tensor, sizes: Tensor) -> dict[str, Tensor]:
        """The result "masks", bool [m, height, width]: predicted from boxes and a first prediction.

        The first prediction is the candidate with the highest predicted IoU of three. Without boxes, `images`
        may be [0, 3, S, S].
        """
        embedding = model.embed(images, sizes=sizes)
        parts = [torch.zeros((0, *self.source), dtype=torch.bool, device=images.device)]
        for start in range(0, len(self.boxes), _AT_ONCE):
            corners = self.boxes[start : start + _AT_ONCE].reshape(-1, 2, 2)
            rows, columns = sizes[0].tolist()
            prompts = _Prompts(model, embedding, self.source, (rows, columns))
            labels = np.tile([TOP_LEFT, BOTTOM_RIGHT], (len(corners), 1))
            logits, predicted, _ = prompts.answer(corners, labels, AMBIGUOUS)
            each = torch.arange(len(logits), device=logits.device)
            best = logits[each, predicted.argmax(dim=1)][:, None]
            single = prompts.answer(corners, labels, SINGLE, best)[2]
            parts.append(single.chosen(each * 0))
        return {"masks": torch.cat(parts)}


def centre(region: Mask, clicked: Sequence[tuple[int, int]] = ()) -> tuple[int, int, int]:
    """The pixel of a region that is farthest from the region's outside: x, y and the squared distance.

    Of equally far pixels, the first in row-major order. The distance is 0 if the region has no pixel, or only
    `clicked` ones. Pixels outside of the array are outside of the region.
    """
    top, left, box = _cropped(region)
    if not box.size:
        return 0, 0, 0
    before = np.array(clicked, np.int64).reshape(-1, 2) - (left, top)
    x, y, distance = farthest(np.ascontiguousarray(box), before)
    return (left + x, top + y, distance) if distance else (0, 0, 0)


def next_click(predicted: Mask, truth: Mask, clicked: Sequence[tuple[int, int]] = ()) -> Click:
    """The click that corrects a mask: foreground on missing pixels, background on surplus pixels.

    If both are equally far from the outside, the click is background. If no pixel is wrong, or all wrong
    pixels are clicked, the label is NOTHING: an empty point.
    """
    top, left, wrong = _cropped(predicted ^ truth)
    inside = truth[top : top + wrong.shape[0], left : left + wrong.shape[1]]
    before = [(x - left, y - top) for x, y in clicked]
    missing, surplus = centre(wrong & inside, before), centre(wrong & ~inside, before)
    x, y, distance = missing if missing[2] > surplus[2] else surplus
    if not distance:
        return Click(0, 0, NOTHING)
    return Click(left + x, top + y, FOREGROUND if missing[2] > surplus[2] else BACKGROUND)


def _cropped(region: Mask) -> tuple[int, int, Mask]:
    """The first row and column of a region's bounding box, and the region in that box."""
    rows = np.flatnonzero(region.any(axis=1))
    if not len(rows):
        return 0, 0, region[:0, :0]
    part = region[rows[0] : rows[-1] + 1]
    columns = np.flatnonzero(part.any(axis=0))
    return int(rows[0]), int(columns[0]), part[:, columns[0] : columns[-1] + 1]


class _Prompts:
    """Points of m masks in source pixels, for `decoded` on one image."""

    def __init__(self, model: Sam, embedding: Tensor, source: Size, taken: Size) -> None:
        self.model, self.embedding = model, embedding
        self.source, self.taken = source, taken

    def framed(self, at: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Convert points in source pixels to the padded square; a pixel's centre is its integer index."""
        scale = np.array(self.taken[::-1]) / self.source[::-1]
        return np.asarray((at + 0.5) * scale - 0.5, np.float64)

    def answer(
        self,
        at: npt.NDArray[np.float64],
        labels: npt.NDArray[np.int64],
        candidates: slice,
        feedback: Tensor | None = None,
    ) -> "tuple[Tensor, Tensor, _Masks]":
        """Logits [m, K, R, R], predicted IoU [m, K] and masks [m, K] at source resolution of K candidates."""
        logits, predicted = decoded(self.model, self.embedding, self.framed(at), labels, candidates, feedback)
        return logits, predicted, _Masks(logits, self.source, self.taken, self.model.config.image_size)


class _Masks:
    """K candidates of m masks, logits [m, K, R, R], at source resolution: runs on a CPU, where a dense mask
    takes 20 times as long, and dense on a GPU.
    """

    def __init__(self, logits: Tensor, source: Size, taken: Size, image_size: int) -> None:
        self.shape, self.source, self.device = logits.shape[:2], source, logits.device
        flat, self.runs, self.dense = logits.flatten(0, 1), None, None
        if logits.device.type == "cpu":
            rows, columns = (
                logit_axis(*of_axis, image_size, logits.shape[-1])
                for of_axis in zip(source, taken, strict=True)
            )
            self.runs = runs_of_logits(flat.numpy(), np.arange(len(flat)), rows, columns)
        else:
            self.dense = at_source(flat, source, taken, image_size)

    def chosen(self, best: Tensor) -> Tensor:
        index = best + torch.arange(len(best), device=best.device) * self.shape[1]
        if self.dense is not None:
            return self.dense[index]
        assert self.runs is not None
        return torch.from_numpy(rasterize(self.runs.select(index.numpy()), dtype=np.bool_))

    def counts(self, truth: "_Truth") -> tuple[Tensor, Tensor]:
        """Pixels of intersection and union with each annotated mask: int64 [m, K]."""
        if self.runs is None:
            assert self.dense is not None
            masks = self.dense.view(*self.shape, *self.source)
            both = _pixels(masks & truth.dense[:, None])
            return both, _pixels(masks) + _pixels(truth.dense)[:, None] - both
        count = self.shape[1]
        common = np.zeros(self.shape, np.int64)
        for number in range(len(common)):
            predicted = self.runs.select(np.arange(number * count, (number + 1) * count))
            common[number] = intersection(predicted, truth.runs.select([number]))[:, 0]
        either = area(self.runs).reshape(self.shape) + area(truth.runs)[:, None] - common
        return torch.from_numpy(common), torch.from_numpy(either)


class _Truth:
    """The annotated masks of a part: runs on a CPU, else dense."""

    def __init__(self, masks: Mask, device: torch.device) -> None:
        self.runs = Runs.from_pixels(masks if device.type == "cpu" else masks[:0])
        self.dense = torch.from_numpy(masks if device.type != "cpu" else masks[:0]).to(device)


def _score(model: Sam, embedding: Tensor, truth: ImageTruth, taken: Size) -> dict[str, Tensor]:
    masks = _Truth(truth.masks, embedding.device)
    count, source = len(truth.masks), (truth.masks.shape[1], truth.masks.shape[2])
    prompts = _Prompts(model, embedding, source, taken)
    each = torch.arange(count, device=embedding.device)
    first = np.array([centre(mask)[:2] for mask in truth.masks], np.float64)
    # As in the published code, a prompt without a box gets an empty point.
    at = np.stack([first, np.zeros_like(first)], axis=1)
    labels = np.tile([FOREGROUND, NOTHING], (count, 1))
    logits, predicted, candidates = prompts.answer(at, labels, AMBIGUOUS)
    best = predicted.argmax(dim=1)
    first_click = {
        "logits": logits[each, best],
        "predicted_iou": predicted[each, best],
        "points": torch.from_numpy(prompts.framed(first).astype(np.float32)).to(each.device) + 0.5,
    }
    columns = {"1_click": _overlaps(candidates, masks, best), "1_click_oracle": _overlaps(candidates, masks)}
    for number in range(2, max(CLICKS) + 1):
        answers = candidates.chosen(best).cpu().numpy()
        before = [
            points[present].astype(int).tolist()
            for points, present in zip(at, labels != NOTHING, strict=True)
        ]
        clicks = [next_click(*of_mask) for of_mask in zip(answers, truth.masks, before, strict=True)]
        at = np.concatenate([at, [[[click.x, click.y]] for click in clicks]], axis=1)
        labels = np.concatenate([labels, [[click.label] for click in clicks]], axis=1)
        logits, _, candidates = prompts.answer(at, labels, SINGLE, logits[each, best][:, None])
        best = torch.zeros_like(best)
        if number in CLICKS:
            columns[f"{number}_clicks"] = _overlaps(candidates, masks, best)
    corners = np.tile([TOP_LEFT, BOTTOM_RIGHT], (count, 1))
    _, predicted, candidates = prompts.answer(truth.boxes.reshape(-1, 2, 2), corners, AMBIGUOUS)
    columns["box"] = _overlaps(candidates, masks, predicted.argmax(dim=1))
    columns["box_oracle"] = _overlaps(candidates, masks)
    intersections, unions = zip(*(columns[prompt] for prompt in PROMPTS), strict=True)
    return {
        "intersections": torch.stack(intersections, dim=1),
        "unions": torch.stack(unions, dim=1),
        **first_click,
    }


def _overlaps(masks: _Masks, truth: _Truth, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Pixels of intersection and union, int64 [m], of the annotated mask and one of its K candidates."""
    # `chosen`: int64 [m], index of the candidate; None: the candidate with the highest IoU.
    both, either = masks.counts(truth)
    if chosen is None:
        chosen = (both.double() / either.clamp(min=1)).argmax(dim=1)
    each = torch.arange(len(both), device=both.device)
    return both[each, chosen], either[each, chosen]


def _pixels(masks: Tensor) -> Tensor:
    return masks.flatten(-2).sum(dim=-1)


def _nothing(size: int, device: torch.device) -> dict[str, Tensor]:
    none = torch.zeros((0, len(PROMPTS)), dtype=torch.int64, device=device)
    return {
        "intersections": none,
        "unions": none,
        "logits": torch.zeros((0, size, size), device=device),
        "predicted_iou": torch.zeros(0, device=device),
        "points": torch.zeros((0, 2), device=device),
    }


def prediction_lines(
    batch: Any,
    rows: Tensor,
    points: Tensor,
    iou: Tensor,
    predicted_iou: Tensor,
    runs_of: Callable[[npt.NDArray[np.int64], Size, Size], Runs],
    phrases: Sequence[str] = (),
) -> list[tuple[int, str]]:
    """Position and line of predictions.jsonl for each image of a `sa1b.Batch` that has masks.

    `rows`: int64 [N], masks of the batch. Points are in the padded square. `runs_of` is called with some of
    the numbers 0 to N - 1, of an image, its source size and the part of the square that it fills.
    """
    image, mask_ids = (x[rows].cpu().numpy() for x in (batch.masks.image, batch.mask_ids))
    at, actual, predicted = (x.double().cpu().numpy() for x in (points, iou, predicted_iou))
    of_images = (batch.ids, batch.positions, batch.source_sizes, batch.framed_sizes)
    lines = []
    for number, (image_id, position, source, taken) in enumerate(
        zip(*(values.tolist() for values in of_images), strict=True)
    ):
        masks = np.flatnonzero(image == number)
        if len(masks):
            some = Predicted(
                mask_id=mask_ids[masks],
                points=at[masks] * (np.array(source[::-1]) / taken[::-1]),
                iou=actual[masks],
                predicted_iou=predicted[masks],
                runs=runs_of(masks, tuple(source), tuple(taken)),
                phrases=tuple(phrases[mask] for mask in masks.tolist()) if phrases else (),
            )
            lines.append((position, some.line(image_id)))
    return lines


QUICK_PROMPTS = ("1_click", "3_clicks", "5_clicks", "box")  # of an evaluation with uniform clicks
SIZES = ("small", "medium", "large")
MEDIUM, LARGE = 32**2, 96**2  # smallest areas of medium and of large masks in source pixels, as in COCO
UNIT = 1 << 32  # the integer for an IoU of 1; sums fit 2**31 masks, products 2**31 pixels per mask


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """Sums over masks by size and prompt.

    An IoU counts as floor(UNIT * intersection / union), so that sums are exact; the rounding is 2**-32.
    """

    # int64 [3, P + 1]: a row for each of SIZES; the IoU of each prompt, then the number of masks
    sums: Tensor
    prompts: tuple[str, ...] = QUICK_PROMPTS
    by_size: bool = True  # meaningful only for IoU at source resolution

    @classmethod
    def empty(
        cls,
        device: torch.device | str = "cpu",
        prompts: tuple[str, ...] = QUICK_PROMPTS,
        *,
        by_size: bool = True,
    ) -> "Score":
        sums = torch.zeros((len(SIZES), len(prompts) + 1), dtype=torch.int64, device=device)
        return cls(sums, prompts, by_size)

    def add(self, intersections: Tensor, unions: Tensor, areas: Tensor, weights: Tensor) -> None:
        """Add the masks of a batch; the host does not wait for the device.

        Intersections and unions are pixels, int64 [M, P]; a union of 0 is an IoU of 0, as in training.
        `areas` are source pixels, int64 [M]. A weight of 0 excludes a mask, any other counts it once.
        """
        ious = intersections * UNIT // unions.clamp(min=1)
        row = (areas >= MEDIUM).long() + (areas >= LARGE).long()
        belongs = (row[:, None] == torch.arange(len(SIZES), device=row.device)) & (weights != 0)[:, None]
        entries = torch.cat((ious, torch.ones_like(ious[:, :1])), dim=1)
        self.sums.add_((belongs[:, :, None] * entries[:, None, :]).sum(dim=0))

    def merge(self, other: "Score") -> None:
        """Add the sums of another score."""
        self.sums.add_(other.sums)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Add the sums of all ranks, in one collective that every rank of the group must call."""
        dist.all_reduce(self.sums, group=group)

    def result(self) -> dict[str, float]:
        """Mean IoU, 0 to 1, and counts: "miou_1_click", "miou_1_click_small", ..., "masks", "masks_small".

        A size without masks has the count 0 and no mean.
        """
        rows = self.sums.tolist()
        by_size = {"": [sum(column) for column in zip(*rows, strict=True)]}
        if self.by_size:
            by_size |= {f"_{size}": row for size, row in zip(SIZES, rows, strict=True)}
        means_and_counts: dict[str, float] = {}
        for suffix, (*ious, masks) in by_size.items():
            means_and_counts[f"masks{suffix}"] = masks
            if masks:
                means = zip(self.prompts, ious, strict=True)
                means_and_counts |= {
                    f"miou_{prompt}{suffix}": total / (UNIT * masks) for prompt, total in means
                }
        return means_and_counts
