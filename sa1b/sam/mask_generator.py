"""`sa1b.generate_masks`: all masks of an image, without prompts of a user.

The algorithm and defaults are those of the published `SamAutomaticMaskGenerator` ("Segment Anything", 2023,
appendix B); given the same resized image, so are the masks (`tests/sam/test_mask_generator.py`). Points are
scaled by the ratio of the sizes, as there; `sa1b.predict` scales the centres of pixels instead.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sa1b.arguments import check_names, number, whole_number
from sa1b.masks import geometry
from sa1b.masks.grid import framed_size
from sa1b.masks.raster import areas, logit_axis, runs_of_logits
from sa1b.masks.runs import Runs, joined
from sa1b.sam.clicks import FOREGROUND, NOTHING
from sa1b.sam.kernel_proof import use_kernels
from sa1b.sam.mask_decoder import AMBIGUOUS
from sa1b.sam.model import Sam
from sa1b.sam.prediction import Pixels, check_model, decoded, embedded, rgb_pixels

_THREADS = 4  # for masks; on a GPU, one thread takes longer than the decoder
_EDGE = 20  # pixels; a mask whose box ends this close to the border of a crop continues outside of it


@dataclass(frozen=True, slots=True)
class GeneratorConfig:
    """Which points are prompts and which masks are kept; the defaults are the published ones.

    Attributes:
        points_per_side: Points of the grid along each side of the image, and of each crop.
        points_per_batch: Points that are decoded together. A larger number needs more memory; the masks are
            the same.
        min_predicted_iou: Keep masks whose IoU, as predicted by the model, is above this number.
        min_stability: Keep masks whose stability score is at least this number: the IoU of the masks at the
            logits +stability_offset and -stability_offset.
        stability_offset: Shift of the threshold for the stability score, in logits.
        max_box_iou: If the boxes of masks have a higher IoU, only the mask with the highest predicted IoU is
            kept.
        crop_layers: Also use crops of the image: layer 1 has 2 x 2, layer 2 has 4 x 4, and so on.
        crop_overlap: Overlap of the crops of layer 1, as a part of the shorter side of the image; those of
            further layers overlap by half as much as the layer before.
        crop_points_divisor: Each layer of crops has the points per side of the layer before, divided by this
            number.
        crop_max_box_iou: As max_box_iou, between masks of different crops: masks of smaller crops are kept.
    """

    points_per_side: int = 32
    points_per_batch: int = 64
    min_predicted_iou: float = 0.88
    min_stability: float = 0.95
    stability_offset: float = 1.0
    max_box_iou: float = 0.7
    crop_layers: int = 0
    crop_overlap: float = 512 / 1500
    crop_points_divisor: int = 1
    crop_max_box_iou: float = 0.7

    def __post_init__(self) -> None:
        whole_number("points_per_side", self.points_per_side, 1, 1024)
        whole_number("points_per_batch", self.points_per_batch, 1)
        number("min_predicted_iou", self.min_predicted_iou)
        number("min_stability", self.min_stability, most=1)
        number("stability_offset", self.stability_offset)
        number("max_box_iou", self.max_box_iou, most=1)
        whole_number("crop_layers", self.crop_layers, 0, 4)
        number("crop_overlap", self.crop_overlap, most=0.9)
        whole_number("crop_points_divisor", self.crop_points_divisor, 1)
        number("crop_max_box_iou", self.crop_max_box_iou, most=1)

    def crops(self, height: int, width: int) -> Iterator["Crop"]:
        """The image, then its crops, layer by layer."""
        yield Crop(0, 0, width, height, self.points_per_side)
        for layer in range(1, self.crop_layers + 1):
            count = 2**layer
            points = max(1, self.points_per_side // self.crop_points_divisor**layer)
            shared = int(self.crop_overlap * min(height, width) * 2 / count)
            sides = [-(-(shared * (count - 1) + side) // count) for side in (width, height)]
            for x in (sides[0] - shared) * np.arange(count):
                for y in (sides[1] - shared) * np.arange(count):
                    if x < width and y < height:  # an image of few pixels has fewer crops
                        ends = min(sides[0], width - int(x)), min(sides[1], height - int(y))
                        yield Crop(int(x), int(y), *ends, points)


class Crop(NamedTuple):
    """A part of an image, in its pixels, and the points along each side of the grid."""

    x: int
    y: int
    width: int
    height: int
    points_per_side: int


@dataclass(frozen=True, slots=True, eq=False)
class GeneratedMasks:
    """N masks of an image: those of smaller crops first, and those of a crop by descending predicted IoU.

    Attributes:
        runs: the masks, at the resolution of the image; each has a pixel.
        predicted_iou: float32 [N], the IoU with the true mask as predicted by the model.
        stability_score: float32 [N], 0 to 1, see `GeneratorConfig.min_stability`.
        points: float64 [N, 2], x and y of the prompt in pixels of the image, inside or outside of the mask.
        crop_boxes: int64 [N, 4], x, y, width and height of the crop in which the mask was found.
    """

    runs: Runs
    predicted_iou: npt.NDArray[np.float32]
    stability_score: npt.NDArray[np.float32]
    points: npt.NDArray[np.float64]
    crop_boxes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.runs)

    def select(self, indices: npt.NDArray[np.int64]) -> "GeneratedMasks":
        """The masks of these indices, in this order."""
        figures = (getattr(self, field.name)[indices] for field in fields(self)[1:])
        return GeneratedMasks(self.runs.select(indices), *figures)


def generate_masks(model: Sam, image: Any, **settings: Any) -> GeneratedMasks:
    """Find the masks of an image with a grid of points as prompts.

    Args:
        model: the result of `sa1b.load_model`, on any device.
        image: uint8 RGB [height, width, 3], or a PIL image of any mode; any size.
        settings: fields of `sa1b.sam.mask_generator.GeneratorConfig`.

    Raises:
        ValueError: an argument has a wrong shape, dtype or range; the message names it.
        TypeError: no setting has this name.
    """
    check_model(model)
    check_names("generate_masks", settings, [setting.name for setting in fields(GeneratorConfig)])
    return generate(model, rgb_pixels(image), GeneratorConfig(**settings))


@torch.no_grad()
def generate(model: Sam, pixels: Pixels, config: GeneratorConfig) -> GeneratedMasks:
    """`generate_masks` from pixels uint8 [height, width, 3]."""
    use_kernels(model)
    height, width = pixels.shape[:2]
    # The model computes the next points meanwhile: the kernels release the GIL.
    with ThreadPoolExecutor(_THREADS) as threads:
        crops = [_of_crop(model, pixels, crop, config, threads) for crop in config.crops(height, width)]
    every = _joined(crops, height, width)
    if len(crops) > 1:
        smaller_first = -(every.crop_boxes[:, 2] * every.crop_boxes[:, 3])
        boxes = geometry.bbox_sa1b(every.runs)
        every = every.select(geometry.suppress(boxes, smaller_first, config.crop_max_box_iou))
    return every


def _of_crop(
    model: Sam, pixels: Pixels, crop: Crop, config: GeneratorConfig, threads: ThreadPoolExecutor
) -> GeneratedMasks:
    x, y, width, height, points_per_side = crop
    image, size = (pixels.shape[0], pixels.shape[1]), model.config.image_size
    taken = framed_size(height, width, size)
    lengths = zip((height, width), taken, strict=True)
    rows, columns = (logit_axis(*of_axis, size, 4 * model.config.side) for of_axis in lengths)

    def masks(
        logits: npt.NDArray[np.float32], quality: npt.NDArray[np.float32], points: npt.NDArray[np.float64]
    ) -> GeneratedMasks:
        pixel_counts = areas(logits, rows, columns, config.stability_offset)
        stability = (pixel_counts[:, 1] / np.maximum(pixel_counts[:, 2], 1)).astype(np.float32)
        chosen = np.flatnonzero((stability >= config.min_stability) & (pixel_counts[:, 0] > 0))
        runs = runs_of_logits(logits, chosen, rows, columns, position=(x, y), image=image)
        boxes = geometry.bbox_sa1b(runs)
        # Whether boxes end at the border of the crop, where it is not the border of the image.
        sides = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
        of_crop = np.abs(sides - (x, y, x + width, y + height)) <= _EDGE
        of_image = np.abs(sides - (0, 0, image[1], image[0])) <= _EDGE
        inside = np.flatnonzero(~(of_crop & ~of_image).any(axis=1))
        chosen = chosen[inside]
        figures = quality[chosen], stability[chosen], points[chosen]
        return GeneratedMasks(runs.select(inside), *figures, np.tile(np.array(crop[:4]), (len(chosen), 1)))

    embedding = embedded(model, pixels[y : y + height, x : x + width])
    # The centres of equal parts, row by row, in pixels of the crop.
    parts = (np.arange(points_per_side) + 0.5) / points_per_side
    down, across = np.meshgrid(parts * height, parts * width, indexing="ij")
    points = np.stack([across.reshape(-1), down.reshape(-1)], axis=1)
    found: list[Future[GeneratedMasks]] = []
    for start in range(0, len(points), config.points_per_batch):
        prompts = points[start : start + config.points_per_batch]
        # The second point is the empty one of prompts without a box.
        at = np.stack([prompts * (taken[1] / width, taken[0] / height), np.zeros_like(prompts)], axis=1)
        labels = np.tile([FOREGROUND, NOTHING], (len(prompts), 1))
        logits, predicted = decoded(model, embedding, at, labels, AMBIGUOUS)
        kept = (predicted > config.min_predicted_iou).nonzero()
        chosen, quality = (values[kept[:, 0], kept[:, 1]].cpu().numpy() for values in (logits, predicted))
        kept_points = prompts[kept[:, 0].cpu().numpy()] + (x, y)
        found.append(threads.submit(masks, chosen, quality, kept_points))
        wait(found[: -2 * _THREADS])  # bounds the memory for logits
    every = _joined([future.result() for future in found], *image)
    boxes = geometry.bbox_sa1b(every.runs)
    return every.select(geometry.suppress(boxes, every.predicted_iou, config.max_box_iou))


def _joined(parts: list[GeneratedMasks], height: int, width: int) -> GeneratedMasks:
    runs, *figures = zip(
        *([getattr(part, field.name) for field in fields(part)] for part in parts), strict=True
    )
    return GeneratedMasks(joined(runs, height, width), *map(np.concatenate, figures))
