"""Images without annotations as pairs: each image with an annotation file that has no masks.

    photos/cats/1.jpg, photos/cats/1.txt        a folder with images at any depth is one source
    train-000000.tar                            the images of a tar with any names, such as one of webdataset
    train-00000-of-00011.parquet                the images of a column, as the library `datasets` writes them

The id of sa_<id>.jpg is the number in its name. Any other image has 53 bits of the SHA-256 of
`<source>/<name in the source>`, so that the same source with the same name always gives the same ids. A row
has the id of its column image_id, or the name of its column file_name. JPEGs keep their bytes; others become
JPEGs.

The texts of an image are stored with it: those of 1.txt, 1.caption.txt and 1.json beside 1.jpg, in a tar
without another image between them, or those of columns of the row. In JSON and Parquet, TEXT_FIELDS
names the fields. Further fields of them, other columns, and other small files such as 1.cls are kept as
`fields` of the image: numbers and short strings. Anything else is left out and counted.
"""

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sa1b.errors import BadSample, SourceError
from sa1b.names import ID_END, member_name, parse_member_path
from sa1b.report import first_names
from sa1b.sources.coco import as_jpeg
from sa1b.sources.coco_pair import image_entry
from sa1b.sources.folder import FolderFormat, below, is_pair_name, listed
from sa1b.sources.image_names import hashed_id, is_image_name
from sa1b.sources.source import Ignore, Progress, Source, SourceFormat, SourceReading
from sa1b.sources.stored_file import open_stored
from sa1b.sources.tar_reader import TarFormat
from sa1b.sources.tar_stream import MAX_MEMBER_BYTES, Damage, Member
from sa1b.storage.atomic import sha256_of

_BINARY = ("image", "jpg", "jpeg", "bytes", "image_bytes")  # names of columns
_ROWS = 64  # that are read at a time
_PIECE = 1 << 20  # bytes of a file at a URL
TEXT_FIELDS = ("caption", "captions", "text", "texts", "txt")
_COMPANIONS = (".json", ".txt")
_MAX_FIELD = 1 << 10  # bytes of a file, or letters of a value, that becomes a field
_MAX_TEXT_BYTES = 1 << 20  # largest text file; the longest captions have 10 kB


class _ImagesPass(SourceReading):
    """The pass of another format, with a pair in place of each image."""

    def __init__(self, reading: SourceReading, source: str, max_pixels: int) -> None:
        self._reading, self._source, self._max_pixels = reading, source, max_pixels
        self.left_out: Counter[str] = Counter()
        self._ids: set[int] = set()

    def items(self) -> Iterator[Member | Damage]:
        """The jpg and the json of each image; damage, and what is no file, as in the source."""
        images, texts = list[Member](), list[Member]()
        for item in self._reading.items():
            if isinstance(item, Damage) or item.reason or item.kind != "file":
                yield item
                continue
            is_image = is_image_name(item.name)
            if not is_image and not _is_text_name(item.name) and len(item.data) > _MAX_FIELD:
                self.left_out[_ending(item.name)] += 1
                continue
            if images and not _belongs(item.name, images[0].name):
                yield from self._pairs(images, texts)
                images, texts = [], []
            (images if is_image else texts).append(item)
        yield from self._pairs(images, texts)
        self.left_out.update(self._reading.left_out)

    def digests(self) -> dict[str, str]:
        return self._reading.digests()

    def check_unchanged(self) -> None:
        return self._reading.check_unchanged()

    def close(self) -> None:
        return self._reading.close()

    def _pairs(self, images: list[Member], files: list[Member]) -> Iterator[Member]:
        """The pairs of images of one name, with the texts beside them; a text of no image is refused."""
        texts: dict[str, None] = {}  # each once, in their order
        fields: dict[str, Any] = {}
        for file in files:
            beside = bool(images and _belongs(file.name, images[0].name))
            if not _is_text_name(file.name):
                self._add_fields(fields, {_ending(file.name): _decoded(file.data) if beside else None})
                continue
            try:
                file_texts, others = _contents(file)
                if file_texts and not beside:
                    raise BadSample("text_unpaired", "no image of this name beside it")
                texts |= dict.fromkeys(file_texts)
                self._add_fields(fields, others)
            except BadSample as error:
                yield replace(file, detail=str(error), reason=error.reason)
        for image in images:
            yield from self._pair(image, {"texts": list(texts)} | ({"fields": fields} if fields else {}))

    def _add_fields(self, fields: dict[str, Any], additions: dict[str, Any]) -> None:
        """Add numbers and short strings; anything else that has a value is left out."""
        for name, value in additions.items():
            is_short = isinstance(value, bool | int | float) or (
                isinstance(value, str) and len(value) <= _MAX_FIELD
            )
            if is_short and not (isinstance(value, float) and not isfinite(value)):
                fields[name] = value
            elif value is not None or name.startswith("."):
                self.left_out[name] += 1

    def _pair(self, image: Member, about: dict[str, Any]) -> Iterator[Member]:
        name = image.name.removeprefix("./")
        named = parse_member_path(f"{name.rpartition('.')[0]}.jpg")
        image_id = hashed_id(self._source, name) if named is None else named.image_id
        try:
            jpeg, height, width, encoding = as_jpeg(image.data, name, (None, None), self._max_pixels)
        except BadSample as error:
            yield replace(image, detail=str(error), reason=error.reason)
            return
        if image_id in self._ids:
            detail = f"{name}: an earlier image of this source has this name, or its id, {image_id}"
            yield replace(image, detail=detail, reason="duplicate")
            return
        self._ids.add(image_id)
        document = {
            "image": image_entry(image_id, height, width),
            "annotations": [],
            "provenance": {"format": "images", "file": name, **about, **encoding},
        }
        yield replace(image, name=member_name(image_id, "jpg"), data=jpeg, origin=name)
        text = json.dumps(document).encode()
        yield replace(image, name=member_name(image_id, "json"), data=text, origin=name)


@dataclass(frozen=True)
class ImageFolder(FolderFormat):
    """Folders of images, with all their subfolders."""

    max_pixels: int

    def files(self, path: Path, ignore: Ignore) -> list[Path]:
        files, unreadable = listed(path, self.parts(path, ignore))  # a folder is refused as a member
        taken = (file for file in files if is_image_name(file.name) or _is_text_name(file.name))
        readable = [file for file in (*taken, *unreadable) if not ignore(file)]
        stems = {(file.parent, file.name.rpartition(".")[0]) for file in readable if is_image_name(file.name)}

        # The files of an image follow each other, after those of longer names, such as 1.mask.png.
        def key(file: Path) -> tuple[Path, str, str]:
            folder, stem = file.parent, file.name
            while stem := stem.rpartition(".")[0]:
                if (folder, stem) in stems:
                    return folder, f"{stem}.\U0010ffff", file.name
            return folder, file.name, ""

        return sorted(readable, key=key)

    def parts(self, path: Path, ignore: Ignore) -> list[Path]:
        return below(path, [path], ignore)

    def is_member(self, name: str) -> bool:
        return is_image_name(name) or name.lower().endswith(_COMPANIONS) or is_pair_name(name)

    def member_name(self, path: Path, file: Path) -> str:
        return file.relative_to(path).as_posix()

    def open(self, source: Source, *, md5: bool, progress: Progress | None) -> SourceReading:
        return _ImagesPass(super().open(source, md5=md5, progress=progress), source.name, self.max_pixels)

    def reading(self, source: Source) -> dict[str, Any]:
        return {**super().reading(source), "images_only": True}


@dataclass(frozen=True)
class ImageTar(TarFormat):
    """Tars that contain images."""

    max_pixels: int

    def open(self, source: Source, *, md5: bool, progress: Progress | None) -> SourceReading:
        return _ImagesPass(super().open(source, md5=md5, progress=progress), source.name, self.max_pixels)

    def reading(self, source: Source) -> dict[str, Any]:
        return {"images_only": True}


class RowsPass(SourceReading):
    """A pass over a Parquet file: the image of each row, and its other columns as a JSON file: those of
    `further` and, with `scalars`, all numbers and strings. A file at a URL is copied to the folder for
    temporary files. `needed`: columns of which the file has one.
    """

    def __init__(
        self,
        source: Source,
        further: Sequence[str],
        *,
        progress: Progress | None,
        scalars: bool = False,
        needed: Sequence[str] = (),
    ) -> None:
        self._path, self._label = source.path, source.label
        self._further, self._progress, self._scalars, self._needed = further, progress, scalars, needed
        self._file = open_stored(source.link or source.path)
        self._copy = None if source.link is None else tempfile.TemporaryFile()  # noqa: SIM115  as the pass

    def items(self) -> Iterator[Member]:
        for image, row in self.rows():
            image_id, name = whole_id(row.get("image_id")), row.get("file_name")
            if image_id is not None:
                name = member_name(image_id, "jpg")
            elif not isinstance(name, str) or not is_image_name(name):
                name = image.name
            yield replace(image, name=name)
            if not image.reason:
                stem = name.rpartition(".")[0]
                yield Member(f"{stem}.json", "file", 0, json.dumps(row, default=str).encode())

    def rows(self) -> Iterator[tuple[Member, dict[str, Any]]]:
        """The image of each row, and the further columns that the file has."""
        if self._copy is not None:
            while data := self._file.read(_PIECE):
                self._copy.write(data)
                if self._progress is not None:
                    self._progress(0)  # a sign that it proceeds
            self._copy.seek(0)
        try:
            with pq.ParquetFile(self._copy or self._path) as file:
                schema = file.schema_arrow
                column = image_column(self._label, schema)
                if self._needed and {*schema.names}.isdisjoint(self._needed):
                    raise SourceError(
                        f"{self._label}: has no column of annotations ({', '.join(self._needed)}); pass "
                        "--images-only for images alone"
                    )
                others = [field for field in schema if field.name != column]
                further = [field.name for field in others if self._takes(field)]
                left = {field.name for field in others}.difference(further)
                self.left_out = dict.fromkeys(left, file.metadata.num_rows)
                batches = file.iter_batches(_ROWS, columns=[column, *further])
                rows = (row for batch in batches for row in batch.to_pylist())
                for number, row in enumerate(rows):
                    yield self._member(number, row.pop(column)), row
        except (pa.ArrowException, OSError) as error:
            why = str(error).splitlines()[0]
            raise SourceError(f"{self._label}: cannot be read as Parquet: {why}; download it again") from None

    def _takes(self, column: pa.Field) -> bool:
        kind = column.type
        is_number = pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
        is_scalar = is_number or pa.types.is_string(kind) or pa.types.is_large_string(kind)
        return column.name in self._further or (self._scalars and is_scalar)

    def _member(self, number: int, row: dict[str, Any] | bytes | None) -> Member:
        data, path = (row.get("bytes"), row.get("path")) if isinstance(row, dict) else (row, None)
        name = f"{number:09d}.jpg" if path is None or not is_image_name(path) else path
        if self._progress is not None:
            self._progress(len(data or b""))
        if data is None or len(data) > MAX_MEMBER_BYTES:
            why = "the row has no bytes of an image" if data is None else f"{len(data):,} bytes are too many"
            return Member(name, "file", 0, b"", detail=f"row {number:,}: {why}", reason="image_missing")
        return Member(name, "file", 0, data)

    def digests(self) -> dict[str, str]:
        if self._copy is None:
            return {"sha256": sha256_of(self._path)}
        self._copy.seek(0)
        return {"sha256": hashlib.file_digest(self._copy, "sha256").hexdigest()}

    def close(self) -> None:
        self._file.close()
        if self._copy is not None:
            self._copy.close()

    def check_unchanged(self) -> None:
        self._file.check_unchanged()


def _is_text_name(name: str) -> bool:
    return name.lower().endswith(_COMPANIONS) and not name.rpartition("/")[2].startswith(".")


def _belongs(name: str, image: str) -> bool:
    """Whether a file is beside an image: 1.txt, 1.caption.txt, 1.json and 1.png beside 1.jpg."""
    stem = image.rpartition(".")[0] + "."
    rest = name.removeprefix(stem)
    return rest != name and "/" not in rest and not (is_image_name(name) and "." in rest)


def _ending(name: str) -> str:
    """What follows the first dot of a file's name: .cls, .seg.npy."""
    return "." + name.rpartition("/")[2].lstrip(".").partition(".")[2]


def _decoded(data: bytes) -> str | None:
    """A small file as text; None if it is none."""
    try:
        text = data.decode()
    except ValueError:
        return None
    return text.strip() if "\0" not in text else None


def _contents(file: Member) -> tuple[list[str], dict[str, Any]]:
    """The texts of a file or of the known fields of its object, and the further fields."""
    if len(file.data) > _MAX_TEXT_BYTES:
        raise BadSample(
            "text_unreadable", f"{len(file.data):,} bytes; a text has at most {_MAX_TEXT_BYTES:,}"
        )
    try:
        if file.name.lower().endswith(".txt"):
            return texts_of({"txt": file.data.decode()}), {}
        document = json.loads(file.data)
        if not isinstance(document, dict):
            return texts_of({"texts": document}), {}
        others = {name: value for name, value in document.items() if name not in TEXT_FIELDS}
        return texts_of(document), others
    except (ValueError, RecursionError) as error:
        raise BadSample("text_unreadable", f"cannot be read: {error}") from None


def whole_id(value: Any) -> int | None:
    """An image id of a column of integers, or of floats, as pandas writes them beside nulls."""
    if type(value) is float and value.is_integer() and value < 1 << 53:
        value = int(value)
    return value if type(value) is int and 0 <= value < ID_END else None


def texts_of(fields: dict[str, Any]) -> list[str]:
    """The texts of the known fields of an object, which are strings or lists of strings; each once."""
    given = [fields.get(name) for name in TEXT_FIELDS]
    texts = [text for value in given for text in (value if isinstance(value, list) else [value])]
    return list(dict.fromkeys(text.strip() for text in texts if isinstance(text, str) and text.strip()))


def image_column(path: Path | str, schema: pa.Schema) -> str:
    """The column with the bytes of the images: binary, or a struct of bytes and path as of `datasets`."""
    named = {field.name: field.type for field in schema}
    binary = (pa.binary(), pa.large_binary())
    columns = [
        name
        for name, type in named.items()
        if (pa.types.is_struct(type) and type.get_field_index("bytes") >= 0)
        or (name in _BINARY and type in binary)
    ]
    if len(columns) != 1:
        which = f"{len(columns)} columns" if columns else "no column"
        raise SourceError(
            f"{path}: {which} of image bytes among {first_names(list(named), 5)}; keep one: a struct of "
            f"bytes and path, or a binary column named {' or '.join(_BINARY)}"
        )
    return str(columns[0])


@dataclass(frozen=True)
class ImageRows(SourceFormat):
    """Parquet files with the bytes of images."""

    max_pixels: int
    kind = "parquet"
    ending = ".parquet"
    has_links = True
    in_folders = True

    def takes(self, path: Path) -> bool:
        return path.name.lower().endswith(self.ending)

    def name_of(self, path: Path) -> str:
        return path.stem

    def open(self, source: Source, *, md5: bool, progress: Progress | None) -> SourceReading:
        return _ImagesPass(
            RowsPass(source, TEXT_FIELDS, progress=progress, scalars=True), source.name, self.max_pixels
        )

    def reading(self, source: Source) -> dict[str, Any]:
        return {"images_only": True}
