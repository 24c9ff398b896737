"""The sample table: 36 bytes a sample, sorted, mapped, checked."""

import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import sa1b
from sa1b.errors import ManifestError, TableError
from tests.directories import reshard
from tests.shards import tiny

IDS = [3, 2**63 - 1, 7, 12_345, 2**40, 5, 9]
COLUMNS = {"image_id": "<u8", "shard": "<u4", "offset": "<u8", "jpg_bytes": "<u4", "masks_bytes": "<u4"}
COLUMNS |= {"jpg_crc32c": "<u4", "masks_crc32c": "<u4"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources, whose ids lie between each other, in shards of two images."""
    folder = tmp_path_factory.mktemp("table")
    for number in range(2):
        tiny.make_tar(folder / f"sa_{number:06d}.tar", IDS[number::2])
    reshard(folder / "root", *sorted(folder.glob("*.tar")), images_per_shard=2)
    return folder / "root"


def table_of(root: Path) -> Path:
    (path,) = root.glob("samples-*.bin")
    return path


def test_the_table_has_the_columns_of_all_indexes_sorted_by_id(root: Path) -> None:
    data, document = table_of(root).read_bytes(), json.loads((root / "dataset.json").read_text())
    magic, version, header, count, ids_sha256, sha256 = struct.unpack_from("<8sIIQ32s32s", data)
    assert (magic, version, header, count) == (b"SA1BTBL1", 1, 128, len(IDS))
    assert hashlib.sha256(np.array(sorted(IDS), "<u8")).digest() == ids_sha256
    assert hashlib.sha256(data[128:]).digest() == sha256
    expected: dict[str, list[int]] = {name: [] for name in COLUMNS}
    for number, shard in enumerate(document["shards"]):
        for row in pq.read_table((root / shard["name"]).with_suffix(".parquet")).to_pylist():
            for name, values in expected.items():
                values.append({"shard": number, "offset": row["jpg_offset"], **row}[name])
    order, at = np.argsort(expected["image_id"]), 128
    for name, kind in COLUMNS.items():
        column = np.frombuffer(data, kind, count, at)
        assert (column == np.array(expected[name], kind)[order]).all(), name
        at += -(-column.nbytes // 8) * 8
    assert at == len(data)


def test_the_digests_name_the_set_of_images_and_the_content(root: Path, tmp_path: Path) -> None:
    reshard(tmp_path / "root", *sorted(root.parent.glob("*.tar")), images_per_shard=3)
    one, other = (
        json.loads((one / "dataset.json").read_text())["samples"] for one in (root, tmp_path / "root")
    )
    assert one["ids_sha256"] == other["ids_sha256"]
    assert one["columns_sha256"] != other["columns_sha256"]
    assert table_of(root).name == f"samples-{one['columns_sha256'][:16]}.bin"


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda data: b"", TableError),
        (lambda data: data[:100], TableError),
        (lambda data: b"x" + data[1:], TableError),
        (lambda data: data[:-1], TableError),
        (lambda data: data + b"\0", TableError),
        (lambda data: data[:8] + b"\x09" + data[9:], TableError),
        (lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:], ManifestError),  # the digest of the ids
        (lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:], ManifestError),  # of the columns
        (lambda data: data[:-30] + bytes([data[-30] ^ 1]) + data[-29:], TableError),
    ],
)
def test_damage_is_named_with_the_file(
    root: Path, tmp_path: Path, damage: Callable[[bytes], bytes], error: type[Exception]
) -> None:
    for path in (root / "dataset.json", table_of(root)):
        shutil.copy(path, tmp_path)
    path = table_of(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(error, match=path.name) as found:
        sa1b.open(tmp_path).check_table()
    assert f"index {tmp_path}" in str(found.value) or "version 9" in str(found.value)


def test_records_are_found_after_images_of_any_length(tmp_path: Path) -> None:
    members, images = [], {}
    for number, rest in enumerate((0, 1, 511), 1):
        jpeg, text = tiny.pair(number)
        size = (rest - len(jpeg) - 4) % 512  # of a comment
        images[number] = jpeg[:2] + b"\xff\xfe" + struct.pack(">H", size + 2) + bytes(size) + jpeg[2:]
        assert len(images[number]) % 512 == rest
        members += tiny.pair_members(number, images[number], text)
    reshard(tmp_path / "root", tiny.write_tar(tmp_path / "sa_000001.tar", members))
    for number, sample in enumerate(sa1b.open(tmp_path / "root"), 1):
        assert sample.jpeg == images[number]
        assert sample.annotations.to_json() == json.loads(tiny.pair(number)[1])
