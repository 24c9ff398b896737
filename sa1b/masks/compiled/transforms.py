"""Resizing, cropping and mirroring of masks, runs to runs."""

import numpy as np
import numpy.typing as npt

from sa1b.kernel import kernel


@kernel
def remap(
    runs: npt.NDArray[np.uint32],
    offsets: npt.NDArray[np.int64],
    height: int,
    width: int,
    boxes: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int64],
    firsts: npt.NDArray[np.int64],
    target_height: int,
    out: npt.NDArray[np.uint32],
    out_offsets: npt.NDArray[np.int64],
) -> None:
    """Write masks whose columns and rows read source columns and rows. Target rows read source rows in order.

    Args:
        boxes: int64 [N, 4], the first column and row, and the last column and row of each mask.
        columns: int64 [target width], the source column of each target column; -1 is background.
        firsts: int64 [height + 1], the first target row at or after each source row.
        out: uint32 [R'], receives the runs; if it is empty, the runs are only counted.
        out_offsets: int64 [N + 1], written.
    """
    writing = len(out) > 0
    total = np.int64(len(columns)) * target_height
    run_of = np.empty(width, np.int64)  # the run in which a source column begins
    start_of = np.empty(width, np.int64)  # position at which that run begins
    written = np.int64(0)
    out_offsets[0] = 0
    for mask in range(len(offsets) - 1):
        first = offsets[mask]
        stop = offsets[mask + 1]
        left, right = boxes[mask, 0], boxes[mask, 2]  # columns with foreground
        column, column_start = np.int64(0), np.int64(0)
        position = np.int64(0)
        for index in range(first, stop):
            end = position + np.int64(runs[index])
            while column_start < end and column < width:
                run_of[column] = index
                start_of[column] = position
                column += 1
                column_start += height
            position = end

        done, fg_start, fg_end = np.int64(0), np.int64(0), np.int64(0)
        for target in range(len(columns)):
            source = columns[target]
            if source < left or source > right:
                continue
            base = source * height
            index = run_of[source]
            position = start_of[source]
            while position < base + height and index < stop:
                end = position + np.int64(runs[index])
                if (index - first) & 1:
                    begin = target * target_height + firsts[max(position - base, 0)]
                    finish = target * target_height + firsts[min(end - base, height)]
                    if finish > begin:
                        if begin == fg_end:
                            fg_end = finish
                        else:
                            if fg_end > fg_start:
                                if writing:
                                    out[written] = fg_start - done
                                    out[written + 1] = fg_end - fg_start
                                written += 2
                                done = fg_end
                            fg_start, fg_end = begin, finish
                position = end
                index += 1
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
        out_offsets[mask + 1] = written


@kernel
def reverse(
    runs: npt.NDArray[np.uint32],
    offsets: npt.NDArray[np.int64],
    out: npt.NDArray[np.uint32],
    out_offsets: npt.NDArray[np.int64],
) -> None:
    """Rotate the masks by 180 degrees; write runs into out [R + N], offsets into out_offsets [N + 1]."""
    written = np.int64(0)
    out_offsets[0] = 0
    for mask in range(len(offsets) - 1):
        if (offsets[mask + 1] - offsets[mask]) % 2 == 0:  # ends with foreground
            out[written] = 0
            written += 1
        for index in range(offsets[mask + 1] - 1, offsets[mask] - 1, -1):
            out[written] = runs[index]
            written += 1
        out_offsets[mask + 1] = written
