"""Logits of masks to runs at a larger size, without dense masks."""

import numpy as np
import numpy.typing as npt

from sa1b.kernel import kernel


@kernel
def enlarge(
    logits: npt.NDArray[np.float32],
    masks: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    row_weights: npt.NDArray[np.float32],
    row_starts: npt.NDArray[np.int64],
    row_stops: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int64],
    column_weights: npt.NDArray[np.float32],
    column_starts: npt.NDArray[np.int64],
    column_stops: npt.NDArray[np.int64],
    x: int,
    y: int,
    height: int,
    width: int,
    offset: float,
    areas: npt.NDArray[np.int64],
    out: npt.NDArray[np.uint32],
    out_offsets: npt.NDArray[np.int64],
) -> None:
    """Write the runs of enlarged logits above 0, and the areas at three thresholds.

    Only the part of a mask is computed that reads a logit above -offset: all other enlarged logits are
    weighted means of numbers that are at most -offset. Rows and columns: see `sa1b.masks.logits.LogitAxis`.

    Args:
        logits: float32 [M, R, R].
        masks: int64 [K], indices of the logits to enlarge.
        x, y: position of the target in its image of height x width, pixels.
        areas: int64 [K, 3], receives the pixels above 0, offset and -offset.
        out: uint32 [R'], receives the runs; if it is empty, the runs are only counted.
        out_offsets: int64 [K + 1], written.
    """
    writing = len(out) > 0
    total = np.int64(height) * width
    low = np.float32(-offset)
    high = np.float32(offset)
    zero = np.float32(0)
    side_rows, side_columns = logits.shape[1], logits.shape[2]
    profile = np.zeros(side_rows, np.float32)  # a target column, at the rows of the logits
    written = np.int64(0)
    out_offsets[0] = 0
    for number in range(len(masks)):
        values = logits[masks[number]]
        top, bottom, left, right = side_rows, -1, side_columns, -1
        for row in range(side_rows):
            first, last = side_columns, -1
            for column in range(side_columns):
                if values[row, column] > low:
                    first = min(first, column)
                    last = column
            if last >= 0:
                top = min(top, row)
                bottom = row
                left, right = min(left, first), max(right, last)
        at_zero, at_high, at_low = np.int64(0), np.int64(0), np.int64(0)
        done, fg_start, fg_end = np.int64(0), np.int64(0), np.int64(0)
        if bottom >= 0 and row_starts[top] < row_stops[bottom] and column_starts[left] < column_stops[right]:
            first_row, stop_row = row_starts[top], row_stops[bottom]
            read_first, read_last = rows[first_row, 0], rows[stop_row - 1, 3]
            for target in range(column_starts[left], column_stops[right]):
                for row in range(read_first, read_last + 1):
                    profile[row] = (
                        column_weights[target, 0] * values[row, columns[target, 0]]
                        + column_weights[target, 1] * values[row, columns[target, 1]]
                        + column_weights[target, 2] * values[row, columns[target, 2]]
                        + column_weights[target, 3] * values[row, columns[target, 3]]
                    )
                position = np.int64((x + target) * height + y + first_row)
                for row in range(first_row, stop_row):
                    value = (
                        row_weights[row, 0] * profile[rows[row, 0]]
                        + row_weights[row, 1] * profile[rows[row, 1]]
                        + row_weights[row, 2] * profile[rows[row, 2]]
                        + row_weights[row, 3] * profile[rows[row, 3]]
                    )
                    if value > low:
                        at_low += 1
                        at_high += value > high
                        if value > zero:
                            at_zero += 1
                            if position != fg_end:
                                if fg_end > fg_start:
                                    if writing:
                                        out[written] = fg_start - done
                                        out[written + 1] = fg_end - fg_start
                                    written += 2
                                    done = fg_end
                                fg_start = position
                            fg_end = position + 1
                    position += 1
        if fg_end > fg_start:
            if writing:
                out[written] = fg_start - done
                out[written + 1] = fg_end - fg_start
            written += 2
            done = fg_end
        if done < total:
            if writing:
                out[written] = total - done
            written += 1
        areas[number, 0], areas[number, 1], areas[number, 2] = at_zero, at_high, at_low
        out_offsets[number + 1] = written
