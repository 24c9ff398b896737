"""One training sample: an image drawn into its slot, and at most K of its masks with what belongs to them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sa1b.hashing import Purpose, random_word, random_words
from sa1b.masks import geometry, points
from sa1b.masks.grid import framed_size
from sa1b.masks.runs import Runs
from sa1b.shards.annotation import Annotations
from sa1b.stream import picture
from sa1b.stream.choice import STRATEGIES, Strategy, choose


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a stored image becomes a sample.

    Attributes:
        image_size: pixels of the padded square S x S.
        masks: at most so many masks an image.
        strategy: which ones, see sa1b.stream.choice.
        flip: probability of mirroring left and right.
    """

    image_size: int = 1024
    masks: int = 64
    strategy: Strategy = "uniform"
    flip: float = 0.0

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
    """The chosen masks of one image, m of them; coordinates in the padded square S x S.

    Attributes:
        image_id: of the image; height, width: pixels of its source.
        runs: of the chosen masks at source resolution, mirrored if the image is.
        boxes: float32 [m, 4], x0, y0, x1, y1: the outer edges of the mask's pixels.
        points: float32 [m, 2], x, y: the centre of a uniform foreground pixel.
        areas: int64 [m], source pixels.
        predicted_iou, stability_score: float32 [m].
        mask_ids: int64 [m].
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


def draw_image(
    jpeg: bytes | memoryview,
    annotations: Annotations,
    recipe: Recipe,
    slot: npt.NDArray[np.uint8],
    seed: int,
    epoch: int,
) -> bool:
    """Draw the image into `slot`, uint8 [S, S, 3]; whether it is mirrored, which (seed, id, epoch) decide.

    Raises:
        BadSample: the JPEG does not decode.
    """
    flip = random_word(seed, Purpose.FLIP, annotations.image_id, epoch) < recipe.flip * 2**64
    picture.draw(jpeg, annotations.height, annotations.width, slot, flip=flip)
    return flip


def pick_masks(
    annotations: Annotations,
    recipe: Recipe,
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
        annotations, filled if usable is None else filled & usable, recipe.masks, recipe.strategy, seed, epoch
    )
    runs = annotations.runs(chosen)
    if flip:
        runs = geometry.flip_horizontal(runs)
    rows, columns = framed_size(height, width, recipe.image_size)
    scale = np.array([columns / width, rows / height])
    corners = geometry.bbox(runs).astype(np.float64)
    corners[:, 2:] += corners[:, :2]
    inside = points.uniform_point(runs, random_words(seed, Purpose.POINT, image_id, epoch, chosen))
    return SampleMasks(
        image_id=image_id,
        height=height,
        width=width,
        runs=runs,
        boxes=(corners * np.tile(scale, 2)).astype(np.float32),
        points=((inside + 0.5) * scale).astype(np.float32),
        areas=geometry.area(runs),
        predicted_iou=annotations.predicted_iou[chosen].astype(np.float32),
        stability_score=annotations.stability_score[chosen].astype(np.float32),
        mask_ids=annotations.mask_id[chosen],
    )
