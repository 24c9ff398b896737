"""One training sample: what is chosen for an image: whether it is mirrored, and at most K of its masks.

Which masks a visit of an image takes is a function of (seed, image id, epoch, mask index): the same on any
rank, worker or thread.

    uniform     each usable mask is equally likely
    area        one mask of each of K equally large classes of area: small and large ones alike
    quality     in proportion to predicted_iou * stability_score
    coverage    a permutation for each cycle of ceil(M / K) epochs, cut into visits: after a cycle every mask
                was taken, and no visit takes one twice
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from sa1b.hashing import Purpose, below, permutation, random_word, random_words, uniforms
from sa1b.masks import geometry, points
from sa1b.masks.grid import framed_size
from sa1b.masks.runs import Runs
from sa1b.shards.annotation import Annotations

Strategy = Literal["uniform", "area", "quality", "coverage"]
STRATEGIES = get_args(Strategy)

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """How a stored image becomes a sample.

    Attributes:
        image_size: pixels of the padded square S x S.
        masks: at most so many masks an image.
        strategy: which ones, see sa1b.stream.sample.
        flip: probability of mirroring left and right.
        decoder: name of the JPEG decoder, see sa1b.stream.decode. Decoders may differ in the last bits of a
            pixel.
    """

    image_size: int = 1024
    masks: int = 64
    strategy: Strategy = "uniform"
    flip: float = 0.0
    decoder: str = "cpu"

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy is {self.strategy!r}; known are {', '.join(STRATEGIES)}")
        if self.image_size < 1 or self.masks < 0 or not 0 <= self.flip <= 1:
            raise ValueError(
                f"image_size={self.image_size} must be at least 1, masks={self.masks} at least 0, "
                f"flip={self.flip} a probability"
            )


@dataclass(frozen=True, slots=True, eq=False)
class SampleMasks:
    """The chosen masks of one image, m of them; coordinates in the padded square S x S, see sa1b.masks.grid.

    Attributes:
        image_id: of the image; height, width: pixels of its source.
        runs: of the chosen masks at source resolution, mirrored if the image is.
        boxes: float32 [m, 4], x0, y0, x1, y1: the centres of the mask's first and last column and row.
        points: float32 [m, 2], x, y: the centre of a uniform foreground pixel.
        areas: int64 [m], source pixels.
        predicted_iou, stability_score: float32 [m].
        mask_ids: int64 [m], -1 where the annotation has none; mask_index: int64 [m], the mask's index in its
            record, ascending and unique in an image.
    """

    image_id: int
    height: int
    width: int
    runs: Runs
    boxes: npt.NDArray[np.float32]
    points: npt.NDArray[np.float32]
    areas: npt.NDArray[np.int64]
    predicted_iou: npt.NDArray[np.float32]
    stability_score: npt.NDArray[np.float32]
    mask_ids: npt.NDArray[np.int64]
    mask_index: npt.NDArray[np.int64]


def is_flipped(image_id: int, options: SampleOptions, seed: int, epoch: int) -> bool:
    """Whether (seed, id, epoch) mirror an image."""
    return random_word(seed, Purpose.FLIP, image_id, epoch) < options.flip * 2**64


def pick_masks(
    annotations: Annotations,
    options: SampleOptions,
    seed: int,
    epoch: int,
    *,
    flip: bool,
    usable: npt.NDArray[np.bool_] | None = None,
) -> SampleMasks:
    """Choose masks and a point in each, as (seed, image id, epoch) decide; mirrored with the image.

    usable: bool [N], which masks may be chosen; None: all. Empty masks never are.
    """
    image_id, height, width = annotations.image_id, annotations.height, annotations.width
    filled = annotations.runs_count > 1  # a mask of one run is all background
    chosen = choose(
        annotations,
        filled if usable is None else filled & usable,
        options.masks,
        options.strategy,
        seed,
        epoch,
    )
    runs = annotations.runs(chosen)
    if flip:
        runs = geometry.flip_horizontal(runs)
    rows, columns = framed_size(height, width, options.image_size)
    scale = np.array([columns / width, rows / height])
    corners = geometry.bbox_sa1b(runs)
    corners[:, 2:] += corners[:, :2]
    inside = points.uniform_point(runs, random_words(seed, Purpose.POINT, image_id, epoch, chosen))
    return SampleMasks(
        image_id=image_id,
        height=height,
        width=width,
        runs=runs,
        boxes=((corners + 0.5) * np.tile(scale, 2)).astype(np.float32),
        points=((inside + 0.5) * scale).astype(np.float32),
        areas=geometry.area(runs),
        predicted_iou=annotations.predicted_iou[chosen].astype(np.float32),
        stability_score=annotations.stability_score[chosen].astype(np.float32),
        mask_ids=annotations.mask_id[chosen],
        mask_index=chosen,
    )


def no_masks(image_id: int, image_size: int) -> SampleMasks:
    """What a black image of the whole padded square has in place of a damaged sample: no masks."""
    empty = Runs(np.zeros(0, np.uint32), np.zeros(1, np.int64), image_size, image_size)
    scores, numbers = np.zeros(0, np.float32), np.zeros(0, np.int64)
    return SampleMasks(
        image_id=image_id,
        height=image_size,
        width=image_size,
        runs=empty,
        boxes=np.zeros((0, 4), np.float32),
        points=np.zeros((0, 2), np.float32),
        areas=numbers,
        predicted_iou=scores,
        stability_score=scores,
        mask_ids=numbers,
        mask_index=numbers,
    )


def choose(
    annotations: Annotations,
    usable: npt.NDArray[np.bool_],
    limit: int,
    strategy: Strategy,
    seed: int,
    epoch: int,
) -> Indices:
    """Indices of the chosen masks, int64, ascending; all usable ones if they are no more than `limit`."""
    candidates = np.flatnonzero(usable)
    image_id = annotations.image_id
    if len(candidates) <= limit:
        return candidates
    if strategy == "coverage":
        picked = _coverage(len(candidates), limit, seed, image_id, epoch)
    elif strategy == "area":
        picked = _one_of_each(annotations.area[candidates], limit, seed, image_id, epoch)
    else:
        chance = uniforms(seed, Purpose.MASKS, image_id, epoch, candidates)
        if strategy == "quality":
            scores = annotations.predicted_iou[candidates] * annotations.stability_score[candidates]
            # An exponential race: the first K arrivals are a draw without replacement by weight.
            chance = -np.log(chance) / np.maximum(np.nan_to_num(scores), 1e-6)
        picked = np.argsort(chance, kind="stable")[:limit]
    return np.sort(candidates[picked])


def _coverage(count: int, limit: int, seed: int, image_id: int, epoch: int) -> Indices:
    cycle, visit = divmod(epoch, -(-count // limit))
    order = permutation(count, seed, Purpose.COVERAGE, image_id, cycle)
    return order[(visit * limit + np.arange(limit)) % count]


def _one_of_each(area: npt.NDArray[np.int64], limit: int, seed: int, image_id: int, epoch: int) -> Indices:
    order = np.argsort(area, kind="stable")
    edges = np.arange(limit + 1) * len(order) // limit
    drawn = random_words(seed, Purpose.MASKS, image_id, epoch, np.arange(limit))
    picked: Indices = order[edges[:-1] + below(drawn, np.diff(edges))]
    return picked
