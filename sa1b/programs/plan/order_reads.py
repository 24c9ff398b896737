"""What an order of training reads, simulated from its formula and the sample table: no image is read.

A node reads the slices of its ranks in each step. Neighbours in a shard that a rank reads together are one
request, as in `sa1b.shards.sample.submit`. Which of them a cache holds follows from the formula of the cache
and from what the node has read before, as in `sa1b.storage.range_cache`. The node is the first one.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.engine.data_config import DataConfig, with_flags
from sa1b.engine.mix_file import read_mix
from sa1b.names import parse_shard_name
from sa1b.programs.plan.order_plan import (
    BatchFigures,
    EpochFigures,
    Float64,
    Int64,
    Limits,
    OrderCase,
    OrderFigures,
)
from sa1b.report import Bar
from sa1b.shards.dataset import Dataset
from sa1b.shards.sample import NEAR
from sa1b.storage.range_cache import choose
from sa1b.stream.batch_stream import BatchStream
from sa1b.stream.dataset import Stream
from sa1b.stream.mix import Mix
from sa1b.stream.order import Order, rank_slice
from sa1b.stream.pending import SampleSource
from sa1b.stream.plan import Plan

_TOGETHER = 1 << 20  # positions that are computed at a time
_STEPS = 100  # steps, evenly spread over the first epoch, whose batches are examined


def simulate(case: OrderCase, epochs: int, limits: Limits, bar: Bar) -> OrderFigures:
    """The figures of an order over some epochs. `bar` advances by one for each step."""
    plan = case.stream.plan
    steps = plan.steps_per_epoch
    counts = _node_counts(case, epochs * steps, limits.gpus, bar)
    images = rank_stops(plan)[min(limits.gpus, plan.world_size) - 1]
    figures = []
    for first in range(0, epochs * steps, steps):
        of_epoch = {name: numbers[first : first + steps] for name, numbers in counts.items()}
        figures.append(_epoch(of_epoch, int(images), plan, limits))
    return OrderFigures(
        name=case.name,
        order=case.order,
        images=plan.order.count,
        steps=steps,
        batch=case.batch,
        epochs=figures,
        bytes=counts["bytes"],
    )


def rank_stops(plan: Plan) -> Int64:
    """For each rank, the position in a step at which its slice ends."""
    size, blocks, shares = plan.global_batch, plan.block_size, plan.shares
    slices = (
        rank_slice(0, size, rank, plan.world_size, block_size=blocks, shares=shares)
        for rank in range(plan.world_size)
    )
    return np.array([stop for _, stop in slices], np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _Ranges:
    """Ranges that a stream reads: of which rows of the sample table, and in which micro-batch each is."""

    dataset: Dataset
    rows: Int64  # [n], in the order in which they are read
    starts: Int64  # [k], the index in `rows` at which each range begins
    bytes: Int64  # [k]
    pieces: Int64  # [k], the number of the micro-batch


def ranges_of(stream: BatchStream, positions: Int64, pieces: Int64) -> list[_Ranges]:
    """The ranges of each source of a stream, for positions [n] and the numbers of their micro-batches [n]."""
    which, local, _ = stream.plan.order.locate(positions)
    ranges = []
    for number, source in enumerate(stream.sources()):
        here = np.flatnonzero(which == number)
        if not len(here):
            continue
        rows, table, piece = _rows(source, local[here]), source.dataset.table, pieces[here]
        start, shard = table.offset[rows].astype(np.int64), table.shard[rows]
        stop = table.stops(rows)
        gap = start[1:] - stop[:-1]
        apart = (piece[1:] != piece[:-1]) | (shard[1:] != shard[:-1]) | (gap < 0) | (gap > NEAR)
        starts = np.flatnonzero(np.append(True, apart))
        ends = np.append(starts[1:], len(rows)) - 1
        ranges.append(_Ranges(source.dataset, rows, starts, stop[ends] - start[starts], piece[starts]))
    return ranges


def _rows(source: SampleSource, local: Int64) -> Int64:
    order = source.plan.order
    assert isinstance(order, Order)
    return source.view.table_rows(order.rows(local))


class _Cache:
    """What a cache of a dataset directory holds, as its node reads."""

    def __init__(self, dataset: Dataset, limit: int) -> None:
        names = {shard.name for shard in choose(dataset.stored_shards(), limit)}
        self._included = np.array([name in names for name in dataset.shards], np.bool_)
        self._present = np.zeros(len(dataset.table), np.bool_)

    def read(self, ranges: _Ranges) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """For each range whether its shard is cached, and whether all of the range was there; both [k]."""
        first = np.zeros(len(ranges.rows), np.bool_)
        first[np.unique(ranges.rows, return_index=True)[1]] = True
        known = self._present[ranges.rows] | ~first
        self._present[ranges.rows] = True
        cached = self._included[ranges.dataset.table.shard[ranges.rows[ranges.starts]]]
        return cached, cached & np.logical_and.reduceat(known, ranges.starts)


def _node_counts(case: OrderCase, steps: int, gpus: int, bar: Bar) -> dict[str, Int64]:
    """By step, what the first node reads: requests, bytes, hits, misses, outside; each int64 [steps]."""
    plan = case.stream.plan
    stops = rank_stops(plan)[:gpus]
    offsets = np.arange(stops[-1])
    rank = np.searchsorted(stops, offsets, "right")
    starts = np.append(0, stops[:-1])
    piece = rank * plan.count + (offsets - starts[rank]) // plan.micro_batch
    pieces_of_step = len(stops) * plan.count
    counts = {name: np.zeros(steps, np.int64) for name in ("requests", "bytes", "hits", "misses", "outside")}
    caches: dict[str, _Cache] = {}
    together = max(1, _TOGETHER // len(offsets))
    for first in range(0, steps, together):
        numbers = np.arange(first, min(first + together, steps))[:, None]
        positions = (numbers * plan.global_batch + offsets).reshape(-1)
        pieces = (numbers * pieces_of_step + piece).reshape(-1)
        for ranges in ranges_of(case.stream, positions, pieces):
            step = ranges.pieces // pieces_of_step
            root = str(ranges.dataset.root)
            cache = caches.setdefault(root, _Cache(ranges.dataset, case.cache_bytes))
            cached, hit = cache.read(ranges)
            tally = partial(np.bincount, minlength=steps)
            counts["hits"] += tally(step[hit])
            counts["misses"] += tally(step[cached & ~hit])
            counts["outside"] += tally(step[~cached])
            counts["requests"] += tally(step[~hit])
            counts["bytes"] += tally(step[~hit], ranges.bytes[~hit]).astype(np.int64)
        bar.update(len(numbers))
    return counts


def _epoch(counts: dict[str, Int64], images: int, plan: Plan, limits: Limits) -> EpochFigures:
    """The figures of an epoch. Nodes prefetch, so the slowest part determines the time."""
    steps = len(counts["bytes"])
    seconds: dict[str, Float64] = {}
    for name, work, rate in (
        ("bytes", counts["bytes"], limits.bytes),
        ("requests", counts["requests"], limits.requests),
        ("decoding", np.full(steps, images), limits.decoded),
        ("training", np.full(steps, images), limits.trained),
    ):
        if rate is not None:
            seconds[name] = work / rate
    total = float(np.max(list(seconds.values()), axis=0).sum()) if seconds else None
    return EpochFigures(
        **{name: int(numbers.sum()) for name, numbers in counts.items()},
        seconds=total,
        limit=max(seconds, key=lambda name: float(seconds[name].sum())) if seconds else None,
        images_per_second=None if total is None else steps * plan.global_batch / total,
    )


def batch_figures(stream: BatchStream) -> BatchFigures:
    """Means over the global batches of steps that are evenly spread over the first epoch."""
    plan = stream.plan
    count = plan.steps_per_epoch
    steps = np.unique(np.linspace(0, count - 1, min(count, _STEPS)).astype(np.int64))
    sources = stream.sources()
    places = [_places(source.dataset) for source in sources]
    tars = [_tars(source.dataset) for source in sources]
    rank = np.searchsorted(rank_stops(plan), np.arange(plan.global_batch), "right")
    figures = np.array(
        [_batch(plan, sources, places=places, tars=tars, rank=rank, step=step) for step in steps.tolist()]
    )
    shards, rank_shards, batch_tars, neighbours, distance = figures.mean(axis=0).tolist()
    return BatchFigures(
        shards=shards,
        rank_shards=rank_shards,
        tars=batch_tars,
        tars_at_random=_at_random(plan, sources, tars),
        neighbours=neighbours,
        distance=distance,
    )


def _batch(
    plan: Plan,
    sources: Sequence[SampleSource],
    places: list[Int64],
    tars: list[Int64],
    rank: Int64,
    step: int,
) -> tuple[float, float, float, float, float]:
    """Of a global batch: shards, shards of a rank, tars, share of images with neighbours, median distance."""
    which, local, _ = plan.order.locate(step * plan.global_batch + np.arange(plan.global_batch))
    shards = rank_shards = batch_tars = near = 0
    distances = []
    for number, source in enumerate(sources):
        here = np.flatnonzero(which == number)
        rows = _rows(source, local[here])
        shard = source.dataset.table.shard[rows].astype(np.int64)
        shards += len(np.unique(shard))
        rank_shards += len(np.unique(rank[here] * len(source.dataset.shards) + shard))
        batch_tars += len(np.unique(tars[number][shard]))
        place = places[number][rows]
        distances.append(np.abs(np.diff(place)))
        adjacent = np.diff(np.sort(place)) == 1
        near += int((np.append(adjacent, False) | np.append(False, adjacent)).sum()) if len(rows) else 0
    every = np.concatenate(distances)
    median = float(np.median(every)) if len(every) else 0.0
    return shards, rank_shards / plan.world_size, batch_tars, near / plan.global_batch, median


def _at_random(plan: Plan, sources: Sequence[SampleSource], tars: list[Int64]) -> float:
    """The expected number of tars in a batch of independent images, with the sources' parts of an epoch."""
    which = plan.order.locate(np.arange(min(plan.order.count, _TOGETHER)))[0]
    total = 0.0
    for number, source in enumerate(sources):
        rows = source.view.table_rows(np.arange(len(source.view)))
        images = np.bincount(tars[number][source.dataset.table.shard[rows]])
        part = float((which == number).mean()) * images / len(rows)
        total += float((1 - (1 - part) ** plan.global_batch).sum())
    return total


def _places(dataset: Dataset) -> Int64:
    """For each row of the sample table, its number in the order of shard and offset."""
    places = np.empty(len(dataset.table), np.int64)
    places[np.lexsort((dataset.table.offset, dataset.table.shard))] = np.arange(len(places))
    return places


def _tars(dataset: Dataset) -> Int64:
    """For each shard the number of the source that it was made from."""
    stems = [parse_shard_name(name) for name in dataset.shards]
    names = [name if stem is None else stem.stem for name, stem in zip(dataset.shards, stems, strict=True)]
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


def streams(
    root: str, view: str | None, blocks: tuple[int, ...], settings: dict[str, Any]
) -> dict[str, BatchStream]:
    """A stream for each block size, by the name of its case. UsageError names the flag that is wrong."""
    return {f"blocks of {size}": _stream(root, view, size, settings) for size in blocks}


def mixture(file: str, settings: dict[str, Any]) -> BatchStream:
    """The mixture of a file of `--data.mix`. UsageError names file and source."""
    sources, schedule = read_mix(DataConfig(mix=file, global_batch=settings["global_batch"]), "--mix")
    weighted = {}
    for source in sources:
        data = source.data
        source_settings = settings if source.seed is None else {**settings, "seed": source.seed}
        weighted[source.name] = _stream(data.root, data.view, data.block_size, source_settings), source.weight
    try:
        return Mix(weighted, schedule=schedule)
    except ValueError as error:
        raise with_flags(error, "--") from None


def _stream(root: str, view: str | None, block_size: int, settings: dict[str, Any]) -> Stream:
    try:
        stream = Stream(
            root,
            view=view,
            block_size=block_size,
            epochs=None,
            rank=0,
            damage_log=os.devnull,
            **settings,
        )
    except ValueError as error:
        raise with_flags(error, "--") from None
    stream.dataset.check_table()
    return stream
