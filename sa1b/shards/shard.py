"""A shard: a plain tar of image and mask record pairs, with its index beside it.

Members are USTAR, in the order pairs are added: `sa_<id>.jpg`, right behind it `sa_<id>.masks`, then, if
asked for, `sa_<id>.json`. One read from the jpg's content to the end of the masks is a training sample.
Everything that could differ between two runs (times, owners) is fixed.
"""

import contextlib
import hashlib
import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import pyarrow.parquet as pq

from sa1b.errors import ShardError
from sa1b.masks.runs import Runs
from sa1b.names import member_name
from sa1b.shards import record
from sa1b.shards.annotation import Annotations
from sa1b.shards.index import IndexWriter, Row
from sa1b.shards.manifest import ShardInfo
from sa1b.storage.publish import flush

_COPY_BYTES = 256 << 20  # larger than any member: tarfile then writes each in one piece

_PLACE = {  # member -> its columns in the index
    "jpg": ("jpg_offset", "jpg_bytes", "jpg_crc32c"),
    "masks": ("masks_offset", "masks_bytes", "masks_crc32c"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """One image, ready to be stored.

    Attributes:
        jpeg: the bytes to store.
        height, width: pixels of that JPEG.
        annotations, runs: of the source image.
        text: the annotation file to store verbatim, or None.
    """

    jpeg: bytes
    height: int
    width: int
    annotations: Annotations
    runs: Runs
    text: bytes | None = None


class ShardWriter:
    """Writes one shard and its index into `folder`, under their final names."""

    def __init__(self, folder: Path, name: str, *, with_runs: bool) -> None:
        self.path = folder / name
        self.images = 0
        self.masks = 0
        self._tar = tarfile.TarFile(self.path, "w", format=tarfile.USTAR_FORMAT, copybufsize=_COPY_BYTES)
        self._index = IndexWriter(index_path(self.path), with_runs=with_runs)

    def add(self, pair: Pair) -> Row:
        """Append one image; its row of the index."""
        annotations = pair.annotations
        masks = record.encode(annotations)
        image_id = annotations.image_id
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
        """End the tar and the index; they are not yet on the disk (`seal`)."""
        self._tar.close()
        self._index.close()

    def abandon(self) -> None:
        """Let go of a shard that will not be used."""
        self._index.abandon()
        with contextlib.suppress(OSError):
            self._tar.fileobj.close()

    def _member(self, name: str, data: bytes) -> int:
        """Write one member; the offset of its content."""
        member = tarfile.TarInfo(name)
        member.size = len(data)
        offset = self._tar.offset + tarfile.BLOCKSIZE
        self._tar.addfile(member, io.BytesIO(data))
        return int(offset)


def index_path(shard: Path) -> Path:
    """Where the index of a shard lies."""
    return shard.with_suffix(".parquet")


def seal(shard: Path) -> ShardInfo:
    """Read a finished shard back, hold every member against the index, flush both files to the disk.

    Raises:
        ShardError: the tar does not hold what the index says.
    """
    index = index_path(shard)
    reader = pq.ParquetFile(index)
    places = reader.read(["image_id", *_PLACE["jpg"], *_PLACE["masks"]]).to_pydict()
    masks = reader.read(["runs_count"])["runs_count"]
    digest = hashlib.sha256()
    with shard.open("rb", buffering=0) as file:

        def read(length: int) -> bytes:
            data = file.read(length)
            digest.update(data)
            return data

        for i, image_id in enumerate(places["image_id"]):
            for kind, columns in _PLACE.items():
                offset, size, crc = (places[column][i] for column in columns)
                read(offset - file.tell())
                if google_crc32c.value(read(size)) != crc:
                    raise ShardError(
                        f"{shard}: sa_{image_id}.{kind} at offset {offset:,} does not read back as written"
                    )
        while read(1 << 20):
            pass
        size = file.tell()
    for path in (shard, index):
        flush(path)
    with index.open("rb") as stored:
        index_sha256 = hashlib.file_digest(stored, "sha256").hexdigest()
    return ShardInfo(
        name=shard.name,
        images=len(places["image_id"]),
        masks=sum(len(chunk.flatten()) for chunk in masks.chunks),
        bytes=size,
        sha256=digest.hexdigest(),
        index_bytes=index.stat().st_size,
        index_sha256=index_sha256,
    )
