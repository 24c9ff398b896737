"""The shard index: one parquet file beside each tar, one row per image, in the tar's order.

It says where every byte of the shard lies, and holds every number and every mask, so that questions about
masks are answered without opening a tar.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sa1b.masks.runs import Runs
from sa1b.shards.annotation import Annotations

ROW_GROUP_IMAGES = 128
RUNS_PATH = "runs.list.element.list.element"

_PLAIN = {
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
_PER_MASK = {  # column -> value type, values per mask
    "mask_id": (pa.int64(), 1),
    "area": (pa.int64(), 1),
    "bbox": (pa.float64(), 4),
    "predicted_iou": (pa.float64(), 1),
    "stability_score": (pa.float64(), 1),
    "point_coords": (pa.float64(), 2),
    "crop_box": (pa.float64(), 4),
    "runs_count": (pa.uint32(), 1),
}


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One image of a shard: where its members lie, and what they hold.

    Attributes:
        image_height, image_width: pixels of the stored JPEG; the annotations have the source's.
        jpg_offset, masks_offset: bytes from the start of the tar to the member's content.
    """

    annotations: Annotations
    runs: Runs
    image_height: int
    image_width: int
    jpg_offset: int
    jpg_bytes: int
    masks_offset: int
    masks_bytes: int
    jpg_crc32c: int
    masks_crc32c: int


def schema(*, with_runs: bool) -> pa.Schema:
    """The columns of an index file, with or without the decoded masks."""
    fields = [pa.field(name, kind, nullable=False) for name, kind in _PLAIN.items()]
    for name, (kind, width) in _PER_MASK.items():
        fields.append(pa.field(name, _lists(kind if width == 1 else _lists(kind)), nullable=False))
    if with_runs:
        fields.append(pa.field("runs", _lists(_lists(pa.uint32())), nullable=False))
    return pa.schema(fields)


def _lists(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


class IndexWriter:
    """Writes the rows of one shard; a row group leaves memory as soon as it is full."""

    def __init__(self, path: Path, *, with_runs: bool) -> None:
        self._schema = schema(with_runs=with_runs)
        self._rows: list[Row] = []
        integers = dict.fromkeys(_PLAIN, "DELTA_BINARY_PACKED")
        per_mask = {
            f"{name}.list.element" + ("" if width == 1 else ".list.element"): (
                "BYTE_STREAM_SPLIT" if kind == pa.float64() else "DELTA_BINARY_PACKED"
            )
            for name, (kind, width) in _PER_MASK.items()
        }
        runs = {RUNS_PATH: "BYTE_STREAM_SPLIT"} if with_runs else {}
        self._writer = pq.ParquetWriter(
            path,
            self._schema,
            compression="zstd",
            compression_level=3,
            use_dictionary=False,
            column_encoding=integers | per_mask | runs,
            # Bounds of whole row groups help only where one value stands per image.
            write_statistics=list(_PLAIN),
        )

    def add(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) == ROW_GROUP_IMAGES:
            self._write()

    def close(self) -> None:
        if self._rows:
            self._write()
        self._writer.close()

    def abandon(self) -> None:
        """Let go of a file that cannot be completed, without another attempt to write to it."""
        self._writer.is_open = False  # or its destructor writes the footer, and complains when it cannot

    def _write(self) -> None:
        rows, self._rows = self._rows, []
        arrays = {name: pa.array([_plain(row, name) for row in rows], kind) for name, kind in _PLAIN.items()}
        counts = np.array([len(row.annotations) for row in rows])
        images = _offsets(counts)
        for name, (kind, width) in _PER_MASK.items():
            values = np.concatenate([getattr(row.annotations, name) for row in rows])
            masks = pa.array(values.reshape(-1), kind)
            if width > 1:
                masks = _list_array(np.arange(len(values) + 1) * width, masks)
            arrays[name] = _list_array(images, masks)
        if "runs" in self._schema.names:
            lengths = np.concatenate([row.annotations.runs_count for row in rows])
            flat = pa.array(np.concatenate([row.runs.runs for row in rows]), pa.uint32())
            arrays["runs"] = _list_array(images, _list_array(_offsets(lengths), flat))
        table = pa.Table.from_arrays([arrays[name] for name in self._schema.names], schema=self._schema)
        self._writer.write_table(table, row_group_size=len(rows))


def _plain(row: Row, name: str) -> int:
    value: int = getattr(row.annotations if name in ("image_id", "width", "height") else row, name)
    return value


def _offsets(counts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _list_array(offsets: npt.NDArray[np.int64], values: pa.Array) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=_lists(values.type))
