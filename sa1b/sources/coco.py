"""A file in COCO's format and its folder of images, read as a stream of members: a pair for each image.

JPEGs keep their bytes. Other images (PNG, BMP, WebP, TIFF) are stored as JPEGs, because shards contain JPEGs.
An image that EXIF declares as rotated is turned upright if the annotated size is that of the upright image.
Everything that cannot be stored is a member with a reason: an image without a file, annotations of an image
that is not in the file, annotations without a mask.
"""

import hashlib
import io
import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sa1b.console import counted
from sa1b.errors import SourceError
from sa1b.names import image_name, member_name
from sa1b.sources.coco_file import CocoFile, CocoImage, CocoOptions
from sa1b.sources.coco_pair import coco_pair
from sa1b.sources.folder import fingerprint, stat_of
from sa1b.sources.tar_stream import Member

if TYPE_CHECKING:
    from PIL import Image

QUALITY = 95
MAX_IMAGE_BYTES = 256 << 20  # of an image file; that of a JPEG is checked later, like in every source
_ORIENTATION = 274  # EXIF
_ROTATED = (5, 6, 7, 8)  # values of the orientation for images whose stored rows are columns
_EIGHT_BITS = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"})


class _NoImageError(Exception):
    """An image that cannot be stored: reason and message."""


class CocoReader:
    """One pass over a file in COCO's format: `items()`, then `digests()` and `check_unchanged()`.

    Attributes:
        categories: those of the file, with all their fields, once the first item is there.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        options: CocoOptions,
        *,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        self.path, self._name, self._options = path, name, options
        self._progress = progress
        self.categories: list[dict[str, Any]] = []
        self._sha256 = hashlib.sha256()
        self._files: list[tuple[Path, bytes]] = []  # each file with its state when it was read

    def items(self) -> Iterator[Member]:
        """The jpg and the json of each image in the order of the file; refused annotations follow theirs."""
        self._read(self.path, keep=False)
        file = CocoFile(self.path, self._name, self._options)
        self.categories = file.listed
        for image in file.images:
            yield from self._image(file, image)
        for key, numbers in file.unlisted.items():
            found = [file.annotation(number) for number in numbers]
            message = f"the list 'images' of {self.path.name} has no image {str(key)[:60]!r}"
            yield _refused(f"image-{key}", "annotation_without_image", message, found)

    def digests(self) -> dict[str, str]:
        """sha256 of the file and of names and contents of the images."""
        return {"sha256": self._sha256.hexdigest()}

    def check_unchanged(self) -> None:
        """Check that no file has changed since it was read, by size, mtime and ctime.

        Raises:
            SourceError: a file was removed, replaced or written since.
        """
        for path, state in self._files:
            if fingerprint(path, stat_of(path)) != state:
                raise SourceError(f"{path}: changed while {self.path} was read; run the same command again")

    def close(self) -> None:
        """Does nothing: every file is closed once it has been read."""

    def _image(self, file: CocoFile, image: CocoImage) -> Iterator[Member]:
        annotations = [file.annotation(number) for number in image.annotations]
        own = image_name(image.image_id)
        try:
            path, data = self._content(file, image)
            jpeg, height, width, encoding = _jpeg(data, path, image.entry, self._options.max_pixels)
        except _NoImageError as error:
            reason, message = error.args
            yield _refused(own, reason, message, {"image": image.entry, "annotations": annotations})
            return
        provenance = {"format": "coco", "file": self.path.name, "image": image.entry, **encoding}
        pair = coco_pair(image.image_id, height, width, annotations, file.categories, provenance)
        yield Member(member_name(image.image_id, "jpg"), "file", 0, jpeg)
        yield Member(member_name(image.image_id, "json"), "file", 0, pair.text)
        for reason, lost in pair.refused.items():
            message = f"{len(lost):,} of {len(annotations):,} annotations of {image.name}: "
            yield _refused(f"{own}-{reason}", reason, message + pair.messages[reason], lost)

    def _content(self, file: CocoFile, image: CocoImage) -> tuple[Path, bytes]:
        path = file.file_of(image)
        if path is None:
            why = f"file_name {image.name!r} is not in {file.folder}" if image.name else "it has no file_name"
            raise _NoImageError("image_name", why)
        found = stat_of(path)
        if isinstance(found, OSError):
            raise _NoImageError("image_missing", f"{path}: {found.strerror}")
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_IMAGE_BYTES:
            why = f"{path}: not a file of at most {MAX_IMAGE_BYTES:,} bytes"
            raise _NoImageError("image_unreadable", why)
        try:
            return path, self._read(path)
        except OSError as error:
            raise _NoImageError("image_unreadable", f"{path}: {error.strerror}") from None

    def _read(self, path: Path, *, keep: bool = True) -> bytes:
        """The content of a file, which becomes part of the digest; without `keep` nothing is returned."""
        state = fingerprint(path, stat_of(path))
        self._sha256.update(f"{path.name} {path.stat().st_size}\n".encode("utf-8", "surrogateescape"))
        pieces = []
        with path.open("rb") as opened:
            while piece := opened.read(1 << 24):
                self._sha256.update(piece)
                if self._progress is not None:
                    self._progress(len(piece))
                if keep:
                    pieces.append(piece)
        self._files.append((path, state))
        return b"".join(pieces)


def _jpeg(
    data: bytes, path: Path, entry: dict[str, Any], max_pixels: int
) -> tuple[bytes, int, int, dict[str, Any]]:
    """The image as a JPEG, its height and width, and how it was encoded for the provenance."""
    import simplejpeg
    from PIL import Image, ImageOps

    annotated = entry.get("height"), entry.get("width")
    try:
        with Image.open(io.BytesIO(data)) as image:
            size = image.height, image.width
            kept = data[:2] == b"\xff\xd8"
            rotated = image.getexif().get(_ORIENTATION) in _ROTATED
            upright = rotated and annotated == size[::-1] and annotated != size
            _check_size(annotated, size[::-1] if upright else size)
            if kept and not upright:
                return data, *size, {}
            if size[0] * size[1] > max_pixels:
                why = f"{size[1]} x {size[0]} pixels; --max-pixels {size[0] * size[1]} takes it"
                raise _NoImageError("absurd_size", f"{path}: {why}")
            if why := not_convertible(image):
                raise _NoImageError("image_unsupported", f"{path}: {why}")
            turned = ImageOps.exif_transpose(image) if upright else image
            pixels = np.ascontiguousarray(np.asarray(turned.convert("RGB")))
            encoded = simplejpeg.encode_jpeg(pixels, QUALITY, "RGB", "420", fastdct=False)
            encoding = {"encoded": {"from": image.format, "quality": QUALITY, "turned_upright": upright}}
            return encoded, *pixels.shape[:2], encoding
    except (_NoImageError, MemoryError):
        raise
    except Exception as error:  # Pillow raises errors of many classes for damaged files
        raise _NoImageError("image_unreadable", f"{path}: not an image that can be read: {error}") from None


def not_convertible(image: "Image.Image") -> str:
    """Why an image cannot be converted to JPEG without other pixels; an empty string if it can."""
    frames = getattr(image, "n_frames", 1)
    if image.mode in _EIGHT_BITS and frames == 1:
        return ""
    found = f"{image.format} of mode {image.mode} with {counted(frames, 'frame')}"
    return f"{found}; save it as one image with 8 bits a channel"


def _check_size(annotated: tuple[Any, Any], size: tuple[int, int]) -> None:
    """Refuse an image whose size differs from the annotated one; a size that is not annotated is accepted."""
    height, width = annotated
    if (height or size[0], width or size[1]) != size:
        raise _NoImageError(
            "image_size",
            f"image of {size[1]} x {size[0]}, annotated as {str(width)[:20]} x {str(height)[:20]}",
        )


def _refused(name: str, reason: str, message: str, content: Any) -> Member:
    return Member(f"{name}.refused.json", "file", 0, json.dumps(content).encode(), message, reason)
