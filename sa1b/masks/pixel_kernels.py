"""Runs to pixels, pixels to outlines, logits to runs, distances in a dense mask."""

import numpy as np

from sa1b.kernel import Bools, Float32s, Int32s, Int64s, Uint8s, Uint32s, kernel


@kernel
def rasterize(
    runs: Uint32s, offsets: Int64s, masks: Int64s, row_firsts: Int64s, column_firsts: Int64s, out: Uint8s,
    boxes: Int64s,
) -> None:  # fmt: skip
    """Write chosen masks, int64 [K], into out [K, H, W], 0 or 1. `boxes` [K, 4], top, bottom, left, right:
    pixels of `out` outside are already 0; it receives the boxes of the new masks.
    """
    # A pixel differs from the pixel above it if a run begins or ends between them. First, only these changes
    # are written: two bytes for a run inside a column, whatever its length. Then each row of the mask's box
    # is XORed with the row above it, which compiles to vector instructions. 64 masks at 1024x1024 take 1.3
    # ms, half of it for clearing; filling each run pixel by pixel takes 3.1 ms.
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


@kernel
def trace(pixels: Uint8s, points: Int32s, ends: Int64s, starts: Int32s) -> int:
    """Trace the borders of the foreground along the sides of pixels, and return their number.

    Receive, of each border: `points` x and y of its corners, `ends` its end there, `starts` row and column of
    a foreground pixel.
    """
    # A walk along a border has the foreground on its right: outer borders are clockwise. Pixels that touch at
    # a corner only are separate. A walk begins at the upper side of a foreground pixel; `pixels`, with a
    # border of zeros, is set to 2 where a walk has passed such a side.
    count = 0
    borders = 0
    for row in range(1, pixels.shape[0]):
        for column in range(1, pixels.shape[1]):
            if pixels[row, column] != 1 or pixels[row - 1, column] != 0:
                continue
            starts[borders, 0], starts[borders, 1] = row, column
            x, y, dx, dy = column, row, 1, 0
            last_dx, last_dy = 0, 0
            while True:
                if dx == 1:
                    if pixels[y, x] == 2:  # back at the start
                        break
                    pixels[y, x] = 2
                if dx != last_dx or dy != last_dy:
                    points[count, 0], points[count, 1] = x, y
                    count += 1
                    last_dx, last_dy = dx, dy
                x, y = x + dx, y + dy
                # The pixels ahead, on the right and on the left of the walk.
                if dx == 1:
                    right, left = pixels[y, x], pixels[y - 1, x]
                elif dx == -1:
                    right, left = pixels[y - 1, x - 1], pixels[y, x - 1]
                elif dy == 1:
                    right, left = pixels[y, x - 1], pixels[y, x]
                else:
                    right, left = pixels[y - 1, x], pixels[y - 1, x - 1]
                if right == 0:
                    dx, dy = -dy, dx
                elif left != 0:
                    dx, dy = dy, -dx
            ends[borders] = count
            borders += 1
    return borders


@kernel
def enlarge(
    logits: Float32s, masks: Int64s, rows: Int64s, row_weights: Float32s, row_starts: Int64s,
    row_stops: Int64s, columns: Int64s, column_weights: Float32s, column_starts: Int64s, column_stops: Int64s,
    x: int, y: int, height: int, width: int, offset: float, areas: Int64s, out: Uint32s, out_offsets: Int64s,
) -> None:  # fmt: skip
    """Write the runs of enlarged logits above 0 of K `masks`, and the pixels above 0, offset and -offset into
    `areas` [K, 3]; see `sa1b.masks.raster.LogitAxis`. If `out` is empty, the runs are only counted.
    """
    # Only the part of a mask is computed that reads a logit above -offset: all other enlarged logits are
    # weighted means of numbers that are at most -offset.
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


@kernel
def farthest(region: Bools, clicked: Int64s) -> tuple[int, int, int]:
    """The pixel of a region that is farthest from its outside: x, y and the squared distance; or zeros."""
    # See `sa1b.sam.protocol.centre`. Distances are in integers, so that the result is exact. Rows whose
    # pixels are all nearer to the outside above or below than the farthest pixel so far are skipped.
    height, width = region.shape
    vertical = np.empty((height, width), np.int32)  # distance from the nearest pixel outside in the column
    vertical[0] = region[0]
    for y in range(1, height):
        for x in range(width):
            vertical[y, x] = vertical[y - 1, x] + 1 if region[y, x] else 0
    vertical[height - 1] = np.minimum(vertical[height - 1], 1)
    for y in range(height - 2, -1, -1):
        for x in range(width):
            vertical[y, x] = min(vertical[y, x], vertical[y + 1, x] + 1)
    largest = np.zeros(height, np.int64)
    for y in range(height):
        for x in range(width):
            largest[y] = max(largest[y], vertical[y, x])
    best_x, best_y, best = 0, 0, np.int64(0)
    for y in np.argsort(-largest):
        if largest[y] ** 2 < max(best, 1):
            break
        for x in range(width):
            near = min(np.int64(vertical[y, x]), x + 1, width - x) ** 2
            step = 1
            while near >= best and step * step < near:
                left, right = np.int64(vertical[y, x - step]), np.int64(vertical[y, x + step])
                near = min(near, min(left, right) ** 2 + step * step)
                step += 1
            first = y < best_y or (y == best_y and x < best_x)
            if near > best or (near == best and near > 0 and first):
                left_out = False
                for i in range(len(clicked)):
                    left_out |= clicked[i, 0] == x and clicked[i, 1] == y
                if not left_out:
                    best_x, best_y, best = x, y, near
    return best_x, best_y, int(best)


@kernel
def paint(runs: Uint32s, offsets: Int64s, most: float, out: Int32s, kept: Bools) -> None:
    """Paint masks over one another into out, [pixels], column-major: number of the mask, from 1. A mask of
    which more than the part `most` is painted already is left out; `kept` [N]: the others.
    """
    for mask in range(len(kept)):
        pixels, covered, position = np.int64(0), np.int64(0), np.int64(0)
        for index in range(offsets[mask], offsets[mask + 1]):
            end = position + np.int64(runs[index])
            if (index - offsets[mask]) & 1:
                pixels += end - position
                for place in range(position, end):
                    covered += out[place] > 0
            position = end
        kept[mask] = pixels == 0 or covered / pixels <= most
        position = np.int64(0)
        for index in range(offsets[mask], offsets[mask + 1]):
            end = position + np.int64(runs[index])
            if kept[mask] and (index - offsets[mask]) & 1:
                out[position:end] = mask + 1
            position = end
