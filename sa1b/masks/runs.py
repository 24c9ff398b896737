"""All masks of an image as two arrays: run lengths and offsets."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.arguments import BadValue
from sa1b.errors import Sa1bError

MAX_PIXELS = 2**32 - 1  # a run must fit uint32


class MaskError(Sa1bError, ValueError):
    """A mask that cannot be decoded.

    Attributes:
        mask: index of the mask in the list.
        reason: short snake_case word, one of the reasons that sa1b.masks.coco documents.
    """

    def __init__(self, mask: int, reason: str, message: str) -> None:
        super().__init__(f"mask {mask}: {message}")
        self.mask = mask
        self.reason = reason

    def __reduce__(self) -> tuple[type["MaskError"], tuple[int, str, str]]:
        message = str(self.args[0]).removeprefix(f"mask {self.mask}: ")
        return type(self), (self.mask, self.reason, message)


class SizeError(Sa1bError, ValueError):
    """An invalid image size: height or width is not an integer >= 1, or their product exceeds MAX_PIXELS.

    Attributes:
        reason: always "bad_size".
    """

    reason = "bad_size"


def check_size(height: object, width: object) -> tuple[int, int]:
    """Height and width in pixels as plain ints, or SizeError."""
    sizes = list[int]()
    for name, value in (("height", height), ("width", width)):
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
            raise SizeError(f"{name} must be an integer, got {type(value).__name__}")
        if value < 1:
            raise SizeError(f"{name} must be at least 1, got {value}")
        sizes.append(int(value))
    if sizes[0] * sizes[1] > MAX_PIXELS:
        raise SizeError(f"{height} x {width} pixels are more than {MAX_PIXELS}")
    return sizes[0], sizes[1]


def check_window(x: int, y: int, width: int, height: int, image: tuple[int, int]) -> None:
    """ValueError for a window that is not inside an image, height and width; all in pixels."""
    if min(x, y) < 0 or min(width, height) < 1 or x + width > image[1] or y + height > image[0]:
        raise BadValue(
            f"window x {x}, y {y}, {width} wide, {height} high must be inside the image of "
            f"{image[0]} x {image[1]} pixels (height x width)"
        )


def chosen_indices(indices: npt.ArrayLike, count: int) -> npt.NDArray[np.int64]:
    """Indices of `count` items as int64 [K], each 0 <= index < count; IndexError for values that are invalid.

    They are integers [K], -count <= index < count, with repeats; or bool [count], the items to keep.
    """
    chosen = np.asarray(indices).reshape(-1)
    if chosen.dtype == np.bool_:
        if len(chosen) != count:
            raise IndexError(f"bool indices must be [{count}], one for each, got [{len(chosen)}]")
        return np.flatnonzero(chosen)
    if len(chosen) and not np.issubdtype(chosen.dtype, np.integer):
        raise IndexError(f"indices must be integers or bool, got {chosen.dtype}")
    if len(chosen) and not -count <= int(chosen.min()) <= int(chosen.max()) < count:
        raise IndexError(f"indices must be from {-count} to {count - 1}: {chosen.min()} to {chosen.max()}")
    rows = chosen.astype(np.int64)
    rows[rows < 0] += count
    return rows


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """N masks of one image as run lengths.

    Runs go down the columns of the image (column-major), background first. The runs of one mask add up to
    height * width exactly. Mask i is runs[offsets[i]:offsets[i + 1]]. Runs of length zero are allowed
    anywhere. The class does not check its arrays: call `check` on arrays from other code.

    Attributes:
        runs: uint32 [R], pixels.
        offsets: int64 [N + 1], ascending from 0 to R.
        height: height in pixels of the image that the masks belong to.
        width: width in pixels of the image that the masks belong to.
    """

    runs: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.int64]
    height: int
    width: int

    @classmethod
    def from_pixels(cls, pixels: npt.NDArray[np.bool_]) -> "Runs":
        """The runs of dense masks; the inverse of `sa1b.masks.rasterize` at the size of the image.

        Args:
            pixels: bool [N, height, width], True for foreground.

        Raises:
            ValueError: `pixels` does not have three dimensions, or its height or width is zero.
        """
        if pixels.ndim != 3 or 0 in pixels.shape[1:]:
            raise BadValue(f"pixels must be [N, height, width], got {list(pixels.shape)}")
        count, height, width = pixels.shape
        columns = pixels.transpose(0, 2, 1).reshape(count, height * width)
        # A run starts where a pixel differs from the previous one; background precedes the first pixel.
        before = np.concatenate((np.zeros((count, 1), bool), columns[:, :-1]), axis=1)
        masks, starts = np.nonzero(columns != before)
        number = np.bincount(masks, minlength=count) + 1  # the leading background run, possibly of length 0
        offsets = np.concatenate(([0], np.cumsum(number)))
        bounds = np.zeros(offsets[-1] + 1, np.int64)
        bounds[np.arange(len(starts)) + masks + 1] = starts
        ends = np.append(bounds[1:], 0)
        ends[offsets[1:] - 1] = height * width
        lengths = ends[: offsets[-1]] - bounds[: offsets[-1]]
        return cls(lengths.astype(np.uint32), offsets, height, width)

    def __repr__(self) -> str:
        return f"Runs({len(self):,} masks, {len(self.runs):,} runs, {self.width} x {self.height} pixels)"

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[npt.NDArray[np.uint32]]:
        for start, stop in zip(self.offsets[:-1], self.offsets[1:], strict=True):
            yield self.runs[start:stop]

    def select(self, indices: npt.ArrayLike) -> "Runs":
        """The masks of these indices, in this order, copied.

        Args:
            indices: integers [K], -N <= index < N, repeats allowed; or bool [N], the masks to keep.

        Raises:
            IndexError: an index is outside the masks, or a bool array has another length.
        """
        chosen = self.indices(indices)
        counts = np.diff(self.offsets)[chosen]
        offsets = np.zeros(len(chosen) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        rows = np.arange(offsets[-1], dtype=np.int64) + np.repeat(self.offsets[chosen] - offsets[:-1], counts)
        return Runs(self.runs[rows], offsets, self.height, self.width)

    def indices(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The indices for `select` as int64 [K], each 0 <= index < N."""
        return chosen_indices(indices, len(self))

    def to_coco(self, *, text: bool = False) -> list[dict[str, Any]]:
        """The masks as the dicts that pycocotools takes and returns; nothing is decoded to pixels.

        The inverse is `sa1b.masks.decode([mask["counts"] for mask in dicts], height, width)`.

        Args:
            text: return `counts` as str, for JSON, instead of bytes; pycocotools accepts both.

        Returns:
            For each mask {"size": [height, width], "counts": COCO's compressed string}, in pixels of the
            image the masks belong to.
        """
        from sa1b.masks import string_kernels  # numba takes long to import

        return [
            {"size": [self.height, self.width], "counts": string.decode("ascii") if text else string}
            for string in string_kernels.encode(self.runs, self.offsets)
        ]

    def check(self) -> "Runs":
        """Check the arrays and return the object.

        Raises:
            SizeError: height or width is out of range.
            ValueError: an array has a wrong type or shape, or the offsets are wrong.
            MaskError: the runs of a mask do not add up to height * width (sum_mismatch).
        """
        height, width = check_size(self.height, self.width)
        if self.runs.dtype != np.uint32 or self.runs.ndim != 1:
            raise BadValue(f"runs must be uint32 [R], got {self.runs.dtype} {list(self.runs.shape)}")
        if self.offsets.dtype != np.int64 or self.offsets.ndim != 1 or len(self.offsets) == 0:
            raise BadValue(f"offsets must be int64 [N + 1], got {self.offsets.dtype} {self.offsets.shape}")
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.runs) or (np.diff(self.offsets) < 0).any():
            raise BadValue(f"offsets must ascend from 0 to {len(self.runs)}")
        ends = np.zeros(len(self.runs) + 1, np.uint64)
        np.cumsum(self.runs, dtype=np.uint64, out=ends[1:])
        sums = np.diff(ends[self.offsets])
        wrong = np.flatnonzero(sums != height * width)
        if len(wrong):
            mask = int(wrong[0])
            raise MaskError(
                mask, "sum_mismatch", f"runs add up to {sums[mask]} pixels instead of {height} x {width}"
            )
        return self


def joined(parts: Sequence[Runs], height: int, width: int) -> Runs:
    """All masks of several lists of images of height x width pixels, in order; other sizes: ValueError."""
    for part in parts:
        if (part.height, part.width) != (height, width):
            raise BadValue(f"masks of {part.height} x {part.width} pixels must be of {height} x {width}")
    counts = [np.diff(part.offsets) for part in parts]
    offsets = np.concatenate([np.zeros(1, np.int64), *counts]).cumsum()
    return Runs(
        np.concatenate([np.empty(0, np.uint32), *(part.runs for part in parts)]), offsets, height, width
    )
