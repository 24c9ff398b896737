"""What an order of training reads, simulated from its formula and the sample table: no image is read.

A node reads the slices of its ranks in each step. Neighbours in a shard that a rank reads together are one
request, as in `sa1b.shards.sample.submit`. Which of them a cache holds follows from the formula of the cache
and from what the node has read before, as in `sa1b.storage.range_cache`. The node is the first one.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.charts import Line, line_chart
from sa1b.charts import page as frame
from sa1b.names import parse_shard_name
from sa1b.report import Bar, aligned, duration_text, size_text
from sa1b.shards.dataset import Dataset
from sa1b.shards.sample import NEAR
from sa1b.storage.range_cache import choose
from sa1b.stream.batch_stream import BatchStream
from sa1b.stream.order import Order, rank_slice
from sa1b.stream.pending import SampleSource
from sa1b.stream.plan import Plan

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

_TOGETHER = 1 << 20  # positions that are computed at a time
_STEPS = 100  # steps, evenly spread over the first epoch, whose batches are examined
_DRAWN = 200  # points of a line in a chart


@dataclass(frozen=True, slots=True)
class Limits:
    """What a node can do, per second; None: not a limit."""

    gpus: int  # ranks of a node
    bytes: float | None  # read from the store
    requests: float | None  # answered by the store
    decoded: float | None  # images, by all cores
    trained: float | None  # images, by all GPUs


@dataclass(frozen=True, slots=True)
class EpochFigures:
    """An epoch of the first node."""

    requests: int  # to the store
    bytes: int  # read from the store
    hits: int  # ranges that were read from the cache
    misses: int  # ranges of cached shards that were read from the store
    outside: int  # ranges of shards that the cache leaves out, or all without a cache
    seconds: float | None  # None without any limit
    limit: str | None  # what takes longest
    images_per_second: float | None  # of all nodes

    @property
    def hit_rate(self) -> float:
        """Part of the ranges that the cache had."""
        return self.hits / max(self.hits + self.misses + self.outside, 1)


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """Means over the global batches of some steps."""

    shards: float  # that a step touches
    rank_shards: float  # that a rank touches in a step
    tars: float  # tars of the source whose images are in a batch
    tars_at_random: float  # the same, if each image were drawn independently
    neighbours: float  # part of the images whose neighbour in the shards is in the same batch
    distance: float  # median number of images in the shards between consecutive images of the order


@dataclass(frozen=True, slots=True)
class OrderCase:
    """An order to examine with a cache on each node."""

    order: str  # its name
    stream: BatchStream  # of the first rank
    batch: BatchFigures
    cache_bytes: int  # 0: no cache

    @property
    def name(self) -> str:
        return f"{self.order}, cache {self.cache_bytes / 1e9:g} GB" if self.cache_bytes else self.order


@dataclass(frozen=True, slots=True, eq=False)
class OrderFigures:
    """The figures of a case."""

    name: str
    order: str  # its name without the cache
    images: int  # of an epoch
    steps: int  # of an epoch
    batch: BatchFigures
    epochs: list[EpochFigures]
    bytes: Int64  # that the node reads from the store in each step, [steps of all epochs]


@dataclass(frozen=True, slots=True, eq=False)
class OrderPlan:
    """The figures of all cases."""

    root: str
    ranks: int
    global_batch: int
    limits: Limits
    cases: list[OrderFigures]

    def document(self) -> dict[str, Any]:
        cases = []
        for case in self.cases:
            epochs = [{**asdict(one), "hit_rate": one.hit_rate} for one in case.epochs]
            shown = {"name": case.name, "images": case.images, "steps": case.steps}
            cases.append({**shown, "batch": asdict(case.batch), "epochs": epochs})
        settings = {"root": self.root, "ranks": self.ranks, "global_batch": self.global_batch}
        return {**settings, "limits": asdict(self.limits), "cases": cases}

    def heading(self) -> str:
        nodes = -(-self.ranks // self.limits.gpus)
        return (
            f"{self.root}: {self.ranks:,} ranks on {nodes:,} node{'s' * (nodes > 1)}, {self.global_batch:,} "
            "images a step"
        )

    def table(self) -> str:
        orders = {case.order: case for case in self.cases}
        batches = [_BATCH_HEADS, *([name, *_batch_cells(case)] for name, case in orders.items())]
        reads = [_EPOCH_HEADS]
        for case in self.cases:
            cells = [_epoch_cells(case, number, one) for number, one in enumerate(case.epochs)]
            reads += [[case.name if not number else "", *row] for number, row in enumerate(cells)]
        if not any(one.seconds for case in self.cases for one in case.epochs):
            reads = [row[:6] for row in reads]
        tables = [aligned(rows, (False, *(True for _ in rows[0][1:]))) for rows in (batches, reads)]
        return "\n".join([self.heading(), "", *tables[0], "", *tables[1]])

    def page(self) -> str:
        """The figures as an HTML page with charts."""
        read = [Line(case.name, _by_step(case.bytes / 1e6)) for case in self.cases]
        hits = [
            Line(case.name, [(n + 1, 100 * one.hit_rate) for n, one in enumerate(case.epochs)])
            for case in self.cases
            if case.epochs[-1].hits + case.epochs[-1].misses
        ]
        rates = [
            Line(case.name, [(n + 1, one.images_per_second or 0) for n, one in enumerate(case.epochs)])
            for case in self.cases
        ]
        epochs = range(1, len(self.cases[0].epochs) + 1)
        shown = [line_chart("What a node reads from the store in a step", read, ("step", "MB"))]
        if hits:
            shown.append(line_chart("Ranges that the cache has", hits, ("epoch", "%"), epochs))
        if any(one.seconds for case in self.cases for one in case.epochs):
            shown.append(line_chart("Images per second", rates, ("epoch", "images/s"), epochs))
        parts = {
            "VERDICT": "",
            "FACTS": "<p>Simulated from the formula of the order; no image was read.</p>",
            "CHARTS": f'<div class="curves">{"".join(shown)}</div>',
            "TABLE": self.table(),
        }
        return frame("What an order reads", self.heading(), parts)


def _by_step(values: Float64) -> list[tuple[float, float]]:
    """Means of consecutive steps, at most `_DRAWN` of them."""
    together = -(-len(values) // _DRAWN)
    starts = np.arange(0, len(values), together)
    sizes = np.diff(np.append(starts, len(values)))
    return list(zip(starts.tolist(), (np.add.reduceat(values, starts) / sizes).tolist(), strict=True))


_BATCH_HEADS = [
    *("one step", "images of an epoch", "steps", "shards", "of a rank"),
    *("tars", "at random", "neighbours", "distance"),
]
_EPOCH_HEADS = [
    *("first node", "epoch", "requests", "bytes", "a step", "cache hits"),
    *("images/s", "limited by", "reads", "time"),
]


def _batch_cells(case: OrderFigures) -> list[str]:
    batch = case.batch
    counts = f"{batch.shards:,.0f}", f"{batch.rank_shards:,.1f}", f"{batch.tars:,.0f}"
    spread = f"{batch.tars_at_random:,.0f}", f"{batch.neighbours:.1%}", f"{batch.distance:,.0f}"
    return [f"{case.images:,}", f"{case.steps:,}", *counts, *spread]


def _epoch_cells(case: OrderFigures, number: int, one: EpochFigures) -> list[str]:
    reads = [str(number + 1), f"{one.requests:,}", size_text(one.bytes), size_text(one.bytes / case.steps)]
    reads.append(f"{one.hit_rate:.1%}" if one.hits + one.misses else "")
    if not one.seconds:
        return reads
    rates = f"{one.requests / one.seconds:,.0f}/s, {size_text(one.bytes / one.seconds)}/s"
    return [*reads, f"{one.images_per_second:,.0f}", one.limit or "", rates, duration_text(one.seconds)]


def simulate(case: OrderCase, epochs: int, limits: Limits, bar: Bar) -> OrderFigures:
    """The figures of an order over some epochs. `bar` advances by one for each step."""
    plan = case.stream.plan
    steps = plan.steps_per_epoch
    counts = _node_counts(case, epochs * steps, limits.gpus, bar)
    images = rank_stops(plan)[min(limits.gpus, plan.world_size) - 1]
    found = []
    for first in range(0, epochs * steps, steps):
        of_epoch = {name: one[first : first + steps] for name, one in counts.items()}
        found.append(_epoch(of_epoch, int(images), plan, limits))
    return OrderFigures(case.name, case.order, plan.order.count, steps, case.batch, found, counts["bytes"])


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
    found = []
    for number, source in enumerate(stream.sources()):
        here = np.flatnonzero(which == number)
        if not len(here):
            continue
        rows, table, piece = _rows(source, local[here]), source.dataset.table, pieces[here]
        start, shard = table.offset[rows].astype(np.int64), table.shard[rows]
        image_end = start + table.jpg_bytes[rows].astype(np.int64)
        stop = -(-image_end // 512) * 512 + 512 + table.masks_bytes[rows].astype(np.int64)
        gap = start[1:] - stop[:-1]
        apart = (piece[1:] != piece[:-1]) | (shard[1:] != shard[:-1]) | (gap < 0) | (gap > NEAR)
        starts = np.flatnonzero(np.append(True, apart))
        ends = np.append(starts[1:], len(rows)) - 1
        found.append(_Ranges(source.dataset, rows, starts, stop[ends] - start[starts], piece[starts]))
    return found


def _rows(source: SampleSource, local: Int64) -> Int64:
    order = source.plan.order
    assert isinstance(order, Order)
    return source.view.table_rows(order.rows(local))


class _Cache:
    """What a cache of a dataset directory holds, as its node reads."""

    def __init__(self, dataset: Dataset, limit: int) -> None:
        names = {one.name for one in choose(dataset.stored_shards(), limit)}
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
    """The figures of an epoch; a step takes as long as the slowest part of the node, which reads ahead."""
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
        **{name: int(one.sum()) for name, one in counts.items()},
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
    figures = np.array([_batch(plan, sources, places, tars, rank, step) for step in steps.tolist()])
    shards, rank_shards, found, neighbours, distance = figures.mean(axis=0).tolist()
    return BatchFigures(
        shards=shards,
        rank_shards=rank_shards,
        tars=found,
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
    """Of a global batch: shards, shards of a rank, tars, part with neighbours, and median distance."""
    which, local, _ = plan.order.locate(step * plan.global_batch + np.arange(plan.global_batch))
    shards = rank_shards = found = near = 0
    distances = []
    for number, source in enumerate(sources):
        here = np.flatnonzero(which == number)
        rows = _rows(source, local[here])
        shard = source.dataset.table.shard[rows].astype(np.int64)
        shards += len(np.unique(shard))
        rank_shards += len(np.unique(rank[here] * len(source.dataset.shards) + shard))
        found += len(np.unique(tars[number][shard]))
        place = places[number][rows]
        distances.append(np.abs(np.diff(place)))
        adjacent = np.diff(np.sort(place)) == 1
        near += int((np.append(adjacent, False) | np.append(False, adjacent)).sum()) if len(rows) else 0
    every = np.concatenate(distances)
    median = float(np.median(every)) if len(every) else 0.0
    return shards, rank_shards / plan.world_size, found, near / plan.global_batch, median


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
