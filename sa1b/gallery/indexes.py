"""Galleries of shards with their indexes beside them: no tar is opened but for the chosen images."""

import heapq
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sa1b.errors import BadSample, ShardError
from sa1b.gallery.selection import NEVER, Choice, Exhibit, Gathered, Skipped
from sa1b.shards import record
from sa1b.shards.record import RecordError
from sa1b.shards.shard import index_path

_BATCH_IMAGES = 1024
_PLACES = ("image_id", "jpg_offset", "jpg_bytes", "jpg_crc32c", "masks_offset", "masks_bytes", "masks_crc32c")
_SIZES = ("width", "height")
_NUMBERS = ("area", "predicted_iou", "stability_score", "runs_count")


def read_indexes(
    shards: Sequence[Path], choice: Choice, gathered: Gathered, progress: Callable[[int], None]
) -> None:
    """Survey all indexes; the chosen images are read from the tars when asked for."""
    chosen: list[tuple[int, int, int, dict[str, Any]]] = []
    for number, shard in enumerate(shards):
        index = index_path(shard)
        try:
            with pq.ParquetFile(index) as file:
                columns = [*_PLACES, *_SIZES, *_NUMBERS]
                for batch in file.iter_batches(_BATCH_IMAGES, columns=columns):
                    chosen += _survey_batch(batch, number, choice, gathered)
                    chosen = heapq.nsmallest(choice.limit, chosen, key=lambda row: row[:2])
        except FileNotFoundError:
            raise ShardError(f"{index}: missing; tools/index.py makes it again from the tar") from None
        except (pa.ArrowException, KeyError) as error:
            raise ShardError(f"{index}: {error}; tools/index.py makes it again from the tar") from None
        gathered.parts.append((shard.name, None, None, shard.stat().st_size + index.stat().st_size))
        progress(index.stat().st_size)
    gathered.found = {image_id for _, image_id, _, _ in chosen}
    gathered.exhibits = _read_chosen(shards, chosen, gathered.skipped)


def _survey_batch(
    batch: pa.RecordBatch, shard: int, choice: Choice, gathered: Gathered
) -> list[tuple[int, int, int, dict[str, Any]]]:
    """Count one batch of an index; the best of its images: rank, id, shard, where it lies."""
    lists = batch["area"]
    flat = {name: batch[name].flatten().to_numpy(zero_copy_only=False) for name in _NUMBERS}
    gathered.survey.add(
        batch["width"].to_numpy(), batch["height"].to_numpy(), np.diff(lists.offsets.to_numpy()), **flat
    )
    ids = batch["image_id"].to_numpy()
    ranks = choice.ranks(ids)
    best = np.argsort(ranks, kind="stable")[: choice.limit]
    rows = batch.select(list(_PLACES)).take(pa.array(best)).to_pylist()
    return [
        (int(ranks[i]), int(ids[i]), shard, row)
        for i, row in zip(best, rows, strict=True)
        if int(ranks[i]) != NEVER
    ]


def _read_chosen(
    shards: Sequence[Path], chosen: list[tuple[int, int, int, dict[str, Any]]], skipped: Skipped
) -> Iterator[Exhibit]:
    for _, image_id, number, row in chosen:
        shard = shards[number]
        parts = {}
        with shard.open("rb", buffering=0) as file:
            for kind in ("jpg", "masks"):
                part = os.pread(file.fileno(), row[f"{kind}_bytes"], row[f"{kind}_offset"])
                if google_crc32c.value(part) == row[f"{kind}_crc32c"]:
                    parts[kind] = part
        where = f"sa_{image_id} in {shard.name} at offset {row['jpg_offset']:,}"
        try:
            if len(parts) < 2:
                raise BadSample("checksum", "its bytes do not fit the index")
            annotations = record.decode(parts["masks"])
        except (BadSample, RecordError) as error:
            skipped.add(getattr(error, "reason", "damaged_record"), f"{where}: {error}")
            continue
        yield Exhibit(parts["jpg"], annotations, shard.name)
