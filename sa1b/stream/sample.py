"""One training sample: the frame of its image in the padded square, and up to K of its masks.

The choice of masks is a function of (seed, image id, epoch, mask index): it is the same on any rank, worker
or thread. The strategies:

    uniform     each usable mask is equally likely
    area        sort the masks by area, cut them into K classes of equal count, take one mask of each class
    quality     the probability is proportional to predicted_iou * stability_score
    coverage    a permutation for each cycle of ceil(M / K) epochs, cut into visits: each cycle takes every
                mask, and no visit takes a mask twice. This does not hold with a transform that crops, because
                the usable masks then change from visit to visit

Masks without foreground, and masks without a pixel in a transform's window, are never chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from sa1b.arguments import BadValue, number, whole_number
from sa1b.hashing import Purpose, as_uniforms, below, permutation, random_word, random_words
from sa1b.masks import geometry
from sa1b.masks.geometry import boxes_and_points
from sa1b.masks.runs import Runs
from sa1b.shards.annotation import Annotations
from sa1b.stream.crops import MultiCrop
from sa1b.stream.transform import Frame, Transform, apply, apply_pixels, name_of

Resize = Literal["pad", "crop", "stretch"]
RESIZES = get_args(Resize)
_RESAMPLING = 2  # version; 1, not recorded, displaced images by up to half a pixel against their masks
Strategy = Literal["uniform", "area", "quality", "coverage"]
STRATEGIES = get_args(Strategy)

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """Options for turning a stored image into a sample.

    Attributes:
        image_size: pixels of the padded square S x S.
        masks: largest number of masks per image; 0: images only, and masks are not decoded.
        strategy: how masks are chosen, see sa1b.stream.sample.
        flip: probability of mirroring left and right.
        resize: "pad" scales the longer side to S and pads the shorter one; "stretch" scales both sides to S;
            "crop" cuts the square of the shorter side from the middle and scales it to S.
        transform: one or several transforms of the image's frame; see sa1b.stream.transform.
        min_pixels: masks with fewer pixels in the dense mask at `min_pixels_size` are not chosen. If it is 0,
            a chosen mask may have no pixel in the dense mask: it is a target without foreground, with a point
            and scores. `batch.masks.empty(size)` finds such masks.
        min_pixels_size: size of the square, in pixels, for `min_pixels`; None: image_size.
        decoder: name of the JPEG decoder, see sa1b.stream.decode. Decoders may differ in the last bits of a
            pixel. States record the version of the resampling too, such as "cpu-2".
    """

    image_size: int = 1024
    masks: int = 64
    strategy: Strategy = "uniform"
    flip: float = 0.0
    resize: Resize = "pad"
    transform: Transform | Sequence[Transform] | None = None
    min_pixels: int = 0
    min_pixels_size: int | None = None
    decoder: str = "cpu"

    def __post_init__(self) -> None:
        for name, choices in (("strategy", STRATEGIES), ("resize", RESIZES)):
            if (value := getattr(self, name)) not in choices:
                raise BadValue(f"{name}={value!r} must be one of {', '.join(choices)}")
        for name, least in (("image_size", 1), ("masks", 0), ("min_pixels", 0), ("min_pixels_size", 1)):
            if (value := getattr(self, name)) is not None or name != "min_pixels_size":
                object.__setattr__(self, name, whole_number(name, value, least))
        object.__setattr__(self, "flip", number("flip", self.flip, 0, 1))
        for transform in self.transforms:
            if isinstance(transform, type) or not callable(transform):
                raise BadValue(f"transform={transform!r} must be a callable object, such as RandomCrop()")
            if isinstance(transform, MultiCrop) and (self.masks, self.decoder) != (0, "cpu"):
                raise BadValue(f"transform={transform!r} must be used with masks=0 and decoder='cpu'")

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """All transforms, in the order in which they run."""
        if isinstance(self.transform, Sequence) and not isinstance(self.transform, str):
            return tuple(self.transform)
        return () if self.transform is None else (self.transform,)

    def record(self) -> dict[str, str | int | float | None]:
        """The options by name as JSON values, for the state of a stream: equal where samples are equal."""
        named = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "transform"}
        return named | {
            "min_pixels_size": (self.min_pixels_size or self.image_size) if self.min_pixels else None,
            "decoder": f"{self.decoder}-{_RESAMPLING}",
            "transform": ", ".join(map(name_of, self.transforms)) or None,
        }


@dataclass(frozen=True, slots=True, eq=False)
class SampleMasks:
    """The chosen masks of one image, m of them; coordinates in the padded square, see sa1b.masks.grid."""

    image_id: int
    frame: Frame
    runs: Runs  # in the frame's window, at source resolution, mirrored if the image is
    boxes: npt.NDArray[np.float32]  # [m, 4], x0, y0, x1, y1: centres of the first and last column and row
    points: npt.NDArray[np.float32]  # [m, 2], x, y: the centre of a uniform foreground pixel
    areas: npt.NDArray[np.int64]  # [m], source pixels in the window
    predicted_iou: npt.NDArray[np.float32]
    stability_score: npt.NDArray[np.float32]
    mask_ids: npt.NDArray[np.int64]  # [m], -1 where the annotation has none
    mask_index: npt.NDArray[np.int64]  # [m], index in the record, ascending and unique in an image


def frame_of(annotations: Annotations, options: SampleOptions, seed: int, epoch: int) -> Frame:
    """The frame of an image, a function of (seed, image id, epoch); TransformError if a transform failed."""
    image_id, stretch = annotations.image_id, options.resize == "stretch"
    frame = Frame.whole_image(annotations.height, annotations.width, options.image_size, stretch=stretch)
    if random_word(seed, Purpose.FLIP, image_id, epoch) < options.flip * 2**64:
        frame = replace(frame, flip=True)
    frame = apply(options.transforms, frame, annotations, seed, epoch)
    if frame.pixels is not None:
        frame = replace(frame, pixels=partial(apply_pixels, frame.pixels, image_id))
    return frame.center_square() if options.resize == "crop" else frame


def pick_masks(
    annotations: Annotations,
    options: SampleOptions,
    seed: int,
    epoch: int,
    *,
    usable: npt.NDArray[np.bool_] | None = None,
) -> SampleMasks:
    """Choose masks and a point in each: a function of (seed, image id, epoch) in the frame of the image.
    `usable` is bool [N], the masks that may be chosen; None means all. TransformError if a transform failed.
    """
    image_id = annotations.image_id
    frame = frame_of(annotations, options, seed, epoch)
    if options.masks == 0:
        return no_masks(image_id, frame)
    filled = annotations.runs_count > 1  # a mask of one run has no foreground
    if usable is not None:
        filled &= usable
    if frame.is_whole and options.min_pixels == 0:
        # The record's columns are enough to choose; only the chosen masks are decoded.
        chosen = choose(annotations, filled, options.masks, options.strategy, seed, epoch)
        runs = _in_frame(annotations.runs(chosen), frame)
    else:
        candidates = np.flatnonzero(filled)
        all_runs = _in_frame(annotations.runs(candidates), frame)
        areas = annotations.area.copy()
        areas[candidates] = geometry.area(all_runs)
        filled[candidates] = areas[candidates] > 0
        if options.min_pixels:
            size = options.min_pixels_size or options.image_size
            dense = geometry.frame(all_runs, options.image_size, size, frame.taken)
            filled[candidates] &= geometry.area(dense) >= options.min_pixels
        seen = replace(annotations, area=areas)
        chosen = choose(seen, filled, options.masks, options.strategy, seed, epoch)
        runs = all_runs.select(np.searchsorted(candidates, chosen))
    rows, columns = frame.taken
    words = random_words(seed, Purpose.POINT, image_id, epoch, chosen)
    boxes, inside, areas = boxes_and_points(runs, words, (columns / runs.width, rows / runs.height))
    return SampleMasks(
        image_id=image_id,
        frame=frame,
        runs=runs,
        boxes=boxes,
        points=inside,
        areas=areas,
        predicted_iou=annotations.predicted_iou[chosen].astype(np.float32),
        stability_score=annotations.stability_score[chosen].astype(np.float32),
        mask_ids=annotations.mask_id[chosen],
        mask_index=chosen,
    )


def _in_frame(runs: Runs, frame: Frame) -> Runs:
    """The masks of the source image cropped to the frame's window, mirrored if the frame is."""
    if not frame.is_whole:
        runs = geometry.crop(runs, *frame.window)
    return geometry.flip_horizontal(runs) if frame.flip else runs


def no_masks(image_id: int, frame: Frame) -> SampleMasks:
    _, _, width, height = frame.window
    runs = Runs(np.zeros(0, np.uint32), np.zeros(1, np.int64), height, width)
    rows, scores, numbers = np.zeros((0, 4), np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64)
    columns = (rows, rows[:, :2], numbers, scores, scores, numbers, numbers)
    return SampleMasks(image_id, frame, runs, *columns)


def choose(
    annotations: Annotations,
    usable: npt.NDArray[np.bool_],
    limit: int,
    strategy: Strategy,
    seed: int,
    epoch: int,
) -> Indices:
    """Indices of the chosen masks, int64, ascending; all usable masks if there are at most `limit`."""
    candidates, image_id = np.flatnonzero(usable), annotations.image_id
    count = len(candidates)
    if count <= limit:
        return candidates
    picked: Indices
    if strategy == "coverage":
        cycle, visit = divmod(epoch, -(-count // limit))
        order = permutation(count, seed, Purpose.COVERAGE, image_id, cycle)
        picked = order[(visit * limit + np.arange(limit)) % count]
    elif strategy == "area":
        order = np.argsort(annotations.area[candidates], kind="stable")
        edges = np.arange(limit + 1) * count // limit
        words = random_words(seed, Purpose.MASKS, image_id, epoch, np.arange(limit))
        picked = order[edges[:-1] + below(words, np.diff(edges))]
    else:
        words = random_words(seed, Purpose.MASKS, image_id, epoch, candidates)
        arrival: npt.NDArray[Any] = words >> np.uint64(12)  # in the order of `as_uniforms`
        if strategy == "quality":
            scores = annotations.predicted_iou[candidates] * annotations.stability_score[candidates]
            # An exponential race: the first K arrivals are a sample without replacement by weight.
            arrival = -np.log(as_uniforms(words)) / np.maximum(np.nan_to_num(scores), 1e-6)
        picked = np.argsort(arrival, kind="stable")[:limit]
    return np.sort(candidates[picked])
