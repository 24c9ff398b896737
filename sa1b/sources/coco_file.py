"""A file of annotations in COCO's format: its images, and the annotations of each of them.

The file is mapped into memory, and an annotation is parsed when its image is read. The memory is 100
bytes for each annotation and 1 kB for each image: 46 MB for 254,000 annotations of 20,000 images with the
keys of LVIS, in a file of 234 MB, which takes 0.9 s to open. LVIS has five times as many. What is mapped is a
copy without a name in the folder for temporary files: a process that truncates a mapped file ends its readers
with SIGBUS.
"""

import codecs
import json
import mmap
import os
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from sa1b.arguments import BadValue
from sa1b.console import command
from sa1b.errors import SourceError
from sa1b.names import ID_END, parse_member_path, unicode_forms
from sa1b.report import first_names
from sa1b.sources.image_names import hashed_id
from sa1b.storage.atomic import naming_path

Ids = Literal["keep", "hash"]
_LISTS = ("images", "annotations", "categories")
_PHRASE = "text_input"  # key of an image and, in shards, of a mask
_NEAR = 30  # bytes before an error that are shown


@dataclass(frozen=True, slots=True)
class CocoOptions:
    """How files in COCO's format are read."""

    images: Path | None = None  # folder that each `file_name` is relative to; None: that of the file
    # "keep": those of the file; "hash": 53 bits of the SHA-256 of `<source>/<file_name>`, for ids that are
    # not integers or that another source has too
    ids: Ids = "keep"
    # a larger image is refused before it is decoded
    max_pixels: int = 1 << 24  # MAX_IMAGE_PIXELS of sa1b.shards


class _Key(msgspec.Struct):
    image_id: Any = None


class CocoDocument(msgspec.Struct):
    """The lists of a file in COCO's format. An annotation is parsed on request."""

    images: list[dict[str, Any]]
    annotations: list[msgspec.Raw]
    categories: list[Any] | None = None

    def annotation(self, number: int) -> Any:
        """Annotation `number` as parsed JSON."""
        return _decode(self.annotations[number])


@dataclass(frozen=True, slots=True)
class CocoImage:
    image_id: int  # in the dataset directory
    entry: dict[str, Any]  # the object in the list `images`
    name: str  # of its file, relative to the folder of images
    annotations: list[int]  # ascending positions in the list `annotations`
    # of a file with phrases, as SA-Co: those of the image, also without a mask, and that of each annotation
    phrases: list[str] | None = None
    further: list[dict[str, Any]] = field(default_factory=list)  # its entries after the first
    phrase_of: dict[int, str] = field(default_factory=dict)

    @property
    def size(self) -> tuple[Any, Any]:
        """Height and width as annotated, also as text; None where there is none."""
        sides = (self.entry.get("height"), self.entry.get("width"))
        height, width = (int(side) if isinstance(side, str) and side.isdecimal() else side for side in sides)
        return height, width


class CocoFile:
    """The images and annotations of a file. The source's name is part of the ids by hash.

    Attributes:
        folder: folder of the images.
        categories: id of a category -> its name.
        listed: the categories with integers as ids, with all their fields.
        images: the images in the order of the file.
        unlisted: id of an image that is not in the file -> positions of its annotations.

    Raises:
        SourceError: another format, an id of an image is not an integer, two images or categories with one
            id, or no image of the file exists.
    """

    def __init__(self, path: Path, source: str, options: CocoOptions) -> None:
        self.path = path
        self.folder = options.images or path.parent
        self._file = read_document(path)
        categories = [category for category in self._file.categories or [] if isinstance(category, dict)]
        self.listed = [category for category in categories if type(category.get("id")) is int]
        self.categories = dict[int | str, str]()
        for category in categories:
            if isinstance(key := category.get("id"), int | str):
                name = str(category.get("name", key))
                if self.categories.setdefault(key, name) != name:
                    raise SourceError(
                        f"{path}: the categories {self.categories[key]!r} and {name!r} have the id {key!r}, "
                        "so that the category of an annotation is unknown; give each category its own id"
                    )
        entries, rows = self._file.images, dict[Any, int]()
        firsts = list(range(len(entries)))  # row of the first entry with the id of each entry
        for row, entry in enumerate(entries):
            if isinstance(key := entry.get("id"), int | str) and rows.setdefault(key, row) != row:
                first = entries[rows[key]]
                names = self._name(first), self._name(entry)
                if names[0] != names[1] or first.get(_PHRASE) != entry.get(_PHRASE):
                    raise SourceError(
                        f"{path}: several entries of 'images' have the id {key!r} ({names[0]!r}, "
                        f"{names[1]!r}), so that the image or the phrase of its annotations is unknown; give "
                        "each entry an id of its own"
                    )
                firsts[row] = rows[key]
        groups, self.unlisted = self._groups(rows)
        # With phrases, an image has an entry for each of them, and its id is that of its name.
        with_phrases = any(isinstance(entry.get(_PHRASE), str) for entry in entries)
        ids = "hash" if with_phrases else options.ids
        images: dict[str | int, CocoImage] = {}
        for row, entry in enumerate(entries):
            name = self._name(entry)
            named = parse_member_path(f"{name.rpartition('.')[0]}.jpg") if with_phrases else None
            image_id = named.image_id if named is not None else _image_id(path, source, entry, name, ids)
            new = CocoImage(image_id, entry, name, [], [] if with_phrases else None)
            image = images.setdefault(name if with_phrases else firsts[row], new)
            if image is not new:
                image.further.append(entry)
            image.annotations.extend(groups[row])
            if isinstance(phrase := entry.get(_PHRASE), str) and image.phrases is not None:
                image.phrases.append(phrase)
                image.phrase_of.update(dict.fromkeys(groups[row], phrase))
        self.images = list(images.values())

    def annotation(self, number: int) -> Any:
        """Annotation `number` of the file as parsed JSON."""
        return self._file.annotation(number)

    def annotations(self, image: CocoImage) -> list[Any]:
        """The annotations of an image, with their phrases as `text_input`."""
        annotations = [self.annotation(number) for number in image.annotations]
        for number, annotation in zip(image.annotations, annotations, strict=True):
            if isinstance(annotation, dict) and number in image.phrase_of:
                annotation.setdefault(_PHRASE, image.phrase_of[number])
        return annotations

    def file_of(self, image: CocoImage) -> Path | None:
        """The path of the image's file; None if the folder has no file of this name."""
        if not image.name or "\0" in image.name:
            return None
        base = self.folder.absolute()
        # Lexically: links inside the folder are followed.
        spelled = str(image.entry.get("file_name", image.name))
        names = unicode_forms(image.name) | unicode_forms(spelled)
        paths = [Path(os.path.normpath(base / name)) for name in names]
        path = paths[0] if len(paths) == 1 else next(filter(os.path.exists, paths), paths[0])
        return path if path.is_relative_to(os.path.normpath(base)) else None

    def size(self) -> tuple[int, int]:
        """Bytes of the file and all images, and the newest mtime in ns. SourceError: no image exists."""
        stats = [self.path.stat()]
        for image in self.images:
            path = self.file_of(image)
            try:
                stats += [path.stat()] if path is not None else []
            except OSError:  # refused when the source is read
                continue
        if self.images and len(stats) == 1:
            if not any(image.name for image in self.images):
                raise SourceError(f"{self.path}: no image has a 'file_name'; add the names of the files")
            names = first_names([repr(image.name) for image in self.images], 3)
            raise SourceError(
                f"{self.path}: none of its images is in {self.folder} ({names}); "
                f"name their folder with --images of `{command('reshard')}`"
            )
        return sum(state.st_size for state in stats), max(state.st_mtime_ns for state in stats)

    def _groups(self, rows: dict[Any, int]) -> tuple[list[list[int]], dict[Any, list[int]]]:
        """Positions in `annotations`, for each row of `images` and for each id that is not in `images`."""
        unlisted: dict[Any, list[int]] = {}
        decoder = msgspec.json.Decoder(_Key)
        row_of = np.full(len(self._file.annotations), -1, np.int64)
        for number, raw in enumerate(self._file.annotations):
            try:
                key = decoder.decode(raw).image_id
                row_of[number] = rows[key]
            except (msgspec.DecodeError, KeyError, TypeError):
                entry = _decode(raw)
                key = entry.get("image_id") if isinstance(entry, dict) else None
                key = key if isinstance(key, int | str) else None
                unlisted.setdefault(key, []).append(number)
        order = np.argsort(row_of, kind="stable")
        ends = np.searchsorted(row_of[order], np.arange(len(self._file.images) + 1))
        groups = [part.tolist() for part in np.split(order, ends)[1:-1]]
        return groups, unlisted

    def _name(self, entry: dict[str, Any]) -> str:
        name = entry.get("file_name")
        if isinstance(name, str):
            return name.replace("\\", "/")  # Windows writes images\a.jpg
        # LVIS has the URL of each image in COCO: .../train2017/000000391895.jpg
        url = entry.get("coco_url")
        parts = url.split("/")[-2:] if isinstance(url, str) else []
        return parts[-1] if parts and not (self.folder / "/".join(parts)).exists() else "/".join(parts)


def _decode(raw: msgspec.Raw) -> Any:
    """Parsed JSON; a number beyond float64, such as 1e999, is infinite, and refused where it is used."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return json.loads(bytes(raw))


def read_document(path: Path) -> CocoDocument:
    """The lists of a file in COCO's format; SourceError if it has another one."""
    with path.open("rb") as file, tempfile.TemporaryFile() as copy, naming_path(Path(tempfile.gettempdir())):
        shutil.copyfileobj(file, copy, 1 << 24)
        copy.flush()
        if not copy.tell():
            raise SourceError(f"{path}: an empty file; pass a file of annotations in COCO's format")
        data = mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        start = len(codecs.BOM_UTF8) if data[:3] == codecs.BOM_UTF8 else 0  # editors on Windows write it
        parsed = msgspec.json.decode(memoryview(data)[start:], type=CocoDocument)
        _check_keys(path, data)
        return parsed
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        why = f"{error}{_near(data, str(error))}"
        raise SourceError(
            f"{path}: not annotations in COCO's format ({why}); the file must be a JSON object with the "
            "lists 'images' and 'annotations', or, for a layer, a list of results. For extracted pairs of "
            "SA-1B, name their folder"
        ) from None


def read_results(path: Path) -> list[Any]:
    """The entries of a file of results in COCO's format. Raises the errors of `read_document`."""
    try:
        results = json.loads(path.read_bytes(), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not JSON ({error}); correct it or copy it again") from None
    if not isinstance(results, list):
        raise SourceError(f"{path}: not a list; pass results in COCO's format")
    return results


def _refuse(constant: str) -> None:
    raise BadValue(f"{constant} is not JSON: write null")


def _check_keys(path: Path, data: mmap.mmap) -> None:
    """Refuse a file with two lists of the same name, of which a parser would silently keep only the last."""
    for key in _LISTS:
        if len(re.findall(rb'"%s"\s*:' % key.encode(), data)) > 1:  # else it cannot be there twice
            pairs = json.loads(data[:], object_pairs_hook=list)
            if [name for name, _ in pairs].count(key) > 1:
                raise SourceError(f"{path}: has the key {key!r} more than once; join these lists into one")


def _near(data: mmap.mmap, message: str) -> str:
    """The text at the byte that a message of the parser names, with the reason if it is NaN."""
    if not (match := re.search(r"\(byte (\d+)\)", message)):
        return ""
    at = int(match[1])
    text = data[max(0, at - _NEAR) : at + _NEAR // 2].decode(errors="replace")
    number = re.match(rb"NaN|Infinity", data[at : at + 8]) is not None
    why = ". NaN and Infinity are not JSON: write null" if number else ""
    return f" near {text!r}{why}"


def _image_id(path: Path, source: str, entry: dict[str, Any], name: str, ids: Ids) -> int:
    """The id of an image in the dataset directory."""
    if ids == "hash":
        return hashed_id(source, name)
    image_id = entry.get("id")
    if type(image_id) is not int or not 0 <= image_id < ID_END:
        raise SourceError(
            f"{path}: the image {name!r} has the id {str(image_id)[:60]!r}, and ids must be integers from 0 "
            "to 2**63 - 1; take ids that are hashes of the file names with --image-ids hash"
        )
    return image_id
