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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sa1b.masks.geometry import area, intersection
from sa1b.masks.pixel_kernels import farthest
from sa1b.masks.raster import logit_axis, rasterize, runs_of_logits
from sa1b.masks.runs import Runs
from sa1b.sam.clicks import BACKGROUND, BOTTOM_RIGHT, FOREGROUND, NOTHING, TOP_LEFT
from sa1b.sam.iteration import pick
from sa1b.sam.mask_decoder import AMBIGUOUS, SINGLE
from sa1b.sam.model import Sam
from sa1b.sam.prediction import Floats, Ints, at_source, decoded
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
    boxes: Floats


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
        none, side = torch.zeros(0, device=images.device), 4 * model.config.side
        counts = none.long().view(0, len(PROMPTS))
        scores = [{"intersections": counts, "unions": counts, "logits": none.view(0, side, side)}]
        scores[0] |= {"predicted_iou": none, "points": none.view(0, 2)}
        scores += [
            _score(model, embeddings[i : i + 1], truth, slice(start, start + _AT_ONCE), (rows, columns))
            for i, (truth, (rows, columns)) in enumerate(zip(self.truth, sizes.tolist(), strict=True))
            for start in range(0, len(truth.masks), _AT_ONCE)
        ]
        return {name: torch.cat([score[name] for score in scores]) for name in scores[0]}


class BoxMasks:
    """Masks for boxes float64 [m, 4] of one image, x0, y0, x1, y1 in source pixels; m may be 0."""

    def __init__(self, boxes: Floats, source: Size) -> None:
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
            best = pick(logits, predicted.argmax(dim=1))[:, None]
            single = prompts.answer(corners, labels, SINGLE, best)[2]
            parts.append(_dense(single, torch.arange(len(corners), device=images.device)))
        return {"masks": torch.cat(parts)}


def centre(region: Mask, clicked: Sequence[tuple[int, int]] = ()) -> tuple[int, int, int]:
    """The pixel of a region that is farthest from its outside, and from that of the array: x, y and the
    squared distance, 0 if there is no pixel but `clicked` ones. Of equally far ones, the first by rows.
    """
    top, left, box = _cropped(region)
    if not box.size:
        return 0, 0, 0
    before = np.array(clicked, np.int64).reshape(-1, 2) - (left, top)
    x, y, distance = farthest(np.ascontiguousarray(box), before)
    return (left + x, top + y, distance) if distance else (0, 0, 0)


def next_click(predicted: Mask, truth: Mask, clicked: Sequence[tuple[int, int]] = ()) -> tuple[int, int, int]:
    """The click that corrects a mask, x, y and label: foreground on missing pixels, background on surplus
    ones and if both are equally far from the outside, NOTHING if all wrong pixels are clicked.
    """
    top, left, wrong = _cropped(predicted ^ truth)
    inside = truth[top : top + wrong.shape[0], left : left + wrong.shape[1]]
    before = [(x - left, y - top) for x, y in clicked]
    missing, surplus = centre(wrong & inside, before), centre(wrong & ~inside, before)
    x, y, distance = missing if missing[2] > surplus[2] else surplus
    if not distance:
        return 0, 0, NOTHING
    return left + x, top + y, FOREGROUND if missing[2] > surplus[2] else BACKGROUND


def _cropped(region: Mask) -> tuple[int, int, Mask]:
    """The first row and column of a region's bounding box, and the region in that box."""
    rows = np.flatnonzero(region.any(axis=1))
    if not len(rows):
        return 0, 0, region[:0, :0]
    part = region[rows[0] : rows[-1] + 1]
    columns = np.flatnonzero(part.any(axis=0))
    return int(rows[0]), int(columns[0]), part[:, columns[0] : columns[-1] + 1]


class _Prompts:
    """Points of m masks in source pixels, for `decoded` on one image, and masks at source resolution: runs on
    a CPU, where dense ones take 20 times as long, and bool [m * K, height, width] on a GPU.
    """

    def __init__(self, model: Sam, embedding: Tensor, source: Size, taken: Size) -> None:
        self.model, self.embedding, self.source, self.taken = model, embedding, source, taken

    def framed(self, at: Floats) -> Floats:
        """Convert points in source pixels to the padded square; a pixel's centre is its integer index."""
        scale = np.array(self.taken[::-1]) / self.source[::-1]
        return np.asarray((at + 0.5) * scale - 0.5, np.float64)

    def answer(
        self, at: Floats, labels: Ints, candidates: slice, feedback: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Runs | Tensor]:
        """Logits [m, K, R, R], predicted IoU [m, K] and masks of K candidates."""
        size = self.model.config.image_size
        logits, predicted = decoded(self.model, self.embedding, self.framed(at), labels, candidates, feedback)
        flat = logits.flatten(0, 1)
        if flat.device.type != "cpu":
            return logits, predicted, at_source(flat, self.source, self.taken, size)
        lengths = zip(self.source, self.taken, strict=True)
        axes = [logit_axis(*of_axis, size, logits.shape[-1]) for of_axis in lengths]
        return logits, predicted, runs_of_logits(flat.numpy(), np.arange(len(flat)), *axes)


def _dense(masks: Runs | Tensor, chosen: Tensor) -> Tensor:
    if isinstance(masks, Runs):
        return torch.from_numpy(rasterize(masks.select(chosen.numpy()), dtype=np.bool_))
    return masks[chosen]


def _score(model: Sam, embedding: Tensor, truth: ImageTruth, part: slice, taken: Size) -> dict[str, Tensor]:
    pixels, device = truth.masks[part], embedding.device
    masks = Runs.from_pixels(pixels) if device.type == "cpu" else torch.from_numpy(pixels).to(device)
    prompts = _Prompts(model, embedding, (pixels.shape[1], pixels.shape[2]), taken)
    count, each = len(pixels), torch.arange(len(pixels), device=device)
    first = np.array([centre(mask)[:2] for mask in pixels], np.float64)
    # As in the published code, a prompt without a box gets an empty point.
    at = np.stack([first, np.zeros_like(first)], axis=1)
    labels = np.tile([FOREGROUND, NOTHING], (count, 1))
    logits, predicted, candidates = prompts.answer(at, labels, AMBIGUOUS)
    best = predicted.argmax(dim=1)
    first_click = {
        "logits": pick(logits, best),
        "predicted_iou": pick(predicted, best),
        "points": torch.from_numpy(prompts.framed(first).astype(np.float32)).to(device) + 0.5,
    }
    columns = {"1_click": _overlaps(candidates, masks, best), "1_click_oracle": _overlaps(candidates, masks)}
    for number in range(2, max(CLICKS) + 1):
        answers = _dense(candidates, each * logits.shape[1] + best).cpu().numpy()
        before = [
            points[present].astype(int).tolist()
            for points, present in zip(at, labels != NOTHING, strict=True)
        ]
        clicks = np.array([next_click(*of_mask) for of_mask in zip(answers, pixels, before, strict=True)])
        at = np.concatenate([at, clicks[:, None, :2]], axis=1)
        labels = np.concatenate([labels, clicks[:, 2:]], axis=1)
        logits, _, candidates = prompts.answer(at, labels, SINGLE, pick(logits, best)[:, None])
        best = torch.zeros_like(best)
        if number in CLICKS:
            columns[f"{number}_clicks"] = _overlaps(candidates, masks, best)
    corners = np.tile([TOP_LEFT, BOTTOM_RIGHT], (count, 1))
    _, predicted, candidates = prompts.answer(truth.boxes[part].reshape(-1, 2, 2), corners, AMBIGUOUS)
    columns["box"] = _overlaps(candidates, masks, predicted.argmax(dim=1))
    columns["box_oracle"] = _overlaps(candidates, masks)
    intersections, unions = (
        torch.stack(some, dim=1) for some in zip(*(columns[prompt] for prompt in PROMPTS), strict=True)
    )
    return {"intersections": intersections, "unions": unions, **first_click}


def _overlaps(masks: Runs | Tensor, truth: Any, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Pixels of intersection and union, int64 [m], of each annotated mask and one of its K candidates."""
    # `chosen`: int64 [m], index of the candidate; None: the candidate with the highest IoU.
    if isinstance(masks, Runs):
        grouped = np.arange(len(masks)).reshape(len(truth), -1)
        common = [intersection(masks.select(some), truth.select([i]))[:, 0] for i, some in enumerate(grouped)]
        both = torch.from_numpy(np.stack(common))
        areas, true_areas = torch.from_numpy(area(masks)), torch.from_numpy(area(truth))
    else:
        candidates = masks.view(len(truth), -1, *truth.shape[1:])
        both, areas, true_areas = map(_pixels, (candidates & truth[:, None], masks, truth))
    either = areas.view(both.shape) + true_areas[:, None] - both
    if chosen is None:
        chosen = (both.double() / either.clamp(min=1)).argmax(dim=1)
    return pick(both, chosen), pick(either, chosen)


def _pixels(masks: Tensor) -> Tensor:
    return masks.flatten(-2).sum(dim=-1)


def prediction_lines(
    batch: Any,
    rows: Tensor,
    points: Tensor,
    iou: Tensor,
    predicted_iou: Tensor,
    runs_of: Callable[[Ints, Size, Size], Runs],
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


class Score:
    """Sums over masks by size and prompt; `by_size` is meaningful only for IoU at source resolution.

    An IoU counts as floor(UNIT * intersection / union), so that sums are exact; the rounding is 2**-32.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        prompts: tuple[str, ...] = QUICK_PROMPTS,
        *,
        by_size: bool = True,
    ) -> None:
        self.prompts, self.by_size = prompts, by_size
        # int64 [3, P + 1]: a row for each of SIZES; the IoU of each prompt, then the number of masks
        self.sums = torch.zeros((len(SIZES), len(prompts) + 1), dtype=torch.int64, device=device)

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

    def result(self) -> dict[str, float]:
        """Mean IoU, 0 to 1, and counts: "miou_1_click", "miou_1_click_small", ..., "masks", "masks_small".

        A size without masks has the count 0 and no mean.
        """
        rows = {"": self.sums.sum(dim=0)}
        if self.by_size:
            rows |= {f"_{size}": row for size, row in zip(SIZES, self.sums, strict=True)}
        found: dict[str, float] = {}
        for suffix, row in rows.items():
            *ious, masks = row.tolist()
            found[f"masks{suffix}"] = masks
            for prompt, total in zip(self.prompts, ious, strict=True) if masks else ():
                found[f"miou_{prompt}{suffix}"] = total / (UNIT * masks)
        return found
