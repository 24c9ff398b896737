"""COCO's compressed mask strings, for all masks of an image at once; masks of polygons, and their outlines.

A string is a sequence of numbers, the run lengths of a mask down the columns of the image, background first.
From index 3 on a number is the difference to the run two before it. A number is written in characters of
five bits, lowest first: 48 + bits, + 32 if more follow; bit 4 of the last one is the sign
(https://github.com/cocodataset/cocoapi, maskApi.c).

Input that does not decode raises MaskError with the index of the first mask that fails and one of these
reasons:

    wrong_type        neither str nor bytes
    bad_character     a character outside 48..111
    cut_number        the string ends inside a number
    number_too_long   a number of more than 12 characters
    negative_run      a run below zero
    run_overflow      a run that extends beyond the last pixel of the image
    sum_mismatch      the runs end before the last pixel; also the empty string

If a mask has several errors, the first one from left to right is the reason. Runs of length zero are legal.
An impossible image size raises SizeError (bad_size). Memory depends on the length of the strings, never on a
number in them or on the size of the image.

100 masks of 2250x1500 (33,000 runs, 38 kB), one thread: 0.043 ms to runs, 0.084 ms back to strings;
pycocotools.mask.area of the same list takes 0.088 ms (`pytest benchmarks/test_masks.py -k strings`).

Polygons become the masks that pycocotools makes of them, and outlines of masks are polygons of which it makes
these masks again.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from sa1b.arguments import BadValue
from sa1b.masks import geometry, pixel_kernels, string_kernels
from sa1b.masks.raster import rasterize
from sa1b.masks.runs import MaskError, Runs, check_size, chosen_indices

_MESSAGES = {
    "valid": "",
    "bad_character": "a character of its string lies outside 48..111",
    "cut_number": "its string ends inside a number",
    "number_too_long": f"a number of its string has more than {string_kernels.MAX_CHARACTERS} characters",
    "negative_run": "a run is negative",
    "run_overflow": "a run goes beyond the last of {height} x {width} pixels",
    "sum_mismatch": "its runs end before the last of {height} x {width} pixels",
    "wrong_type": "its string is neither str nor bytes",
}
REASONS = tuple(_MESSAGES)  # by the code of a verdict

Text = npt.NDArray[np.uint8]


def decode(strings: Sequence[str | bytes], height: int, width: int) -> Runs:
    """Decode the masks of one image to runs.

    Args:
        strings: COCO's compressed string of each mask (`segmentation["counts"]`).
        height: pixels of the image.
        width: pixels of the image.

    Raises:
        MaskError: the first mask that does not decode, with its reason.
        SizeError: height or width is not a valid image size.
    """
    height, width = check_size(height, width)
    text, lengths, wrong = join(strings)
    runs, verdicts = _parse(text, lengths, height, width)
    verdicts[wrong] = REASONS.index("wrong_type")
    return _decoded(runs, verdicts)


def decode_joined(
    buffer: bytes | bytearray | memoryview | Text, lengths: npt.NDArray[np.integer], height: int, width: int
) -> Runs:
    """`decode` for the concatenated strings of all masks; the buffer is not copied.

    Args:
        lengths: integers [N], bytes of each mask's string; their sum is the length of the buffer.

    Raises:
        ValueError: type or shape of `buffer` or `lengths` is wrong, or the lengths do not fit the buffer.
    """
    height, width = check_size(height, width)
    text = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    if text.dtype != np.uint8 or text.ndim != 1 or not text.flags.c_contiguous:
        raise BadValue(f"buffer must be contiguous uint8 [bytes], got {text.dtype} {list(text.shape)}")
    sizes = np.asarray(lengths)
    fits = sizes.ndim == 1 and (not sizes.size or np.issubdtype(sizes.dtype, np.integer))
    if not fits or (sizes < 0).any() or (sizes > len(text)).any() or sizes.sum() != len(text):
        raise BadValue(f"lengths must be integers from 0 that add up to the {len(text)} bytes of the buffer")
    return _decoded(*_parse(text, sizes.astype(np.int64), height, width))


def decode_selected(
    text: Text, lengths: npt.NDArray[np.integer], indices: npt.ArrayLike, height: int, width: int
) -> Runs:
    """`decode_joined` for some masks, see `Runs.select`; MaskError has the position in `indices`."""
    height, width = check_size(height, width)
    chosen = chosen_indices(indices, len(lengths))
    ends = np.cumsum(lengths, dtype=np.int64)
    if (total := int(ends[-1]) if len(ends) else 0) != len(text):
        raise BadValue(f"lengths must add up to the {len(text)} bytes of the text, got {total}")
    chosen_lengths = lengths[chosen].astype(np.int64)
    starts = ends[chosen] - chosen_lengths
    return _decoded(*_parse(text, chosen_lengths, height, width, starts))


def reasons(strings: Sequence[str | bytes], height: int, width: int) -> list[str]:
    """The reason of each mask of an image, "valid" if it decodes; SizeError: see `decode`."""
    height, width = check_size(height, width)
    text, lengths, wrong = join(strings)
    _, verdicts = _parse(text, lengths, height, width)
    verdicts[wrong] = REASONS.index("wrong_type")
    return [REASONS[code] for code in verdicts]


def encode(runs: Runs) -> list[bytes]:
    """The compressed string of every mask: the bytes that pycocotools writes for the same runs."""
    return string_kernels.encode(runs.runs, runs.offsets)


def encode_joined(runs: Runs) -> tuple[Text, npt.NDArray[np.int64]]:
    """`encode` with all strings joined: uint8 [bytes], and the bytes of each mask's string, int64 [N]."""
    return string_kernels.encode_joined(runs.runs, runs.offsets)


def join(strings: Sequence[str | bytes]) -> tuple[Text, npt.NDArray[np.int64], list[int]]:
    """The bytes and lengths of all strings, and the indices of those of a wrong type, which have none."""
    kinds = set(map(type, strings))
    parts, wrong = cast("Sequence[bytes]", strings), list[int]()
    if kinds <= {str} and (text := "".join(cast("Sequence[str]", strings))).isascii():
        lengths = np.fromiter(map(len, strings), np.int64, len(strings))
        return np.frombuffer(text.encode("ascii"), np.uint8), lengths, wrong
    if not kinds <= {bytes}:
        wrong = [index for index, string in enumerate(strings) if not isinstance(string, str | bytes)]
        parts = [
            bytes(min(ord(character), 255) for character in string)
            if isinstance(string, str)
            else (string if isinstance(string, bytes) else b"")
            for string in strings
        ]
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    return np.frombuffer(b"".join(parts), np.uint8), lengths, wrong


def _parse(
    text: Text,
    lengths: npt.NDArray[np.int64],
    height: int,
    width: int,
    starts: npt.NDArray[np.int64] | None = None,
) -> tuple[Runs, npt.NDArray[np.uint8]]:
    """Runs of masks, and the verdict on each; a mask that does not decode has no runs. `starts`: of strings
    anywhere in the text.
    """
    if starts is None:
        starts, most = np.cumsum(lengths) - lengths, string_kernels.count_numbers(text)
    else:
        most = int(lengths.sum())  # an upper bound for the runs; counting them would take longer
    runs = np.empty(most, np.uint32)
    offsets = np.empty(len(lengths) + 1, np.int64)
    verdicts = np.empty(len(lengths), np.uint8)
    string_kernels.parse(text, starts, lengths, height * width, runs, offsets, verdicts)
    return Runs(runs[: offsets[-1]], offsets, height, width), verdicts


def _decoded(runs: Runs, verdicts: npt.NDArray[np.uint8]) -> Runs:
    if verdicts.any():
        mask = int(np.flatnonzero(verdicts)[0])
        reason = REASONS[verdicts[mask]]
        raise MaskError(mask, reason, _MESSAGES[reason].format(height=runs.height, width=runs.width))
    return runs


MAX_LENGTH = 838_861  # pixels, of the lines of one mask: 100 bytes for each fifth of a pixel
_FARTHEST = 1e6  # pixels: largest coordinate


def encode_polygons(polygons: Sequence[Sequence[float]], height: int, width: int) -> bytes:
    """The compressed string of the mask of polygons, such as those of a COCO file's `segmentation`.

    A polygon is x and y of its vertices in turn, at least three, in pixels from the corner of the top left
    pixel. They may be outside of the image.

    Raises:
        MaskError: there is no polygon, a polygon has fewer than three vertices, an odd number of coordinates
            or a coordinate that is not a finite number below 1,000,000 (bad_polygon), or the lines are longer
            than 838,861 pixels (polygon_too_long).
    """
    # To a mask: pycocotools traces a polygon on a grid five times finer than the pixels. A pixel belongs to a
    # mask of several polygons if it belongs to one of them. The checks come first: pycocotools takes memory
    # for the length of the lines without a limit, and converts numbers that are not finite to whole ones.
    from pycocotools import mask

    height, width = check_size(height, width)
    if not len(polygons):
        raise MaskError(0, "bad_polygon", "it has no polygon")
    vertices = [_vertices(polygon) for polygon in polygons]
    if sum(map(_length, vertices)) > MAX_LENGTH:
        raise MaskError(0, "polygon_too_long", f"its lines are longer than {MAX_LENGTH:,} pixels")
    parts = mask.frPyObjects([polygon.tolist() for polygon in vertices], height, width)
    counts: bytes = mask.merge(parts)["counts"]
    return counts


def _vertices(polygon: Sequence[float]) -> npt.NDArray[np.float64]:
    try:
        numbers = np.asarray(polygon, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise MaskError(0, "bad_polygon", "a coordinate of its polygons is not a number") from None
    if numbers.ndim != 1 or len(numbers) % 2 or len(numbers) < 6:
        why = (
            f"a polygon has {numbers.size:,} coordinates; it must have two for each of three or more vertices"
        )
        raise MaskError(0, "bad_polygon", why)
    if not (np.abs(numbers) < _FARTHEST).all():
        why = f"a coordinate of its polygons is not a finite number below {_FARTHEST:,.0f}"
        raise MaskError(0, "bad_polygon", why)
    return numbers


def _length(polygon: npt.NDArray[np.float64]) -> float:
    """Number of pixels of a polygon's lines: for each line, its extent along its longer axis."""
    vertices = polygon.reshape(-1, 2)
    return float(np.abs(vertices - np.roll(vertices, -1, axis=0)).max(axis=1).sum())


Polygon = npt.NDArray[np.int32]


def polygons(runs: Runs, *, single: bool = False) -> list[list[Polygon]]:
    """The polygons of each mask, one for each part, or a `single` one that joins all parts.

    A polygon is int32 [V, 2]: x and y of the vertices in pixels from the corner of the top left pixel. Pixels
    that touch at a corner only belong to different parts. A mask without pixels has no polygon.
    """
    # To polygons: they follow the sides of pixels. A hole is joined to the border around it by a line that
    # the polygon follows in both directions; with `single`, so are the parts of a mask. Programs that also
    # paint the lines, like OpenCV's fillPoly, paint these lines, and pixels right of and below the mask. 100
    # masks (200,000 runs) take 80 ms in one thread.
    boxes = geometry.bbox(runs).tolist()
    polygons_of_masks: list[list[Polygon]] = []
    for index, (x, y, width, height) in enumerate(boxes):
        if not width:
            polygons_of_masks.append([])
            continue
        crop = geometry.crop(runs.select([index]), x, y, width, height)
        pixels = np.pad(rasterize(crop)[0], 1)
        borders, parts = _borders(pixels)
        origin, groups = np.array([x - 1, y - 1], np.int32), dict[int, list[Polygon]]()
        for border, part in zip(borders, parts.tolist(), strict=True):
            groups.setdefault(0 if single else part, []).append(border)
        polygons_of_masks.append([_joined(group) + origin for group in groups.values()])
    return polygons_of_masks


def _borders(pixels: npt.NDArray[np.uint8]) -> tuple[list[Polygon], npt.NDArray[np.int32]]:
    """Borders of padded pixels, outer ones before the holes in them, and the part that each belongs to."""
    import cv2  # a source of COCO files reads polygons without it

    sides = int(np.count_nonzero(pixels[1:] & (pixels[:-1] ^ 1)))
    points = np.empty((4 * sides, 2), np.int32)
    ends = np.empty(sides, np.int64)
    starts = np.empty((sides, 2), np.int32)
    _, labels = cv2.connectedComponents(pixels, connectivity=4)
    count = pixel_kernels.trace(pixels, points, ends, starts)
    parts = labels[starts[:count, 0], starts[:count, 1]].astype(np.int32)
    last = int(ends[count - 1]) if count else 0
    return np.split(points[:last], ends[: count - 1]), parts


def _joined(borders: list[Polygon]) -> Polygon:
    """One polygon: each border after the first is reached from the first vertex, and left to it again."""
    first, *others = borders
    pieces = [first]
    for border in others:
        pieces += [first[:1], border, border[:1]]
    return np.concatenate([*pieces, first[:1]] if others else pieces)
