"""`sa1b.predict`: masks of one image for points and boxes, at the resolution of the image.

    model = sa1b.load_model("run")                                  # or a .pth or .safetensors of a SAM
    prediction = sa1b.predict(model, image, points=[[[120, 80]], [[500, 310]]])
    prediction.masks[0]                                             # bool [height, width]

    embedded = sa1b.embed_image(model, image)                       # the image encoder runs once
    sa1b.predict(model, embedded, points=[[120, 80], [90, 60]], labels=[1, 0])            # one object

Coordinates are in pixels of the passed image, x right and y down. The centre of a pixel has integer
coordinates, so points and boxes are pixel indices. The image is resized so that its longer side is the
model's image_size, as the stream resizes it.
"""

from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn import functional

from sa1b.arguments import BadValue, check_arguments
from sa1b.masks.grid import framed_size
from sa1b.sam.clicks import BACKGROUND, BOTTOM_RIGHT, FOREGROUND, NOTHING, TOP_LEFT
from sa1b.sam.iteration import pick
from sa1b.sam.kernel_proof import use_kernels
from sa1b.sam.mask_decoder import AMBIGUOUS, MASKS, SINGLE
from sa1b.sam.model import Sam

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_AREA_FACTOR = 4 / 3  # at larger reductions, bilinear interpolation would skip pixels
_AT_ONCE = 32  # prompts that are decoded together
_PIXELS = 1 << 25  # largest number of pixels that are enlarged together: 128 MiB


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """The masks that a model predicts for N prompts; with all candidates, a second axis has the three.

    Attributes:
        masks: bool [N, height, width], at the resolution of the image that was passed.
        predicted_iou: float32 [N], the IoU with the intended mask as predicted by the model.
        logits: float32 [N, 4 * side, 4 * side], of the padded square, side = image_size / patch_size. Masks
            are the pixels where the enlarged logits are above 0.
    """

    masks: npt.NDArray[np.bool_]
    predicted_iou: npt.NDArray[np.float32]
    logits: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.masks)


@dataclass(frozen=True, slots=True, eq=False)
class ImageEmbedding:
    """What `Sam.embed` returns for an image, on the model's device, for several calls of `predict`."""

    features: Tensor = field(repr=False)
    height: int  # of the image that was passed, pixels
    width: int


@check_arguments
@torch.no_grad()
def embed_image(model: Sam, image: Any) -> ImageEmbedding:
    """Run the image encoder; arguments and errors as for `predict`."""
    check_model(model)
    pixels = rgb_pixels(image)
    return ImageEmbedding(embedded(model, pixels), *pixels.shape[:2])


@check_arguments
@torch.no_grad()
def predict(
    model: Sam,
    image: Any,
    *,
    points: ArrayLike | None = None,
    labels: ArrayLike | None = None,
    boxes: ArrayLike | None = None,
    multimask: bool | None = None,
    all_candidates: bool = False,
) -> Prediction:
    """Predict the masks of an image for one or several prompts.

    A prompt is a point, several points, a box, or a box with points. For a single point or a single box, the
    model predicts three candidates, and the one with the highest predicted IoU is returned. For other prompts
    it predicts a single mask.

    Args:
        model: the result of `sa1b.load_model`, on any device.
        image: uint8 RGB [height, width, 3], or a PIL image of any mode; any size. Or the result of
            `embed_image`.
        points: [P, 2], the points (x, y) of one prompt, as in SAM's own predictor, or [N, P, 2], P points for
            each of N prompts; pixels of the image, within it.
        labels: [P] or [N, P], 1 for foreground, 0 for background, -1 for a placeholder, which pads prompts
            with fewer points and has no effect. By default all are 1.
        boxes: [4], the box of one prompt, or [N, 4]: x0, y0, x1, y1, the first and the last pixel of the
            object; pixels of the image, within it: x1 and y1 may be its width and height.
        multimask: True: the best of three candidates for every prompt; False: the single mask; None: as
            described above.
        all_candidates: return the three candidates of every prompt instead: masks [N, 3, height, width],
            predicted_iou [N, 3].

    Raises:
        ValueError: an argument has a wrong shape, dtype or range; the message names it.
    """
    check_model(model)
    use_kernels(model)
    if all_candidates and multimask is False:
        raise BadValue("multimask=False: has a single mask; drop it, or all_candidates")
    pixels = None if isinstance(image, ImageEmbedding) else rgb_pixels(image)
    height, width = (image.height, image.width) if pixels is None else pixels.shape[:2]
    prompts, tags = _prompts(points, labels, boxes, height, width)
    kinds = (tags != NOTHING).sum(axis=1)  # prompts with equally many points and corners are decoded together
    if boxes is None and not kinds.all():
        raise BadValue(
            f"prompt {int(kinds.argmin())}: has no box, and all of its points are placeholders (label -1); "
            "pass a box or a point"
        )
    size, side = model.config.image_size, 4 * model.config.side
    rows, columns = framed_size(height, width, size)
    features = image.features if pixels is None else embedded(model, pixels)
    prompts = (prompts + 0.5) * (columns / width, rows / height) - 0.5
    shape = (len(tags), MASKS - 1) if all_candidates else (len(tags),)
    prediction = Prediction(
        np.empty((*shape, height, width), np.bool_),
        np.empty(shape, np.float32),
        np.empty((*shape, side, side), np.float32),
    )
    for count in np.unique(kinds).tolist():
        alike = np.flatnonzero(kinds == count)
        several = count == (1 if boxes is None else 2) if multimask is None else multimask
        candidates = AMBIGUOUS if several or all_candidates else SINGLE
        # Prompts without a box get one more point of label -1, as in the published code.
        used = slice(count + 1 if boxes is None else count)
        for start in range(0, len(alike), _AT_ONCE):
            group = alike[start : start + _AT_ONCE]
            logits, predicted = decoded(model, features, prompts[group, used], tags[group, used], candidates)
            if not all_candidates:
                best = predicted.argmax(dim=1)
                logits, predicted = pick(logits, best), pick(predicted, best)
            masks = at_source(logits.flatten(0, -3), (height, width), (rows, columns), size)
            prediction.masks[group] = masks.reshape(*logits.shape[:-2], height, width).cpu().numpy()
            prediction.logits[group] = logits.cpu().numpy()
            prediction.predicted_iou[group] = predicted.cpu().numpy()
    return prediction


def decoded(
    model: Sam, embedding: Tensor, points: Floats, labels: Ints, candidates: slice, low: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logits [N, K, R, R] and predicted IoU [N, K] of K candidates for N prompts of one image, float32.

    Points [N, P, 2] are in pixels of the padded square; `low`: logits of an earlier answer.
    """
    count, device = len(points), embedding.device
    logits, predicted = model.decode(
        embedding,
        torch.zeros(count, dtype=torch.int64, device=device),
        torch.from_numpy(points.astype(np.float32)).to(device),
        torch.from_numpy(labels).to(device),
        low,
        counts=[count],
        candidates=candidates,
    )
    return logits.float(), predicted.float()


def at_source(logits: Tensor, source: tuple[int, int], taken: tuple[int, int], image_size: int) -> Tensor:
    """Masks at the resolution of their image: bool [N, height, width], from logits float [N, R, R].

    As in the published model, logits are enlarged to the padded square of image_size pixels, cropped to the
    image and resized to its source size, both times with bilinear interpolation. A mask is the pixels where
    the result is above 0. `taken`: rows and columns of the square that the image fills.
    """
    masks = torch.empty((len(logits), *source), dtype=torch.bool, device=logits.device)
    many = max(1, _PIXELS // max(source[0] * source[1], image_size**2))
    for start in range(0, len(logits), many):
        part = logits[start : start + many, None]
        large = functional.interpolate(part, (image_size, image_size), mode="bilinear", align_corners=False)
        cut = large[..., : taken[0], : taken[1]]
        masks[start : start + many] = (
            functional.interpolate(cut, source, mode="bilinear", align_corners=False)[:, 0] > 0
        )
    return masks


def check_model(model: object) -> None:
    """Refuse what is not the result of `sa1b.load_model`, such as a path, with a ValueError."""
    if not hasattr(model, "pixel_mean"):  # not isinstance, because a compiled model has another class
        path = repr(str(model)) if isinstance(model, str | PathLike) else "path"
        kind = "None" if model is None else f"a {type(model).__name__}"
        raise BadValue(f"model: {kind} is not a SAM; pass sa1b.load_model({path})")


def rgb_pixels(image: Any) -> Pixels:
    """The RGB pixels of a PIL image or of an array uint8 [height, width, 3]; else ValueError."""
    if isinstance(image, str | PathLike):
        kind = type(image).__name__
        raise BadValue(f"image: a {kind} is not an array of pixels; open it with PIL.Image.open")
    # A PIL image has `convert`; PIL need not be imported for this test.
    pixels = np.asarray(image.convert("RGB") if hasattr(image, "convert") else image)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        actual = f"{pixels.dtype} {list(pixels.shape)}" if pixels.ndim else f"{image!r:.60}"
        raise BadValue(f"image: must be uint8 RGB [height, width, 3] or a PIL image, got {actual}")
    return pixels


def framed_image(pixels: Pixels, rows: int, columns: int, size: int) -> Pixels:
    """An image, uint8 [height, width, 3], in the padded square of `size` pixels: uint8 [size, size, 3]."""
    square = np.zeros((size, size, 3), np.uint8)
    small = pixels.shape[0] > _AREA_FACTOR * rows or pixels.shape[1] > _AREA_FACTOR * columns
    how = cv2.INTER_AREA if small else cv2.INTER_LINEAR
    square[:rows, :columns] = cv2.resize(np.ascontiguousarray(pixels), (columns, rows), interpolation=how)
    return square


def framed(pixels: Pixels, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """An image as `Sam.embed` takes it: uint8 [1, 3, size, size], and its rows and columns, int64 [1, 2]."""
    taken = framed_size(pixels.shape[0], pixels.shape[1], size)
    square = torch.from_numpy(framed_image(pixels, *taken, size)).to(device)
    return square[None].permute(0, 3, 1, 2), torch.tensor([taken])


def embedded(model: Sam, pixels: Pixels) -> Tensor:
    """The result of `Sam.embed` for an image, uint8 [height, width, 3]."""
    images, sizes = framed(pixels, model.config.image_size, model.pixel_mean.device)
    return model.embed(images, sizes=sizes)


def _prompts(
    points: ArrayLike | None, labels: ArrayLike | None, boxes: ArrayLike | None, height: int, width: int
) -> tuple[Floats, Ints]:
    """Points and box corners of N prompts, [N, P, 2], and their labels as `Sam.decode` takes them, [N, P]."""
    # Points with an effect come first; the last point is always empty.
    if points is None and boxes is None:
        reason = "" if labels is None else ", only labels"
        raise BadValue(f"predict(...): has no prompts{reason}; pass points or boxes")
    if labels is not None and points is None:
        raise BadValue("labels: belong to points, but no points were passed; pass points")
    where, tags = [], []
    outside = f"outside of the image of {width} x {height} pixels (width x height)"
    if points is not None:
        at = np.asarray(points, np.float64)
        if at.ndim not in (2, 3) or at.shape[-1] != 2 or 0 in at.shape[:-1]:
            raise BadValue(
                "points: must be [P, 2], the points (x, y) of one prompt, or [N, P, 2], those of N prompts, "
                f"in pixels; got {list(at.shape)}"
            )
        of_points = np.full(at.shape[:-1], FOREGROUND) if labels is None else np.asarray(labels, np.float64)
        if of_points.shape != at.shape[:-1]:
            expected = f"{list(at.shape[:-1])} for points {list(at.shape)}"
            raise BadValue(f"labels: must be {expected}, got {list(of_points.shape)}")
        if not np.isin(of_points, (FOREGROUND, BACKGROUND, NOTHING)).all():
            raise BadValue(
                "labels: must be 1 (foreground), 0 (background) or -1 (a point that does not count)"
            )
        at, of_points = at.reshape(-1, *at.shape[-2:]), of_points.reshape(-1, at.shape[-2])
        inside = ((at >= -0.5) & (at <= (width - 0.5, height - 0.5))).all(axis=-1)  # NaN is outside
        _refuse(~inside & (of_points != NOTHING), "point", at, outside, "points as (x, y), in pixels")
        where.append(at)
        tags.append(of_points.astype(np.int64))
    if boxes is not None:
        corners = np.asarray(boxes, np.float64)
        if corners.ndim not in (1, 2) or corners.shape[-1] != 4 or not len(corners):
            raise BadValue(
                f"boxes: must be [4] or [N, 4], x0, y0, x1, y1 in pixels, got {list(corners.shape)}"
            )
        corners = corners.reshape(-1, 4)
        if max(height, width) > 2 and corners.min() >= 0 and 0 < corners.max() <= 1:
            raise BadValue(
                f"boxes: are in pixels of the image, which has {width} x {height} (width x height); these "
                "are not above 1; multiply x by the width and y by the height"
            )
        form = "boxes as x0, y0, x1, y1, in pixels"
        crossed = (corners[:, :2] > corners[:, 2:]).any(axis=1)
        _refuse(crossed, "box", corners, "ends before it begins", form)
        inside = ((corners >= -0.5) & (corners <= (width, height, width, height))).all(axis=1)
        _refuse(~inside, "box", corners, outside, form)
        if where and len(where[0]) != len(corners):
            raise BadValue(
                f"boxes: {len(corners)} boxes for the {len(where[0])} prompts of points; "
                "pass a box for each prompt, and points as [N, P, 2]"
            )
        where.append(corners.reshape(-1, 2, 2))
        tags.append(np.tile([TOP_LEFT, BOTTOM_RIGHT], (len(corners), 1)))
    where.append(np.zeros((len(where[0]), 1, 2)))
    tags.append(np.full((len(where[0]), 1), NOTHING))
    at, kinds = np.concatenate(where, axis=1), np.concatenate(tags, axis=1)
    order = np.argsort(kinds == NOTHING, axis=1, kind="stable")  # sorts the empty points last
    return np.take_along_axis(at, order[..., None], axis=1), np.take_along_axis(kinds, order, axis=1)


def _refuse(wrong: ArrayLike, kind: str, values: Floats, why: str, form: str) -> None:
    """Name the first point or box that is wrong, if there is one."""
    for first in np.argwhere(wrong)[:1].tolist():
        numbers = ", ".join(f"{value:g}" for value in values[tuple(first)].tolist())
        raise BadValue(f"{kind} ({numbers}) of prompt {first[0]}: {why}; pass {form} of the image")
