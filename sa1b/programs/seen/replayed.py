"""A rebuilt step: its samples in the order of their positions, with their images if they are drawn."""

import base64
import hashlib
import json
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from html import escape
from importlib.resources import files
from pathlib import Path
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
        dense: npt.NDArray[np.uint8] = rasterize(self.masks, *self.pixels.shape[:2], select=[mask])[0]
        return dense


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
        return "\n".join(
            [*lines, *(f"{sample['position']:>12,}  {caption(sample)}" for sample in self.samples)]
        )


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


def by_loss(masks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Masks or samples, those whose loss is not finite first, then by loss, then those without."""
    losses = [
        -math.inf if "loss" not in item else math.inf if item["loss"] is None else item["loss"]
        for item in masks
    ]
    return [masks[i] for i in sorted(range(len(masks)), key=lambda i: -losses[i])]


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
        opened = Samples(span)
    changes = [*changes_of(span.start), *(str(warning.message) for warning in noted)]
    config = span.start.get("config")
    samples: list[dict[str, Any]] = []
    drawings: list[Drawing] = []
    with closing(opened) as stream:
        size = (config and config["data"]["target_size"]) or stream.options.image_size // 4
        for piece in micro_batches(span, stream.order, step):
            if positions is not None and positions.isdisjoint(range(piece.start, piece.stop)):
                continue
            for read in _readable(stream, piece, changes):
                batch = replace(read, images=read.images.cpu(), dense=read.masks.dense(size))
                masks, at = prompts.of(batch), batch.positions.tolist()
                wanted = [i for i in range(len(batch)) if positions is None or at[i] in positions]
                samples += [_sample(batch, i, masks) for i in wanted]
                drawings += [_drawing(batch, i) for i in wanted] if draw else []
    changes += _other_damage(run, opened.damaged, {sample["position"] for sample in samples})
    return Replayed(
        run=run, step=step, samples=samples, changes=changes, prompts=prompts.note, drawings=drawings
    )


def _readable(stream: Samples, piece: MicroBatch, changes: list[str]) -> Iterator[Batch]:
    """The batch of a micro-batch, or those of its samples that can be read; `changes` gets the others."""
    singles = [MicroBatch(at, at + 1, at + 1) for at in range(piece.start, piece.stop)]
    lacking = [stream.why_not(single.start) for single in singles]
    if not any(lacking):
        try:
            yield stream.submit(piece).finish()
            return
        except (Sa1bError, OSError) as error:
            if len(singles) == 1:
                changes.append(f"position {piece.start:,}: not rebuilt: {error}")
                return
    for single, reason in zip(singles, lacking, strict=True):
        if reason is None:
            yield from _readable(stream, single, changes)
        else:
            changes.append(f"position {single.start:,}: not rebuilt: {reason}")


def _other_damage(run: str, now: set[tuple[int, int]], shown: set[int]) -> list[str]:
    """The samples that were damaged in the run and are not now, or the reverse: position and image id."""
    try:
        lines = [json.loads(line) for line in open_store(run).read("damaged.jsonl").splitlines()]
    except (MissingError, FileNotFoundError):
        lines = []
    before = {(line["position"], line["image_id"]) for line in lines}
    now, before = ({sample for sample in some if sample[0] in shown} for some in (now, before))
    new = "is damaged now, and was not in the run: a substitute is shown"
    texts = [f"{_named(sample)} {new}" for sample in now - before]
    texts += [f"{_named(sample)} was damaged in the run, which had a substitute" for sample in before - now]
    return sorted(texts)


def _named(sample: tuple[int, int]) -> str:
    return f"position {sample[0]:,}: image {sample[1]}"


def digest(batch: Batch, i: int) -> str:
    """SHA-256 of the tensors of a sample: its image, and its dense masks with boxes and points."""
    assert batch.dense is not None
    sha256 = hashlib.sha256(batch.images[i].contiguous().numpy().tobytes())
    masks = batch.masks.image == i
    for value in (batch.boxes, batch.points, batch.mask_ids, batch.mask_index, batch.dense):
        sha256.update(value[masks].numpy().tobytes())
    return sha256.hexdigest()


def _sample(batch: Batch, i: int, masks: list[dict[str, Any]]) -> dict[str, Any]:
    of_image = np.flatnonzero((batch.masks.image == i).numpy()).tolist()
    ids, indices = batch.mask_ids.tolist(), batch.mask_index.tolist()
    sample = {
        "position": int(batch.positions[i]),
        "source": batch.source[i] if batch.source else None,
        "image_id": int(batch.ids[i]),
        "window": batch.windows[i].tolist(),
        "mirrored": bool(batch.flipped[i]),
        "sha256": digest(batch, i),
        "masks": [{"mask_id": ids[mask], "mask_index": indices[mask], **masks[mask]} for mask in of_image],
    }
    losses = [masks[mask]["loss"] for mask in of_image if "loss" in masks[mask]]
    if losses:
        sample["loss"] = None if None in losses else sum(losses) / len(losses)
    return sample


def _drawing(batch: Batch, i: int) -> Drawing:
    rows, columns = batch.framed_sizes[i].tolist()
    pixels = batch.images[i].permute(1, 2, 0).numpy()[:rows, :columns]
    first = sum(batch.masks.counts[:i])
    offsets = batch.masks.offsets.numpy()[first : first + batch.masks.counts[i] + 1]
    runs = batch.masks.runs.numpy().view(np.uint32)[offsets[0] : offsets[-1]]
    return Drawing(pixels, Runs(runs, offsets - offsets[0], *batch.source_sizes[i].tolist()))


_SHOWN = 12  # masks of an image; the others are listed as text
_TINT = (255, 140, 0, 120)  # RGB and opacity of a mask
_AROUND = 0.3  # of the size of a mask and its prompts, on each side of it


def write_page(out: Path, title: str, replayed: Sequence[Replayed]) -> None:
    """Write OUT/index.html and the images; OUT is new."""
    out.mkdir(parents=True)
    legend = (
        "Points and coordinates are prompts in the order of the iterations: + foreground, \u2212 background."
    )
    notes, sections = {f"<p>{legend}</p>": None}, list[str]()
    for replay in replayed:
        notes |= dict.fromkeys(f'<p class="warning">{escape(change)}</p>' for change in replay.changes)
        notes |= dict.fromkeys([f"<p>Prompts: {escape(replay.prompts)}</p>"] if replay.prompts else [])
        drawn = dict(zip((sample["position"] for sample in replay.samples), replay.drawings, strict=True))
        for sample in by_loss(replay.samples):
            shown = _section(out, replay.step, sample, drawn[sample["position"]], several=len(replayed) > 1)
            sections.append(shown)
    if not any(
        "prompts" in mask for replay in replayed for sample in replay.samples for mask in sample["masks"]
    ):
        del notes[f"<p>{legend}</p>"]
    fields = {"TITLE": escape(title), "NOTES": "\n".join(notes), "SAMPLES": "\n".join(sections)}
    template = files("sa1b.programs.seen").joinpath("page.html").read_text(encoding="utf-8")
    page = re.sub(r"<!--([A-Z]+)-->", lambda match: fields[match[1]], template)
    (out / "index.html").write_text(page, encoding="utf-8")


def _section(out: Path, step: int, sample: dict[str, Any], drawing: Drawing, *, several: bool) -> str:
    name = str(sample["position"])
    (out / f"{name}.png").write_bytes(drawing.overlay())
    (out / f"{name}.jpg").write_bytes(encoded(Image.fromarray(drawing.pixels), "JPEG"))
    number = {mask["mask_index"]: i for i, mask in enumerate(sample["masks"])}
    masks = by_loss(sample["masks"])
    cards = [_card(f"{name}.jpg", mask, drawing, number[mask["mask_index"]]) for mask in masks[:_SHOWN]]
    more = "".join(f"<p>{_described(mask)}</p>" for mask in masks[_SHOWN:])
    rest = (
        f"<details><summary>{counted(len(masks) - _SHOWN, 'other mask')}</summary>{more}</details>"
        if more
        else ""
    )
    facts = [f"step {step:,}"] * several + [f"position {sample['position']:,}", counted(len(masks), "mask")]
    facts += ["mirrored"] * sample["mirrored"]
    facts += [f"loss {number_text(sample['loss'])}"] if "loss" in sample else []
    source = f"{escape(sample['source'])}: " if sample["source"] else ""
    return (
        f"<section><h2>{source}image {sample['image_id']} <small>{', '.join(facts)}</small></h2>"
        f'<div class="sample"><img src="{name}.png" alt="image with all masks" loading="lazy">'
        f'<div><div class="masks">{"".join(cards)}</div>{rest}</div></div></section>'
    )


def _card(image: str, mask: dict[str, Any], drawing: Drawing, number: int) -> str:
    dense = drawing.dense(number)
    height, width = dense.shape
    rows, columns = np.flatnonzero(dense.any(axis=1)), np.flatnonzero(dense.any(axis=0))
    corners = (
        [(columns[0], rows[0]), (columns[-1] + 1, rows[-1] + 1)] if len(rows) else [(0, 0), (width, height)]
    )
    for prompt in mask.get("prompts", ()):
        corners += [(x + 0.5, y + 0.5) for x, y in zip(prompt["at"][::2], prompt["at"][1::2], strict=True)]
    low, high = np.array(corners, float).min(axis=0), np.array(corners, float).max(axis=0)
    side = float((high - low).max()) * (1 + 2 * _AROUND) + 4
    left, top = ((low + high - side) / 2).tolist()
    drawn = "".join(_drawn(prompt, side) for prompt in mask.get("prompts", ()))
    return (
        f'<figure><svg viewBox="{left:.2f} {top:.2f} {side:.2f} {side:.2f}" role="img" '
        f'aria-label="mask {mask["mask_id"]} and its prompts">'
        f'<image href="{image}" width="{width}" height="{height}"/>'
        f'<image href="{_tinted(dense)}" width="{width}" height="{height}"/>{drawn}</svg>'
        f"<figcaption>{_described(mask)}</figcaption></figure>"
    )


def _drawn(prompt: dict[str, Any], side: float) -> str:
    """A prompt as SVG: a box, or a point with the number of its iteration."""
    at = [coordinate + 0.5 for coordinate in prompt["at"]]
    if prompt["kind"] == "box":
        x, y, right, bottom = at
        return (
            f'<rect class="box" x="{x:.2f}" y="{y:.2f}" width="{right - x:.2f}" height="{bottom - y:.2f}"/>'
        )
    radius = side / 22
    return (
        f'<circle class="{prompt["kind"]}" cx="{at[0]:.2f}" cy="{at[1]:.2f}" r="{radius:.2f}"/>'
        f'<text x="{at[0]:.2f}" y="{at[1]:.2f}" font-size="{1.3 * radius:.2f}">{prompt["iteration"]}</text>'
    )


def _described(mask: dict[str, Any]) -> str:
    signs = {"box": "box", "foreground": "+", "background": "\u2212"}
    prompts = "; ".join(
        f"{prompt['iteration']} {signs[prompt['kind']]} "
        f"{', '.join(f'{number:.1f}' for number in prompt['at'])}"
        for prompt in mask.get("prompts", ())
    )
    figures = ""
    if "ious" in mask:
        loss = f"loss {number_text(mask['loss'])}" if "loss" in mask else "no pixel in the targets"
        ious = " \u2192 ".join(f"{iou:.2f}" for iou in mask["ious"])
        figures = f", {loss}, IoU {ious}"
    return f"mask {mask['mask_id']}{figures}<br><span>{prompts}</span>"


def _tinted(dense: npt.NDArray[np.uint8]) -> str:
    """A mask as a transparent PNG in a URL."""
    pixels = np.where(dense[:, :, None] > 0, np.array(_TINT, np.uint8), np.uint8(0)).astype(np.uint8)
    data = encoded(Image.fromarray(pixels, "RGBA").quantize(2), "PNG")
    return f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}"
