"""The sample table: the location of every image of a dataset, sorted by id, as a memory-mapped file.

`samples-<digest>.bin` is the table of a dataset. `tasks/<source>.samples` is the table of one source; its
`shard` counts the shards of that source.

    header   128 bytes: magic "SA1BTBL1", version u32, header bytes u32, count u64,
             sha256 of the image_id column (32 bytes), sha256 of all columns (32 bytes), zeros
    columns  image_id u64, shard u32, offset u64, jpg_bytes u32, masks_bytes u32, jpg_crc32c u32,
             masks_crc32c u32; little-endian, one after the other, each begins at a multiple of 8

`shard` is an index into the shards of dataset.json; `offset` is the offset of the jpg's content. The content
of the jpg is padded to a multiple of 512 bytes. The masks' header of 512 bytes comes next, then the masks'
content. So one read from `offset` returns a sample. A row takes 36 bytes.
"""

import hashlib
import mmap
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.console import command
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
MAGIC = b"SA1BTBL1"
_VERSION = 1
_HEADER_BYTES = 128


_NAME = re.compile(r"samples-[0-9a-f]{16}\.bin")


def is_table_name(name: str) -> bool:
    """Whether `name` is a name that `TableFacts` gives to the table of a dataset."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, eq=False)
class SampleTable:
    """The columns of a sample table, each [N], sorted by image_id; views into the mapped file."""

    image_id: npt.NDArray[np.uint64]
    shard: npt.NDArray[np.uint32]
    offset: npt.NDArray[np.uint64]
    jpg_bytes: npt.NDArray[np.uint32]
    masks_bytes: npt.NDArray[np.uint32]
    jpg_crc32c: npt.NDArray[np.uint32]
    masks_crc32c: npt.NDArray[np.uint32]
    ids_digest: str  # sha256 of the sorted image ids, which identifies the set of images for any sharding
    digest: str  # sha256 of all columns

    def __len__(self) -> int:
        return len(self.image_id)

    def masks_offset(self, i: int) -> int:
        """Offset in bytes of the content of the mask record of row i."""
        end = int(self.offset[i]) + int(self.jpg_bytes[i])
        return -(-end // 512) * 512 + 512

    def stops(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Ends in bytes of the mask records of rows, int64 [n]; see `masks_offset`."""
        ends = self.offset[rows].astype(np.int64) + self.jpg_bytes[rows]
        return -(-ends // 512) * 512 + 512 + self.masks_bytes[rows]


@dataclass(frozen=True, slots=True)
class TableFacts:
    """The manifest's entry for a sample table: size and sha256 of its file, digests as in `SampleTable`."""

    bytes: int
    sha256: str
    ids_sha256: str
    columns_sha256: str

    @property
    def name(self) -> str:
        """The table's file name in a dataset directory."""
        return f"samples-{self.columns_sha256[:16]}.bin"


_EMPTY = SampleTable(
    **{name: np.empty(0, dtype) for name, dtype in COLUMNS.items()}, ids_digest="", digest=""
)


def encode(columns: dict[str, npt.NDArray[Any]]) -> bytes:
    """The file's bytes, from columns in any order of rows; ValueError names an image id that occurs twice."""
    order = np.argsort(columns["image_id"], kind="stable")
    ids = columns["image_id"][order]
    twice = ids[1:] == ids[:-1]
    if twice.any():
        raise ValueError(f"image id {int(ids[1:][twice][0])} occurs twice")
    body = b"".join(_column(columns[name][order], dtype) for name, dtype in COLUMNS.items())
    return _header(ids, hashlib.sha256(body).digest()) + body


def write_table(path: Path, parts: Sequence[SampleTable], first_shards: Sequence[int]) -> TableFacts:
    """Join tables into one flushed file; ValueError: an image id twice. 24 bytes a row in memory."""
    parts = [*parts, _EMPTY]
    first_shards = [*first_shards, 0]
    ids = np.concatenate([part.image_id for part in parts])
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    twice = ids[1:] == ids[:-1]
    if twice.any():
        raise ValueError(f"image id {int(ids[1:][twice][0])} occurs twice")
    digest = hashlib.sha256()
    with path.open("wb") as file:
        file.write(bytes(_HEADER_BYTES))
        for name, dtype in COLUMNS.items():
            if name == "image_id":
                column = ids
            elif name == "shard":
                pairs = zip(parts, first_shards, strict=True)
                column = np.concatenate([part.shard + np.uint32(first) for part, first in pairs])[order]
            else:
                column = np.concatenate([getattr(part, name) for part in parts])[order]
            data = _column(column, dtype)
            digest.update(data)
            file.write(data)
        header = _header(ids, digest.digest())
        file.seek(0)
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
    with path.open("rb") as file:
        return read_facts(file)


def read_facts(file: BufferedReader) -> TableFacts:
    """The manifest's entry for a table's file, which is read completely."""
    file.seek(0)
    header = file.read(_HEADER_BYTES)
    file.seek(0)
    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return TableFacts(file.tell(), sha256, **digests(header))


def _column(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    data = values.astype(dtype, copy=False).tobytes()
    return data + bytes(-len(data) % 8)


def _header(ids: npt.NDArray[Any], sha256: bytes) -> bytes:
    ids_sha256 = hashlib.sha256(ids.astype("<u8", copy=False).tobytes()).digest()
    fields = _HEADER.pack(MAGIC, _VERSION, _HEADER_BYTES, len(ids), ids_sha256, sha256)
    return fields.ljust(_HEADER_BYTES, b"\0")


def open_table(path: Path, root: str | None = None, *, check: bool = False) -> SampleTable:
    """Map a sample table, with `check` also verified; TableError: none, another version, or damaged.

    `root` is its dataset directory, for messages.
    """
    try:
        with path.open("rb") as file:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise TableError(f"{path}: empty file; {_rebuild(root)}") from None
    table = decode(view, path, root)
    if check and not is_intact(table):
        raise TableError(f"{path}: the columns do not match their digest; {_rebuild(root)}")
    return table


def _rebuild(root: str | None) -> str:
    if root is None:
        return f"rebuild it as `{command('index', '--help')}` says"
    return f"run `{command('index', root)}` to rebuild it"


def decode(view: bytes | mmap.mmap, path: object = "sample table", root: str | None = None) -> SampleTable:
    """A table from its file's bytes, which are from `path`; TableError: see `open_table`."""
    if len(view) < _HEADER_BYTES or view[:8] != MAGIC:
        raise TableError(f"{path}: not a sample table; {_rebuild(root)}")
    _, version, header_bytes, count, ids_sha256, sha256 = _HEADER.unpack_from(view)
    if version != _VERSION or header_bytes != _HEADER_BYTES:
        raise TableError(f"{path}: version {version}; this package reads version {_VERSION}")
    starts, size = _layout(count)
    if size != len(view):
        raise TableError(
            f"{path}: {len(view):,} bytes, {size:,} expected for {count:,} samples; {_rebuild(root)}"
        )
    arrays = {name: np.frombuffer(view, dtype, count, starts[name]) for name, dtype in COLUMNS.items()}
    return SampleTable(**arrays, ids_digest=ids_sha256.hex(), digest=sha256.hex())


def is_intact(table: SampleTable) -> bool:
    """Whether the mapped columns match their digest; takes 0.3 s for all of SA-1B."""
    digest = hashlib.sha256()
    for name in COLUMNS:
        column = getattr(table, name)
        digest.update(column.data)
        digest.update(bytes(-column.nbytes % 8))
    return digest.hexdigest() == table.digest


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
    if len(header) < _HEADER.size:
        raise TableError(f"sample table of {len(header)} bytes: truncated; {_rebuild(None)}")
    _, _, _, _, ids_sha256, sha256 = _HEADER.unpack_from(header)
    return {"ids_sha256": ids_sha256.hex(), "columns_sha256": sha256.hex()}


def clashes(tables: Mapping[str, SampleTable]) -> dict[str, str]:
    """Sources that hold an image of a source before them, by name: source -> message."""
    messages = _neighbour_clashes(tables)
    if messages:  # an image in three sources: the first and the last are compared without the second
        messages |= clashes({name: table for name, table in tables.items() if name not in messages})
    return messages


def _neighbour_clashes(tables: Mapping[str, SampleTable]) -> dict[str, str]:
    """Clashes of sources with the source before them that holds the same image."""
    names = list(tables)
    ids = np.concatenate([tables[name].image_id for name in names]) if names else np.empty(0, np.uint64)
    ends = list(accumulate(len(tables[name]) for name in names))
    order = np.argsort(ids, kind="stable")
    same = np.flatnonzero(ids[order][1:] == ids[order][:-1])
    if not len(same):
        return {}
    # Of equal ids the stable order has the earlier source first.
    owners = np.searchsorted(ends, np.stack([order[same], order[same + 1]]), side="right")
    messages: dict[str, str] = {}
    pairs, at = np.unique(owners, axis=1, return_index=True)
    for (first, second), position in sorted(zip(pairs.T.tolist(), at.tolist(), strict=True)):
        if names[first] not in messages and first != second:
            image_id = int(ids[order[same[position]]])
            message = clash_message(image_id, names[second], names[first])
            messages.setdefault(names[second], message)
    return messages


def clash_message(image_id: int, source: str, owner: str) -> str:
    """The error for a source with an image that `owner`, a source or a shard, has already."""
    return (
        f"image {image_id} of {source} is in {owner} already: the same images under two names, or two "
        f"sources that overlap. Leave {source} out, or drop the other one first (--drop)"
    )
