"""A shard: a plain tar of pairs of an image and its mask record, and the index of the tar.

Members are USTAR, in the order in which pairs are added: `sa_<id>.jpg`, `sa_<id>.masks`, and with keep_json
`sa_<id>.json`. With annotations_only, there is no `sa_<id>.jpg`. One read from the content of the JPEG to the
end of the masks is a training sample. All header fields that could differ between two runs (times, owners)
are fixed.
"""

import contextlib
import hashlib
import tarfile
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import google_crc32c
import pyarrow.parquet as pq

from sa1b.errors import ShardError
from sa1b.masks.runs import Runs
from sa1b.names import member_name
from sa1b.shards import record
from sa1b.shards.annotation import Annotations
from sa1b.shards.image_warnings import ImageWarnings
from sa1b.shards.index import IndexWriter, Row
from sa1b.shards.manifest import ShardInfo
from sa1b.shards.shard_walk import StoredImage, damaged, member_header, walk_shard
from sa1b.storage.atomic import flush

# Columns of the index that describe the members of an image.
_COLUMNS = frozenset(
    {"image_id"}
    | {f"{ending}_{what}" for ending in ("jpg", "masks") for what in ("offset", "bytes", "crc32c")}
)


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """One image, ready to be stored.

    Attributes:
        jpeg: the bytes to store; empty: the shard gets no image.
        height, width: pixels of that JPEG; 0 if it is empty.
        annotations, runs: annotations and masks of the source image.
        text: the annotation file to store verbatim, or None.
        warnings: reason -> warning about an odd value; not stored in the shard.
    """

    jpeg: bytes
    height: int
    width: int
    annotations: Annotations
    runs: Runs
    text: bytes | None = None
    warnings: ImageWarnings = field(default_factory=ImageWarnings)


class ShardWriter:
    """Writes one shard and its index into `folder`, under their final names."""

    def __init__(self, folder: Path, name: str, *, with_runs: bool) -> None:
        self.path = folder / name
        self.images = 0
        self.masks = 0
        self._tar = tarfile.TarFile(self.path, "w", format=tarfile.USTAR_FORMAT)
        self._index = IndexWriter(index_path(self.path), with_runs=with_runs)

    def add(self, pair: Pair) -> Row:
        """Append one image; returns its row of the index."""
        annotations = pair.annotations
        masks = record.encode(annotations)
        image_id = annotations.image_id
        # Without an image, its empty content is at the header of the masks. So the masks begin where they do
        # after a JPEG, and one read from the offset returns the sample.
        jpg_offset = int(self._tar.offset)
        if pair.jpeg:
            jpg_offset = self._member(member_name(image_id, "jpg"), pair.jpeg)
        masks_offset = self._member(member_name(image_id, "masks"), masks)
        if pair.text is not None:
            self._member(member_name(image_id, "json"), pair.text)
        row = Row(
            annotations=annotations,
            runs=pair.runs,
            image_height=pair.height,
            image_width=pair.width,
            jpg_offset=jpg_offset,
            jpg_bytes=len(pair.jpeg),
            masks_offset=masks_offset,
            masks_bytes=len(masks),
            jpg_crc32c=google_crc32c.value(pair.jpeg),
            masks_crc32c=google_crc32c.value(masks),
        )
        self._index.add(row)
        self.images += 1
        self.masks += len(annotations)
        return row

    def close(self) -> None:
        """Complete the tar and the index; `seal` flushes them to the disk."""
        self._tar.close()
        self._index.close()

    def abandon(self) -> None:
        """Drop a shard that will not be used."""
        self._index.abandon()
        with contextlib.suppress(OSError):
            self._tar.fileobj.close()

    def _member(self, name: str, data: bytes) -> int:
        """Write one member; returns the offset of its content."""
        offset = self._tar.offset + tarfile.BLOCKSIZE
        file = self._tar.fileobj
        for piece in (member_header(name, len(data)), data, bytes(-len(data) % tarfile.BLOCKSIZE)):
            file.write(piece)  # tarfile's addfile would copy the data once more
            self._tar.offset += len(piece)
        return int(offset)


def index_path(shard: Path) -> Path:
    """The path of the index of a shard."""
    return shard.with_suffix(".parquet")


def seal(shard: Path) -> ShardInfo:
    """Read a finished shard, compare every image with the index, and flush both files to the disk.

    Raises:
        ShardError: the tar does not read back as it was written, or differs from the index.
    """
    index = index_path(shard)
    reader = pq.ParquetFile(index.absolute())
    rows = reader.read([name for name in reader.schema_arrow.names if name in _COLUMNS]).to_pylist()
    masks = reader.read(["runs_count"])["runs_count"]
    digest = hashlib.sha256()
    try:
        images = sum(
            _compare(shard, row, image) for row, image in zip_longest(rows, walk_shard(shard, digest))
        )
    except ShardError as error:
        raise ShardError(
            f"{error}: the shard was just written; check disk and memory, then run the same command again"
        ) from None
    for path in (shard, index):
        flush(path)
    with index.open("rb") as stored:
        index_sha256 = hashlib.file_digest(stored, "sha256").hexdigest()
    return ShardInfo(
        name=shard.name,
        images=images,
        masks=sum(len(chunk.flatten()) for chunk in masks.chunks),
        bytes=shard.stat().st_size,
        sha256=digest.hexdigest(),
        index_bytes=index.stat().st_size,
        index_sha256=index_sha256,
    )


def _compare(shard: Path, row: dict[str, int] | None, image: StoredImage | None) -> int:
    """Compare an image with its row of the index; returns 1, the number of images compared.

    Raises:
        ShardError: they differ, or one of the two is missing.
    """
    if row is None or image is None:
        name, where = ("the index", "the tar") if image is None else ("the tar", "the index")
        known = row["image_id"] if row is not None else image.image_id if image is not None else -1
        raise damaged(shard, shard.stat().st_size, f"image {known} is in {name} and not in {where}")
    found = {"image_id": image.image_id}
    for ending, member in image.members().items():
        found[f"{ending}_offset"], found[f"{ending}_bytes"] = member.offset, len(member.data)
        found[f"{ending}_crc32c"] = member.crc32c
    if row != found:
        wrong = ", ".join(name for name in found if found[name] != row[name])
        raise damaged(shard, image.jpg.offset, f"image {image.image_id} differs from the index in {wrong}")
    return 1
