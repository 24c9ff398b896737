"""The masks of the images that layers change, as a Parquet file for `sa1b.programs.query.sql`.

A row has the lists of an index for one image, with the changes applied, and the layer of each mask.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sa1b.report import bar
from sa1b.shards.annotation import Annotations
from sa1b.shards.dataset import Dataset
from sa1b.shards.layer import Layer, open_layers

_NUMBERS, _INTEGERS = pa.list_(pa.float64()), pa.list_(pa.int64())
COLUMNS = {
    "mask_id": _INTEGERS,
    "area": _INTEGERS,
    "bbox": pa.list_(_NUMBERS),
    "predicted_iou": _NUMBERS,
    "stability_score": _NUMBERS,
    "point_coords": pa.list_(_NUMBERS),
    "crop_box": pa.list_(_NUMBERS),
    "runs_count": pa.list_(pa.uint32()),
}
FURTHER = {
    "category": pa.list_(pa.string()),
    "category_id": _INTEGERS,
    "iscrowd": _INTEGERS,
    "fields": pa.list_(pa.string()),
}
_FIELDS = {"image_id": pa.int64(), **COLUMNS, **FURTHER, "layer": pa.list_(pa.string())}
_SCHEMA = pa.schema(list(_FIELDS.items()))
_IMAGES = 256  # of a row group


def write_changed(dataset: Dataset, layers: Sequence[str], path: Path, *, quiet: bool) -> tuple[Layer, ...]:
    """Open layers, and write the masks of all images that they change; ManifestError, ShardError: damage."""
    opened = open_layers(dataset.reader, dataset.table, layers)
    names = np.array(["", *(layer.info.name for layer in opened)])
    ids = np.unique(np.concatenate([layer.columns["image_id"] for layer in opened]))
    ids = ids[np.isin(ids.astype(np.uint64), dataset.table.image_id)]
    progress = bar(len(ids), "layers", " images", quiet)
    with pq.ParquetWriter(path, _SCHEMA, compression="zstd") as writer, progress as shown:
        for start in range(0, len(ids), _IMAGES):
            block = ids[start : start + _IMAGES].tolist()
            columns: dict[str, list[object]] = {name: [] for name in _SCHEMA.names}
            stored = dataset.masks([dataset.row(image_id) for image_id in block])
            for image_id, base in zip(block, stored, strict=True):
                # The column is not part of the file, and follows its mask through every change.
                annotations = replace(base, number_types=np.zeros(len(base), np.uint8))
                for number, layer in enumerate(opened, 1):
                    pending = layer.submit(dataset.reader, image_id)
                    annotations = annotations if pending is None else pending.apply(annotations, mark=number)
                _append(columns, annotations, names)
            writer.write_table(pa.table(columns, schema=_SCHEMA))
            shown.update(len(block))
    return opened


def _append(columns: dict[str, list[object]], annotations: Annotations, names: np.ndarray) -> None:
    columns["image_id"].append(annotations.image_id)
    for name in (*COLUMNS, *FURTHER):
        columns[name].append(annotations.column(name).tolist())
    columns["layer"].append(names[annotations.number_types].tolist())


def with_layers(select: str, changed: str, *, of_coco: bool) -> str:
    """`select` with the lists of the file `changed`, a literal; `of_coco`: indexes with COCO's columns."""
    replaced = ", ".join(
        f"coalesce(c.{name}, b.{name}) AS {name}" for name in (*COLUMNS, *(FURTHER if of_coco else ()))
    )
    added = "".join(f", c.{name}" for name in (() if of_coco else FURTHER))
    return (
        f"SELECT b.* REPLACE ({replaced}){added}, c.layer FROM ({select}) AS b "
        f"LEFT JOIN read_parquet({changed}) AS c USING (image_id)"
    )
