"""A rebuilt step: its samples in the order of their positions, with their images if they are drawn."""

import hashlib
import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from sa1b.console import counted
from sa1b.errors import Sa1bError
from sa1b.masks.raster import rasterize
from sa1b.masks.runs import Runs
from sa1b.programs.seen.history import Span
from sa1b.programs.seen.prompts import Prompts
from sa1b.programs.seen.samples import Samples, changes_of, micro_batches
from sa1b.shards.display import encoded, overlay
from sa1b.storage.errors import MissingError
from sa1b.storage.open import open_store
from sa1b.stream.batch import Batch
from sa1b.stream.plan import MicroBatch


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

    def exit_code(self) -> int:
        """3: an image was not rebuilt; `changes` names it."""
        return 3 if any(": not rebuilt: " in change for change in self.changes) else 0

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


def rebuilt(
    run: str,
    span: Span,
    step: int,
    prompts: Prompts,
    *,
    positions: set[int] | None = None,
    draw: bool = False,
) -> Replayed:
    """The samples of a step of this start of a run, or those of some of its positions; `changes` has those
    that cannot be rebuilt.
    """
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        stream = Samples(span)
    changes = [*changes_of(span.start), *(str(one.message) for one in noted)]
    config = span.start.get("config")
    size = (config and config["data"]["target_size"]) or stream.options.image_size // 4
    samples: list[dict[str, Any]] = []
    drawings: list[Drawing] = []
    for piece in micro_batches(span, stream.order, step):
        if positions is not None and positions.isdisjoint(range(piece.start, piece.stop)):
            continue
        for read in _readable(stream, piece, changes):
            batch = replace(read, images=read.images.cpu(), dense=read.masks.dense(size))
            masks, at = prompts.of(batch), batch.positions.tolist()
            wanted = [i for i in range(len(batch)) if positions is None or at[i] in positions]
            samples += [_sample(batch, i, masks) for i in wanted]
            drawings += [_drawing(batch, i) for i in wanted] if draw else []
    stream.close()
    changes += _other_damage(run, stream.damaged, {one["position"] for one in samples})
    return Replayed(run, step, samples, changes, prompts.note, drawings)


def _readable(stream: Samples, piece: MicroBatch, changes: list[str]) -> Iterator[Batch]:
    """The batch of a micro-batch, or those of its samples that can be read; `changes` gets the others."""
    singles = [MicroBatch(at, at + 1, at + 1) for at in range(piece.start, piece.stop)]
    lacking = [stream.why_not(one.start) for one in singles]
    if not any(lacking):
        try:
            yield stream.submit(piece).finish()
            return
        except (Sa1bError, OSError) as error:
            if len(singles) == 1:
                changes.append(f"position {piece.start:,}: not rebuilt: {error}")
                return
    for one, reason in zip(singles, lacking, strict=True):
        if reason is None:
            yield from _readable(stream, one, changes)
        else:
            changes.append(f"position {one.start:,}: not rebuilt: {reason}")


def _other_damage(run: str, now: set[tuple[int, int]], shown: set[int]) -> list[str]:
    """The samples that were damaged in the run and are not now, or the reverse: position and image id."""
    try:
        lines = [json.loads(line) for line in open_store(run).read("damaged.jsonl").splitlines()]
    except (MissingError, FileNotFoundError):
        lines = []
    before = {(line["position"], line["image_id"]) for line in lines}
    now, before = ({one for one in some if one[0] in shown} for some in (now, before))
    new = "is damaged now, and was not in the run: a substitute is shown"
    texts = [f"{_named(one)} {new}" for one in now - before]
    texts += [f"{_named(one)} was damaged in the run, which had a substitute" for one in before - now]
    return sorted(texts)


def _named(sample: tuple[int, int]) -> str:
    return f"position {sample[0]:,}: image {sample[1]}"


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
