"""Conditions evaluated over the index files of a dataset directory, several at a time, in threads.

Only the columns that a condition names are read, and no tar is opened. One thread takes 3 to 5 ms for a shard
of 1024 images and 100,000 masks; for indexes on disk, more threads keep more reads in flight.
"""

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sa1b.report import bar
from sa1b.shards.annotation import no_origin
from sa1b.shards.dataset import Dataset
from sa1b.shards.index_file import index_file, naming_index, shard_files
from sa1b.views.predicate import MASK_FIELDS, ORIGIN_FIELDS, Predicate, mask_values

_IN_FLIGHT = 4  # index files waiting for each thread


@dataclass(frozen=True, slots=True, eq=False)
class ShardPart:
    """Results for the n images of a shard; `left` is the number of masks that pass."""

    ids: npt.NDArray[np.uint64]
    passes: npt.NDArray[np.bool_]
    masks: npt.NDArray[np.int64]
    left: npt.NDArray[np.int64]


def scan(
    dataset: Dataset,
    shards: list[int],
    masks_where: Predicate | None,
    images_where: Predicate | None,
    *,
    workers: int,
    quiet: bool,
) -> Iterator[ShardPart]:
    """Evaluate conditions over the index files of shards, in threads; the results are in any order. The masks
    of images that the dataset's layers change are read. ShardError: a file is missing or damaged.
    """
    waiting = iter(shards)
    running: set[Future[ShardPart]] = set()
    pool = ThreadPoolExecutor(workers)
    try:
        with bar(len(shards), "view", "shard", quiet) as progress:
            while True:
                for shard in islice(waiting, _IN_FLIGHT * workers - len(running)):
                    running.add(pool.submit(_part, dataset, shard, masks_where, images_where))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
                    progress.update()
    finally:
        pool.shutdown(cancel_futures=True)


def _part(
    dataset: Dataset, shard: int, masks_where: Predicate | None, images_where: Predicate | None
) -> ShardPart:
    reader, name = dataset.reader, shard_files(dataset.shards[shard])[1]
    images = images_where.fields - {"masks"} if images_where is not None else frozenset()
    fields = masks_where.fields if masks_where is not None else frozenset()
    per_image = {"image_id", *images} | (fields & {"width", "height"})
    if "area_fraction" in fields:
        per_image |= {"width", "height"}
    per_mask = {(MASK_FIELDS | ORIGIN_FIELDS)[name][0] for name in fields} - {"width", "height"}
    with naming_index(reader, name):
        with pq.ParquetFile(index_file(reader, name), pre_buffer=True) as file:
            absent = per_mask & ORIGIN_FIELDS.keys() - set(file.schema_arrow.names)
            per_mask = per_mask - absent or {"runs_count"}
            table = file.read(sorted(per_image | per_mask), use_threads=False)
        columns = {name: table[name].to_numpy() for name in per_image}
        lists = {name: table[name].combine_chunks() for name in per_mask}
        if any(isinstance(column, pa.ChunkedArray) for column in lists.values()):
            lists = {name: column.chunk(0) for name, column in lists.items()}
        counts = next(iter(lists.values())).value_lengths().to_numpy().astype(np.int64)
        left = counts
        if masks_where is not None:
            total = int(counts.sum())

            def column(name: str) -> npt.NDArray[Any]:
                if name in absent:
                    return no_origin(total)[name]
                return np.repeat(columns[name], counts) if name in columns else _flat(lists[name], total)

            passed = np.concatenate([[0], np.cumsum(masks_where(mask_values(fields, column)))])
            ends = np.cumsum(counts)
            left = passed[ends] - passed[ends - counts]
    if dataset.layers:
        counts, left = _changed(dataset, columns["image_id"], counts, left, masks_where)
    passes = np.ones(len(counts), np.bool_)
    if images_where is not None:
        passes = images_where({**columns, "masks": left})
    return ShardPart(columns["image_id"].astype(np.uint64), passes, counts, left)


def _changed(
    dataset: Dataset,
    ids: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    left: npt.NDArray[np.int64],
    masks_where: Predicate | None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The numbers of masks, and of those that pass, with the changes of layers."""
    counts, left = counts.copy(), left.copy()
    of_layers = np.concatenate([layer.columns["image_id"] for layer in dataset.layers])
    places = np.flatnonzero(np.isin(ids, of_layers)).tolist()
    rows = [dataset.row(image_id) for image_id in ids[places].tolist()]
    for i, annotations in zip(places, dataset.masks(rows), strict=True):
        counts[i] = len(annotations)
        left[i] = counts[i] if masks_where is None else masks_where.masks(annotations).sum()
    return counts, left


def _flat(lists: pa.ListArray, masks: int) -> npt.NDArray[Any]:
    """The values of all masks: [N] or, for boxes and points, [N, width]."""
    values = lists.flatten()
    if not pa.types.is_list(values.type):
        flat: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
        return flat
    nested: npt.NDArray[Any] = values.flatten().to_numpy()
    return nested.reshape(masks, -1) if masks else np.empty((0, 4))
