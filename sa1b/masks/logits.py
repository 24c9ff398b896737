"""Masks that a model predicts as logits, enlarged to the pixels of their image and encoded as runs.

The values are those of `sa1b.sam.prediction.at_source`. Its two bilinear interpolations of an axis are one
sum of four logits here, and no dense mask is written. 16 masks of 4 % of an image of 2250 x 1500 take 41 ms
with their areas, in one thread; `at_source` and `dense.runs_of` take 655 ms (`pytest benchmarks -k logits`).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sa1b.arguments import BadValue
from sa1b.masks import pixel_kernels
from sa1b.masks.runs import Runs, check_size, chosen_indices

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class LogitAxis:
    """How the pixels of an image read logits along one axis."""

    reads: npt.NDArray[np.int64]  # [n, 4], the logits that each pixel reads, in ascending order
    weights: npt.NDArray[np.float32]  # [n, 4], which add up to 1
    starts: npt.NDArray[np.int64]  # [R], for each logit the first pixel that reads it or a later one
    stops: npt.NDArray[np.int64]  # [R], for each logit the end of the pixels that read it or an earlier one

    def __len__(self) -> int:
        return len(self.reads)


def logit_axis(length: int, taken: int, image_size: int, side: int) -> LogitAxis:
    """The axis of an image of `length` pixels in the padded square of image_size pixels, with `side` logits.

    `taken`: pixels of the square that the image covers, see `grid.framed_size`.
    """
    near, near_weights = _bilinear(taken, length)  # pixels of the square, [n, 2]
    far, far_weights = _bilinear(side, image_size)  # logits, [image_size, 2]
    reads = np.ascontiguousarray(far[near].reshape(length, 4))
    weights = (near_weights[:, :, None] * far_weights[near]).reshape(length, 4)
    each = np.arange(side)
    return LogitAxis(
        reads,
        weights.astype(np.float32),
        np.searchsorted(reads[:, 3], each, "left").astype(np.int64),
        np.searchsorted(reads[:, 0], each, "right").astype(np.int64),
    )


def areas(logits: Logits, rows: LogitAxis, columns: LogitAxis, offset: float) -> npt.NDArray[np.int64]:
    """Pixels of each mask whose enlarged logit is above 0, above `offset` and above -`offset`: int64 [M, 3].
    Logits are float32 [M, R, R], of the padded square; `offset` is at least 0.
    """
    counts = np.empty((len(logits), 3), np.int64)
    every = np.arange(len(logits), dtype=np.int64)
    image = (len(rows), len(columns))
    buffers = (counts, np.empty(0, np.uint32), np.empty(len(logits) + 1, np.int64))
    _enlarge(logits, every, rows, columns, image=image, offset=offset, buffers=buffers)
    return counts


def runs_of_logits(
    logits: Logits,
    select: npt.ArrayLike,
    rows: LogitAxis,
    columns: LogitAxis,
    *,
    position: tuple[int, int] = (0, 0),
    image: tuple[int, int] | None = None,
) -> Runs:
    """The masks of the pixels whose enlarged logit is above 0: K masks in canonical form.

    Logits are float32 [M, R, R], of the padded square. `select`: integers [K] or bool [M], as for
    `Runs.select`. `position` is x and y of the enlarged logits in the `image`, height and width, if they are
    of a crop; ValueError if the crop is not inside.
    """
    height, width = (len(rows), len(columns)) if image is None else check_size(*image)
    x, y = position
    if x < 0 or y < 0 or x + len(columns) > width or y + len(rows) > height:
        raise BadValue(
            f"crop at x {x}, y {y}, {len(columns)} wide, {len(rows)} high must be inside the image of "
            f"{height} x {width} pixels (height x width)"
        )
    chosen = chosen_indices(select, len(logits))
    counts = np.empty((len(chosen), 3), np.int64)
    offsets = np.empty(len(chosen) + 1, np.int64)
    out = np.empty(0, np.uint32)
    for _ in range(2):  # the first pass counts the runs
        _enlarge(
            logits,
            chosen,
            rows,
            columns,
            position=position,
            image=(height, width),
            buffers=(counts, out, offsets),
        )
        out = np.empty(offsets[-1], np.uint32) if not len(out) else out
    return Runs(out, offsets, height, width)


def _enlarge(
    logits: Logits,
    chosen: npt.NDArray[np.int64],
    rows: LogitAxis,
    columns: LogitAxis,
    *,
    image: tuple[int, int],
    buffers: tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32], npt.NDArray[np.int64]],
    position: tuple[int, int] = (0, 0),
    offset: float = 0.0,
) -> None:
    """See `pixel_kernels.enlarge`; `buffers` are its areas, out and out_offsets."""
    counts, out, offsets = buffers
    of_rows = (rows.reads, rows.weights, rows.starts, rows.stops)
    of_columns = (columns.reads, columns.weights, columns.starts, columns.stops)
    pixel_kernels.enlarge(
        np.ascontiguousarray(logits, np.float32),
        chosen,
        *of_rows,
        *of_columns,
        *position,
        *image,
        float(offset),
        counts,
        out,
        offsets,
    )


def _bilinear(source: int, target: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The two source pixels that each target pixel reads, [target, 2], and their weights."""
    # Bilinear interpolation of pixel centres without antialiasing; pixels at the border are repeated.
    at = np.maximum((np.arange(target) + 0.5) * (source / target) - 0.5, 0)
    first = np.minimum(at.astype(np.int64), source - 1)
    second = np.minimum(first + 1, source - 1)
    part = at - first
    return np.stack([first, second], axis=1), np.stack([1 - part, part], axis=1)
