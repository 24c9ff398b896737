"""Rebuild of the index of one shard from its tar."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

from sa1b.console import command
from sa1b.errors import ShardError
from sa1b.shards.annotation import PROVENANCE, Annotations
from sa1b.shards.documents import ShardInfo
from sa1b.shards.index import IndexWriter
from sa1b.shards.shard import Largest, index_row, walk_shard
from sa1b.storage.atomic import flush, sha256_of


@dataclass(frozen=True, slots=True)
class RebuiltIndex:
    """Result of a pass over a shard."""

    info: ShardInfo  # as in a task file
    jpg_bytes: int  # of all JPEGs
    largest: dict[str, int]  # as in a task file
    keep_json: list[bool]  # whether it has annotation files: [True], [False], or both
    scaled: list[int]  # longer sides, pixels, of images stored smaller than their annotations say
    quality: int | None  # JPEG quality of the first of those images; None: no such image, or unknown
    # whether the shard has no images: [True], [False], or both
    annotations_only: list[bool] = field(default_factory=lambda: [False])
    # by its first image, see sa1b.sources.source.Source.reading
    reading: dict[str, Any] = field(default_factory=dict)
    resumed: bool = False  # an interrupted rebuild built the index

    def document(self) -> dict[str, Any]:
        """As JSON, see `from_document`."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "RebuiltIndex":
        """The result that `document` was made from."""
        return cls(**{**document, "info": ShardInfo(**document["info"])})


def rebuild_index(
    shard: Path,
    name: str,
    temporary: Path,
    *,
    with_runs: bool,
    progress: Callable[[int], object] | None = None,
) -> RebuiltIndex:
    """Write the index of a shard to `temporary`, flushed; ShardError: the tar is damaged."""
    digest = hashlib.sha256()
    writer = IndexWriter(temporary, with_runs=with_runs)
    images = masks = jpg_bytes = 0
    largest = Largest()
    keep_json: set[bool] = set()
    annotations_only: set[bool] = set()
    scaled: set[int] = set()
    quality = None
    reading: dict[str, Any] = {}
    try:
        for image in walk_shard(shard, digest, progress):
            row = index_row(shard, image)
            if not images:
                reading = _reading(row.annotations)
            writer.add(row)
            images += 1
            masks += len(row.annotations)
            jpg_bytes += row.jpg_bytes
            largest.see(row)
            keep_json.add(image.json is not None)
            annotations_only.add(not image.jpg.data)
            if image.jpg.data and (row.image_height, row.image_width) != (
                row.annotations.height,
                row.annotations.width,
            ):
                quality = quality if scaled else jpeg_quality(image.jpg.data)
                scaled.add(max(row.image_height, row.image_width))
        writer.close()
        flush(temporary)
        index_sha256 = sha256_of(temporary)
        info = ShardInfo(
            name=name,
            images=images,
            masks=masks,
            bytes=shard.stat().st_size,
            sha256=digest.hexdigest(),
            index_bytes=temporary.stat().st_size,
            index_sha256=index_sha256,
        )
    except BaseException as error:
        writer.abandon()
        temporary.unlink(missing_ok=True)
        if isinstance(error, ShardError):
            raise ShardError(
                f"{error}: a damaged tar gets no index; restore the tar from a copy, or run "
                f"`{command('reshard')}` again with its source"
            ) from None
        raise
    return RebuiltIndex(
        info, jpg_bytes, largest.values, sorted(keep_json), sorted(scaled), quality, sorted(annotations_only),
        reading,
    )  # fmt: skip


def _reading(annotations: Annotations) -> dict[str, Any]:
    """How a source of annotations in COCO's format, or of images alone, was read; empty for other sources."""
    origin = annotations.to_json().get(PROVENANCE)
    if isinstance(origin, dict) and origin.get("format") == "images":
        return {"kind": None, "images_only": True}
    if not isinstance(origin, dict) or origin.get("format") != "coco":
        return {}
    listed = origin.get("image", {}).get("id")
    kept = str(listed) == str(annotations.image_id)
    return {"kind": "coco", "image_ids": "keep" if kept else "hash", "images": True}


def jpeg_quality(data: bytes) -> int | None:
    """The quality that a JPEG was encoded with, from its quantisation tables; None if it is unknown."""
    tables = _quantisation_tables(data)
    blank = np.zeros((16, 16, 3), np.uint8)
    for quality in range(1, 101):
        encoded = simplejpeg.encode_jpeg(blank, quality, "RGB", "420", fastdct=False)
        if _quantisation_tables(encoded) == tables:
            return quality
    return None


def _quantisation_tables(data: bytes) -> list[bytes]:
    """The DQT segments before the first scan (ITU-T T.81, B.2.4.1)."""
    found = []
    position = 2
    while data[position + 1] != 0xDA:
        end = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        if data[position + 1] == 0xDB:
            found.append(data[position:end])
        position = end
    return found
