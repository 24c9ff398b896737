"""The images that a run has used, from the starts in its metrics.jsonl.

Each start records the step and position at which it begins, and the state of its stream. The order is a
formula of that state, so the images of every step can be computed; nothing is logged for each image.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from sa1b.errors import UsageError
from sa1b.shards.dataset import Dataset
from sa1b.shards.sample_table import SampleTable
from sa1b.storage.errors import MissingError
from sa1b.storage.open import open_store
from sa1b.stream.mixture import Mixture, Phase
from sa1b.stream.order import Order
from sa1b.stream.plan import ResumeError, check_state
from sa1b.views.view import View, ids_digest, view_of

Int64 = npt.NDArray[np.int64]
_NEWLINE = ord("\n")


@dataclass(frozen=True, slots=True)
class Span:
    """Steps [first, stop) of one start of a run, its positions from `position` on, and its line `run`."""

    first: int
    stop: int
    position: int
    start: dict[str, Any]

    @property
    def receipt(self) -> dict[str, Any]:
        """What decides the data of the start, see `sa1b.engine.step.feed.Feed.receipt`."""
        data: dict[str, Any] = self.start["data"]
        return data

    @property
    def states(self) -> dict[str, Any]:
        """The state of the stream of each dataset."""
        stream, sources = self.receipt["stream"], self.receipt["sources"]
        states: dict[str, Any] = stream.get("sources", dict.fromkeys(sources, stream))
        return states

    @property
    def phases(self) -> tuple[Phase, ...] | None:
        """The phases of a mixture."""
        phases = self.receipt["stream"].get("phases")
        return phases and tuple(Phase(start, tuple(weights.values())) for start, weights in phases)

    @property
    def end(self) -> int:
        """The position after the last step."""
        return self.position + (self.stop - self.first) * int(self.receipt["global_batch"])


class _State(msgspec.Struct):
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    seed: int
    ids_sha256: str


class _Source(msgspec.Struct):
    root: str
    view: str | None


class _Data(msgspec.Struct):
    global_batch: Annotated[int, msgspec.Meta(ge=1)]
    stream: dict[str, Any]
    sources: dict[str, _Source]


class _Start(msgspec.Struct):
    """What every start has; others are read where they are used."""

    step: int
    data: _Data


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One dataset of a run: its images and their order."""

    name: str
    root: str
    view: View
    table: SampleTable
    order: Order


@dataclass(frozen=True, slots=True, eq=False)
class SeenImages:
    """The images of one dataset of a run: their ids, and how often each was used, int64 [N]."""

    source: str
    root: str
    ids: Int64
    times: Int64


def read_metrics(run: str) -> bytes:
    """The complete lines of the run's metrics.jsonl, in a folder or at a URL. UsageError: there is none."""
    try:
        data = open_store(run).read("metrics.jsonl")
        return data[: data.rfind(b"\n") + 1]
    except (MissingError, FileNotFoundError):
        raise UsageError(f"{run}: has no metrics.jsonl; pass --out of `sa1b train`") from None


def _documents(data: bytes, kind: bytes, *, last: bool = False) -> Iterator[Any]:
    """The lines of a kind, in their order or, with `last`, from the end on."""
    # Others are not parsed: a long run has many lines.
    begin, at, find = b'{"%s": ' % kind, len(data) + 1 if last else 0, data.rfind if last else data.find
    while (at := find(begin, *((0, at - 1) if last else (at,)))) >= 0:
        if at == 0 or data[at - 1] == _NEWLINE:
            try:
                yield json.loads(data[at : data.index(b"\n", at)])
            except (ValueError, RecursionError) as error:
                raise UsageError(
                    f"metrics.jsonl, line at byte {at:,}: damaged ({error}); restore the file from a copy"
                ) from None
        at += 0 if last else 1


def spans(run: str, data: bytes, before: int | None) -> list[Span]:
    """The starts of a run from its metrics.jsonl, up to step `before`. UsageError: they have no record of
    their data, or there is no such step.
    """
    try:
        starts = [line["run"] for line in _documents(data, b"run")]
        done = next((int(line["step"]) for line in _documents(data, b"step", last=True)), 0)
        for start in starts:
            if "data" in start:
                msgspec.convert(start, _Start)
                msgspec.convert(Span(0, 0, 0, start).states, dict[str, _State])
                msgspec.convert(start["data"]["stream"]["position"], int)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{run}/metrics.jsonl: damaged ({str(error)[:200]}); restore it from a copy"
        ) from None
    if not starts or any("data" not in start for start in starts):
        raise UsageError(
            f"{run}/metrics.jsonl: has no record of its data, because an earlier version wrote it; start the "
            "run again to record the data of its later steps"
        )
    if before is not None and not 0 <= before <= done:
        raise UsageError(f"--before-step {before}: the run has {done} steps; pass a number up to {done}")
    last, result = done if before is None else before, []
    for start, following in zip(starts, [*starts[1:], {"step": last}], strict=True):
        stop = min(following["step"], last)
        if start["step"] < stop:
            result.append(Span(start["step"], stop, start["data"]["stream"]["position"], start))
    return result


def sources_of(span: Span) -> tuple[list[Source], Mixture | None]:
    """The datasets of a start of a run, and the order of a mixture. UsageError: a dataset directory or view
    is no longer that of the run.
    """
    opened = [
        _opened(name, json.dumps(source), json.dumps({**span.states[name], "position": 0}))
        for name, source in span.receipt["sources"].items()
    ]
    if span.phases is None:
        return opened, None
    return opened, Mixture(tuple(len(source.view) for source in opened), span.phases)


@lru_cache(maxsize=64)  # all starts of a run have the same datasets
def _opened(name: str, source_json: str, state_json: str) -> Source:
    source, state = json.loads(source_json), json.loads(state_json)
    root, which = source["root"], source["view"]
    if "://" not in root and not Path(root).is_absolute() and not Path(root).exists():
        raise UsageError(
            f"{root}: no such folder; the run was started with this relative path: run this command in the "
            "folder in which it was started"
        )
    dataset = Dataset(root, layers=[layer for layer, _ in state.get("layers", [])])
    view, dataset = view_of(dataset, which)
    if state["block_size"] > 1:
        view = view.by_location(dataset.table)
    if view.ids_digest != state["ids_sha256"] and which is None:
        view = before_growth(dataset, source, state) or view
    current = {
        **state,
        "ids_sha256": view.ids_digest,
        "masks_where": None if view.masks_where is None else view.masks_where.text,
        "layers": [[layer.info.name, layer.info.digest] for layer in dataset.layers],
    }
    named = "all images of the directory" if which is None else f"the view {which!r}"
    try:
        check_state(current, state, named, root, grown=view.digest == dataset.table.ids_digest)
    except ResumeError as error:
        raise UsageError(f"{root}: {error}") from None
    order = Order(len(view), view.ids_digest, state["seed"], state["block_size"])
    return Source(name, str(dataset.root), view, dataset.table, order)


def before_growth(dataset: Dataset, source: Mapping[str, Any], state: Mapping[str, Any]) -> View | None:
    """The images of a dataset directory before its last sources were added, if these are those of the state;
    None: they are not, or `source` does not record their number. Sources are in the order of their shards.
    """
    table, stems = dataset.table, [name.rpartition("-")[0] for name in dataset.shards]
    images = np.cumsum(np.bincount(table.shard, minlength=len(stems)))
    for stop in range(1, len(stems)):
        if stems[stop - 1] == stems[stop] or images[stop - 1] != source.get("images"):
            continue
        rows = np.flatnonzero(table.shard < stop).astype(np.uint32)
        digest = ids_digest(table.image_id[rows])
        view = View(rows=rows, count=len(rows), digest=digest, ids_digest=digest, bytes_digest=table.digest)
        if state["block_size"] > 1:
            view = view.by_location(table)
        if view.ids_digest == state["ids_sha256"]:
            return view
    return None


def ranges_of(span: Span, mixture: Mixture | None) -> list[tuple[int, int]]:
    """Of each dataset, the positions [start, stop) of its own order that a start of a run has used."""
    if mixture is None:
        return [(span.position, span.end)]
    return list(zip(mixture.seen(span.position), mixture.seen(span.end), strict=True))


def seen_images(spans: list[Span]) -> list[SeenImages]:
    """The images of each dataset. UsageError: a dataset directory or view is no longer that of the run."""
    images: dict[str, SeenImages] = {}
    for span in spans:
        sources, mixture = sources_of(span)
        for source, (start, stop) in zip(sources, ranges_of(span, mixture), strict=True):
            times = _times(source.order, start, stop)
            if source.name in images:
                times = times + images[source.name].times
            ids = source.view.image_ids(source.table).astype(np.int64)
            images[source.name] = SeenImages(source.name, source.root, ids, times)
    return list(images.values())


def _row(source: Source, image_id: int) -> int | None:
    """The row of an image in a view; None: it has no such image."""
    if source.view.rows is None:  # sorted
        ids = source.table.image_id
        row = int(np.searchsorted(ids, np.uint64(image_id)))
        return row if row < len(ids) and int(ids[row]) == image_id else None
    rows = np.flatnonzero(source.view.image_ids(source.table) == image_id)
    return int(rows[0]) if len(rows) else None


def visits(spans: list[Span], image_id: int) -> list[tuple[Span, Source, list[int]]]:
    """Where an image was used: in each start and dataset that has it, its positions in the run's order."""
    there = []
    for span in spans:
        sources, mixture = sources_of(span)
        for number, (source, (start, stop)) in enumerate(zip(sources, ranges_of(span, mixture), strict=True)):
            row = _row(source, image_id)
            if row is None:
                continue
            epochs = range(start // source.order.count, -(-stop // source.order.count))
            local = [source.order.position_of(row, epoch) for epoch in epochs]
            positions = [position for position in local if start <= position < stop]
            if mixture is not None:
                of_run = (mixture.position_of(number, position) for position in positions)
                positions = [position for position in of_run if position is not None]
            there.append((span, source, positions))
    return there


def _times(order: Order, start: int, stop: int) -> Int64:
    """How often each row is at the positions [start, stop)."""
    count = order.count
    times, first = np.zeros(count, np.int64), -(-start // count) * count
    whole = max(stop // count - first // count, 0)
    for begin, end in ((start, min(first, stop)), (max(first + whole * count, start), stop)):
        if begin < end:
            times += np.bincount(order.rows(np.arange(begin, end)), minlength=count)
    return times + whole
