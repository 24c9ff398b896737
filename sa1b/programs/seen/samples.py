"""The samples of a run, read again from its dataset directories, and what has changed in them since; and the
masks that the run has used, chosen again from the stored masks of each sample.
"""

import os
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from sa1b.errors import ManifestError, Sa1bError, UsageError
from sa1b.programs.seen.history import Span, before_growth
from sa1b.shards.dataset import Dataset
from sa1b.shards.manifest import versions
from sa1b.stream.damage_log import DamageLog
from sa1b.stream.dataset import Stream
from sa1b.stream.mixture import Mixture
from sa1b.stream.order import Order, Sequential
from sa1b.stream.pending import PendingBatch, submit
from sa1b.stream.plan import MicroBatch, Plan, ResumeError, largest_share
from sa1b.version import __version__, code_digest
from sa1b.views.view import write_view

_TOGETHER = 16  # images that are rebuilt at a time
_READ = 64  # samples whose masks are read at a time
_KEYS = ["source", "image_id", "mask_id", "mask_index"]


def micro_batches(span: Span, order: Order | Sequential | Mixture, step: int) -> list[MicroBatch]:
    """The micro-batches of a step, rank by rank, as the ranks of the run had them; of 16 images for runs of
    earlier versions, whose ranks are not recorded.
    """
    size, config = int(span.receipt["global_batch"]), span.start.get("config")
    position, micro_batch, ranks, shares = span.position + (step - 1 - span.first) * size, _TOGETHER, 1, None
    if config is not None:
        ranks = span.start["world_size"] if config["parallel"]["mode"] != "pipeline" else 1
        if config["parallel"]["shares"] is not None:
            shares = tuple(map(int, config["parallel"]["shares"].split(",")))
        largest = largest_share(size, ranks, shares)
        micro_batch = min(config["data"]["micro_batch"] or largest, largest)
    plans = [
        Plan(
            order=order,
            global_batch=size,
            micro_batch=micro_batch,
            rank=rank,
            world_size=ranks,
            shares=shares,
        )
        for rank in range(ranks)
    ]
    pieces = [piece for plan in plans for piece in islice(plan.micro_batches(position), plan.count)]
    return [piece for piece in pieces if piece.start < piece.stop]


class Samples:
    """The samples of a start of a run. Warnings name what has changed since the run, such as the stored
    bytes.

    Attributes:
        order: of the run.
        options: of the samples, of a mixture those of its first source.
        missing: number of a source of a mixture -> why it cannot be read.
        damaged: position and image id of the samples that were damaged and have a substitute.

    UsageError: the images are not those of the run, or a transform of its own code is missing.
    """

    def __init__(self, span: Span) -> None:
        sources = span.receipt["sources"]
        self.missing: dict[int, str] = {}
        log = _DamageNotes(Path(os.devnull), 0)
        self.damaged = log.found
        self._folder = tempfile.TemporaryDirectory()
        opened: dict[str, Stream | None] = {}
        for number, (name, source) in enumerate(sources.items()):
            try:
                opened[name] = _opened(source, span.states[name], Path(self._folder.name, f"{number}.json"))
            except Sa1bError as error:
                if len(sources) == 1 or not isinstance(error, UsageError | ManifestError):
                    raise
                opened[name], self.missing[number] = None, str(error)
        self._streams = [stream for stream in opened.values() if stream is not None]
        if not self._streams:
            raise UsageError(next(iter(self.missing.values())))
        self.options = self._streams[0].options
        self.order = self._streams[0].plan.order
        names = [None] if span.phases is None else list(sources)
        self._sources = [
            replace(source, name=name, damage_log=log)
            for name, stream in zip(names, opened.values(), strict=True)
            for source in (self._streams[0] if stream is None else stream).sources()
        ]
        if span.phases is not None:
            self.order = Mixture(tuple(len(source.view) for source in self._sources), span.phases)

    def submit(self, piece: MicroBatch) -> PendingBatch:
        """Start reading all samples of a micro-batch, none of a missing source."""
        return submit(self._sources, self.order, piece)

    def why_not(self, position: int) -> str | None:
        """Why the sample at a position cannot be read: its source is missing."""
        which, _, _ = self.order.locate(np.array([position]))
        return self.missing.get(int(which[0]))

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._folder.cleanup()


class _DamageNotes(DamageLog):
    """A damage log in memory, without a limit."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path, rank)
        self.found: set[tuple[int, int]] = set()

    def damaged(self, *, image_id: int, position: int, **line: Any) -> None:
        self.found.add((position, image_id))


def _opened(source: dict[str, Any], state: dict[str, Any], path: Path) -> Stream:
    """The stream of a source of a run. Warnings say what else has changed. If sources were added to the
    directory, a view of the previous images is written to `path`.
    """
    options = dict(state["options"])
    if options.pop("transform") is not None:
        raise UsageError(
            f"{source['root']}: the run had a transform of its own code; replay it from Python, with "
            "Stream(transform=...) and load_state_dict"
        )
    options.pop("text", None)  # texts are not rebuilt
    decoder = str(options.pop("decoder")).rpartition("-")[0]
    layers = [layer for layer, _ in state.get("layers", [])]
    which = source["view"]
    dataset = Dataset(source["root"])
    view = before_growth(dataset, source, state) if which is None else None
    if view is not None and view.rows is not None:
        write_view(source["root"], dataset.table, np.sort(view.rows), out=path)
        which = path
        warnings.warn(f"{source['root']}: sources were added since; the run has those before", stacklevel=2)
    stream = Stream(
        source["root"],
        view=which,
        global_batch=int(state["block_size"]),
        seed=state["seed"],
        block_size=state["block_size"],
        epochs=None,
        rank=0,
        world_size=1,
        layers=layers,
        damage_log=os.devnull,
        decoder=decoder if torch.cuda.is_available() else "cpu",
        **options,
    )
    try:
        known = {name: value for name, value in state["options"].items() if name != "text"}
        stream.check_state({**state, "options": known})
    except ResumeError as error:
        raise UsageError(f"{source['root']}: {error}") from None
    return stream


def changes_of(start: dict[str, Any]) -> list[str]:
    """Changes of code and libraries since a start of a run that may change its samples."""
    changes = []
    if start.get("code", code_digest()) != code_digest():
        changes.append(
            f"the code that decides samples and prompts has changed since the run (sa1b {start['sa1b']}, "
            f"{start['code']}; now {__version__}, {code_digest()}): they may differ; install that version"
        )
    now, before = versions(), start.get("libraries", {})
    changed = [f"{name} {old}, now {now[name]}" for name, old in before.items() if now.get(name, old) != old]
    if start.get("torch", torch.__version__) != torch.__version__:
        changed.append(f"torch {start['torch']}, now {torch.__version__}")
    if changed:
        changes.append(
            f"libraries have changed since the run: {', '.join(changed)}; pixels, and prompts after the "
            "first iteration, may differ in their last bits"
        )
    return changes


def seen_masks(pieces: Sequence[tuple[Span, Sequence[int]]]) -> pa.Table:
    """How often each mask was chosen at these positions of a run's order: the columns image_id, mask_id,
    mask_index, times and source. No image is decoded. A sample whose masks are damaged has a substitute, as
    in the run.
    """
    types = dict.fromkeys((*_KEYS[1:], "times"), pa.int64())
    total = pa.schema({"source": pa.string(), **types}).empty_table()
    for span, positions in pieces:
        names = list(span.receipt["sources"])
        with closing(Samples(span)) as stream:
            for start in range(0, len(positions), _READ):
                some = positions[start : start + _READ]
                pending = [stream.submit(MicroBatch(at, at + 1, at + 1)) for at in some]
                parts = pa.concat_tables([total, *(_picked(batch, names) for batch in pending)])
                summed = parts.group_by(_KEYS, use_threads=False).aggregate([("times", "sum")])
                total = summed.rename_columns([*_KEYS, "times"])
    ordered = total.sort_by([(name, "ascending") for name in _KEYS])
    return ordered.select(["image_id", "mask_id", "mask_index", "times", "source"])


def _picked(pending: PendingBatch, names: Sequence[str]) -> pa.Table:
    """The chosen masks of a pending batch of one sample."""
    pending.pick(0)
    sample = pending.picked[0]
    assert sample is not None
    masks, count = sample.masks, len(sample.masks.mask_ids)
    numbers = np.full(count, masks.image_id), masks.mask_ids, masks.mask_index, np.ones(count, np.int64)
    columns = dict(zip((*_KEYS[1:], "times"), (values.astype(np.int64) for values in numbers), strict=True))
    return pa.table({"source": pa.repeat(names[pending.which[0]], count), **columns})
