"""The frame of an image in the padded square, and transforms that change it.

    from sa1b.stream.transform import RandomCrop, ScaleJitter

    stream = sa1b.Stream("shards", global_batch=256, transform=[RandomCrop((0.5, 1)), ScaleJitter(0.5, 2)])

A `Frame` is a window of the source image, mirrored or not, and its size in the square. Image, masks, boxes
and points all follow it. Masks are cropped as runs. Their pixels equal those of pycocotools' decode, a numpy
slice and the indices of sa1b.masks.grid. Masks without a pixel in the window are never chosen.

A transform is a callable that takes a frame and a `Visit` and returns a changed frame. It runs before the
image is decoded; `Frame.pixels` runs after decoding. For spawned worker processes it must be picklable: a
function of a module, or an instance of a class such as those below.

    def largest_mask(frame: Frame, visit: Visit) -> Frame:
        x, y, width, height = visit.annotations.bbox[visit.annotations.area.argmax()].astype(int)
        return frame.crop(x, y, width + 1, height + 1)

    def contrast(frame: Frame, visit: Visit) -> Frame:
        gain = 0.8 + 0.4 * visit.uniforms(1)[0]
        return replace(frame, pixels=partial(cv2.convertScaleAbs, alpha=gain))
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from math import exp, log, sqrt
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.arguments import BadValue
from sa1b.errors import Sa1bError
from sa1b.hashing import Purpose, uniforms
from sa1b.masks.grid import framed_size
from sa1b.masks.runs import check_window
from sa1b.shards.annotation import Annotations

Pixels = Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]


class TransformError(Sa1bError):
    """A transform raised an error or returned something else; the message names it and the image."""


@dataclass(frozen=True, slots=True)
class Crop:
    """One of several crops of an image, and its place in the square."""

    window: tuple[int, int, int, int]  # x, y, width, height in pixels of the source image
    row: int  # the first one in the square
    column: int  # likewise
    size: int  # rows and columns in the square
    flip: bool  # mirrored left to right


@dataclass(frozen=True, slots=True)
class Frame:
    """The window of one image, and its size at the top left of the padded square S x S; the rest is 0.

    Attributes:
        height: pixels of the source image.
        width: pixels of the source image.
        image_size: pixels of the square, S.
        window: x, y, width, height of the visible part, in source pixels, before mirroring.
        side: pixels of the window's longer side in the square, 1 to S.
        stretch: whether the shorter side has `side` pixels too; otherwise it is scaled in proportion.
        flip: whether the window is mirrored left to right.
        pixels: called with the decoded image, uint8 [rows, columns, 3], RGB, mirrored if `flip`; returns an
            image of the same shape and type.
        crops: what the square has instead of the window, see sa1b.stream.crops.

    Raises:
        ValueError: the window exceeds the image, or the side does not fit into the square.
    """

    height: int
    width: int
    image_size: int
    window: tuple[int, int, int, int]
    side: int
    stretch: bool = False
    flip: bool = False
    pixels: Pixels | None = None
    crops: tuple[Crop, ...] = ()

    def __post_init__(self) -> None:
        check_window(*self.window, (self.height, self.width))
        if not 1 <= self.side <= self.image_size:
            raise BadValue(f"side={self.side} must be from 1 to the image size, {self.image_size}")

    @classmethod
    def whole_image(cls, height: int, width: int, image_size: int, *, stretch: bool = False) -> "Frame":
        """The whole image, scaled to fill the square as far as possible."""
        return cls(height, width, image_size, window=(0, 0, width, height), side=image_size, stretch=stretch)

    @property
    def is_whole(self) -> bool:
        """Whether the window is the whole image."""
        return self.window == (0, 0, self.width, self.height)

    @property
    def taken(self) -> tuple[int, int]:
        """Rows and columns of the square that the window fills; see sa1b.masks.grid."""
        _, _, width, height = self.window
        square = self.stretch or self.crops
        return (self.side, self.side) if square else framed_size(height, width, self.side)

    def crop(self, x: int, y: int, width: int, height: int) -> "Frame":
        """A frame with another window, in pixels of the source image."""
        return replace(self, window=(index(x), index(y), index(width), index(height)))

    def center_square(self) -> "Frame":
        """A frame with the largest square in the middle of the window."""
        x, y, width, height = self.window
        side = min(width, height)
        return self.crop(x + (width - side) // 2, y + (height - side) // 2, side, side)


@dataclass(frozen=True, slots=True)
class Visit:
    """Input of a transform: one image in one epoch.

    Attributes:
        image_id: id of the image.
        epoch: number of the epoch, from 0.
        seed: seed of the stream.
        number: index of the transform among those of the stream, from 0.
        annotations: all masks of the image with their columns; `annotations.runs()` returns their runs.
    """

    image_id: int
    epoch: int
    seed: int
    number: int
    annotations: Annotations

    def uniforms(self, count: int) -> npt.NDArray[np.float64]:
        """Uniform random values between 0 and 1, float64 [count].

        They depend only on the visit and the transform, not on the rank or the process.
        """
        key = self.image_id, self.epoch, self.number, np.arange(count)
        return uniforms(self.seed, Purpose.TRANSFORM, *key)


Transform = Callable[[Frame, Visit], Frame]


@dataclass(frozen=True, slots=True)
class RandomCrop:
    """A window of random size, shape and position; Szegedy et al., "Going deeper with convolutions", 2015.

    RandomCrop((1, 1), (1, 1)) is the square of the shorter side at a random position.

    Args:
        area: smallest and largest fraction of the image's area, uniform between them.
        aspect: smallest and largest width / height, uniform in the logarithm; None keeps the aspect ratio of
            the image. A window that would exceed the image is scaled down.
    """

    area: tuple[float, float] = (0.25, 1.0)
    aspect: tuple[float, float] | None = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        _check_range("area", *self.area)
        if self.aspect is not None:
            _check_range("aspect", *self.aspect)

    def __call__(self, frame: Frame, visit: Visit) -> Frame:
        return self.cropped(frame, *visit.uniforms(4).tolist())

    def cropped(self, frame: Frame, size: float, shape: float, right: float, down: float) -> Frame:
        """The frame with a window that four random values from 0 to 1 choose."""
        _, _, width, height = frame.window
        ratio = width / height
        if self.aspect is not None:
            ratio = exp(_between(log(self.aspect[0]), log(self.aspect[1]), shape))
        across = sqrt(_between(*self.area, size) * width * height * ratio)
        fit = min(1.0, width / across, height * ratio / across)
        return _cut(frame, across * fit, across * fit / ratio, right, down)


@dataclass(frozen=True, slots=True)
class ScaleJitter:
    """Large-scale jitter; Ghiasi et al., "Simple Copy-Paste", 2021.

    The image is resized so that its longer side has scale * S pixels. If the result is larger than the
    square, a window is cut out at a random position; if it is smaller, the square is padded.

    Args:
        low: smallest scale, more than 0.
        high: largest scale; the scale of a visit is uniform between the two.

    Raises:
        ValueError: low is not above 0, or above high.
    """

    low: float = 0.1
    high: float = 2.0

    def __post_init__(self) -> None:
        _check_range("low, high", self.low, self.high)

    def __call__(self, frame: Frame, visit: Visit) -> Frame:
        size, right, down = visit.uniforms(3).tolist()
        scale = _between(self.low, self.high, size)
        if scale <= 1:
            return replace(frame, side=max(1, round(scale * frame.side)))
        longest = max(frame.window[2:]) / scale
        return _cut(frame, longest, longest, right, down)


def apply(
    transforms: Sequence[Transform], frame: Frame, annotations: Annotations, seed: int, epoch: int
) -> Frame:
    """Apply all transforms to a frame; TransformError: one failed, or returned no frame of this image."""
    image_id, source = annotations.image_id, (frame.height, frame.width, frame.image_size)
    for number, transform in enumerate(transforms):
        frame = _called(transform, image_id, frame, Visit(image_id, epoch, seed, number, annotations))
        if not isinstance(frame, Frame):
            raise _failed(transform, image_id, f"it returned {type(frame).__name__}, no Frame")
        if (frame.height, frame.width, frame.image_size) != source:
            raise _failed(transform, image_id, "it returned a frame of another image")
    return frame


def apply_pixels(function: Pixels, image_id: int, image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Apply `Frame.pixels` to a decoded image; TransformError if it fails or shape or dtype are others."""
    changed: npt.NDArray[np.uint8] = _called(function, image_id, image)
    is_array = isinstance(changed, np.ndarray)
    if not is_array or changed.dtype != np.uint8 or changed.shape != image.shape:
        returned = f"{changed.dtype} {list(changed.shape)}" if is_array else type(changed)
        what = f"it returned {returned} for an image uint8 {list(image.shape)}"
        raise _failed(function, image_id, what)
    return changed


def _called(function: Callable[..., Any], image_id: int, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        raise _failed(function, image_id, f"{type(error).__name__}: {error}") from error


def name_of(function: object) -> str:
    """A transform for messages: the repr of a dataclass, else the qualified name."""
    if is_dataclass(function):
        return repr(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _failed(function: object, image_id: int, what: str) -> TransformError:
    return TransformError(f"transform {name_of(function)} failed for image {image_id}: {what}")


def _check_range(name: str, low: float, high: float) -> None:
    if not 0 < low <= high:
        raise BadValue(f"{name}={(low, high)} must be two ascending numbers above 0, such as (0.5, 1)")


def _between(low: float, high: float, part: float) -> float:
    return low + (high - low) * part


def _cut(frame: Frame, width: float, height: float, right: float, down: float) -> Frame:
    """A window of about this size inside the frame's window; `right` and `down`: its place, from 0 to 1."""
    x, y, most_wide, most_high = frame.window
    wide, high = min(most_wide, max(1, round(width))), min(most_high, max(1, round(height)))
    left, top = x + int(right * (most_wide - wide + 1)), y + int(down * (most_high - high + 1))
    return frame.crop(left, top, wide, high)
