"""Area, boxes, points, overlap, resizing, cropping and mirroring of masks, on runs."""

import numpy as np

from sa1b.kernel import Bools, Float32s, Float64s, Int64s, Uint32s, Uint64s, kernel


@kernel
def area(runs: Uint32s, offsets: Int64s, out: Int64s) -> None:
    """Write the foreground pixels of each mask into out [N]."""
    for mask in range(len(out)):
        total = np.int64(0)
        for index in range(offsets[mask] + 1, offsets[mask + 1], 2):
            total += np.int64(runs[index])
        out[mask] = total


@kernel
def bbox(runs: Uint32s, offsets: Int64s, height: int, width: int, out: Int64s) -> None:
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


@kernel
def contains(runs: Uint32s, offsets: Int64s, places: Int64s, out: Bools) -> None:
    """Write into out [N] whether pixel places[i] (column-major; -1: no pixel) is foreground of mask i."""
    for mask in range(len(places)):
        place = places[mask]
        end = np.int64(0)
        inside = False
        if place >= 0:
            for index in range(offsets[mask], offsets[mask + 1]):
                end += np.int64(runs[index])
                if end > place:
                    inside = (index - offsets[mask]) & 1 == 1
                    break
        out[mask] = inside


@kernel
def nth_foreground(runs: Uint32s, offsets: Int64s, ranks: Int64s, out: Int64s) -> None:
    """Write into out [N] the position (column-major) of foreground pixel ranks[i] of mask i; -1 if none."""
    for mask in range(len(ranks)):
        left = ranks[mask]
        position = np.int64(0)
        place = np.int64(-1)
        for index in range(offsets[mask], offsets[mask + 1]):
            run = np.int64(runs[index])
            if (index - offsets[mask]) & 1:
                if left >= 0 and left < run:
                    place = position + left
                    break
                left -= run
            position += run
        out[mask] = place


@kernel
def boxes_and_points(
    runs: Uint32s, offsets: Int64s, size: tuple[int, int], scale: tuple[float, float], words: Uint64s,
    boxes: Float32s, points: Float32s, areas: Int64s,
) -> None:  # fmt: skip
    """Write the box [N, 4], a point [N, 2] and the area [N] of each mask; see sa1b.masks.geometry. `size`:
    height and width of the image. `scale`: factors on x and y.
    """
    height, width = size
    across, down = scale
    count = len(areas)
    corners = np.empty((count, 4), np.int64)
    ranks = np.empty(count, np.int64)
    places = np.empty(count, np.int64)
    area(runs, offsets, areas)
    bbox(runs, offsets, height, width, corners)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    for mask in range(count):
        pixels = np.uint64(areas[mask])  # below 2**32, so the products fit 64 bits
        rest = ((words[mask] & low) * pixels) >> half
        ranks[mask] = np.int64(((words[mask] >> half) * pixels + rest) >> half)
    nth_foreground(runs, offsets, ranks, places)
    for mask in range(count):
        left, top = corners[mask, 0], corners[mask, 1]
        boxes[mask, 0] = (left + 0.5) * across
        boxes[mask, 1] = (top + 0.5) * down
        boxes[mask, 2] = (max(corners[mask, 2], left) + 0.5) * across
        boxes[mask, 3] = (max(corners[mask, 3], top) + 0.5) * down
        place = places[mask]
        points[mask, 0] = ((place // height if place >= 0 else -1) + 0.5) * across
        points[mask, 1] = ((place % height if place >= 0 else -1) + 0.5) * down


@kernel
def remap(
    runs: Uint32s, offsets: Int64s, height: int, width: int, boxes: Int64s, columns: Int64s, firsts: Int64s,
    target_height: int, out: Uint32s, out_offsets: Int64s,
) -> None:  # fmt: skip
    """Write masks with boxes as of `bbox`, of which each target column reads one of `columns`, -1 is
    background, and each source row is read from the target row `firsts` on. If `out` is empty, the runs are
    only counted.
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
def reverse(runs: Uint32s, offsets: Int64s, out: Uint32s, out_offsets: Int64s) -> None:
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


@kernel
def cumulate(runs: Uint32s, offsets: Int64s, ends: Int64s, spans: Int64s) -> None:
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
def run_at(ends: Int64s, low: int, high: int, position: int) -> int:
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
    ends_a: Int64s, offsets_a: Int64s, spans_a: Int64s, boxes_a: Int64s, ends_b: Int64s, offsets_b: Int64s,
    spans_b: Int64s, boxes_b: Int64s, out: Int64s,
) -> None:  # fmt: skip
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
def suppress(boxes: Float64s, max_iou: float, kept: Bools) -> None:
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
