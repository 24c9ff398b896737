"""JPEG files: checks of their markers before decoding, decoding, and scaling down.

Markers are those of ITU-T T.81, annex B. A decoder allocates memory for the size in the frame header: 12 GB
for a file of 2 MB with 65500 x 65500 pixels in its header. So sizes are checked here first.
"""

import re
import struct
import threading
from dataclasses import dataclass
from math import ceil

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg

from sa1b.errors import BadSample
from sa1b.masks.grid import scaled_side
from sa1b.shards import MAX_STORED_PIXELS
from sa1b.shards.annotation import pixels_message

MAX_JPEG_BYTES = 32 << 20  # real files: 1 MB on average
MAX_SEGMENTS = 1000  # real files: 10; each scan of a progressive file costs a decoder a pass over the image

_SOI, _EOI, _SOS, _DQT, _DHT, _SOF2 = 0xD8, 0xD9, 0xDA, 0xDB, 0xC4, 0xC2
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # C4, C8 and CC are not frame headers
_DECODABLE = {0xC0, 0xC1, 0xC2}  # baseline, extended and progressive JPEG with Huffman coding
# In coded data, ff is followed by 00, a restart marker or a fill byte; anything else ends the scan.
_MARKER_IN_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_FILL = re.compile(rb"\xff*(?=\xff)")  # a marker may be preceded by any number of fill bytes ff
_ALONE = frozenset(range(0xD0, 0xD8)) | {0x01}  # markers without a length


@dataclass(frozen=True, slots=True)
class JpegFrame:
    """Size of the image in pixels, bytes after its end, and bytes of coded data."""

    height: int
    width: int
    components: int
    trailing_bytes: int
    coded_bytes: int
    progressive: bool


def frame(data: bytes, max_pixels: int = MAX_STORED_PIXELS) -> JpegFrame:
    """Read all markers of a JPEG file, without decoding. BadSample: not a JPEG, truncated, no frame header or
    several, an absurd size, or too many pixels.

    Finds truncation at any point: the end-of-image marker must follow the coded data. It cannot detect a
    changed byte inside the coded data; only a checksum can. A file of 1 MB takes 0.3 ms. Ingest passes
    `max_pixels`; readers of stored images do not.
    """
    if len(data) > MAX_JPEG_BYTES:
        raise BadSample("jpeg_too_large", f"JPEG of {len(data):,} bytes, cap {MAX_JPEG_BYTES:,}")
    if data[:2] != b"\xff\xd8":
        raise BadSample("not_a_jpeg", f"image begins with {data[:4].hex(' ') or 'nothing'}, not with ff d8")
    frame_header: tuple[int, int, int] | None = None
    scans, coded = 0, 0
    tables: set[int] = set()
    position = 2
    for _ in range(MAX_SEGMENTS):
        if fill := _FILL.match(data, position):
            position = fill.end()
        marker = data[position + 1] if position + 1 < len(data) else None
        if marker is None:
            raise BadSample(
                "jpeg_truncated", f"JPEG of {len(data):,} bytes ends without an end-of-image marker"
            )
        if data[position] != 0xFF or marker in (0x00, _SOI):
            raise BadSample("jpeg_broken", f"no JPEG marker at byte {position} of {len(data):,}")
        if marker == _EOI:
            break
        if marker in _ALONE:
            position += 2
            continue
        if position + 4 > len(data):
            raise BadSample("jpeg_truncated", f"JPEG ends inside a segment at byte {position}")
        (length,) = struct.unpack_from(">H", data, position + 2)
        end = position + 2 + length
        if length < 2:
            raise BadSample("jpeg_broken", f"segment of {length} bytes at byte {position}")
        if end > len(data):
            raise BadSample(
                "jpeg_truncated", f"JPEG of {len(data):,} bytes ends inside a segment that needs {end:,}"
            )
        if marker in _FRAMES:
            if frame_header is not None:
                raise BadSample("jpeg_broken", "JPEG has several frame headers")
            frame_header = _frame_header(data, position, length, max_pixels)
        tables.add(marker)
        if marker == _SOS:
            if frame_header is None:
                raise BadSample("jpeg_broken", "JPEG has coded data before its frame header")
            if not tables >= {_DQT, _DHT}:
                raise BadSample("jpeg_broken", "JPEG has coded data before its tables")
            start, end = end, _end_of_scan(data, end)
            scans, coded = scans + 1, coded + end - start
        position = end
    else:
        raise BadSample("jpeg_broken", f"JPEG has more than {MAX_SEGMENTS:,} segments")
    if frame_header is None or not scans:
        raise BadSample("jpeg_broken", f"JPEG has no {'coded data' if frame_header else 'frame header'}")
    height, width, components = frame_header
    return JpegFrame(
        height,
        width,
        components,
        trailing_bytes=len(data) - position - 2,
        coded_bytes=coded,
        progressive=_SOF2 in tables,
    )


def check_length(frame: JpegFrame) -> None:
    """BadSample if the coded data cannot be all of the image: fewer bits than blocks of 8 x 8 pixels need."""
    # A block takes at least two bits; a progressive file may leave most blocks to scans that are missing.
    blocks = (frame.height // 8) * (frame.width // 8)
    if not frame.progressive and 8 * frame.coded_bytes < 2 * blocks:
        raise BadSample(
            "jpeg_truncated",
            f"JPEG of {frame.width} x {frame.height} has only {frame.coded_bytes:,} bytes of coded data",
        )


def _frame_header(data: bytes, position: int, length: int, max_pixels: int) -> tuple[int, int, int]:
    marker = data[position + 1]
    if length < 8:
        raise BadSample("jpeg_broken", f"frame header of {length} bytes")
    bits, height, width, components = struct.unpack_from(">BHHB", data, position + 4)
    if length != 8 + 3 * components:
        raise BadSample("jpeg_broken", f"frame header of {length} bytes for {components} components")
    if marker not in _DECODABLE or bits != 8 or components not in (1, 3):
        raise BadSample(
            "jpeg_unsupported",
            f"JPEG of kind {marker:#x}, {bits} bits, {components} components; save it as a baseline or "
            "progressive JPEG with 8 bits and 1 or 3 components",
        )
    if not (height > 0 and width > 0 and height * width <= max_pixels):
        raise BadSample("absurd_size", pixels_message("JPEG says", width, height, max_pixels))
    return height, width, components


def _end_of_scan(data: bytes, position: int) -> int:
    """Offset of the first marker after coded data that is not a restart marker."""
    marker = _MARKER_IN_SCAN.search(data, position)
    if marker is None:
        raise BadSample("jpeg_truncated", f"JPEG of {len(data):,} bytes ends inside its coded data")
    return marker.start()


def decode(data: bytes | memoryview) -> npt.NDArray[np.uint8]:
    """RGB pixels, uint8 [height, width, 3]; BadSample: cut off or corrupt. MemoryError: 9 bytes for each
    pixel cannot be had.
    """
    return _decoded(data, (0, 0), None)


def check_decodes(data: bytes | memoryview) -> tuple[int, int]:
    """Height and width of a JPEG that `decode` decodes. Raises the errors of `decode`.

    The pixels are made at an eighth of the size, which reads all coded data: 8.5 ms instead of 15.4 for an
    image of 2000 x 1500 pixels.
    """
    _decoded(data, (1, 1), None)
    height, width = simplejpeg.decode_jpeg_header(data)[:2]
    return height, width


def decode_scaled(
    data: bytes | memoryview,
    stored: tuple[int, int],
    least: tuple[int, int],
    buffer: npt.NDArray[np.uint8] | None = None,
) -> tuple[npt.NDArray[np.uint8], int]:
    """RGB pixels, scaled down by the decoder's DCT to the smallest n/8 that is not below a size; and n.

    n is 1 to 4, or 8: libjpeg-turbo takes up to twice as long for 5/8 to 7/8 as for the whole image. A pixel
    covers 8/n x 8/n pixels of the file; the last row and column may lie partly outside the image.

    Sizes are height and width: `stored` in the file, `least` the smallest of the result. Images are never
    enlarged. `buffer` is memory for the result, as large as the file's pixels. Raises the errors of `decode`.
    """
    for n in range(1, 5):
        height, width = (-(-side * n // 8) for side in stored)
        if height >= least[0] and width >= least[1]:
            return _decoded(data, (height, width), buffer), n
    return _decoded(data, (0, 0), buffer), 8


def _decoded(
    data: bytes | memoryview, least: tuple[int, int], buffer: npt.NDArray[np.uint8] | None
) -> npt.NDArray[np.uint8]:
    height, width = least
    try:
        image: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(
            data, "RGB", min_height=height, min_width=width, buffer=buffer, strict=True
        )
    except ValueError as error:
        raise decoder_error(error) from None
    return image


def decoder_error(error: ValueError) -> BadSample | MemoryError:
    """What an error of simplejpeg means: a damaged file, or lack of memory, which is no fault of the file."""
    if any(reason in str(error).lower() for reason in ("insufficient memory", "memory allocation")):
        return MemoryError(str(error))
    return BadSample("jpeg_broken", f"JPEG does not decode: {error}")


def scaled_size(height: int, width: int, longer_side: int) -> tuple[int, int]:
    """Height and width of an image scaled so that the longer side is `longer_side`, rounded."""
    longest = max(height, width)
    return scaled_side(height, longest, longer_side), scaled_side(width, longest, longer_side)


def scale_down(data: bytes, stored: JpegFrame, longer_side: int, quality: int) -> tuple[bytes, int, int]:
    """Re-encode to at most `longer_side` pixels: bytes, height, width. Raises the errors of `decode`.

    An image that is not larger is returned unchanged. Pixels are averaged over areas, which avoids aliasing.
    Chroma subsampling is 4:2:0, as in SA-1B's files.
    """
    if max(stored.height, stored.width) <= longer_side:
        return data, stored.height, stored.width
    height, width = scaled_size(stored.height, stored.width, longer_side)
    try:
        image = cv2.resize(decode(data), (width, height), interpolation=cv2.INTER_AREA)
    except cv2.error as error:  # pixels and size are valid: memory is lacking
        raise MemoryError(str(error)) from None
    return simplejpeg.encode_jpeg(image, quality, "RGB", "420", fastdct=False), height, width


Pixels = npt.NDArray[np.uint8]
Edges = tuple[float, float, float, float]

_STEP = 4 / 3  # pixels; with larger steps between values, bilinear interpolation would skip pixels
_THREAD = threading.local()


def resample(image: Pixels, edges: Edges, rows: int, columns: int, target: Pixels | None = None) -> Pixels:
    """A window of an image, uint8 [height, width, 3], resized: uint8 [rows, columns, 3].

    Interpolates bilinearly. Where the window is reduced by more than 4/3, each pixel is the mean of n x m
    such values, which are at most 4/3 pixels apart. This takes half the time of OpenCV's INTER_AREA. A window
    whose top left corner is the corner of a pixel takes a third of the time of another one.

    `edges` are the top, bottom, left and right edge of the window, in pixels of the image: the last row and
    column may lie partly outside of it. `target` is for the result, unless the image has these pixels
    already.
    """
    top, bottom, left, right = edges
    n, m = ceil((bottom - top) / rows / _STEP), ceil((right - left) / columns / _STEP)
    try:
        if n == m == 1:
            return _interpolated(image, edges, rows, columns, target)
        made = _interpolated(image, edges, n * rows, m * columns, scratch("resample", n * rows, m * columns))
        return np.asarray(
            cv2.resize(made, (columns, rows), dst=target, interpolation=cv2.INTER_AREA), np.uint8
        )
    except cv2.error as error:  # pixels and sizes are valid: memory is lacking
        raise MemoryError(str(error)) from None


def scratch(purpose: str, height: int, width: int) -> Pixels:
    """A reused buffer of this thread, [height, width, 3]: new memory costs a page fault every 4 kB."""
    size = 3 * height * width
    buffer: Pixels | None = getattr(_THREAD, purpose, None)
    if buffer is None or len(buffer) < size:
        buffer = np.empty(size, np.uint8)
        setattr(_THREAD, purpose, buffer)
    return buffer[:size].reshape(height, width, 3)


def _interpolated(image: Pixels, edges: Edges, rows: int, columns: int, target: Pixels | None) -> Pixels:
    top, bottom, left, right = edges
    down, across = rows / (bottom - top), columns / (right - left)
    part = image[int(top) : ceil(bottom), int(left) : ceil(right)]
    height, width = part.shape[:2]
    starts_whole = top % 1 == left % 1 == 0
    if starts_whole and down == across == 1:
        return part
    size = round(height * down), round(width * across)
    if starts_whole and size != (height, width):  # OpenCV would copy an image of the same size
        # By a size instead of factors, pixels that lie partly outside would count as whole ones.
        made = cv2.resize(part, None, dst=target, fx=across, fy=down, interpolation=cv2.INTER_LINEAR)
        return np.asarray(made if size == (rows, columns) else made[:rows, :columns], np.uint8)
    # This maps the centre of a target pixel to the image.
    matrix = np.array([[1 / across, 0, left + 0.5 / across - 0.5], [0, 1 / down, top + 0.5 / down - 0.5]])
    how = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    edge = cv2.BORDER_REPLICATE
    made = cv2.warpAffine(image, matrix, (columns, rows), dst=target, flags=how, borderMode=edge)
    return np.asarray(made, np.uint8)
