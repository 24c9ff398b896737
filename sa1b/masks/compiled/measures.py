"""Area and bounding box from runs."""

import numpy as np
import numpy.typing as npt

from sa1b.kernel import kernel


@kernel
def area(runs: npt.NDArray[np.uint32], offsets: npt.NDArray[np.int64], out: npt.NDArray[np.int64]) -> None:
    """Write the foreground pixels of each mask into out [N]."""
    for mask in range(len(out)):
        total = np.int64(0)
        for index in range(offsets[mask] + 1, offsets[mask + 1], 2):
            total += np.int64(runs[index])
        out[mask] = total


@kernel
def bbox(
    runs: npt.NDArray[np.uint32],
    offsets: npt.NDArray[np.int64],
    height: int,
    width: int,
    out: npt.NDArray[np.int64],
) -> None:
    """Write first column, first row, last column, last row of each mask, [N, 4]; empty: 0, 0, -1, -1."""
    for mask in range(len(out)):
        left, top = np.int64(width), np.int64(height)
        right, bottom = np.int64(-1), np.int64(-1)
        column, row = np.int64(0), np.int64(0)
        for index in range(offsets[mask], offsets[mask + 1]):
            run = np.int64(runs[index])
            end = row + run
            if (index - offsets[mask]) & 1 and run > 0:
                left = min(left, column)
                if end > height:  # from the top of one column to the bottom of another
                    right = max(right, column + (end - 1) // height)
                    top, bottom = np.int64(0), np.int64(height - 1)
                else:
                    right = max(right, column)
                    top, bottom = min(top, row), max(bottom, end - 1)
            # Most runs end in their own column or the next: a division for each would take most of the time.
            if end < height:
                row = end
            elif end < 2 * height:
                column, row = column + 1, end - height
            else:
                column, row = column + end // height, end % height
        if right < 0:
            left, top = np.int64(0), np.int64(0)
        out[mask, 0] = left
        out[mask, 1] = top
        out[mask, 2] = right
        out[mask, 3] = bottom
