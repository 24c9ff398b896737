"""A finished source takes its place in the root: files get their names, the task file last; and all sources
together become a dataset.
"""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sa1b.errors import SourceError
from sa1b.names import SHARD_PREFIX, shard_order, source_stem
from sa1b.shards.manifest import (
    DATASET,
    QUARANTINE,
    SAMPLES,
    ShardInfo,
    Task,
    dataset_document,
    read_dataset,
    task_path,
    write_task,
)
from sa1b.shards.sample_table import encode, open_table
from sa1b.shards.shard import index_path
from sa1b.storage.publish import flush, publish, write_whole


def publish_task(task: Task, aside: Path, root: Path) -> None:
    """Name everything, the task file last. What an earlier task of this source left is removed first."""
    (root / DATASET).unlink(missing_ok=True)
    (root / SAMPLES).unlink(missing_ok=True)
    task_path(root, task.name).unlink(missing_ok=True)
    flush(root)
    stem = source_stem(task.name)
    names = {shard.name for shard in task.shards}
    for old in root.glob(f"{SHARD_PREFIX}{stem}-*.tar"):
        if old.name not in names and shard_order(old.name).stem == stem:
            old.unlink()
            index_path(old).unlink(missing_ok=True)
    publish_quarantine(task.name, aside, root)
    for shard in task.shards:
        for path in (aside / shard.name, index_path(aside / shard.name)):
            publish(path, root / path.name)
    write_task(root, task)


def publish_quarantine(name: str, aside: Path, root: Path) -> None:
    """Name what was refused of a source; what an earlier run refused of it is removed."""
    refused = root / QUARANTINE / name
    shutil.rmtree(refused, ignore_errors=True)
    if (aside / QUARANTINE).exists():
        publish(aside / QUARANTINE, refused)


def check_clash(task: Task, aside: Path, root: Path) -> None:
    """Refuse images that a complete root holds already, before anything of it is touched.

    Raises:
        SourceError: naming the image and the shard.
    """
    if not (root / DATASET).exists() or not (root / SAMPLES).exists():
        return
    table = open_table(root / SAMPLES)
    owners = [shard["name"] for shard in read_dataset(root)["shards"]]
    for shard in task.shards:
        ids = pq.read_table(index_path(aside / shard.name), columns=["image_id"])["image_id"].to_numpy()
        rows = np.searchsorted(table.image_id, ids.astype(np.uint64))
        rows = rows[(rows < len(table)) & (table.image_id[np.minimum(rows, len(table) - 1)] == ids)]
        for row in rows:
            owner = owners[int(table.shard[row])]
            if shard_order(owner).stem != source_stem(task.name):
                raise SourceError(
                    f"image {table.image_id[row]} of {task.name} is in {root / owner} already; "
                    "leave this source out"
                )


def write_dataset(root: Path, tasks: dict[str, Task]) -> None:
    """Write samples.bin and dataset.json over all finished sources: the root is complete.

    Raises:
        SourceError: an image stands in two sources.
    """
    shards = sorted(
        (shard for task in tasks.values() for shard in task.shards), key=lambda shard: shard_order(shard.name)
    )
    samples = _sample_columns(root, shards, tasks)
    write_whole(root / SAMPLES, samples)
    write_whole(root / DATASET, dataset_document(shards, tasks, samples))


def _sample_columns(root: Path, shards: list[ShardInfo], tasks: dict[str, Task]) -> bytes:
    names = ["image_id", "jpg_offset", "jpg_bytes", "masks_bytes", "jpg_crc32c", "masks_crc32c"]
    read = [pq.read_table(index_path(root / shard.name), columns=names) for shard in shards]
    rows = pa.concat_tables(read)
    columns = {name: rows[name].to_numpy() for name in names}
    columns["offset"] = columns.pop("jpg_offset")
    columns["shard"] = np.repeat(np.arange(len(shards)), [len(part) for part in read])
    ids = columns["image_id"]
    unique, times = np.unique(ids, return_counts=True)
    if len(unique) != len(ids):
        twice = int(unique[times > 1][0])
        pair = [shards[columns["shard"][i]].name for i in np.flatnonzero(ids == twice)[:2]]
        owners = [name for name, task in tasks.items() for shard in task.shards if shard.name in pair]
        raise SourceError(
            f"image {twice} stands in two sources: {' and '.join(owners)}; to drop one of them, remove "
            f"{task_path(root, owners[-1])} and that source's shards in {root}, and leave it out"
        )
    return encode(columns)
