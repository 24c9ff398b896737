"""Intersection of every mask of one list with every mask of another."""

import numpy as np
import numpy.typing as npt

from sa1b.kernel import kernel


@kernel
def cumulate(
    runs: npt.NDArray[np.uint32],
    offsets: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    spans: npt.NDArray[np.int64],
) -> None:
    """Write the end of each run into ends [R], and the span of each mask's foreground into spans [N, 2]."""
    for mask in range(len(spans)):
        start, stop = np.int64(-1), np.int64(-1)
        position = np.int64(0)
        for index in range(offsets[mask], offsets[mask + 1]):
            run = np.int64(runs[index])
            if (index - offsets[mask]) & 1 and run > 0:
                if start < 0:
                    start = position
                stop = position + run
            position += run
            ends[index] = position
        spans[mask, 0] = start
        spans[mask, 1] = stop


@kernel
def run_at(ends: npt.NDArray[np.int64], low: int, high: int, position: int) -> int:
    """Index of the run in ends[low:high] that contains the pixel at this position."""
    while low < high:
        middle = (low + high) // 2
        if ends[middle] > position:
            high = middle
        else:
            low = middle + 1
    return low


@kernel
def intersection(
    ends_a: npt.NDArray[np.int64],
    offsets_a: npt.NDArray[np.int64],
    spans_a: npt.NDArray[np.int64],
    boxes_a: npt.NDArray[np.int64],
    ends_b: npt.NDArray[np.int64],
    offsets_b: npt.NDArray[np.int64],
    spans_b: npt.NDArray[np.int64],
    boxes_b: npt.NDArray[np.int64],
    out: npt.NDArray[np.int64],
) -> None:
    """Write the number of common foreground pixels of every pair into out [Na, Nb].

    A box is first column, first row, last column and last row; for an empty mask, the last is before the
    first.
    """
    for a in range(len(spans_a)):
        for b in range(len(spans_b)):
            common = np.int64(0)
            if max(boxes_a[a, 0], boxes_b[b, 0]) <= min(boxes_a[a, 2], boxes_b[b, 2]) and max(
                boxes_a[a, 1], boxes_b[b, 1]
            ) <= min(boxes_a[a, 3], boxes_b[b, 3]):
                position = max(spans_a[a, 0], spans_b[b, 0])
                stop = min(spans_a[a, 1], spans_b[b, 1])
                first_a, first_b = offsets_a[a], offsets_b[b]
                index_a = run_at(ends_a, first_a, offsets_a[a + 1], position)
                index_b = run_at(ends_b, first_b, offsets_b[b + 1], position)
                while position < stop:
                    end_a, end_b = ends_a[index_a], ends_b[index_b]
                    end = min(end_a, end_b)
                    if (index_a - first_a) & (index_b - first_b) & 1 and end > position:
                        common += min(end, stop) - position
                        position = end
                    else:
                        position = max(position, end)
                    index_a += end_a == end
                    index_b += end_b == end
            out[a, b] = common


@kernel
def suppress(boxes: npt.NDArray[np.float64], max_iou: float, kept: npt.NDArray[np.bool_]) -> None:
    """Write into kept [N] whether no kept box before it overlaps a box by more than `max_iou`.

    A box is x, y, width and height. Two boxes without area overlap completely if they are equal.
    """
    for b in range(len(boxes)):
        right, bottom = boxes[b, 0] + boxes[b, 2], boxes[b, 1] + boxes[b, 3]
        kept[b] = True
        for a in range(b):
            if kept[a]:
                across = min(right, boxes[a, 0] + boxes[a, 2]) - max(boxes[b, 0], boxes[a, 0])
                down = min(bottom, boxes[a, 1] + boxes[a, 3]) - max(boxes[b, 1], boxes[a, 1])
                if across < 0 or down < 0:
                    continue
                common = across * down
                union = boxes[a, 2] * boxes[a, 3] + boxes[b, 2] * boxes[b, 3] - common
                if union > 0:
                    iou = common / union
                elif (boxes[a] == boxes[b]).all():
                    iou = 1.0
                else:
                    iou = 0.0
                if iou > max_iou:
                    kept[b] = False
                    break
