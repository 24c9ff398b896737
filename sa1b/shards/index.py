"""The shard index: one parquet file beside each tar, one row per image, in the tar's order.

It contains the offsets of all members, every number and every mask, so that queries need not open the tar.
`IndexReader` reads it back, one row group in memory at a time.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sa1b.masks.runs import Runs
from sa1b.shards.annotation import Annotations, no_origin
from sa1b.shards.index_file import TEXTS

ROW_GROUP_IMAGES = 128
ROW_GROUP_BYTES = 64 << 20  # bytes of numbers and runs; 128 usual images hold 19 MB and never reach the limit
RUNS_PATH = "runs.list.element.list.element"


def _lists(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


_PLAIN = {  # columns with one value per image
    "image_id": pa.int64(),
    "width": pa.int32(),
    "height": pa.int32(),
    "image_width": pa.int32(),
    "image_height": pa.int32(),
    "jpg_offset": pa.int64(),
    "jpg_bytes": pa.uint32(),
    "masks_offset": pa.int64(),
    "masks_bytes": pa.uint32(),
    "jpg_crc32c": pa.uint32(),
    "masks_crc32c": pa.uint32(),
}
_PER_MASK = {  # column -> type of its values, number of values per mask
    "mask_id": (pa.int64(), 1),
    "area": (pa.int64(), 1),
    "bbox": (pa.float64(), 4),
    "predicted_iou": (pa.float64(), 1),
    "stability_score": (pa.float64(), 1),
    "point_coords": (pa.float64(), 2),
    "crop_box": (pa.float64(), 4),
    "runs_count": (pa.uint32(), 1),
}
_ORIGIN = {  # only of shards from files in COCO's format; lists of one value per mask
    "category": pa.string(),
    "category_id": pa.int64(),
    "iscrowd": pa.int64(),
    "fields": pa.string(),
}
FIELDS = "image_fields"  # JSON object; only of shards from images alone, or from files in COCO's format
_OPTIONAL = {
    "runs": _lists(_lists(pa.uint32())),
    **{name: _lists(kind) for name, kind in _ORIGIN.items()},
    TEXTS: _lists(pa.string()),
    FIELDS: pa.string(),
}


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One image of a shard; offsets of the members' contents from the start of the tar, in bytes."""

    annotations: Annotations
    runs: Runs
    image_height: int  # of the stored JPEG, pixels; the annotations have the size of the source image
    image_width: int
    jpg_offset: int
    jpg_bytes: int
    masks_offset: int
    masks_bytes: int
    jpg_crc32c: int
    masks_crc32c: int


def schema(optional: Collection[str]) -> pa.Schema:
    """The columns of an index file; `optional` names those of _OPTIONAL that it has."""
    per_mask = {
        name: _lists(kind if width == 1 else _lists(kind)) for name, (kind, width) in _PER_MASK.items()
    }
    columns = {**_PLAIN, **per_mask, **{name: _OPTIONAL[name] for name in _OPTIONAL if name in optional}}
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


class IndexWriter:
    """Writes the rows of one shard.

    A row group is written, and leaves memory, as soon as it holds ROW_GROUP_IMAGES images or ROW_GROUP_BYTES
    of numbers and runs. Other contents of a row (the COCO strings, the annotation file) are not kept.
    """

    def __init__(self, path: Path, *, with_runs: bool) -> None:
        self._path, self._with_runs = path, with_runs
        self._writer: pq.ParquetWriter | None = None
        self._columns: dict[str, list[Any]] = {}
        self._held_bytes = 0

    def _open(self, first: Annotations | None) -> pq.ParquetWriter:
        """Open the file: its first image says which columns it has."""
        optional = {"runs"} if self._with_runs else set[str]()
        if first is not None:
            optional |= _ORIGIN.keys() if first.origin() is not None else set()
            optional |= {TEXTS} if first.texts() is not None else set()
            optional |= {FIELDS} if first.image_fields() is not None else set()
        self._schema = schema(optional)
        self._columns = {name: [] for name in self._schema.names}
        integers = dict.fromkeys(_PLAIN, "DELTA_BINARY_PACKED")
        per_mask = {
            f"{name}.list.element" + ("" if width == 1 else ".list.element"): (
                "BYTE_STREAM_SPLIT" if kind == pa.float64() else "DELTA_BINARY_PACKED"
            )
            for name, (kind, width) in _PER_MASK.items()
        }
        runs = {RUNS_PATH: "BYTE_STREAM_SPLIT"} if self._with_runs else {}
        return pq.ParquetWriter(
            self._path.absolute(),
            self._schema,
            compression="zstd",
            compression_level=3,
            use_dictionary=False,
            column_encoding=integers | per_mask | runs,
            # Statistics of row groups help only for columns with one value per image.
            write_statistics=list(_PLAIN),
        )

    def add(self, row: Row) -> None:
        if self._writer is None:
            self._writer = self._open(row.annotations)
        of = row.annotations
        further: dict[str, Any] = {
            "runs": row.runs.runs,
            TEXTS: of.texts() or [],
            FIELDS: of.image_fields() or "{}",
        }
        if _ORIGIN.keys() <= self._columns.keys():
            further |= of.origin() or no_origin(len(of))
        for name, values in self._columns.items():
            value = further[name] if name in further else getattr(row if hasattr(row, name) else of, name)
            values.append(value)
            if name not in _PLAIN:
                self._held_bytes += value.nbytes if isinstance(value, np.ndarray) else sum(map(len, value))
        if len(self._columns["image_id"]) == ROW_GROUP_IMAGES or self._held_bytes >= ROW_GROUP_BYTES:
            self._write()

    def close(self) -> None:
        """Write the remaining rows and the footer."""
        if self._writer is None:
            self._writer = self._open(None)
        if self._columns["image_id"]:
            self._write()
        self._writer.close()

    def abandon(self) -> None:
        """Abandon a file that cannot be completed, without writing to it again."""
        if self._writer is not None:
            # Otherwise the destructor tries to write the footer and prints an error.
            self._writer.is_open = False

    def _write(self) -> None:
        columns = self._columns
        self._columns = {name: [] for name in columns}
        self._held_bytes = 0
        rows = len(columns["image_id"])
        arrays = {name: pa.array(columns.pop(name), kind) for name, kind in _PLAIN.items()}
        images = _offsets(np.array([len(counts) for counts in columns["runs_count"]]))
        for name, (kind, width) in _PER_MASK.items():
            values = np.concatenate(columns[name])
            masks = pa.array(values.reshape(-1), kind)
            if width > 1:
                masks = _list_array(np.arange(len(values) + 1) * width, masks)
            arrays[name] = _list_array(images, masks)
        for name in _ORIGIN.keys() & columns.keys():
            arrays[name] = _list_array(
                images, pa.array(np.concatenate(columns[name]).tolist(), _ORIGIN[name])
            )
        for name in {TEXTS, FIELDS} & columns.keys():
            arrays[name] = pa.array(columns[name], _OPTIONAL[name])
        if "runs" in columns:
            arrays["runs"] = _runs_column(columns.pop("runs"), columns.pop("runs_count"))
        table = pa.Table.from_arrays([arrays[name] for name in self._schema.names], schema=self._schema)
        assert self._writer is not None
        self._writer.write_table(table, row_group_size=rows)


def _runs_column(runs: list[npt.NDArray[np.uint32]], counts: list[npt.NDArray[Any]]) -> pa.ChunkedArray:
    """One chunk per image, not copied: the Parquet writer needs six times the bytes of the largest chunk."""
    chunks = []
    for flat, lengths in zip(runs, counts, strict=True):
        masks = _list_array(_offsets(lengths), pa.array(flat, pa.uint32()))
        chunks.append(_list_array(np.array([0, len(lengths)]), masks))
    return pa.chunked_array(chunks)


def _offsets(counts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _list_array(offsets: npt.NDArray[np.int64], values: pa.Array) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=_lists(values.type))


class IndexFormatError(ValueError):
    """A Parquet file that is not the index of a shard."""


@dataclass(frozen=True, slots=True)
class MemberLocation:
    """Offset, size in bytes and checksum of a member's content."""

    offset: int
    bytes: int
    crc32c: int


class IndexReader:
    """The rows of an index file. `with_runs`: it has the decoded masks; `columns`: those by image, [rows]."""

    def __init__(self, path: Path) -> None:
        self._file = pq.ParquetFile(path.absolute())  # see index_file
        stored = self._file.schema_arrow
        self.with_runs = "runs" in stored.names
        if not stored.equals(schema(stored.names)):
            raise IndexFormatError("its columns are not those of a shard index")
        groups = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(groups, dtype=np.int64)])
        names = [*_PLAIN]
        plain = self._file.read(names)
        self.columns = {name: plain[name].to_numpy() for name in names}
        self._per_mask = [
            field.name
            for field in stored
            if pa.types.is_list(field.type) and field.name not in ("runs", TEXTS)
        ]
        self._group: tuple[int, pa.Table] | None = None

    def __len__(self) -> int:
        return int(self._starts[-1])

    def close(self) -> None:
        self._file.close()

    def location(self, row: int, ending: str) -> MemberLocation:
        """Location of the jpg or the masks of a row."""
        values = (self.columns[f"{ending}_{what}"][row] for what in ("offset", "bytes", "crc32c"))
        return MemberLocation(*map(int, values))

    def numbers(self, row: int) -> dict[str, npt.NDArray[Any]]:
        """The columns of masks: [N] or, for boxes and points, [N, width]. UNREADABLE: damaged row group."""
        table, i = self._row(row)
        return {name: _entry(table[name], i) for name in self._per_mask}

    def of_image(self, row: int) -> dict[str, Any]:
        """The texts and fields of a row that the index has. UNREADABLE: damaged row group."""
        table, i = self._row(row)
        return {name: table[name][i].as_py() for name in (TEXTS, FIELDS) if name in table.schema.names}

    def runs(self, row: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """All masks of a row as runs and offsets, see sa1b.masks.runs. UNREADABLE: damaged row group."""
        table, i = self._row(row)
        masks = _single(table["runs"])
        first, last = masks.offsets[i].as_py(), masks.offsets[i + 1].as_py()
        offsets = masks.values.offsets.to_numpy()[first : last + 1].astype(np.int64)
        return masks.values.values.to_numpy()[offsets[0] : offsets[-1]], offsets - offsets[0]

    def _row(self, row: int) -> tuple[pa.Table, int]:
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        if self._group is None or self._group[0] != group:
            self._group = None  # frees the previous row group before the next one is read
            self._group = (group, self._file.read_row_group(group))
        return self._group[1], row - int(self._starts[group])


def _single(column: pa.ChunkedArray) -> pa.ListArray:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def _entry(column: pa.ChunkedArray, i: int) -> npt.NDArray[Any]:
    lists = _single(column)
    first, last = lists.offsets[i].as_py(), lists.offsets[i + 1].as_py()
    values = lists.values
    if not pa.types.is_list(values.type):
        plain: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)[first:last]
        return plain.astype(np.str_) if plain.dtype == object else plain
    offsets = values.offsets.to_numpy()[first : last + 1]
    if len(offsets) < 2:
        return np.empty((0, 0))
    widths = np.diff(offsets)
    if (widths != widths[0]).any():
        raise IndexFormatError("masks of one image have boxes or points of different lengths")
    nested: npt.NDArray[Any] = values.values.to_numpy()[offsets[0] : offsets[-1]]
    return nested.reshape(-1, int(widths[0]))
