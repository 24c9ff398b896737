"""A rebuilt step: its samples in the order of their positions, with their images if they are drawn."""

import hashlib
import math
import os
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from sa1b.console import counted
from sa1b.errors import UsageError
from sa1b.masks.raster import rasterize
from sa1b.masks.runs import Runs
from sa1b.programs.seen.history import Span
from sa1b.programs.seen.prompts import Prompts
from sa1b.shards.display import encoded, overlay
from sa1b.stream.batch import Batch
from sa1b.stream.dataset import Stream
from sa1b.stream.mix import Mix
from sa1b.stream.mixture import Mixture
from sa1b.stream.order import Order, Sequential
from sa1b.stream.plan import MicroBatch, Plan, ResumeError, largest_share

_TOGETHER = 16  # images that are rebuilt at a time


@dataclass(frozen=True, slots=True, eq=False)
class Drawing:
    """What is drawn of a sample: its image as the model got it, uint8 [h, w, 3], and its masks."""

    pixels: npt.NDArray[np.uint8]
    masks: Runs  # at source resolution

    def overlay(self) -> bytes:
        """The image with all masks, as PNG."""
        return encoded(Image.fromarray(overlay(self.pixels, self.masks)), "PNG")

    def dense(self, mask: int) -> npt.NDArray[np.uint8]:
        """One mask at the size of the image, uint8 [h, w], 0 or 1."""
        found: npt.NDArray[np.uint8] = rasterize(self.masks, *self.pixels.shape[:2], select=[mask])[0]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """The samples of a step, in the order of their positions, and what has changed since the run."""

    run: str
    step: int
    samples: list[dict[str, Any]]
    changes: list[str]
    prompts: str  # which prompts are those of the run
    drawings: list[Drawing] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        names = ("run", "step", "samples", "changes", "prompts")
        return {name: getattr(self, name) for name in names}

    def table(self) -> str:
        lines = [f"warning: {change}" for change in self.changes]
        lines += [f"prompts: {self.prompts}"] if self.prompts else []
        lines.append(f"{self.run}, step {self.step:,}: {counted(len(self.samples), 'image')}")
        return "\n".join([*lines, *(f"{one['position']:>12,}  {caption(one)}" for one in self.samples)])


def caption(sample: dict[str, Any]) -> str:
    """A sample in one line: image, number of masks, and its loss and worst mask if they are known."""
    source = f"{sample['source']}: " if sample["source"] else ""
    mirrored = ", mirrored" if sample["mirrored"] else ""
    text = f"{source}image {sample['image_id']}, {counted(len(sample['masks']), 'mask')}{mirrored}"
    if "loss" not in sample:
        return text
    worst = by_loss(sample["masks"])[0]
    return (
        f"{text}, loss {number_text(sample['loss'])}; highest: mask {worst['mask_id']} with loss "
        f"{number_text(worst['loss'])}, IoU {worst['ious'][-1]:.3f}"
    )


def number_text(value: float | None) -> str:
    """A figure with four digits; None: it is not finite."""
    return "not finite" if value is None else f"{value:.4f}"


def by_loss(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Masks or samples, those whose loss is not finite first, then by loss, then those without."""
    losses = [
        -math.inf if "loss" not in one else math.inf if one["loss"] is None else one["loss"] for one in found
    ]
    return [found[i] for i in sorted(range(len(found)), key=lambda i: -losses[i])]


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
    plans = [Plan(order, size, micro_batch, rank, ranks, shares) for rank in range(ranks)]
    found = [piece for plan in plans for piece in islice(plan.micro_batches(position), plan.count)]
    return [piece for piece in found if piece.start < piece.stop]


def stream_of(span: Span) -> Stream | Mix:
    """The stream of a start of a run, with its samples. Warnings say what has changed since, such as the
    stored bytes. UsageError: the images are not those of the run, or a transform of its own code is missing.
    """
    state, sources = span.receipt["stream"], span.receipt["sources"]
    states = state.get("sources", dict.fromkeys(sources, state))
    streams = {}
    for name, source in sources.items():
        options = dict(states[name]["options"])
        decoder = str(options.pop("decoder")).rpartition("-")[0]
        if options.pop("transform") is not None:
            raise UsageError(
                f"{source['root']}: the run had a transform of its own code; replay it from Python, with "
                "Stream(transform=...) and load_state_dict"
            )
        options.pop("text", None)
        streams[name] = _opened(name, source, states[name], decoder=decoder, **options)
    if "phases" not in state:
        return next(iter(streams.values()))
    (_, first), *later = state["phases"]
    return Mix({name: (stream, first[name]) for name, stream in streams.items()}, schedule=dict(later))


def _opened(name: str, source: dict[str, Any], state: dict[str, Any], **options: Any) -> Stream:
    """The stream of a source of a run. Warnings say what else has changed."""
    try:
        stream = Stream(
            source["root"],
            view=source["view"],
            global_batch=int(state["block_size"]),
            seed=state["seed"],
            block_size=state["block_size"],
            epochs=None,
            rank=0,
            world_size=1,
            layers=[layer for layer, _ in state.get("layers", [])],
            damage_log=os.devnull,  # that of the run is complete
            **options,
        )
        stream.check_state(state)
    except ResumeError as error:
        raise UsageError(f"{source['root']}: {error}") from None
    return stream


def rebuilt(
    run: str,
    span: Span,
    step: int,
    prompts: Prompts,
    *,
    positions: Collection[int] | None = None,
    draw: bool = False,
) -> Replayed:
    """The samples of a step of this start of a run, or those of some of its positions."""
    stream, config = stream_of(span), span.start.get("config")
    size = (config and config["data"]["target_size"]) or stream.options.image_size // 4
    samples: list[dict[str, Any]] = []
    drawings: list[Drawing] = []
    for piece in micro_batches(span, stream.plan.order, step):
        wanted = [
            i for i, one in enumerate(range(piece.start, piece.stop)) if positions is None or one in positions
        ]
        if wanted:
            batch = stream.submit(piece).finish()
            batch = replace(batch, dense=batch.masks.dense(size))
            masks = prompts.of(batch)
            samples += [_sample(batch, i, masks) for i in wanted]
            drawings += [_drawing(batch, i) for i in wanted] if draw else []
    stream.close()
    return Replayed(run, step, samples, [], prompts.note, drawings)


def digest(batch: Batch, i: int) -> str:
    """SHA-256 of the tensors of a sample: its image, and its dense masks with boxes and points."""
    assert batch.dense is not None
    found = hashlib.sha256(batch.images[i].contiguous().numpy().tobytes())
    masks = batch.masks.image == i
    for value in (batch.boxes, batch.points, batch.mask_ids, batch.mask_index, batch.dense):
        found.update(value[masks].numpy().tobytes())
    return found.hexdigest()


def _sample(batch: Batch, i: int, masks: list[dict[str, Any]]) -> dict[str, Any]:
    own = np.flatnonzero((batch.masks.image == i).numpy()).tolist()
    ids, indices = batch.mask_ids.tolist(), batch.mask_index.tolist()
    found = {
        "position": int(batch.positions[i]),
        "source": batch.source[i] if batch.source else None,
        "image_id": int(batch.ids[i]),
        "window": batch.windows[i].tolist(),
        "mirrored": bool(batch.flipped[i]),
        "sha256": digest(batch, i),
        "masks": [{"mask_id": ids[mask], "mask_index": indices[mask], **masks[mask]} for mask in own],
    }
    losses = [masks[mask]["loss"] for mask in own if "loss" in masks[mask]]
    if losses:
        found["loss"] = None if None in losses else sum(losses) / len(losses)
    return found


def _drawing(batch: Batch, i: int) -> Drawing:
    rows, columns = batch.framed_sizes[i].tolist()
    pixels = batch.images[i].permute(1, 2, 0).numpy()[:rows, :columns]
    first = sum(batch.masks.counts[:i])
    offsets = batch.masks.offsets.numpy()[first : first + batch.masks.counts[i] + 1]
    runs = batch.masks.runs.numpy().view(np.uint32)[offsets[0] : offsets[-1]]
    return Drawing(pixels, Runs(runs, offsets - offsets[0], *batch.source_sizes[i].tolist()))
