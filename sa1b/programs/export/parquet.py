"""Export for Hugging Face's `datasets`: Parquet files with the bytes of the images, and masks as run lengths.

    train-00000-of-00003.parquet    a row for each image

The metadata of the files declare `image` as an image, so that `datasets` decodes it and the viewer of the Hub
shows it. `masks` is a list of objects; `counts` is COCO's compressed string, which pycocotools and
`sa1b.masks.decode` read.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sa1b.masks import coco, geometry
from sa1b.names import member_name
from sa1b.programs.export.export_format import (
    Format,
    Ids,
    JoinedColumn,
    PartFiles,
    Rows,
    check_joined,
    joined_identity,
    joined_value,
)
from sa1b.shards.dataset import Dataset
from sa1b.shards.sample import Sample

IMAGES_PER_FILE = 1000  # about 1 GB
_GROUP_BYTES = 32 << 20  # of images in a row group; to read one row, readers load its complete group
_MASK = pa.struct(
    {
        "id": pa.int64(),
        "counts": pa.string(),
        "bbox": pa.list_(pa.float64()),
        "area": pa.int64(),
        "predicted_iou": pa.float64(),
        "stability_score": pa.float64(),
        "point_coords": pa.list_(pa.float64()),
        "crop_box": pa.list_(pa.float64()),
    }
)
_COLUMNS = {
    "image_id": pa.int64(),
    "image": pa.struct({"bytes": pa.binary(), "path": pa.string()}),
    "width": pa.int32(),
    "height": pa.int32(),
    "masks": pa.list_(_MASK),
}


def _feature(kind: pa.DataType) -> Any:
    """The type of a column in the metadata of `datasets`."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "List"}
    if pa.types.is_struct(kind):
        return {field.name: _feature(field.type) for field in kind}
    return {"dtype": {"double": "float64", "float": "float32"}.get(str(kind), str(kind)), "_type": "Value"}


def _schema(columns: dict[str, pa.DataType]) -> pa.Schema:
    named = {**_COLUMNS, **columns}
    features = {
        name: {"_type": "Image"} if name == "image" else _feature(kind) for name, kind in named.items()
    }
    return pa.schema(named, {"huggingface": json.dumps({"info": {"features": features}})})


@dataclass(frozen=True)
class Parquet(Format):
    """Parquet files for `datasets`. Memory: a row group, 32 MB of images with their masks."""

    unit = "file"
    takes_all_files = True

    images_per_file: int = IMAGES_PER_FILE
    columns: tuple[JoinedColumn, ...] = ()  # one by mask_id has a list with a value or null for each mask
    texts: bool = False  # a column: the texts of the sources

    @property
    def identity(self) -> str:
        return f"parquet {self.images_per_file} {joined_identity(self.columns)}" + ", texts" * self.texts

    def check(self, dataset: Dataset) -> None:
        super().check(dataset)
        check_joined(self.columns, dataset, dict.fromkeys(("image_id", "mask_id"), _COLUMNS), in_json=False)

    def parts(self, dataset: Dataset, rows: Rows) -> Iterable[tuple[str, Rows]]:
        starts = range(0, len(rows), self.images_per_file)
        return [
            (f"train-{part:05d}-of-{len(starts):05d}", rows[start : start + self.images_per_file])
            for part, start in enumerate(starts)
        ]

    def paths(self, part: str, ids: Ids) -> list[str]:
        return [f"{part}.parquet"]

    def write(self, part: str, samples: Iterable[Sample], files: PartFiles) -> None:
        kinds = {
            column.name: column.kind if column.key == "image_id" else pa.list_(column.kind)
            for column in self.columns
        }
        schema = _schema(kinds | ({"texts": pa.list_(pa.string())} if self.texts else {}))
        group: list[dict[str, Any]] = []
        size = 0
        with (
            files.open(f"{part}.parquet") as file,
            pq.ParquetWriter(file, schema, compression="zstd") as writer,
        ):
            for sample in samples:
                row = _row(sample) | {column.name: joined_value(column, sample) for column in self.columns}
                group.append(row | ({"texts": sample.annotations.texts() or []} if self.texts else {}))
                size += len(sample.jpeg)
                if size >= _GROUP_BYTES:
                    _write(writer, group, schema)
                    group, size = [], 0
            if group:
                _write(writer, group, schema)


def _write(writer: pq.ParquetWriter, group: list[dict[str, Any]], schema: pa.Schema) -> None:
    writer.write_table(pa.Table.from_pylist(group, schema), row_group_size=len(group))


def _row(sample: Sample) -> dict[str, Any]:
    annotations, runs = sample.annotations, sample.runs
    columns = {
        "id": annotations.mask_id.tolist(),
        "counts": [string.decode("ascii") for string in coco.encode(runs)],
        "bbox": geometry.bbox(runs).tolist(),
        "area": geometry.area(runs).tolist(),
        "predicted_iou": annotations.predicted_iou.tolist(),
        "stability_score": annotations.stability_score.tolist(),
        "point_coords": annotations.point_coords.tolist(),
        "crop_box": annotations.crop_box.tolist(),
    }
    return {
        "image_id": sample.image_id,
        "image": {"bytes": sample.jpeg, "path": member_name(sample.image_id, "jpg")},
        "width": annotations.width,
        "height": annotations.height,
        "masks": [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)],
    }
