"""Samples and datasets in notebooks and image viewers, with their masks drawn over the images.

A dataset is shown as a contact sheet: a few of its images, always the same ones, evenly spread over its image
ids. The cell of a sample that cannot be read shows the reason. PIL is imported on first use.

Masks are resized on their runs to the pixels of the displayed image, so that a contour is the exact edge of
the mask at that size. Larger masks are drawn first and smaller ones over them. The colour of a mask depends
on its number in that order, and is the same in the gallery. One mask is in memory at a time, and a JPEG is
decoded at a fraction of its size where it is larger than what is displayed.
"""

import base64
import colorsys
import os
import sys
import textwrap
from collections.abc import Callable, Sequence, Sized
from html import escape
from importlib import import_module
from io import BytesIO
from typing import TYPE_CHECKING, Any, Protocol

import cv2
import numpy as np
import numpy.typing as npt

from sa1b.errors import Sa1bError, UsageError
from sa1b.masks import geometry, raster
from sa1b.masks.runs import Runs
from sa1b.shards import jpeg
from sa1b.shards.jpeg import resample

if TYPE_CHECKING:
    from PIL.Image import Image

SHEET_IMAGES = 6  # images in a contact sheet
SHEET_DEADLINE = 10.0  # seconds that a contact sheet waits for a remote read
SAMPLE_SIDE = 640  # pixels of the longer side of a sample in a notebook
_CELL_SIDE, _COLUMNS, _GAP, _LINE = 240, 3, 8, 18  # pixels; the columns of the sheet are fixed
_UNREADABLE = (Sa1bError, OSError, ValueError, IndexError, MemoryError)
Pixels = npt.NDArray[np.uint8]
_OPACITY = 0.4  # opacity of a mask's colour; its contour is opaque
_CROSS = np.array([[0, 1, 0], [1, 1, 1], [0, 1, 0]], np.uint8)  # a pixel and its four neighbours


class Pictured(Protocol):
    """What a picture is made of: a sample."""

    @property
    def annotations(self) -> Sized: ...

    def overlay(self, *, max_side: int = ...) -> "Image": ...


class Displayed:
    """The methods that notebooks call to show an object. A subclass implements `_preview`."""

    __slots__ = ()

    def _preview(self) -> "Image":
        """The image that a notebook shows, RGB; never raises for a damaged or unavailable file."""
        raise NotImplementedError

    def _repr_png_(self) -> bytes:
        return encoded(self._preview(), "PNG")

    def _repr_html_(self) -> str:
        return _html(self._preview(), repr(self))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """PNG and HTML from one preview: IPython requests every form of an object."""
        image = self._preview()
        return {
            "text/plain": repr(self),
            "text/html": _html(image, repr(self)),
            "image/png": base64.b64encode(encoded(image, "PNG")).decode("ascii"),
        }


def encoded(image: "Image", kind: str) -> bytes:
    """An image as the bytes of a "PNG" or "JPEG" file."""
    file = BytesIO()
    image.save(file, kind)
    return file.getvalue()


def _html(image: "Image", caption: str) -> str:
    data = base64.b64encode(encoded(image, "JPEG")).decode("ascii")
    return (
        f'<figure style="margin:0"><img alt="{escape(caption)}" width="{image.width}" '
        f'height="{image.height}" style="max-width:100%;height:auto" src="data:image/jpeg;base64,{data}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def preview(read: Callable[[], Pictured], side: int) -> tuple["Image", str]:
    """An image of at most `side` pixels with its masks and a line of text, or the error of `read`."""
    words = ""
    try:
        sample = read()
        words = f"{len(sample.annotations):,} masks"
        return sample.overlay(max_side=side), words
    except _UNREADABLE as error:
        return _notice(str(error) or type(error).__name__, side), words or "unreadable"


def contact_sheet(reads: Sequence[tuple[int, Callable[[], Pictured]]], images: int) -> "Image":
    """Some of a dataset's images with their masks, in rows of three: ids, and functions that read them."""
    from PIL import Image, ImageDraw

    cells = [(image_id, *preview(read, _CELL_SIDE)) for image_id, read in reads]
    rows = [cells[i : i + _COLUMNS] for i in range(0, len(cells), _COLUMNS)]
    heights = [max(image.height for _, image, _ in row) + _LINE + _GAP for row in rows]
    width = _COLUMNS * (_CELL_SIDE + _GAP) + _GAP
    sheet = Image.new("RGB", (width, sum(heights) + _LINE + 2 * _GAP), "white")
    pen, top = ImageDraw.Draw(sheet), _GAP
    for row, height in zip(rows, heights, strict=True):
        for column, (image_id, image, words) in enumerate(row):
            left = _GAP + column * (_CELL_SIDE + _GAP)
            sheet.paste(image, (left, top))
            _write(pen, (left, top + image.height + 2), f"{image_id}: {words}")
        top += height
    more = images - len(cells)
    _write(pen, (_GAP, top), f"{len(cells):,} of {images:,} images" + (f"; {more:,} more" if more else ""))
    return sheet


def _notice(text: str, side: int) -> "Image":
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (side, side * 3 // 4), (225, 225, 225))
    lines = textwrap.wrap(text, max(side // 7, 8))[: image.height // _LINE - 1]
    pen = ImageDraw.Draw(image)
    for number, line in enumerate(lines):
        _write(pen, (6, 6 + number * _LINE), line)
    return image


def _write(pen: Any, place: tuple[int, int], text: str) -> None:
    from PIL import ImageFont

    pen.text(place, text, fill="black", font=ImageFont.load_default(size=12))


def show(image: "Image", title: str) -> None:
    """Show an image in the notebook or PIL's viewer; UsageError: no display, or no such program."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if getattr(shell, "kernel", None) is not None:  # IPython in a terminal cannot show images
        import_module("IPython.display").display(image)
        return
    from PIL import ImageShow

    instead = "save it instead: sample.overlay().save('sample.png')"
    has_display = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    if sys.platform not in ("darwin", "win32") and not has_display:
        raise UsageError(f"show(): this machine has no display (DISPLAY is not set); {instead}")
    if not ImageShow.show(image, title=title):
        raise UsageError(f"show(): no image viewer is installed; install one (xdg-utils), or {instead}")


def largest_first(runs: Runs) -> npt.NDArray[np.int64]:
    """Mask indices by area in pixels, largest first, int64 [N]: the order of drawing."""
    return np.argsort(-geometry.area(runs), kind="stable").astype(np.int64)


def display_size(height: int, width: int, longer_side: int) -> tuple[int, int]:
    """Height and width of the displayed image: reduced if the longer side exceeds a limit."""
    if max(height, width) <= longer_side:
        return height, width
    return jpeg.scaled_size(height, width, longer_side)


def scaled(pixels: Pixels, longer_side: int) -> Pixels:
    """An RGB image at its `display_size`, uint8 [h, w, 3]."""
    height, width = pixels.shape[:2]
    return resample(pixels, (0, height, 0, width), *display_size(height, width, longer_side))


def decode_for_display(data: bytes, longer_side: int) -> Pixels:
    """Decode a JPEG at its `display_size`: RGB uint8 [h, w, 3]; BadSample as `sa1b.shards.jpeg.frame`."""
    # The decoder's DCT scales down first: memory and time grow with the displayed pixels, not with those of
    # the file, up to a reduction of 8.
    header = jpeg.frame(data)
    stored = header.height, header.width
    size = display_size(*stored, longer_side)
    pixels, eighths = jpeg.decode_scaled(data, stored, size)
    height, width = (side * eighths / 8 for side in stored)
    return resample(pixels, (0, height, 0, width), *size)


def overlay(pixels: Pixels, runs: Runs) -> Pixels:
    """A copy of an image, RGB uint8 [h, w, 3] at any size, with masks of the source image drawn over it.

    Each pixel is tinted in the colour of the smallest mask that covers it, with contours of one pixel inside
    the masks, also at the edge of the image. Masks are resized to h x w, one at a time.
    """
    height, width = pixels.shape[:2]
    top = np.zeros((height, width), np.int32)  # number, from 1, of the last mask drawn at each pixel
    contour = np.zeros((height, width), np.bool_)
    buffer = np.empty((1, height, width), np.uint8)
    for number, mask in enumerate(largest_first(runs).tolist(), 1):
        (dense,) = raster.rasterize(runs, height, width, select=[mask], out=buffer)
        inside = dense.view(np.bool_)
        top[inside] = number
        # A mask hides the contours of the masks below it.
        edge = cv2.erode(dense, _CROSS, borderType=cv2.BORDER_CONSTANT, borderValue=0)
        contour[inside] = (dense != edge)[inside]
    colours = np.array([(0.0, 0.0, 0.0), *map(colour, range(len(runs)))], np.float32)
    share = np.where(contour, 1.0, np.where(top > 0, _OPACITY, 0.0)).astype(np.float32)[:, :, None]
    mixed = pixels * (1 - share) + colours[top] * share
    return np.rint(mixed).astype(np.uint8)


def colour(number: int) -> tuple[float, float, float]:
    """RGB, 0 to 255, of mask `number` in the order of drawing: hues at golden angles, as in the gallery."""
    hue = (number * 137.508 + 20) % 360 / 360
    red, green, blue = colorsys.hls_to_rgb(hue, 0.58, 0.85)
    return 255 * red, 255 * green, 255 * blue
