"""A file in COCO's format and its folder of images, read as a stream of members: a pair for each image.

JPEGs keep their bytes. Other images (PNG, BMP, WebP, TIFF) are stored as JPEGs, because shards contain JPEGs.
An image that EXIF declares as rotated is turned upright if the annotated size is that of the upright image.
What cannot be stored becomes a member with the reason of its refusal: an image without a file, annotations of
an image that is not in the file, annotations without a mask.
"""

import hashlib
import io
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sa1b.console import counted
from sa1b.errors import BadSample, SourceError
from sa1b.names import image_name, member_name, parse_member_path
from sa1b.sources.coco_file import CocoFile, CocoImage, CocoOptions
from sa1b.sources.coco_pair import coco_pair, json_text
from sa1b.sources.folder import fingerprint, stat_of
from sa1b.sources.source import Ignore, Progress, Source, SourceFormat, SourceReading
from sa1b.sources.tar_stream import Member

if TYPE_CHECKING:
    from PIL import Image

QUALITY = 95
MAX_IMAGE_BYTES = 256 << 20  # of an image file; that of a JPEG is checked later, like in every source
_ORIENTATION = 274  # EXIF
_ROTATED = (5, 6, 7, 8)  # values of the orientation for images whose stored rows are columns
_EIGHT_BITS = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"})


class CocoPass(SourceReading):
    """One pass over a file in COCO's format and its images."""

    def __init__(
        self, path: Path, name: str, options: CocoOptions, *, progress: Progress | None = None
    ) -> None:
        self.path, self._name, self._options = path, name, options
        self._progress = progress
        self._sha256 = hashlib.sha256()
        self._files: list[tuple[Path, bytes]] = []  # each file with its state when it was read
        self._members = self._all()

    def items(self) -> Iterator[Member]:
        """The jpg and the json of each image in the order of the file; refused annotations follow theirs."""
        return self._members

    def _all(self) -> Iterator[Member]:
        self._read(self.path, keep=False)
        file = CocoFile(self.path, self._name, self._options)
        self.categories = file.listed
        for image in file.images:
            yield from self._image(file, image)
        for key, numbers in file.unlisted.items():
            annotations = [file.annotation(number) for number in numbers]
            message = f"the list 'images' of {self.path.name} has no image {str(key)[:60]!r}"
            yield _refused(f"image-{key}", "annotation_without_image", message, annotations)

    def digests(self) -> dict[str, str]:
        """sha256 of the file and of names and contents of the images."""
        for _ in self._members:
            pass
        return {"sha256": self._sha256.hexdigest()}

    def check_unchanged(self) -> None:
        """SourceError if a file was removed, replaced or written since, by size, mtime and ctime."""
        for path, state in self._files:
            if fingerprint(path, stat_of(path)) != state:
                raise SourceError(f"{path}: changed while {self.path} was read; run the same command again")

    def _image(self, file: CocoFile, image: CocoImage) -> Iterator[Member]:
        annotations = file.annotations(image)
        name = image_name(image.image_id)
        further = {"further_entries": image.further} if image.further else {}
        try:
            path, data = self._content(file, image)
            jpeg, height, width, encoding = as_jpeg(data, path, image.size, self._options.max_pixels)
        except BadSample as error:
            content = {"image": image.entry, **further, "annotations": annotations}
            yield _refused(name, error.reason, str(error), content)
            return
        provenance = {"format": "coco", "file": self.path.name, "image": image.entry, **encoding}
        if image.phrases is not None:
            provenance |= {"texts": list(dict.fromkeys(image.phrases)), **further}
        pair = coco_pair(
            image.image_id,
            height,
            width,
            annotations=annotations,
            categories=file.categories,
            provenance=provenance,
        )
        for ending, data in (("jpg", jpeg), ("json", pair.text)):
            yield Member(member_name(image.image_id, ending), "file", 0, data, origin=image.name)
        for reason, lost in pair.refused.items():
            message = f"{len(lost):,} of {len(annotations):,} annotations of {image.name}: "
            yield _refused(f"{name}-{reason}", reason, message + pair.messages[reason], lost)

    def _content(self, file: CocoFile, image: CocoImage) -> tuple[Path, bytes]:
        path = file.file_of(image)
        if path is None:
            why = f"file_name {image.name!r} is not in {file.folder}" if image.name else "it has no file_name"
            raise BadSample("image_name", why)
        state = stat_of(path)
        if isinstance(state, OSError):
            raise BadSample("image_missing", f"{path}: {state.strerror}")
        if not stat.S_ISREG(state.st_mode) or state.st_size > MAX_IMAGE_BYTES:
            raise BadSample("image_unreadable", f"{path}: not a file of at most {MAX_IMAGE_BYTES:,} bytes")
        try:
            return path, self._read(path)
        except OSError as error:
            raise BadSample("image_unreadable", f"{path}: {error.strerror}") from None

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


def as_jpeg(
    data: bytes, path: Path | str, annotated: tuple[Any, Any], max_pixels: int
) -> tuple[bytes, int, int, dict[str, Any]]:
    """The image as a JPEG, its height and width, and how it was encoded for the provenance.

    A JPEG keeps its bytes, unless its EXIF orientation makes it an image of the annotated height and width.
    BadSample: it is no image, has another size than annotated, or cannot become a JPEG.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            size = image.height, image.width
            rotated = image.getexif().get(_ORIENTATION) in _ROTATED
            upright = rotated and annotated == size[::-1] and annotated != size
            _check_size(annotated, size[::-1] if upright else size)
            if data[:2] == b"\xff\xd8" and not upright:
                return data, *size, {}
            encoding = {"from": image.format, "quality": QUALITY, "turned_upright": upright}
            encoded = encode_jpeg(image, QUALITY, max_pixels, upright=upright)
            return encoded, *(size[::-1] if upright else size), {"encoded": encoding}
    except BadSample as error:
        raise BadSample(error.reason, f"{path}: {error}") from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises errors of many classes for damaged files
        why = "its format is unknown" if isinstance(error, UnidentifiedImageError) else str(error)
        raise BadSample("image_unreadable", f"{path}: not an image that can be read: {why}") from None


def encode_jpeg(image: "Image.Image", quality: int, max_pixels: int, *, upright: bool = False) -> bytes:
    """An image of another format as a JPEG with 4:2:0 chroma subsampling; alpha is dropped.

    The image is opened and not decoded yet; one of more than `max_pixels` is refused before. `upright` turns
    it as its EXIF orientation says. BadSample: the image is too large, or the JPEG would change its pixels.
    OSError, SyntaxError or ValueError: it does not decode.
    """
    import simplejpeg
    from PIL import ImageOps

    if not 0 < (count := image.width * image.height) <= max_pixels:
        why = f"{image.width} x {image.height} pixels; --max-pixels {count} takes it"
        raise BadSample("absurd_size", why)
    if why := _not_convertible(image):
        raise BadSample("image_unsupported", why)
    turned = ImageOps.exif_transpose(image) if upright else image
    pixels = np.ascontiguousarray(np.asarray(turned.convert("RGB")))
    return bytes(simplejpeg.encode_jpeg(pixels, quality, "RGB", "420", fastdct=False))


def _not_convertible(image: "Image.Image") -> str:
    """Why an image cannot be converted to JPEG without other pixels; an empty string if it can."""
    frames = getattr(image, "n_frames", 1)
    if image.mode in _EIGHT_BITS and frames == 1:
        return ""
    description = f"{image.format} of mode {image.mode} with {counted(frames, 'frame')}"
    return f"{description}; save it as one image with 8 bits a channel"


def _check_size(annotated: tuple[Any, Any], size: tuple[int, int]) -> None:
    """Refuse an image whose size differs from the annotated one; a size that is not annotated is accepted."""
    height, width = annotated
    if (height or size[0], width or size[1]) != size:
        raise BadSample(
            "image_size",
            f"image of {size[1]} x {size[0]}, annotated as {repr(width)[:20]} x {repr(height)[:20]}",
        )


def _refused(name: str, reason: str, message: str, content: Any) -> Member:
    data = json_text(content).encode()
    return Member(f"{name}.refused.json", "file", 0, data, detail=message, reason=reason)


@dataclass(frozen=True)
class CocoFormat(CocoOptions, SourceFormat):
    """Files in COCO's format, which are sources only if the user names them."""

    kind = "coco"
    ending = ".json"

    def takes(self, path: Path) -> bool:
        """x.json, but not sa_5.json, the member of a pair."""
        return path.name.lower().endswith(self.ending) and parse_member_path(path.name) is None

    def name_of(self, path: Path) -> str:
        return path.stem

    def measure(self, path: Path, name: str, ignore: Ignore) -> tuple[int, int]:
        return CocoFile(path, name, self).size()

    def open(self, source: Source, *, md5: bool, progress: Progress | None) -> SourceReading:
        return CocoPass(source.path, source.name, self, progress=progress)

    def reading(self, source: Source) -> dict[str, Any]:
        return {"image_ids": self.ids, "images": self.images is not None}
