"""Runs to pixels."""

import numpy as np
import numpy.typing as npt

from sa1b.kernel import kernel


@kernel
def rasterize(
    runs: npt.NDArray[np.uint32],
    offsets: npt.NDArray[np.int64],
    masks: npt.NDArray[np.int64],
    row_firsts: npt.NDArray[np.int64],
    column_firsts: npt.NDArray[np.int64],
    out: npt.NDArray[np.uint8],
    boxes: npt.NDArray[np.int64],
) -> None:
    """Write chosen masks into out [K, H, W], 0 or 1.

    A pixel differs from the pixel above it if a run begins or ends between them. First, only these changes
    are written: two bytes for a run inside a column, whatever its length. Then each row of the mask's box is
    XORed with the row above it, which compiles to vector instructions. 64 masks at 1024x1024 take 1.3 ms,
    half of it for clearing; filling each run pixel by pixel takes 3.1 ms, a transposed column-major tile 1.5
    ms.

    Args:
        masks: int64 [K].
        row_firsts, column_firsts: int64 [source size + 1], the first target pixel at or after each source
            pixel.
        boxes: int64 [K, 4], top, bottom, left, right: pixels of `out` outside the box are already 0. Receives
            the boxes of the new masks.
    """
    height = len(row_firsts) - 1
    width = len(column_firsts) - 1
    limit = row_firsts[height]  # rows from this one on are outside the image
    for number in range(len(masks)):
        pixels = out[number]
        box = boxes[number]
        if box[3] - box[2] == pixels.shape[1]:
            pixels[box[0] : box[1]] = 0  # full rows are contiguous: 10 % less time for a full image
        else:
            pixels[box[0] : box[1], box[2] : box[3]] = 0
        box[:] = 0
        if limit == 0:  # no target row reads an image of so few rows
            continue
        start, stop = offsets[masks[number]], offsets[masks[number] + 1]
        left, right = np.int64(pixels.shape[1]), np.int64(-1)
        top, bottom = np.int64(pixels.shape[0]), np.int64(-1)
        column, row = np.int64(0), np.int64(0)  # source position of the start of the run
        for index in range(start, stop):
            end_row = row + np.int64(runs[index])
            end_column = column
            if end_row >= height:
                end_row -= height
                end_column += 1
                if end_row >= height:
                    end_column += end_row // height
                    end_row %= height
            if end_column * height + end_row > width * height:
                break  # not a mask of this size: no write may leave the image
            if (index - start) & 1 and runs[index] > 0:
                if end_column == column:
                    first, last = column_firsts[column], column_firsts[column + 1]
                    begin, end = row_firsts[row], row_firsts[end_row]
                    if first < last and begin < end:
                        for x in range(first, last):
                            pixels[begin, x] ^= 1
                        if end < limit:
                            for x in range(first, last):
                                pixels[end, x] ^= 1
                        left, right = min(left, first), max(right, last)
                        top, bottom = min(top, begin), max(bottom, end)
                else:
                    # The run covers the first column from this row down, all columns between, and the top of
                    # the last column.
                    first, last = column_firsts[column], column_firsts[column + 1]
                    begin = row_firsts[row]
                    if begin < limit:
                        for x in range(first, last):
                            pixels[begin, x] ^= 1
                    stop_column = end_column
                    if end_row > 0:
                        stop_column += 1
                        first, last = column_firsts[end_column], column_firsts[stop_column]
                        end = row_firsts[end_row]
                        if end < limit:
                            for x in range(first, last):
                                pixels[end, x] ^= 1
                    first, last = column_firsts[column + 1], column_firsts[stop_column]
                    for x in range(first, last):
                        pixels[0, x] ^= 1
                    first = column_firsts[column]
                    if first < last:
                        left, right = min(left, first), max(right, last)
                        top, bottom = np.int64(0), limit
            row, column = end_row, end_column
        if left < right:
            box[0], box[1], box[2], box[3] = top, min(bottom + 1, limit), left, right
        for y in range(top + 1, min(bottom + 1, limit)):
            pixels[y, left:right] ^= pixels[y - 1, left:right]
