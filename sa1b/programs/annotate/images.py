"""The images of a user: files, folders and dataset directories, and the images that can be annotated."""

import io
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from sa1b.arguments import is_url
from sa1b.console import command
from sa1b.errors import BadSample, ShardError, UsageError
from sa1b.names import image_name
from sa1b.programs.annotate.folder import SETTINGS
from sa1b.shards import jpeg
from sa1b.shards.dataset import Dataset, check_images, open_dataset
from sa1b.shards.manifest import DATASET
from sa1b.sources.coco import encode_jpeg
from sa1b.sources.tar_reader import holds_tar, is_tar_name
from sa1b.storage.errors import StorageError

_JPEG_ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif")
_ENDINGS = (
    *_JPEG_ENDINGS, ".png", ".webp", ".tif", ".tiff", ".bmp", ".gif", ".avif", ".heic", ".heif", ".jp2",
    ".ppm", ".pgm",
)  # fmt: skip
_CONVERTED = ("not_a_jpeg", "jpeg_unsupported")  # reasons that conversion to JPEG removes


@dataclass(frozen=True, slots=True)
class InputImage:
    """An image to annotate."""

    name: str  # path, or the dataset directory and `sa_<id>`
    read: Callable[[], bytes]  # the bytes of its file
    image_id: int | None = None  # only of an image of a dataset directory


@dataclass(slots=True)
class FoundImages:
    """The images in the paths of a user, in the order of the paths, and in folders by name, each once."""

    images: list[InputImage] = field(default_factory=list)
    others: int = 0  # files in the folders that are not images, by their extensions


def find_images(paths: Sequence[str], skip: Path) -> FoundImages:
    """Find all images in files, folders, dataset directories and URLs of dataset directories.

    Folders and links to folders are searched at any depth for files with the extension of an image, except
    hidden files and folders, `skip`, and folders with the output of an annotation. A path that is a file is
    always an image. UsageError: a path does not exist, is a tar, or contains no image.
    """
    images_of_paths = FoundImages()
    known_names: set[str] = set()
    for path in paths:
        if is_url(path) or (Path(path) / DATASET).exists():
            dataset = open_dataset(path)
            check_images(dataset, "the model")
            images = stored_images(dataset, range(len(dataset)))
        elif Path(path).is_file() and (is_tar_name(path) or holds_tar(Path(path))):
            raise UsageError(
                f"{path}: a tar; extract its images to a folder, or pass the dataset directory that "
                f"`{command('reshard')}` made of it"
            )
        elif Path(path).is_file():
            images = list(_files_of([Path(path)]))
        elif Path(path).is_dir():
            if Path(path).resolve().is_relative_to(skip.resolve()):
                raise UsageError(f"{path}: is inside --out {skip}; name another folder for the annotations")
            names = list(_names(Path(path), skip))
            images = list(_files_of([name for name in names if name.suffix.lower() in _ENDINGS]))
            images_of_paths.others += len(names) - len(images)
        else:
            raise UsageError(f"{path}: no such file or folder; name images, or folders that hold them")
        if not images:
            raise UsageError(f"{path}: holds no image; name image files, or folders that hold them")
        images_of_paths.images += [image for image in images if _is_new(image, known_names)]
    return images_of_paths


def stored_images(dataset: Dataset, rows: Iterable[int]) -> list[InputImage]:
    """The images of some rows of a dataset directory."""
    numbered = ((int(row), int(dataset.table.image_id[row])) for row in rows)
    return [
        InputImage(f"{dataset.root}: {image_name(image_id)}", partial(_read_stored, dataset, row), image_id)
        for row, image_id in numbered
    ]


def _read_stored(dataset: Dataset, row: int) -> bytes:
    try:
        return dataset[row].jpeg
    except ShardError as error:
        raise BadSample("damaged", str(error)) from None


def _names(folder: Path, skip: Path) -> Iterator[Path]:
    """All visible files of a folder, by name; links to folders are followed, each folder once."""
    # The output of an annotation has copies of images, and is skipped.
    visited = {os.path.realpath(folder), os.path.realpath(skip)}
    for parent, folders, names in os.walk(folder, followlinks=True):
        below = {name: os.path.realpath(Path(parent) / name) for name in sorted(folders) if name[0] != "."}
        folders[:] = [
            name for name, real in below.items() if real not in visited and not Path(real, SETTINGS).exists()
        ]
        visited.update(below.values())
        yield from (Path(parent) / name for name in sorted(names) if name[0] != ".")


def _files_of(paths: Sequence[Path]) -> Iterator[InputImage]:
    for path in paths:
        yield InputImage(str(path), partial(_read_file, path))


def _read_file(path: Path) -> bytes:
    if not stat.S_ISREG(path.stat().st_mode):  # reading a named pipe would wait forever
        raise BadSample("unreadable", "not a file but a device, pipe or folder")
    return path.read_bytes()


def _is_new(image: InputImage, names: set[str]) -> bool:
    """Whether no earlier image has this name; the name is added to `names`."""
    before = len(names)
    names.add(os.path.realpath(image.name) if image.image_id is None else image.name)
    return len(names) > before


@dataclass(frozen=True, slots=True, eq=False)
class ReadImage:
    """An image that can be annotated: bytes of its file, and its JPEG, the same bytes unless converted."""

    source: bytes
    jpeg: bytes
    height: int
    width: int

    def pixels(self) -> npt.NDArray[np.uint8]:
        """RGB, uint8 [height, width, 3]; BadSample if the JPEG does not decode."""
        return jpeg.decode(self.jpeg)


def read_image(image: InputImage, max_pixels: int, quality: int | None) -> ReadImage:
    """Read an image and check its header. Images in other formats become JPEGs of this quality, 1 to 100.

    BadSample: the file cannot be read, is damaged, too large, or no JPEG without `quality`. StorageError: the
    store of a dataset directory failed.
    """
    try:
        source = image.read()
    except StorageError:
        raise
    except OSError as error:
        raise BadSample("unreadable", f"cannot be read: {error.strerror or error}") from None
    data = source
    try:
        frame = jpeg.frame(data, max_pixels)
    except BadSample as error:
        if error.reason not in _CONVERTED:
            raise
        if quality is None:
            raise BadSample(error.reason, f"{error}; --quality 95 converts such images to JPEG") from None
        data = _converted(source, max_pixels, quality)
        frame = jpeg.frame(data, max_pixels)
    jpeg.check_length(frame)
    return ReadImage(source, data, frame.height, frame.width)


def _converted(source: bytes, max_pixels: int, quality: int) -> bytes:
    """Encode an image that Pillow can read as a JPEG, see `encode_jpeg`."""
    try:
        with Image.open(io.BytesIO(source)) as image:
            return encode_jpeg(image, quality, max_pixels)
    except BadSample:
        raise
    except UnidentifiedImageError:
        raise BadSample("not_an_image", "neither JPEG nor another format that Pillow reads") from None
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise BadSample("image_broken", f"image does not decode: {error}") from None
