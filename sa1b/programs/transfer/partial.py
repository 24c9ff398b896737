"""The task file of a source of which only some shards were copied.

Like a task file that was rebuilt from shards, it has no size, time or digest of the source and no counts
of its members, because they would be those of all shards. So reshard considers the source changed, and verify
does not compare it with a quarantine. The quarantine and the warnings of the source are not copied.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from sa1b.shards import record
from sa1b.shards.lost_task import counts_of
from sa1b.shards.manifest import LARGEST, READING, ShardInfo, Task
from sa1b.storage.reader import Range, Reader

_COLUMNS = ["jpg_bytes", "masks_offset", "masks_bytes", "masks_crc32c", "runs_count"]
_UNKNOWN = ("size", "mtime_ns", "sha256", "md5")  # of the source


def partial_task(task: Task, shards: Sequence[ShardInfo], indexes: Sequence[Path], reader: Reader) -> Task:
    """The task file of a source with some of its shards, in order, without `samples`.

    Reads the mask records of the shards, verified by their checksums.
    """
    reading = task.source.get(READING, {"kind": task.source["kind"]})
    largest = dict.fromkeys(LARGEST, 0)
    jpg_bytes = 0
    for shard, index in zip(shards, indexes, strict=True):
        rows = pq.read_table(index.absolute(), columns=_COLUMNS)
        jpg_bytes += int(rows["jpg_bytes"].to_numpy().sum())
        for name, value in _largest(shard.name, rows, reader).items():
            largest[name] = max(largest[name], value)
    return replace(
        task,
        source={**task.source, **dict.fromkeys(_UNKNOWN), READING: {**reading, "part": True}},
        shards=list(shards),
        counts=counts_of(shards, jpg_bytes),
        damage=[],
        largest=largest,
        samples=None,
        quarantine=None,
    )


def _largest(shard: str, rows: Any, reader: Reader) -> dict[str, int]:
    """Per image: masks, runs, and bytes of COCO strings, JPEG and mask record; see sa1b.shards.largest."""
    locations = zip(*(rows[name].to_pylist() for name in _COLUMNS[1:4]), strict=True)
    records = reader.read_ranges(Range(shard, offset, length, crc) for offset, length, crc in locations)
    counts = rows["runs_count"].to_pylist()
    return {
        "masks": max(map(len, counts), default=0),
        "runs": max(map(sum, counts), default=0),
        "rle_bytes": max((len(record.decode(data).rle) for data in records), default=0),
        "jpg_bytes": max(rows["jpg_bytes"].to_pylist(), default=0),
        "masks_bytes": max(rows["masks_bytes"].to_pylist(), default=0),
    }
