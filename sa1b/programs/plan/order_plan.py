"""The figures of orders of training, as a table, as JSON and as a page with charts."""

from dataclasses import asdict, dataclass
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.charts import Line, line_chart
from sa1b.charts import page as frame
from sa1b.report import aligned, duration_text, size_text
from sa1b.stream.batch_stream import BatchStream

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

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
    tars_at_random: float  # the same, if each image were sampled independently
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
            epochs = [{**asdict(epoch), "hit_rate": epoch.hit_rate} for epoch in case.epochs]
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
            cells = [_epoch_cells(case, number, epoch) for number, epoch in enumerate(case.epochs)]
            reads += [[case.name if not number else "", *row] for number, row in enumerate(cells)]
        if not any(epoch.seconds for case in self.cases for epoch in case.epochs):
            reads = [row[:6] for row in reads]
        tables = [aligned(rows, (False, *(True for _ in rows[0][1:]))) for rows in (batches, reads)]
        return "\n".join([self.heading(), "", *tables[0], "", *tables[1]])

    def page(self) -> str:
        """The figures as an HTML page with charts."""
        read = [Line(case.name, _by_step(case.bytes / 1e6)) for case in self.cases]
        hits = [
            Line(case.name, [(n + 1, 100 * epoch.hit_rate) for n, epoch in enumerate(case.epochs)])
            for case in self.cases
            if case.epochs[-1].hits + case.epochs[-1].misses
        ]
        rates = [
            Line(case.name, [(n + 1, epoch.images_per_second or 0) for n, epoch in enumerate(case.epochs)])
            for case in self.cases
        ]
        epochs = range(1, len(self.cases[0].epochs) + 1)
        shown = [line_chart("What a node reads from the store in a step", read, ("step", "MB"))]
        if hits:
            shown.append(line_chart("Ranges that the cache has", hits, ("epoch", "%"), epochs))
        if any(epoch.seconds for case in self.cases for epoch in case.epochs):
            shown.append(line_chart("Images per second", rates, ("epoch", "images/s"), epochs))
        parts = {
            "VERDICT": "",
            "FACTS": "<p>Simulated from the formula of the order; no image was read.</p>",
            "CHARTS": f'<div class="curves">{"".join(shown)}</div>',
            "TABLE": escape(self.table()),
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


def _epoch_cells(case: OrderFigures, number: int, epoch: EpochFigures) -> list[str]:
    reads = [
        str(number + 1),
        f"{epoch.requests:,}",
        size_text(epoch.bytes),
        size_text(epoch.bytes / case.steps),
    ]
    reads.append(f"{epoch.hit_rate:.1%}" if epoch.hits + epoch.misses else "")
    if not epoch.seconds:
        return reads
    rates = f"{epoch.requests / epoch.seconds:,.0f}/s, {size_text(epoch.bytes / epoch.seconds)}/s"
    return [*reads, f"{epoch.images_per_second:,.0f}", epoch.limit or "", rates, duration_text(epoch.seconds)]
