"""Distances in a dense mask."""

import numpy as np
import numpy.typing as npt

from sa1b.kernel import kernel


@kernel
def farthest(region: npt.NDArray[np.bool_], clicked: npt.NDArray[np.int64]) -> tuple[int, int, int]:
    """The pixel of a region that is farthest from its outside: x, y and the squared distance; or zeros.

    See `sa1b.sam.protocol.centre`. Distances are in integers, so that the result is exact. Rows whose pixels
    are all nearer to the outside above or below than the farthest pixel so far are skipped.
    """
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
