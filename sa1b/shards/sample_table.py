"""The sample table `samples.bin`: where every image lies, sorted by id, to be memory-mapped.

    header   128 bytes: magic "SA1BTBL1", version u32, header bytes u32, count u64,
             sha256 of the image_id column (32 bytes), sha256 of all columns (32 bytes), zeros
    columns  image_id u64, shard u32, offset u64, jpg_bytes u32, masks_bytes u32, jpg_crc32c u32,
             masks_crc32c u32; little-endian, one behind the other, each begins at a multiple of 8

`shard` counts the shards of dataset.json; `offset` is that of the jpg's content. The masks' content follows
at the next multiple of 512 plus 512: one read from `offset` to its end is a sample. 36 bytes a sample.
"""

import hashlib
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.errors import TableError

COLUMNS: dict[str, np.dtype[Any]] = {
    "image_id": np.dtype("<u8"),
    "shard": np.dtype("<u4"),
    "offset": np.dtype("<u8"),
    "jpg_bytes": np.dtype("<u4"),
    "masks_bytes": np.dtype("<u4"),
    "jpg_crc32c": np.dtype("<u4"),
    "masks_crc32c": np.dtype("<u4"),
}
_HEADER = struct.Struct("<8sIIQ32s32s")
_MAGIC = b"SA1BTBL1"
_VERSION = 1
_HEADER_BYTES = 128


@dataclass(frozen=True, slots=True, eq=False)
class SampleTable:
    """The columns of samples.bin, each [N], sorted by image_id; views into the mapped file.

    Attributes:
        ids_digest: sha256 of the sorted image ids: names the set of images, whatever their sharding.
        digest: sha256 of all columns.
    """

    image_id: npt.NDArray[np.uint64]
    shard: npt.NDArray[np.uint32]
    offset: npt.NDArray[np.uint64]
    jpg_bytes: npt.NDArray[np.uint32]
    masks_bytes: npt.NDArray[np.uint32]
    jpg_crc32c: npt.NDArray[np.uint32]
    masks_crc32c: npt.NDArray[np.uint32]
    ids_digest: str
    digest: str

    def __len__(self) -> int:
        return len(self.image_id)

    def masks_offset(self, i: int) -> int:
        """Offset of the mask record's content of row i, in bytes."""
        end = int(self.offset[i]) + int(self.jpg_bytes[i])
        return -(-end // 512) * 512 + 512


def encode(columns: dict[str, npt.NDArray[Any]]) -> bytes:
    """The file's bytes, from columns in any order of rows.

    Raises:
        ValueError: an image id stands twice; the message names it.
    """
    order = np.argsort(columns["image_id"], kind="stable")
    ids = columns["image_id"][order]
    twice = ids[1:] == ids[:-1]
    if twice.any():
        raise ValueError(f"image id {int(ids[1:][twice][0])} stands twice")
    pieces = []
    for name, dtype in COLUMNS.items():
        data = columns[name][order].astype(dtype).tobytes()
        pieces.append(data + bytes(-len(data) % 8))
    body = b"".join(pieces)
    ids_sha256 = hashlib.sha256(ids.astype("<u8").tobytes()).digest()
    header = _HEADER.pack(
        _MAGIC, _VERSION, _HEADER_BYTES, len(ids), ids_sha256, hashlib.sha256(body).digest()
    )
    return header.ljust(_HEADER_BYTES, b"\0") + body


def open_table(path: Path, *, check: bool = False) -> SampleTable:
    """Map samples.bin. `check` also computes the digest of its columns.

    Raises:
        TableError: not a sample table, another version, a size that does not fit, or a wrong digest.
    """
    try:
        with path.open("rb") as file:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise TableError(f"{path}: empty file") from None
    if len(view) < _HEADER_BYTES or view[:8] != _MAGIC:
        raise TableError(f"{path}: not a sample table; `tools/index.py` makes it again from the tars")
    _, version, header_bytes, count, ids_sha256, sha256 = _HEADER.unpack_from(view)
    if version != _VERSION or header_bytes != _HEADER_BYTES:
        raise TableError(f"{path}: version {version}; this package reads version {_VERSION}")
    starts, size = _layout(count)
    if size != len(view):
        raise TableError(f"{path}: {len(view):,} bytes, {size:,} expected for {count:,} samples")
    if check and hashlib.sha256(memoryview(view)[_HEADER_BYTES:]).digest() != sha256:
        raise TableError(f"{path}: the columns do not fit their digest")
    arrays = {name: np.frombuffer(view, dtype, count, starts[name]) for name, dtype in COLUMNS.items()}
    return SampleTable(**arrays, ids_digest=ids_sha256.hex(), digest=sha256.hex())


def _layout(count: int) -> tuple[dict[str, int], int]:
    """Where each column starts, and the size of the file, in bytes."""
    starts = {}
    position = _HEADER_BYTES
    for name, dtype in COLUMNS.items():
        starts[name] = position
        position += -(-count * dtype.itemsize // 8) * 8
    return starts, position


def digests(header: bytes) -> dict[str, str]:
    """The two digests in the header of a sample table."""
    _, _, _, _, ids_sha256, sha256 = _HEADER.unpack_from(header)
    return {"ids_sha256": ids_sha256.hex(), "columns_sha256": sha256.hex()}
