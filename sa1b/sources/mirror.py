"""Mirrors of SA-1B in Parquet: each row has the bytes of an image and the annotations of its JSON file.

    image: {bytes, path}, annotations: [{bbox, area, segmentation: {size, counts}, ...}]    of `datasets`
    jpg: {bytes, path}, json: {image, annotations}, __key__: "sa_1"       a webdataset that the Hub converted
    image: {bytes, path}, image_id, width, height, masks: [{counts, bbox, ...}]  `sa1b export --to parquet`

The image id is that of a column image_id, of the object `image` or of a name sa_<id>. A JPEG keeps its bytes;
whether the mirror encoded it again cannot be seen. An image of another format is stored as a JPEG, and its
provenance records the conversion.
"""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sa1b.errors import BadSample, SourceError
from sa1b.names import MASK_KEYS, member_name, parse_member_path
from sa1b.sources.coco import CocoFormat, as_jpeg
from sa1b.sources.coco_file import Ids
from sa1b.sources.coco_pair import json_text
from sa1b.sources.discovery import formats_with
from sa1b.sources.images import (
    TEXT_FIELDS,
    ImageFolder,
    ImageRows,
    ImageTar,
    RowsPass,
    image_column,
    texts_of,
    whole_id,
)
from sa1b.sources.source import Progress, Source, SourceFormat, SourceReading
from sa1b.sources.tar_stream import Member

_ANNOTATED = ("json", "annotations", "masks", "annotation")  # columns, searched in this order
_MASK = frozenset(("segmentation", "counts"))  # keys of which an annotation has one
_OF_IMAGE = ("image_id", "file_name", "width", "height", "__key__")


def is_parquet(path: Path) -> bool:
    """Whether a file begins as a Parquet file does; False if it cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(4) == b"PAR1"
    return False


class PairRows(ImageRows):
    """Parquet files with the bytes of images and their annotations."""

    def takes(self, path: Path) -> bool:
        """Whether the file has images and annotations. True also for an unreadable file, whose error is
        reported later. Any other Parquet file is a source only with a flag.
        """
        if not super().takes(path):
            return False
        try:
            schema = pq.read_schema(path)
            return not {*schema.names}.isdisjoint(_ANNOTATED) and bool(image_column(path, schema))
        except SourceError:
            return False
        except (pa.ArrowException, OSError):
            return True

    def open(self, source: Source, *, md5: bool, progress: Progress | None) -> SourceReading:
        columns = (*_ANNOTATED, *_OF_IMAGE, *TEXT_FIELDS)
        return _PairsPass(source, columns, self.max_pixels, progress=progress)

    def reading(self, source: Source) -> dict[str, Any]:
        return {"kind": self.kind}


class _PairsPass(RowsPass):
    """One pass over the pairs of a Parquet file."""

    def __init__(
        self, source: Source, columns: tuple[str, ...], max_pixels: int, *, progress: Progress | None
    ) -> None:
        super().__init__(source, columns, progress=progress, needed=_ANNOTATED)
        self._max_pixels = max_pixels

    def items(self) -> Iterator[Member]:
        for image, row in self.rows():
            if image.reason:
                yield image
                continue
            try:
                yield from self._pair(image, row)
            except BadSample as error:
                yield replace(image, detail=str(error), reason=error.reason)

    def _pair(self, image: Member, row: dict[str, Any]) -> Iterator[Member]:
        column, entry, masks = _masks(row)
        size = {key: entry.get(key, row.get(key)) for key in ("width", "height")}
        annotated = (size["height"], size["width"])
        data, height, width, encoding = as_jpeg(image.data, image.name, annotated, self._max_pixels)
        if annotated == (None, None):
            size = {"width": width, "height": height}
        image_id = _image_id(entry, row, image.name)
        name = member_name(image_id, "jpg")
        document: dict[str, Any] = {
            "image": {"image_id": image_id, **size, "file_name": name} | _given(entry),
            "annotations": [_annotation(mask, size) for mask in masks],
        }
        further = encoding | ({} if row.keys().isdisjoint(TEXT_FIELDS) else {"texts": texts_of(row)})
        if further:
            document["provenance"] = {"format": "parquet", "file": image.name, **further}
        given = row[column]
        try:
            text = given if isinstance(given, str) and entry and not further else json_text(document)
        except TypeError as error:
            raise BadSample("unreadable_json", f"column {column!r}: {error}") from None
        yield replace(image, name=name, data=data, origin=image.name)
        name = member_name(image_id, "json")
        yield replace(image, name=name, data=text.encode(), origin=image.name)


def _masks(row: dict[str, Any]) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    """The first column with masks, or with an empty list of them: its name, its object `image`, the masks."""
    empty = None
    for name in _ANNOTATED:
        given, entry = row.get(name), None
        if isinstance(given, str | bytes):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError) as error:
                raise BadSample("unreadable_json", f"column {name!r} is no JSON: {error}") from None
        if isinstance(given, dict) and "annotations" in given:
            entry, given = given.get("image"), given["annotations"]
        if isinstance(given, dict):  # a list of objects as `datasets` before version 4 stores it
            given = _objects(name, {key: value for key, value in given.items() if isinstance(value, list)})
        if isinstance(given, list) and all(isinstance(mask, dict) for mask in given):
            found = name, entry if isinstance(entry, dict) else {}, given
            if not all(map(_MASK.isdisjoint, given)):
                return found
            empty = empty or (None if given else found)
    if empty is None:
        names = ", ".join(repr(name) for name in _ANNOTATED if name in row)
        raise BadSample("jpg_unpaired", f"{names} has no masks; pass --images-only for images alone")
    return empty


def _objects(name: str, lists: dict[str, list[Any]]) -> list[dict[str, Any]] | None:
    """The objects of an object of lists; None if they are no masks."""
    if _MASK.isdisjoint(lists):
        return None
    if len({*map(len, lists.values())}) > 1:
        lengths = ", ".join(f"{key} {len(values)}" for key, values in lists.items())
        raise BadSample("unreadable_json", f"the lists of column {name!r} have different lengths: {lengths}")
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def _image_id(entry: dict[str, Any], row: dict[str, Any], name: str) -> int:
    """The first id of an object, a row and a name, which may be the number of the row: no id."""
    values = [place.get(key) for key in ("image_id", "file_name") for place in (entry, row)]
    for value in (*values, row.get("__key__"), name):
        if (number := whole_id(value)) is not None:
            return number
        if isinstance(value, str):
            stem = value.rpartition("/")[2].partition(".")[0]
            named = parse_member_path(f"{stem}.jpg")
            if named is not None or (stem.isdecimal() and value is not name):
                return int(stem) if named is None else named.image_id
    why = f"no column image_id, file_name or __key__ has an id, and {name!r} is not of the form sa_<id>.jpg"
    raise BadSample("unexpected_name", why)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """The keys with a value: columns of objects have null or NaN where an object lacks a key."""
    given = {}
    for key, value in values.items():
        items = value if isinstance(value, list) else [value]
        if not any(item is None or (isinstance(item, float) and math.isnan(item)) for item in items):
            given[key] = value
    return given


def _annotation(given: dict[str, Any], size: dict[str, Any]) -> dict[str, Any]:
    """An annotation in SA-1B's form; values that the row lacks are left out."""
    annotation = _given(given)
    if "counts" in annotation:  # of sa1b export: COCO's boxes, and points without a list around them
        annotation["segmentation"] = {
            "size": [size["height"], size["width"]],
            "counts": annotation.pop("counts"),
        }
        if len(box := annotation.get("bbox", ())) == 4:
            annotation["bbox"] = [*box[:2], *(max(0.0, side - 1) for side in box[2:])]
        if "point_coords" in annotation:
            annotation["point_coords"] = [annotation["point_coords"]]
    mask = annotation.get("segmentation")
    if isinstance(mask, dict) and mask.keys() == {"size", "counts"}:
        counts = mask["counts"]
        text = counts.decode("ascii", "replace") if isinstance(counts, bytes) else counts
        annotation["segmentation"] = {"size": mask["size"], "counts": text}
    usual = {key: annotation[key] for key in MASK_KEYS if key in annotation}
    return usual | {key: value for key, value in annotation.items() if key not in usual}


def formats_of(
    images: Path | None = None,
    image_ids: Ids = "keep",
    max_pixels: int = 1 << 24,
    *,
    images_only: bool = False,
) -> tuple[SourceFormat, ...]:
    """The formats of a run, by the flags of `sa1b reshard`."""
    coco = CocoFormat(images, image_ids, max_pixels)
    if not images_only:
        return PairRows(max_pixels), *formats_with(coco)
    return ImageRows(max_pixels), *formats_with(coco, ImageFolder(max_pixels), ImageTar(max_pixels))
