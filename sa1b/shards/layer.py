"""Layers: masks that are added, replaced or hidden in images of a dataset directory, beside its shards.

    layers/<name>/masks.bin       b"SA1BLAY1", then the records one after another, sorted by image id
    layers/<name>/index.parquet   a row for each record: see COLUMNS
    layers/<name>/layer.json      digests, counts and origin; written last: without it, a layer is unfinished

A record is a mask record (sa1b.shards.record) with two further tensors: `replaces`, for each mask whether it
replaces the mask of the image with its id, and `hidden`, ids of masks that the image loses. A replacing mask
takes the place of the replaced one; the other masks follow those of the image. `base_crc32c` is the checksum
of the image's record in the shard that the changes refer to: other masks there are detected, while sources
may be added to the directory. A layer may build on another one, its parent, which is applied first.
"""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sa1b.arguments import BadValue
from sa1b.console import command
from sa1b.errors import ManifestError, ShardError, UsageError
from sa1b.names import is_short_name
from sa1b.report import first_names
from sa1b.shards import record
from sa1b.shards.annotation import PROVENANCE, Annotations
from sa1b.shards.documents import LAYER_FORMAT, FieldError, LayerInfo, check_layer
from sa1b.shards.manifest import LAYERS
from sa1b.shards.record import RecordError
from sa1b.shards.sample_table import SampleTable
from sa1b.storage.atomic import json_bytes, sha256_of
from sa1b.storage.cache import fetch_once
from sa1b.storage.errors import DamageError, MissingError, ReplacedError
from sa1b.storage.reader import Range, Reader
from sa1b.storage.store import Store

if TYPE_CHECKING:
    import pyarrow

MASKS, INDEX, DOCUMENT = "masks.bin", "index.parquet", "layer.json"
MAGIC = b"SA1BLAY1"
COLUMNS: dict[str, tuple[str, str]] = {  # column -> its type, and that of `array` in memory
    "image_id": ("int64", "q"),
    "offset": ("int64", "q"),  # of the record in masks.bin, as its bytes
    "bytes": ("uint32", "I"),
    "crc32c": ("uint32", "I"),  # of the record
    "base_crc32c": ("uint32", "I"),
    "added": ("uint32", "I"),  # masks, as replaced and hidden
    "replaced": ("uint32", "I"),
    "hidden": ("uint32", "I"),
}
_CAP = 4 << 20  # bytes of a layer.json


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """The changes of a layer to the masks of one image."""

    masks: Annotations  # that are added or replace others
    replaces: npt.NDArray[np.bool_]  # [N], for each of them
    hidden: npt.NDArray[np.int64]  # [H], ids of masks of the image

    def __len__(self) -> int:
        return len(self.masks) + len(self.hidden)

    def encode(self) -> bytes:
        """The record of the layer; equal changes give equal bytes."""
        return record.encode(self.masks, {"replaces": self.replaces.view(np.uint8), "hidden": self.hidden})

    def apply(self, base: Annotations, *, text: bool = True) -> Annotations:
        """The changed annotations of the image. Takes 0.03 ms for 100 masks if no text is stored.

        `text`: also join the stored texts, which keep what columns cannot hold, such as categories; takes a
        few ms. RecordError: the image has another size, or lacks a mask that is replaced or hidden.
        """
        changes, count = self.masks, len(base)
        if (changes.image_id, changes.height, changes.width) != (base.image_id, base.height, base.width):
            raise RecordError(
                f"changes of image {changes.image_id}, {changes.width} x {changes.height} pixels: the image "
                f"has the id {base.image_id} and {base.width} x {base.height} pixels"
            )
        source = np.arange(count + len(changes))
        if len(self.hidden) or self.replaces.any():
            source = self._source(base, source)
        lengths = np.concatenate([base.rle_bytes, changes.rle_bytes])
        rle = np.concatenate([base.rle, changes.rle])
        if not len(source):
            rle = rle[:0]
        elif len(source) < len(lengths):
            ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            # Neighbours that stay neighbours are copied together.
            cuts = np.flatnonzero(np.diff(source) != 1) + 1
            first, last = np.append(0, cuts), np.append(cuts, len(source)) - 1
            pairs = zip(ends[source[first]].tolist(), ends[source[last] + 1].tolist(), strict=True)
            rle = np.concatenate([rle[start:stop] for start, stop in pairs])
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(base, name), getattr(changes, name)])[source] for name in _JOINED
        }
        joined = _text(base, changes, source.tolist()) if text else None
        return replace(base, rle=rle, rle_bytes=lengths[source], text=joined, **columns)

    def _source(self, base: Annotations, source: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of the masks of image and layer, one after the other, those that are left, in their new order."""
        changes, count, lost = self.masks, len(base), list[int]()
        new = np.flatnonzero(self.replaces)
        if len(new) and count:
            order = np.argsort(base.mask_id, kind="stable")
            at = np.searchsorted(base.mask_id, changes.mask_id[new], sorter=order)
            old = order[np.minimum(at, count - 1)]
            lost = changes.mask_id[new][base.mask_id[old] != changes.mask_id[new]].tolist()
            source[old] = count + new
        elif len(new):
            lost = changes.mask_id[new].tolist()
        keep = np.ones(len(source), np.bool_)
        keep[count + new] = False
        if len(self.hidden):
            keep[:count] = ~np.isin(base.mask_id, self.hidden)
            lost += np.setdiff1d(self.hidden, base.mask_id).tolist()
        if lost:
            raise RecordError(
                f"changes of image {changes.image_id}: the image has no mask {first_names(lost)}"
            )
        return source[keep]


_JOINED = (
    *("mask_id", "area", "bbox", "predicted_iou", "stability_score", "point_coords", "crop_box"),
    *("number_types", "runs_count"),
)


def _text(base: Annotations, changes: Annotations, source: list[int]) -> bytes | None:
    """The annotation file of both, if columns cannot give it back; with the origin of each mask."""
    if base.text is None and changes.text is None:
        return None
    document, other = base.to_json(), changes.to_json()
    masks = [*document["annotations"], *other["annotations"]]
    document["annotations"] = [masks[i] for i in source]
    with_origin = base.origin() is not None, changes.origin() is not None
    if any(with_origin) and isinstance(document.get(PROVENANCE, {}), dict):
        origins: list[Any] = []
        for part, has_origin, count in zip(
            (document, other), with_origin, (len(base), len(changes)), strict=True
        ):
            origins += part[PROVENANCE]["masks"] if has_origin else [{}] * count
        kept = document.get(PROVENANCE, other.get(PROVENANCE, {}))
        document[PROVENANCE] = {**kept, "masks": [origins[i] for i in source]}
    return json.dumps(document).encode()


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A complete layer. Memory: 40 bytes for each of its images."""

    info: LayerInfo
    columns: dict[str, npt.NDArray[Any]]  # of the index, in the order of the image ids

    def __repr__(self) -> str:
        info = self.info
        return f"Layer({info.name}, {info.digest[:12]}: {info.images:,} images, {info.added:,} masks added)"

    @property
    def file(self) -> str:
        """The name of masks.bin in the dataset directory."""
        return f"{LAYERS}/{self.info.name}/{MASKS}"

    def submit(self, reader: Reader, image_id: int) -> "PendingChange | None":
        """Start to read the changes of an image; None: the layer has none."""
        ids = self.columns["image_id"]
        row = int(np.searchsorted(ids, image_id))
        if row == len(ids) or ids[row] != image_id:
            return None
        start, length, crc = (int(self.columns[name][row]) for name in ("offset", "bytes", "crc32c"))
        item = Range(self.file, start, length, crc)
        return PendingChange(self.info.name, image_id, reader, item, reader.submit(item))


@dataclass(frozen=True, slots=True, eq=False)
class PendingChange:
    """Changes of an image that are being read."""

    layer: str
    image_id: int
    reader: Reader
    range: Range
    begun: Any  # the pending read

    def apply(self, base: Annotations, *, text: bool = True, mark: int | None = None) -> Annotations:
        """The changed annotations, see `Change.apply`. `mark`: the number_types of the masks of the layer, to
        find them afterwards. ShardError: the changes are damaged, or do not fit the image. StorageError: they
        cannot be read now.
        """
        try:
            change = Change(*record.decode_of_layer(self.begun.result()))
            if change.masks.image_id != self.image_id:
                raise RecordError(f"the record is of image {change.masks.image_id}")
            if mark is not None:
                types = np.full(len(change.masks), mark, np.uint8)
                change = replace(change, masks=replace(change.masks, number_types=types))
            return change.apply(base, text=text)
        except (DamageError, RecordError) as error:
            where = f"record of image {self.image_id} at offset {self.range.start:,}"
            raise ShardError(
                f"{self.reader.url(self.range.name)}: {where}: {error}; "
                f"`{command('layer', 'verify', self.reader.root, self.layer)}` lists all damage"
            ) from None

    def cancel(self) -> None:
        """Drop the read."""
        self.begun.cancel()


def check_layer_name(name: str, flag: str = "--name") -> None:
    """Refuse a name that cannot be that of a folder in layers/: UsageError with `flag`."""
    if not is_short_name(name):
        raise UsageError(
            f"{flag} {name!r}: must be at most 64 letters (a to z), digits, dots, dashes and underscores, "
            "and begin with a letter or digit"
        )


def layer_names(store: Store) -> dict[str, bool]:
    """Names of the layers, and whether each is complete. Folders of others are no layers."""
    names = filter(is_short_name, store.folders(LAYERS))
    layers = {name: store.exists(f"{LAYERS}/{name}/{DOCUMENT}") for name in names}
    return {name: complete for name, complete in layers.items() if complete or _is_unfinished(store, name)}


def _is_unfinished(store: Store, name: str) -> bool:
    """Whether a folder without a document is that of a stopped command: with files of a layer, or empty."""
    files = store.names(f"{LAYERS}/{name}")
    return is_own(store, name) and (MASKS in files or not (files or store.folders(f"{LAYERS}/{name}")))


def is_own(store: Store, name: str) -> bool:
    """Whether the files in the folder with the names of a layer's files are those of a layer, or none."""
    folder = f"{LAYERS}/{name}"
    if not any(store.exists(f"{folder}/{file}") for file in (DOCUMENT, MASKS, INDEX)):
        return True
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        if json.loads(store.read(f"{folder}/{DOCUMENT}"))["format"] == LAYER_FORMAT:
            return True
    masks = f"{folder}/{MASKS}"
    return (store.size(masks) or 0) >= len(MAGIC) and store.reader.read_range(masks, 0, len(MAGIC)) == MAGIC


def read_info(reader: Reader, name: str) -> LayerInfo:
    """The document of a layer; ManifestError: there is no such layer, or the document is damaged."""
    check_layer_name(name, "layer")
    path = reader.url(f"{LAYERS}/{name}/{DOCUMENT}")
    try:
        # A reader keeps files open, and would read a file that was replaced.
        is_local = reader.is_local
        data = Path(path).read_bytes() if is_local else reader.read_whole(f"{LAYERS}/{name}/{DOCUMENT}", _CAP)
        document = json.loads(data)
        if document["format"] != LAYER_FORMAT:
            raise ManifestError(f"{path}: format {document['format']!r}; this package reads {LAYER_FORMAT!r}")
        info = check_layer(document)
        if info.name != name or data != json_bytes(document):
            raise FieldError(f"name {info.name!r}, or not the bytes that are written for its content")
        above = None if info.parent is None else info.parent.digest
        if info.digest != layer_digest(info.masks.sha256, info.index.sha256, above):
            raise FieldError("its digest is not that of its files")
    except (FileNotFoundError, MissingError):
        raise ManifestError(
            f"{path}: no such layer, or it is unfinished; `{command('layer', 'list', reader.root)}` prints "
            "the layers"
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ManifestError(f"{path}: damaged ({str(error)[:200]}); {_again(reader, name)}") from None
    return info


def open_layers(reader: Reader, table: SampleTable, names: Sequence[str]) -> tuple[Layer, ...]:
    """Layers of a dataset directory in the order in which they are applied, each after its parents.

    Reads each index and verifies its digest; 0.5 s for a million images. Images that the table lacks are
    ignored. ManifestError: a layer is missing or damaged, or the masks of an image in the shards are not
    those that it was made for.
    """
    opened: dict[str, Layer] = {}

    def add(name: str, child: LayerInfo | None, below: tuple[str, ...]) -> None:
        info = read_info(reader, name)
        if child is not None and child.parent is not None and info.digest != child.parent.digest:
            raise ManifestError(
                f"{reader.url(f'{LAYERS}/{name}')}: not the layer that {child.name} was made on "
                f"({child.parent.digest[:12]}, now {info.digest[:12]}); make {child.name} again"
            )
        if name in below:
            raise ManifestError(f"{reader.url(f'{LAYERS}/{name}')}: builds on itself; {_again(reader, name)}")
        if info.parent is not None:
            add(info.parent.name, info, (*below, name))
        if name not in opened:
            opened[name] = _open(reader, table, info)

    for name in names:
        add(name, None, ())
    return tuple(opened.values())


def schema() -> "pyarrow.Schema":
    """The columns of index.parquet."""
    import pyarrow as pa

    return pa.schema(
        [pa.field(name, pa.type_for_alias(kind), nullable=False) for name, (kind, _) in COLUMNS.items()]
    )


def _open(reader: Reader, table: SampleTable, info: LayerInfo) -> Layer:
    import pyarrow.parquet as pq

    from sa1b.shards.index_file import UNREADABLE

    name = f"{LAYERS}/{info.name}/{INDEX}"
    try:
        path = fetch_once(reader, name, info.index.sha256)
        if reader.is_local and sha256_of(path) != info.index.sha256:
            raise FieldError("its sha256 is not that of layer.json")
        read = pq.read_table(path.absolute())
        if not read.schema.equals(schema()):
            raise FieldError("its columns are not those of a layer")
        layer = Layer(info, {column: read[column].to_numpy() for column in COLUMNS})
        if reader.size(layer.file) != info.masks.bytes:
            raise ManifestError(
                f"{reader.url(layer.file)}: not the {info.masks.bytes:,} bytes of layer.json; "
                f"{_again(reader, info.name)}"
            )
    except (FileNotFoundError, MissingError) as error:
        missing = error.url if isinstance(error, MissingError) else error.filename
        raise ManifestError(f"{missing}: missing; {_again(reader, info.name)}") from None
    except (*UNREADABLE, DamageError) as error:
        raise ManifestError(
            f"{reader.url(name)}: damaged ({str(error)[:200]}); {_again(reader, info.name)}"
        ) from None
    ids = layer.columns["image_id"].astype(np.uint64)
    rows = np.minimum(np.searchsorted(table.image_id, ids), max(len(table) - 1, 0))
    if len(table):
        present = table.image_id[rows] == ids
        other = present & (table.masks_crc32c[rows] != layer.columns["base_crc32c"])
        if other.any():
            raise ManifestError(
                f"{reader.url(f'{LAYERS}/{info.name}')}: made for other masks of {int(other.sum()):,} images "
                f"({first_names(ids[other].tolist())}) than the shards have now; {_again(reader, info.name)}"
            )
    return layer


def _again(reader: Reader, name: str) -> str:
    again = command("layer", "add", reader.root, "PATH/TO/MASKS", "--name", name, "--overwrite")
    return f"restore it from a copy, or make it again with `{again}`"


def layer_digest(masks: str, index: str, parent: str | None) -> str:
    """The digest that names a layer, from those of its files and of its parent."""
    return hashlib.sha256(f"{LAYER_FORMAT} {masks} {index} {parent or ''}".encode()).hexdigest()


def reopen_layers(reader: Reader, table: SampleTable, layers: Sequence[tuple[str, str]]) -> tuple[Layer, ...]:
    """Open layers again by names and digests. ReplacedError: one is another layer now."""
    reopened = open_layers(reader, table, [name for name, _ in layers])
    if [(layer.info.name, layer.info.digest) for layer in reopened] != [*layers]:
        raise _replaced(reader, reopened[0])
    return reopened


def check_unchanged(reader: Reader, layers: Sequence[Layer]) -> None:
    """ReplacedError: a layer is another one than when it was opened. ManifestError: it was removed."""
    for layer in layers:
        if read_info(reader, layer.info.name).digest != layer.info.digest:
            raise _replaced(reader, layer)


def _replaced(reader: Reader, layer: Layer) -> ReplacedError:
    url = reader.url(layer.file)
    return ReplacedError(f"{url}: replaced since the dataset was opened; open it again", url=url)


def check_layers(layers: object, *, is_open: bool = False) -> tuple[str, ...]:
    """Names of layers from a caller; ValueError: no list, a name twice, or the dataset is open already."""
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        raise BadValue(f"layers={layers!r} must be a list of names, such as layers=['round2']")
    names = tuple(map(str, layers))
    if len({*names}) < len(names):
        raise BadValue(f"layers={layers!r}: must not have a name twice")
    if names and is_open:
        raise BadValue(f"layers={layers!r}: the dataset is open already; pass them to sa1b.open(layers=...)")
    return names
