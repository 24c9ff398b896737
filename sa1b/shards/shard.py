"""A shard: a plain tar of pairs of an image and its mask record, and the index of the tar.

Members are USTAR, in the order in which pairs are added: `sa_<id>.jpg`, `sa_<id>.masks`, and with keep_json
`sa_<id>.json`. With annotations_only, there is no `sa_<id>.jpg`. One read from the content of the JPEG to the
end of the masks is a training sample. All header fields that could differ between two runs (times, owners)
are fixed. So headers, padding and the end of the tar follow from names and sizes: anything else is damage,
and `walk_shard` stops there. `seal` compares the images with the index, and `sa1b index` builds the index
from them. `sa1b verify` continues after damage and therefore reads members with `sa1b.sources.tar_reader`.

If the file is in memory, `walk_shard` takes 1.0 ms for an image of 1 MB, 0.9 ms of it for sha256 and crc32c.
"""

import contextlib
import hashlib
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow.parquet as pq
from crc32c import crc32c

from sa1b.errors import BadSample, ShardError
from sa1b.masks.runs import MaskError, Runs
from sa1b.names import member_name, parse_member_name
from sa1b.shards import jpeg, record
from sa1b.shards.annotation import Annotations
from sa1b.shards.annotation_columns import ImageWarnings
from sa1b.shards.documents import ShardInfo
from sa1b.shards.index import IndexWriter, Row
from sa1b.shards.index_file import index_path
from sa1b.shards.manifest import LARGEST
from sa1b.shards.record import RecordError
from sa1b.sources.tar_stream import BLOCK, parse_header
from sa1b.storage.atomic import flush, sha256_of

# Columns of the index that describe the members of an image.
_COLUMNS = frozenset(
    {"image_id"}
    | {f"{ending}_{what}" for ending in ("jpg", "masks") for what in ("offset", "bytes", "crc32c")}
)


# Twice the limit of ingest: a larger size is damage, and no memory is allocated for it.
_MAX_MEMBER_BYTES = 64 << 20


_ORDER = (["jpg", "masks"], ["jpg", "masks", "json"], ["masks"], ["masks", "json"])


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """One image, ready to be stored."""

    jpeg: bytes  # the bytes to store; empty: the shard gets no image
    height: int  # pixels of that JPEG; 0 if it is empty, as is the width
    width: int
    annotations: Annotations  # of the source image, as are the runs
    runs: Runs
    text: bytes | None = None  # the annotation file to store verbatim, or None
    # about odd values; not stored in the shard
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
        # Without an image, `jpg` is empty and at the offset of the masks' header. So the masks begin where
        # they do after a JPEG, and one read from the offset returns the sample.
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
            jpg_crc32c=crc32c(pair.jpeg),
            masks_crc32c=crc32c(masks),
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


@dataclass(frozen=True, slots=True, eq=False)
class StoredMember:
    """One member of a shard; `offset` is the offset of its content from the start of the tar, in bytes."""

    offset: int
    data: bytes
    crc32c: int


@dataclass(frozen=True, slots=True, eq=False)
class StoredImage:
    """The members of one image. Without images, `jpg` is empty and has the offset of the masks' header."""

    image_id: int
    jpg: StoredMember
    masks: StoredMember
    json: StoredMember | None  # None unless the shard was made with --keep-json

    def members(self) -> dict[str, StoredMember]:
        """Ending -> member, for the members that the index refers to."""
        return {"jpg": self.jpg, "masks": self.masks}


def member_header(name: str, size: int) -> bytes:
    """The header of 512 bytes before the content of a member in a shard."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT)


def tar_size(end: int) -> int:
    """The size of a tar whose last member ends at `end`: two zero blocks, then padding to a record."""
    least = end + 2 * BLOCK
    return least + -least % tarfile.RECORDSIZE


def walk_shard(
    shard: Path, digest: Any, progress: Callable[[int], object] | None = None
) -> Iterator[StoredImage]:
    """The images of a shard in its order; one image is in memory at a time. ShardError names the offset of a
    byte of the tar's structure that differs from what ingest writes.

    `digest` is a hashlib object that is updated with every byte of the file; it is complete when the iterator
    has ended. `progress` is called with the number of bytes of each read.
    """
    with shard.open("rb", buffering=0) as file:
        read = _Reads(shard, file, digest, progress)
        members: dict[str, StoredMember] = {}
        image_id, start = -1, 0
        first = ""  # ending of the first member of every image: jpg, or masks in a shard without images
        while (entry := read.member()) is not None:
            offset, member_id, ending, member = entry
            first = first or ending
            if ending == first and members:
                yield _image(shard, image_id, members, start)
                members = {}
            if not members:
                image_id, start = member_id, offset
            elif member_id != image_id or ending in members:
                last = ", ".join(member_name(image_id, other) for other in members)
                raise damaged(shard, offset, f"{member_name(member_id, ending)} follows {last}")
            members[ending] = member
        if members:
            yield _image(shard, image_id, members, start)


def index_row(shard: Path, image: StoredImage) -> Row:
    """The row of the index for an image, from its bytes; ShardError: they cannot be read."""
    jpg, masks = image.jpg, image.masks
    try:
        frame = jpeg.frame(jpg.data) if jpg.data else None
        annotations = record.decode(masks.data)
        runs = annotations.runs()
    except (BadSample, RecordError, MaskError) as error:
        raise damaged(shard, jpg.offset, f"{member_name(image.image_id, 'jpg')} or .masks: {error}") from None
    if annotations.image_id != image.image_id:
        message = f"{member_name(image.image_id, 'masks')} holds the masks of image {annotations.image_id}"
        raise damaged(shard, masks.offset, message)
    return Row(
        annotations=annotations,
        runs=runs,
        image_height=0 if frame is None else frame.height,
        image_width=0 if frame is None else frame.width,
        jpg_offset=jpg.offset,
        jpg_bytes=len(jpg.data),
        masks_offset=masks.offset,
        masks_bytes=len(masks.data),
        jpg_crc32c=jpg.crc32c,
        masks_crc32c=masks.crc32c,
    )


def damaged(shard: Path, offset: int, message: str) -> ShardError:
    """The error for damage at an offset of a shard; callers that catch it add the advice to the user."""
    return ShardError(f"{shard}, offset {offset:,}: {message}")


def _image(shard: Path, image_id: int, members: dict[str, StoredMember], start: int) -> StoredImage:
    if list(members) not in _ORDER:
        names = ", ".join(member_name(image_id, ending) for ending in members)
        raise damaged(shard, start, f"{names}: not one image's jpg, masks and, where kept, json")
    masks = members["masks"]
    jpg = members.get("jpg", StoredMember(masks.offset - BLOCK, b"", 0))
    return StoredImage(image_id, jpg, masks, members.get("json"))


class _Reads:
    """Reader of the members of a shard, in order."""

    def __init__(
        self, shard: Path, file: BinaryIO, digest: Any, progress: Callable[[int], object] | None
    ) -> None:
        self.shard, self.file, self.digest, self.progress = shard, file, digest, progress
        self.position = 0

    def member(self) -> tuple[int, int, str, StoredMember] | None:
        """Offset of the header, image id, suffix and content; None at the end. ShardError: see
        `walk_shard`.
        """
        offset = self.position
        header = self._read(BLOCK)
        if not header.strip(b"\0"):
            self._end(offset)
            return None
        parsed = parse_header(header) if len(header) == BLOCK else None
        named = parse_member_name(parsed.name) if parsed is not None else None
        if parsed is None or named is None:
            name = "" if parsed is None else f" ({parsed.name[:80]!r})"
            raise damaged(self.shard, offset, f"no header of a member of a shard{name}")
        if not 0 <= parsed.size <= _MAX_MEMBER_BYTES:
            raise damaged(self.shard, offset, f"{parsed.name} claims {parsed.size:,} bytes")
        if header != member_header(parsed.name, parsed.size):
            raise damaged(self.shard, offset, f"the header of {parsed.name} is not the one that is written")
        data = self._read(parsed.size)
        if len(data) < parsed.size:
            message = f"the file ends inside {parsed.name}, after {len(data):,} of {parsed.size:,} bytes"
            raise damaged(self.shard, offset, message)
        padding = self._read(-parsed.size % BLOCK)
        if len(padding) != -parsed.size % BLOCK or padding.strip(b"\0"):
            raise damaged(self.shard, offset, f"the bytes after {parsed.name} are not zero")
        member = StoredMember(offset + BLOCK, data, crc32c(data))
        return offset, *named, member

    def _end(self, offset: int) -> None:
        """Read the rest of the file, which must be the zeros that end a tar."""
        wanted = tar_size(offset) - self.position
        rest = self._read(wanted)
        if len(rest) != wanted or rest.strip(b"\0") or self._read(1):
            raise damaged(self.shard, offset, f"the tar does not end after {tar_size(offset):,} bytes")

    def _read(self, length: int) -> bytes:
        data = self.file.read(length)
        self.digest.update(data)
        self.position += len(data)
        if self.progress is not None:
            self.progress(len(data))
        return data


def seal(shard: Path) -> ShardInfo:
    """Read a finished shard, compare it with the index and flush both; ShardError: they differ."""
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
    return ShardInfo(
        name=shard.name,
        images=images,
        masks=sum(len(chunk.flatten()) for chunk in masks.chunks),
        bytes=shard.stat().st_size,
        sha256=digest.hexdigest(),
        index_bytes=index.stat().st_size,
        index_sha256=sha256_of(index),
    )


def _compare(shard: Path, row: dict[str, int] | None, image: StoredImage | None) -> int:
    """Compare an image with its row; returns 1. ShardError: they differ or one is missing."""
    if row is None or image is None:
        name, where = ("the index", "the tar") if image is None else ("the tar", "the index")
        known = row["image_id"] if row is not None else image.image_id if image is not None else -1
        raise damaged(shard, shard.stat().st_size, f"image {known} is in {name} and not in {where}")
    actual = {"image_id": image.image_id}
    for ending, member in image.members().items():
        actual[f"{ending}_offset"], actual[f"{ending}_bytes"] = member.offset, len(member.data)
        actual[f"{ending}_crc32c"] = member.crc32c
    if row != actual:
        wrong = ", ".join(name for name in actual if actual[name] != row[name])
        raise damaged(shard, image.jpg.offset, f"image {image.image_id} differs from the index in {wrong}")
    return 1


@dataclass(slots=True)
class Largest:
    """Largest masks, runs, and bytes of COCO strings, JPEG and mask record of one image."""

    values: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LARGEST, 0))

    def see(self, row: Row) -> None:
        """Add one image."""
        self.merge(
            {
                "masks": len(row.annotations),
                "runs": len(row.runs.runs),
                "rle_bytes": len(row.annotations.rle),
                "jpg_bytes": row.jpg_bytes,
                "masks_bytes": row.masks_bytes,
            }
        )

    def merge(self, quantities: Mapping[str, int]) -> None:
        """Add the quantities of an image or of another shard."""
        for name, value in quantities.items():
            self.values[name] = max(self.values[name], value)
