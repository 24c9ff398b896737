"""The images of a user (files, folders, dataset directories), and the output of their annotation.

    OUT/annotate.json             weights and settings, which are the same for every run on this folder
    OUT/annotate.jsonl            a line for each annotated image: its id, its file and its number of masks
    OUT/<name>-0000/sa_5.jpg      pairs, in folders of about 10,000 images, each a source of `sa1b reshard`
    OUT/<name>-0000/sa_5.json     written after the image, atomically: with it the image is complete

For a layer, there are no images, and annotate.jsonl also lists those that were refused.

Several processes may write to one folder, on one or several machines: no file depends on another process, and
two processes that write the same file write the same bytes.
"""

import io
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from sa1b.arguments import is_url
from sa1b.console import command
from sa1b.errors import BadSample, ShardError, UsageError
from sa1b.names import (
    ANNOTATE_FORMAT,
    ANNOTATE_LINES,
    ANNOTATE_SETTINGS,
    image_name,
    is_source_name,
    member_name,
    parse_member_name,
)
from sa1b.shards import jpeg
from sa1b.shards.dataset import Dataset, check_images, open_dataset
from sa1b.shards.manifest import DATASET
from sa1b.sources.coco import encode_jpeg
from sa1b.sources.folder import is_dataset, is_of_system
from sa1b.sources.tar_reader import holds_tar, is_tar_name
from sa1b.storage.atomic import (
    append,
    append_line,
    is_of_dead_process,
    json_bytes,
    process_of_temporary,
    temporary_path,
    write_whole,
)
from sa1b.storage.errors import StorageError
from sa1b.storage.open import open_store

_JPEG_ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif")
_ENDINGS = (
    *_JPEG_ENDINGS, ".png", ".webp", ".tif", ".tiff", ".bmp", ".gif", ".avif", ".heic", ".heif", ".jp2",
    ".ppm", ".pgm",
)  # fmt: skip
_CONVERTED = ("not_a_jpeg", "jpeg_unsupported")  # reasons that conversion to JPEG removes


@dataclass(frozen=True, slots=True)
class InputImage:
    name: str  # path, or the dataset directory and `sa_<id>`
    read: Callable[[], bytes]  # the bytes of its file
    image_id: int | None = None  # only of an image of a dataset directory
    # height and width of the source and of its masks, only of a stored image that is smaller
    source_size: Callable[[], tuple[int, int]] | None = None


@dataclass(slots=True)
class FoundImages:
    """The images in the paths of a user, in the order of the paths, and in folders by name, each once."""

    images: list[InputImage] = field(default_factory=list)
    others: int = 0  # files in the folders that are not images, by their extensions


def find_images(paths: Sequence[str], skip: Path) -> FoundImages:
    """Find all images in files, folders, dataset directories and URLs of dataset directories.

    Folders and links to folders are searched at any depth for files with the extension of an image, except
    hidden files and folders, those of the system, `skip`, dataset directories in folders, and folders with
    the output of an annotation. A path that is a file is always an image. UsageError: a path does not exist,
    is a tar, or contains no image.
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
    is_smaller = dataset.manifest["options"]["image_size"] is not None
    return [
        InputImage(
            f"{dataset.root}: {image_name(image_id)}",
            partial(_read_stored, dataset, row),
            image_id,
            partial(_source_size, dataset, row) if is_smaller else None,
        )
        for row, image_id in numbered
    ]


def _read_stored(dataset: Dataset, row: int) -> bytes:
    try:
        return dataset[row].jpeg
    except ShardError as error:
        raise BadSample("damaged", str(error)) from None


def _source_size(dataset: Dataset, row: int) -> tuple[int, int]:
    try:
        (stored,) = dataset.masks([row])
        return stored.height, stored.width
    except ShardError as error:
        raise BadSample("damaged", str(error)) from None


def _names(folder: Path, skip: Path) -> Iterator[Path]:
    """All visible files of a folder, by name; links to folders are followed, each folder once."""
    # The output of an annotation and the quarantine of a dataset directory have copies of images.
    visited = {os.path.realpath(folder), os.path.realpath(skip)}
    for parent, folders, names in os.walk(folder, followlinks=True):
        if Path(parent) != folder and is_dataset([*folders, *names]):
            folders.clear()
            continue
        below = {name: os.path.realpath(Path(parent) / name) for name in sorted(folders) if name[0] != "."}
        folders[:] = [
            name
            for name, real in below.items()
            if real not in visited and not is_of_system(name) and not Path(real, ANNOTATE_SETTINGS).exists()
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

    def pixels(self, size: tuple[int, int] | None = None) -> npt.NDArray[np.uint8]:
        """RGB, uint8 [height, width, 3], resized to a size; BadSample if the JPEG does not decode."""
        image = jpeg.decode(self.jpeg)
        return image if size is None else np.asarray(cv2.resize(image, size[::-1]), np.uint8)


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
            raise BadSample(
                error.reason, f"{error}; --quality 95 converts what Pillow reads to JPEG"
            ) from None
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


# These may differ between runs: the digest identifies weights.
_INFORMATION = ("folders", "name", "weights", "command")
IMAGES_PER_FOLDER = 10_000  # about as many as in a tar of SA-1B


@dataclass(slots=True)
class AnnotationFolder:
    out: Path
    folders: int  # number of folders of pairs
    name: str  # start of their names: that of the output folder in the first run
    image_ids: str  # origin of the ids, see `annotate`
    with_images: bool = True
    complete: set[int] = field(default_factory=set)  # ids of images with an annotation file
    # names by id of the images that have a line in annotate.jsonl
    listed: dict[int, set[str]] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)  # ids of images that cannot be annotated

    def path(self, image_id: int, ending: str) -> Path:
        folder = f"{self.name}-{image_id % self.folders:04d}"
        return self.out / folder / member_name(image_id, ending)

    def other_ids(self) -> str:
        """The remedy for an image with the id of another one."""
        other = "annotate these images into another folder"
        return other if self.image_ids == "content" else f"{other}, or all with --image-ids content"

    def is_complete(self, image_id: int, jpeg: bytes) -> bool:
        """Whether this image is annotated; BadSample if another image has this id."""
        if image_id not in self.complete:
            return False
        path = self.path(image_id, "jpg")
        if not path.exists():
            return False
        if path.read_bytes() == jpeg:
            return True
        if self.image_ids == "content":  # equal ids mean equal images
            raise BadSample(
                "id_taken",
                f"{path} has other bytes than this image; repeat the --quality of the first run, or, if the "
                "file is damaged, remove it and run the same command again",
            )
        raise BadSample("id_taken", f"{path} is another image with this id; {self.other_ids()}")

    def write(self, image_id: int, jpeg: bytes, document: bytes) -> None:
        """Write a pair, the annotation file last; OSError names the file."""
        for ending, data in (("jpg", jpeg), ("json", document))[not self.with_images :]:
            path = self.path(image_id, ending)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data, temporary_path(path))

    def list_image(self, image_id: int, name: str, masks: int | None) -> None:
        """Add a line for a complete image, unless it has one."""
        names = self.listed.setdefault(image_id, set())
        if name not in names:
            names.add(name)
            line: dict[str, Any] = {"image_id": image_id, "file": name}
            append_line(
                self.out / ANNOTATE_LINES, json.dumps(line if masks is None else line | {"masks": masks})
            )

    def refuse(self, image_id: int, name: str, reason: str) -> None:
        """Add a line for an image that cannot be annotated, unless it has one."""
        if image_id not in self.refused:
            self.refused.add(image_id)
            line = {"image_id": image_id, "file": name, "refused": reason}
            append_line(self.out / ANNOTATE_LINES, json.dumps(line))

    def scan(self) -> None:
        """Read which images are complete, listed and refused; remove temporary files of killed processes."""
        for path in (child for part in self.out.iterdir() if part.is_dir() for child in part.iterdir()):
            named = parse_member_name(path.name)
            if named is not None and named.ending == "json":
                self.complete.add(named.image_id)
            elif is_of_dead_process(process_of_temporary(path) or ""):
                path.unlink(missing_ok=True)
        try:
            line = b"\n"
            with (self.out / ANNOTATE_LINES).open("rb") as file:
                for line in file:
                    try:
                        listed = json.loads(line)
                        image_id, name = int(listed["image_id"]), str(listed["file"])
                        if "refused" in listed:
                            self.refused.add(image_id)
                        else:
                            self.listed.setdefault(image_id, set()).add(name)
                    except (ValueError, KeyError, TypeError):
                        continue  # a line truncated by a crash of the machine; the image gets a new line
            if not line.endswith(b"\n"):
                append(self.out / ANNOTATE_LINES, b"\n")
        except FileNotFoundError:
            pass


def open_folder(
    out: Path, settings: Mapping[str, Any], images: int, *, with_images: bool = True
) -> AnnotationFolder:
    """Create the folder, or open that of an earlier run with the same settings, which change the annotations.

    Temporary files of killed processes are removed. The number of folders follows from the number of images.
    UsageError: it has other content, or other settings.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: is a file; name a folder")
    name = out.resolve().name
    expected = {
        "format": ANNOTATE_FORMAT,
        "folders": max(1, -(-images // IMAGES_PER_FOLDER)),
        "name": name if is_source_name(name) else "annotated",
        **settings,
    }
    path = out / ANNOTATE_SETTINGS
    if not path.exists():
        in_use = out.exists() and any(child.name[0] != "." for child in out.iterdir())
        if in_use and not path.exists():  # another process may have started meanwhile
            raise UsageError(
                f"--out {out}: is not empty, and has no {ANNOTATE_SETTINGS}; name another folder"
            )
        open_store(out).put_if_absent(
            ANNOTATE_SETTINGS, json_bytes(expected)
        )  # one of several processes writes it
    try:
        stored = json.loads(path.read_bytes())
        folders, name = int(stored["folders"]), str(stored["name"])
        if folders < 1 or not is_source_name(name):
            raise ValueError(f"folders {folders}, name {name!r}")
        differing = [
            name for name in expected if name not in _INFORMATION and stored.get(name) != expected[name]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: damaged ({error!r}); annotate into another folder") from None
    if differing:
        changes = ", ".join(f"{name} {stored.get(name)}, now {expected[name]}" for name in differing)
        way = f"repeat the settings of {path}, or name another folder"
        if "command" in stored:  # of a layer
            way = f"run `{stored['command']}`, or choose another --name"
        raise UsageError(f"--out {out}: has annotations with other settings ({changes}); {way}")
    folder = AnnotationFolder(
        out=out, folders=folders, name=name, image_ids=str(settings["image_ids"]), with_images=with_images
    )
    folder.scan()
    return folder
