"""Outlines of pixels."""

import numpy as np
import numpy.typing as npt

from sa1b.kernel import kernel


@kernel
def trace(
    pixels: npt.NDArray[np.uint8],
    points: npt.NDArray[np.int32],
    ends: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int32],
) -> int:
    """Trace the borders of the foreground along the sides of pixels, and return their number.

    A walk along a border has the foreground on its right: outer borders are clockwise, borders of holes are
    counterclockwise. Pixels that touch at a corner only are separate. A walk begins at the upper side of a
    foreground pixel; `pixels`, uint8 [height, width] with a border of zeros, is set to 2 where a walk has
    passed such a side.

    Args:
        points: int32 [4 * upper sides, 2], receives x and y of the corners, without those on straight lines.
        ends: receives the end of each border in `points`.
        starts: int32 [borders, 2], receives row and column of a foreground pixel of each border.
    """
    count = 0
    borders = 0
    for row in range(1, pixels.shape[0]):
        for column in range(1, pixels.shape[1]):
            if pixels[row, column] != 1 or pixels[row - 1, column] != 0:
                continue
            starts[borders, 0], starts[borders, 1] = row, column
            x, y, dx, dy = column, row, 1, 0
            last_dx, last_dy = 0, 0
            first = count
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
            if last_dx == 1 and count - first > 1:  # the walk began inside a straight line
                points[first, 0], points[first, 1] = points[count - 1, 0], points[count - 1, 1]
                count -= 1
            ends[borders] = count
            borders += 1
    return borders
