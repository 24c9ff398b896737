"""The index of one shard made again from its tar, and what else that pass sees."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import google_crc32c

from sa1b.errors import BadSample, ShardError
from sa1b.masks.runs import MaskError
from sa1b.names import member_name, parse_member_name
from sa1b.shards import jpeg, record
from sa1b.shards.index import IndexWriter, Row
from sa1b.shards.manifest import ShardInfo
from sa1b.shards.record import RecordError
from sa1b.sources.member import Damage, Member
from sa1b.sources.tar_header import BLOCK
from sa1b.sources.tar_reader import members
from sa1b.sources.tar_stream import StoredStream
from sa1b.storage.publish import flush


@dataclass(slots=True)
class Rebuilt:
    """What a pass over a shard has seen.

    Attributes:
        info: as in a task file.
        largest: as in a task file.
        keep_json: whether images carry their annotation file: {True}, {False}, or both.
        scaled: longer sides, in pixels, of images stored smaller than their annotations say.
        example: one such JPEG.
    """

    info: ShardInfo = field(init=False)
    images: int = 0
    masks: int = 0
    jpg_bytes: int = 0
    largest: dict[str, int] = field(default_factory=dict)
    keep_json: set[bool] = field(default_factory=set)
    scaled: set[int] = field(default_factory=set)
    example: bytes | None = None

    def see(self, row: Row, data: bytes, *, keep_json: bool) -> None:
        """Count one image; `data` is its JPEG."""
        annotations = row.annotations
        self.images += 1
        self.masks += len(annotations)
        self.jpg_bytes += row.jpg_bytes
        self.keep_json.add(keep_json)
        found = {
            "masks": len(annotations),
            "runs": len(row.runs.runs),
            "rle_bytes": len(annotations.rle),
            "jpg_bytes": row.jpg_bytes,
            "masks_bytes": row.masks_bytes,
        }
        self.largest = {name: max(value, self.largest.get(name, 0)) for name, value in found.items()}
        if (row.image_height, row.image_width) != (annotations.height, annotations.width):
            self.scaled.add(max(row.image_height, row.image_width))
            self.example = self.example or data


def rebuild_index(
    shard: Path, aside: Path, *, with_runs: bool, progress: Callable[[int], None] | None = None
) -> Rebuilt:
    """Write the index of a shard to `aside`, flushed. Memory: a row group.

    Raises:
        ShardError: the tar is damaged; nothing can be vouched for then, and `aside` is gone.
    """
    stream = StoredStream(shard, progress=progress)
    writer = IndexWriter(aside, with_runs=with_runs)
    facts = Rebuilt()
    try:
        for pair in _pairs(shard, stream):
            row = _row(shard, pair)
            writer.add(row)
            facts.see(row, pair[0].data, keep_json=len(pair) == 3)
        writer.close()
        flush(aside)
        with aside.open("rb") as file:
            index_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        facts.info = ShardInfo(
            name=shard.name,
            images=facts.images,
            masks=facts.masks,
            bytes=shard.stat().st_size,
            sha256=stream.digests()["sha256"],
            index_bytes=aside.stat().st_size,
            index_sha256=index_sha256,
        )
    except BaseException:
        writer.abandon()
        aside.unlink(missing_ok=True)
        raise
    finally:
        stream.close()
    return facts


def _pairs(shard: Path, stream: StoredStream) -> Iterator[list[Member]]:
    """The members of each image: jpg, masks and, if kept, json."""
    pair: list[Member] = []
    for item in members(stream):
        if isinstance(item, Damage):
            raise _damaged(shard, item.offset, item.message)
        if item.name.endswith(".jpg") and pair:
            yield _checked(shard, pair)
            pair = []
        pair.append(item)
    if pair:
        yield _checked(shard, pair)


def _checked(shard: Path, pair: list[Member]) -> list[Member]:
    names = [member.name for member in pair]
    named = parse_member_name(names[0])
    expected = [member_name(named.image_id, ending) for ending in ("jpg", "masks", "json")] if named else []
    if not expected or names not in (expected[:2], expected):
        shown = ", ".join(names[:4])
        raise _damaged(shard, pair[0].offset, f"{shown}: not one image's jpg, masks and perhaps json")
    return pair


def _row(shard: Path, pair: list[Member]) -> Row:
    jpg, masks = pair[:2]
    try:
        frame = jpeg.frame(jpg.data)
        annotations = record.decode(masks.data)
        runs = annotations.runs()
    except (BadSample, RecordError, MaskError) as error:
        raise _damaged(shard, jpg.offset, f"{jpg.name} or {masks.name}: {error}") from None
    if jpg.name != member_name(annotations.image_id, "jpg"):
        message = f"{masks.name} holds the masks of image {annotations.image_id}"
        raise _damaged(shard, masks.offset, message)
    return Row(
        annotations=annotations,
        runs=runs,
        image_height=frame.height,
        image_width=frame.width,
        jpg_offset=jpg.offset + BLOCK,
        jpg_bytes=len(jpg.data),
        masks_offset=masks.offset + BLOCK,
        masks_bytes=len(masks.data),
        jpg_crc32c=google_crc32c.value(jpg.data),
        masks_crc32c=google_crc32c.value(masks.data),
    )


def _damaged(shard: Path, offset: int, message: str) -> ShardError:
    return ShardError(
        f"{shard}: at offset {offset:,}: {message}. An index is not made from a damaged tar: restore it "
        "from a copy, or remove its source's task file and run tools/reshard.py again with that source"
    )
