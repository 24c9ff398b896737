"""The images that a run has used, from the starts in its metrics.jsonl.

Each start records the step and position at which it begins, and the state of its stream. The order is a
formula of that state, so the images of every step can be computed; nothing is logged for each image.
"""

import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import sa1b
from sa1b.errors import UsageError
from sa1b.storage.errors import MissingError
from sa1b.storage.open import open_store
from sa1b.stream.damage_log import DamageLog
from sa1b.stream.pending import MAX_SUBSTITUTES
from sa1b.stream.plan import MicroBatch, ResumeError
from sa1b.views.view import write_view

Int64 = npt.NDArray[np.int64]
Document = dict[str, Any]
_CHUNK = 1 << 22  # positions that are computed at a time
_TOGETHER = 64  # samples whose masks are read at a time


class Opened(NamedTuple):
    """The stream of a start of a run, those of its datasets, and what has changed in these since."""

    stream: sa1b.Stream | sa1b.Mix
    streams: dict[str, sa1b.Stream]
    ids: list[Int64]  # of each dataset, the images of the rows of its view
    changes: list[str]


@dataclass(frozen=True, slots=True)
class Span:
    """Steps [first, stop) of one start of a run; `start` is its line in metrics.jsonl.

    `damage`: position -> ids of the samples that were damaged there, of the whole run.
    """

    first: int
    stop: int
    start: Document
    damage: dict[int, set[int]]
    known: dict[str, Opened]  # of all starts, most of which have the same datasets

    def positions(self, first: int, stop: int) -> range:
        begin, batch = self.start["data"]["stream"]["position"], self.start["data"]["global_batch"]
        return range(begin + (first - self.first) * batch, begin + (stop - self.first) * batch)

    def opened(self) -> Opened:
        """The stream. UsageError: a dataset directory or view is no longer that of the run."""
        data = self.start["data"]
        state = {**data["stream"], "position": 0, "history": None}
        key = json.dumps((data["sources"], state, data["global_batch"]))
        if key not in self.known:
            self.known[key] = _opened(*json.loads(key))
        return self.known[key]

    def rows(self, positions: Int64) -> tuple[Int64, Int64]:
        """For each position, the number of its dataset and the row of its view that was used: that of the
        order or, if that sample was damaged, of its substitute.
        """
        opened = self.opened()
        sources, local, _ = opened.stream.plan.order.locate(positions)
        orders: list[Any] = [stream.plan.order for stream in opened.streams.values()]
        rows = np.empty_like(local)
        for number, order in enumerate(orders):
            rows[sources == number] = order.rows(local[sources == number])
        for i in np.flatnonzero(np.isin(positions, [*self.damage])).tolist():
            for attempt in range(MAX_SUBSTITUTES):
                if int(opened.ids[sources[i]][rows[i]]) not in self.damage[int(positions[i])]:
                    break
                rows[i] = orders[sources[i]].substitute(int(local[i]), attempt)
        return sources, rows

    def parts(self) -> Iterator[tuple[Int64, Int64, Int64]]:
        """The positions of all steps in parts, with `rows`."""
        whole = self.positions(self.first, self.stop)
        for begin in whole[::_CHUNK]:
            positions = np.arange(begin, min(begin + _CHUNK, whole.stop))
            yield positions, *self.rows(positions)


def read_lines(run: str) -> list[bytes]:
    """The complete lines of a run's metrics.jsonl, in a folder or at a URL."""
    try:
        return open_store(run).read("metrics.jsonl").split(b"\n")[:-1]
    except (MissingError, FileNotFoundError):
        raise UsageError(f"{run}: has no metrics.jsonl; pass --out of `sa1b train`") from None


def spans_of(run: str, before: int | None = None) -> list[Span]:
    """The starts of a run, up to step `before`. UsageError: there is no such step, or the file is damaged."""
    lines = read_lines(run)
    try:
        starts = [json.loads(line)["run"] for line in lines if line.startswith(b'{"run": ')]
        done = next((json.loads(line)["step"] for line in lines[::-1] if line.startswith(b'{"step": ')), 0)
        last = done if before is None else before
        if last > done:
            raise UsageError(f"--before-step {before}: the run has {done} steps; pass a number up to {done}")
        stops, damage = [*(start["step"] for start in starts[1:]), last], _damage_of(run)
        pairs, known = zip(starts, stops, strict=True), dict[str, Opened]()
        spans = [Span(start["step"], min(stop, last), start, damage, known) for start, stop in pairs]
        return [span for span in spans if span.positions(span.first, span.stop)]
    except (ValueError, LookupError, TypeError) as error:
        why = f"damaged, or of another version ({error!r:.200}); restore it from a copy"
        raise UsageError(f"{run}/metrics.jsonl: {why}") from None


def _damage_of(run: str) -> dict[int, set[int]]:
    found, store = defaultdict[int, set[int]](set), open_store(run)
    for name in store.names("", ".jsonl"):  # each machine has one
        for line in store.read(name).splitlines() if name.startswith("damaged") else ():
            with suppress(ValueError, KeyError, TypeError):  # cut by a kill or a full disk
                document = json.loads(line)
                found[document["position"]].add(document["image_id"])
    return found


class _NoDamageLog(DamageLog):
    def damaged(self, **_: Any) -> None:
        pass


def _opened(sources: Document, state: Document, batch: int) -> Opened:
    states = state.get("sources", dict.fromkeys(sources, state))
    with TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        view = Path(folder, "view.json")
        streams = {name: _stream(source, states[name], batch, view) for name, source in sources.items()}
    stream: sa1b.Stream | sa1b.Mix = next(iter(streams.values()))
    if "phases" in state:
        (_, weights), *later = state["phases"]
        stream = sa1b.Mix({name: (streams[name], weights[name]) for name in streams}, schedule=dict(later))
    stream.damage_log = _NoDamageLog(Path("unused"), 0)
    ids = [one.view.image_ids(one.dataset.table).view(np.int64) for one in streams.values()]
    return Opened(stream, streams, ids, [str(warning.message) for warning in noted])


def _stream(source: Document, state: Document, batch: int, path: Path) -> sa1b.Stream:
    """The stream of a dataset with the sequence of a state; warnings name changes. If sources were added to
    the directory, it reads a view of the images before, which is written to `path`.
    """
    root, view, options = source["root"], source["view"], dict(state["options"])
    if "://" not in root and not Path(root).exists():
        raise UsageError(f"{root}: no such folder; run this command in the folder where the run was started")
    table = sa1b.open(root).table
    images = np.cumsum(np.bincount(table.shard))  # up to the end of each shard
    if view is None and source["images"] in images[:-1]:
        rows = np.flatnonzero(table.shard <= np.searchsorted(images, source["images"]))
        write_view(root, table, rows.astype(np.uint32), out=path)
        warnings.warn(f"{root}: sources were added since; the run has those before", stacklevel=2)
        view = path
    options.pop("text", None)  # texts are not rebuilt
    decoder = options["decoder"].rpartition("-")[0] if torch.cuda.is_available() else "cpu"
    own = {name: state[name] for name in ("seed", "block_size")} | options | {"decoder": decoder}
    own |= {"global_batch": batch, "layers": [layer for layer, _ in state.get("layers", ())]}
    stream = sa1b.Stream(root, view=view, rank=0, world_size=1, epochs=None, **own)
    try:
        stream.check_state({**state, "position": 0, "options": options})
    except ResumeError as error:
        raise UsageError(f"{root}: {error}") from None
    return stream


def seen_images(spans: Sequence[Span]) -> dict[str, tuple[str, Int64, Int64]]:
    """Of each dataset: its directory, its image ids, and how often each image was used, both int64 [N]."""
    found: dict[str, tuple[str, Int64, Int64]] = {}
    for span in spans:
        opened = span.opened()
        for (name, stream), ids in zip(opened.streams.items(), opened.ids, strict=True):
            found.setdefault(name, (str(stream.root), ids, np.zeros(len(ids), np.int64)))
        for _, sources, rows in span.parts():
            for number, name in enumerate(opened.streams):
                times = found[name][2]
                times += np.bincount(rows[sources == number], minlength=len(times))
    return found


def seen_masks(spans: Sequence[Span], images: Sequence[int]) -> list[Document]:
    """The masks that were chosen of these images, or of all, and how often each was. No image is decoded."""
    times: Counter[tuple[str, int, int, int]] = Counter()
    for span in spans:
        opened = span.opened()
        wanted = [np.isin(ids, images) if images else ids >= 0 for ids in opened.ids]
        with closing(opened.stream) as stream:
            for positions, sources, rows in span.parts():
                used = [bool(wanted[number][row]) for number, row in zip(sources, rows, strict=True)]
                here = positions[used].tolist()
                for start in range(0, len(here), _TOGETHER):
                    some = here[start : start + _TOGETHER]
                    for pending in [stream.submit(MicroBatch(at, at + 1, at + 1)) for at in some]:
                        pending.pick(0)
                        (sample,) = pending.picked
                        assert sample is not None
                        masks, name = sample.masks, [*opened.streams][pending.which[0]]
                        pairs = zip(masks.mask_ids.tolist(), masks.mask_index.tolist(), strict=True)
                        times.update((name, masks.image_id, *pair) for pair in pairs)
    names = "source", "image_id", "mask_id", "mask_index"
    return [dict(zip(names, key, strict=True)) | {"times": times[key]} for key in sorted(times)]
