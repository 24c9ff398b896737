"""A reader of dataset directories written from docs/dataset-format.md alone, without `sa1b`."""

import hashlib
import json
import struct
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow.parquet as pq
import zstandard

TABLE_COLUMNS = {
    "image_id": "<u8",
    "shard": "<u4",
    "offset": "<u8",
    "jpg_bytes": "<u4",
    "masks_bytes": "<u4",
    "jpg_crc32c": "<u4",
    "masks_crc32c": "<u4",
}
DTYPES = {"U8": "u1", "U16": "<u2", "U32": "<u4", "I64": "<i8", "F32": "<f4", "F64": "<f8"}
MASK_KEYS = [
    "bbox",
    "area",
    "segmentation",
    "predicted_iou",
    "point_coords",
    "crop_box",
    "id",
    "stability_score",
]


@dataclass
class Image:
    image_id: int
    jpeg: bytes
    columns: dict[str, np.ndarray]
    masks: list[np.ndarray]  # each bool [height, width]
    document: Any  # the annotation file


def read_table(path: Path, ids_sha256: str, columns_sha256: str) -> dict[str, np.ndarray]:
    data = path.read_bytes()
    magic, version, header, count, ids, columns = struct.unpack_from("<8sIIQ32s32s", data)
    assert (magic, version, header) == (b"SA1BTBL1", 1, 128)
    assert (ids.hex(), columns.hex()) == (ids_sha256, columns_sha256)
    assert hashlib.sha256(data[header:]).hexdigest() == columns_sha256
    table, start = {}, header
    for name, dtype in TABLE_COLUMNS.items():
        table[name] = np.frombuffer(data, dtype, count, start)
        start += -(-table[name].nbytes // 8) * 8
    assert start == len(data)
    assert hashlib.sha256(table["image_id"].tobytes()).hexdigest() == ids_sha256
    return table


def read_record(data: bytes) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    content = zstandard.decompress(data)
    (size,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + size])
    metadata = header.pop("__metadata__")
    assert metadata["format"] == "sa1b-masks-1"
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        values = np.frombuffer(content[8 + size + begin : 8 + size + end], DTYPES[entry["dtype"]])
        tensors[name] = values.reshape(entry["shape"])
    return metadata, tensors


def runs_of(string: bytes) -> list[int]:
    runs: list[int] = []
    value = shift = 0
    for character in string:
        bits = character - 48
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            if bits & 16:
                value -= 1 << shift
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    return runs


def pixels_of(runs: list[int], height: int, width: int) -> np.ndarray:
    assert sum(runs) == height * width
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(width, height).T


def annotation_file(metadata: dict[str, str], columns: dict[str, np.ndarray], strings: list[bytes]) -> Any:
    if "json" in columns:
        return json.loads(columns["json"].tobytes())
    image_id, width, height = (int(metadata[key]) for key in ("image_id", "width", "height"))
    annotations = []
    for i, string in enumerate(strings):
        kind = columns["number_types"][i]
        bbox, crop_box = (
            columns[name][i].astype("i8" if kind & bit else "f8").tolist()
            for name, bit in (("bbox", 1), ("crop_box", 2))
        )
        segmentation = {"size": [height, width], "counts": string.decode()}
        iou, stability = (float(columns[name][i]) for name in ("predicted_iou", "stability_score"))
        point = [columns["point_coords"][i].astype("f8").tolist()]
        numbers = int(columns["area"][i]), int(columns["mask_id"][i])
        values = (bbox, numbers[0], segmentation, iou, point, crop_box, numbers[1], stability)
        annotations.append(dict(zip(MASK_KEYS, values, strict=True)))
    image = {"image_id": image_id, "width": width, "height": height, "file_name": f"sa_{image_id}.jpg"}
    return {"image": image, "annotations": annotations}


def read_directory(root: Path) -> Iterator[Image]:
    """All images by ascending id, each with one read of its shard."""
    manifest = json.loads((root / "dataset.json").read_bytes())
    assert manifest["format"] == "sa1b-shards-1"
    samples = manifest["samples"]
    table = read_table(root / samples["name"], samples["ids_sha256"], samples["columns_sha256"])
    for row in zip(*table.values(), strict=True):
        image_id, shard, offset, jpg_bytes, masks_bytes, jpg_crc32c, masks_crc32c = map(int, row)
        masks_offset = -(-(offset + jpg_bytes) // 512) * 512 + 512
        with (root / manifest["shards"][shard]["name"]).open("rb") as file:
            file.seek(offset)
            data = file.read(masks_offset + masks_bytes - offset)
        jpeg, record = data[:jpg_bytes], data[masks_offset - offset :]
        assert (google_crc32c.value(jpeg), google_crc32c.value(record)) == (jpg_crc32c, masks_crc32c)
        metadata, columns = read_record(record)
        assert int(metadata["image_id"]) == image_id
        ends = [0, *np.cumsum(columns["rle_bytes"], dtype=np.int64).tolist()]
        joined = columns["rle"].tobytes()
        strings = [joined[start:end] for start, end in pairwise(ends)]
        height, width = int(metadata["height"]), int(metadata["width"])
        masks = [pixels_of(runs_of(string), height, width) for string in strings]
        yield Image(image_id, jpeg, columns, masks, annotation_file(metadata, columns, strings))


def read_shard(root: Path, name: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Names of a shard's members, and the rows of its index, compared with the members' bytes."""
    rows = pq.read_table(root / name.replace(".tar", ".parquet")).to_pylist()
    by_name = {f"sa_{row['image_id']}": row for row in rows}
    names = []
    with tarfile.open(root / name, "r:") as tar:
        for member in tar:
            names.append(member.name)
            stem, ending = member.name.split(".")
            if ending != "json":
                data, row = tar.extractfile(member).read(), by_name[stem]
                found = (member.offset_data, len(data), google_crc32c.value(data))
                assert found == tuple(row[f"{ending}_{what}"] for what in ("offset", "bytes", "crc32c"))
    return names, rows
