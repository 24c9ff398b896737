"""A step of a run, rebuilt: its samples in the order of their positions, their prompts and their losses."""

import hashlib
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from sa1b import Mix, Stream
from sa1b.console import counted
from sa1b.engine.precision import autocast, set_float32
from sa1b.engine.weights import find_weights, nearest_checkpoint
from sa1b.errors import Sa1bError, UsageError
from sa1b.programs.seen.history import Document, Span
from sa1b.sam.clicks import FOREGROUND, NOTHING, TOP_LEFT
from sa1b.sam.initial_weights import read_initial_weights
from sa1b.sam.interactive import Interactive
from sa1b.sam.iteration import first_prompts
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.recipe import Recipe
from sa1b.sam.targets import inputs_of
from sa1b.shards.manifest import versions
from sa1b.stream.batch import Batch
from sa1b.stream.plan import MicroBatch
from sa1b.version import code_digest

_PLAIN = {"compile_blocks": False, "cuda_graphs": False, "kernels": "auto"}
_ONLY = "only the prompts of the first iteration are certainly those of the run"


def replayed(
    run: str, spans: list[Span], step: int, weights: str | None, position: int | None = None
) -> tuple[Document, dict[str, Tensor]]:
    """The samples of a step, or the one at a position of it, and their tensors by "POSITION/NAME"; "changes"
    has those that cannot be rebuilt. UsageError: there is no such step, or the weights are not of a SAM.
    """
    span = next((span for span in reversed(spans) if span.first < step <= span.stop), None)
    if span is None:
        raise UsageError(f"--step {step}: the run has no such step; pass one that its metrics.jsonl has")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of torch about a single process
        prompts = Prompts(run, span, step, weights)
    opened, samples, tensors = span.opened(), list[Document](), dict[str, Tensor]()
    changes = [*_changes_of(span.start), *opened.changes]
    size = span.start["config"]["data"]["target_size"] or opened.stream.options.image_size // 4
    plan, at = opened.stream.plan, span.positions(step - 1, step).start
    ranks = (replace(plan, rank=rank) for rank in range(plan.world_size))
    pieces = [piece for own in ranks for piece in islice(own.micro_batches(at), own.count)]
    with closing(opened.stream) as stream:
        for piece in pieces:
            at_all = range(piece.start, piece.stop) if position is None else (position,)
            if piece.start == piece.stop or not piece.start <= at_all[0] < piece.stop:
                continue
            for read in _readable(stream, piece, changes):
                batch = replace(read, images=read.images.cpu(), dense=read.masks.dense(size))
                masks = prompts.of(batch)
                wanted = [i for i, at in enumerate(batch.positions.tolist()) if at in at_all]
                samples += [_sample(batch, i, masks, tensors) for i in wanted]
    here = np.array([sample["position"] for sample in samples], np.int64)
    for sample, source, row in zip(samples, *span.rows(here), strict=True):
        image, of_run = sample["image_id"], int(opened.ids[source][row])
        if image != of_run:
            why = f"image {of_run} is damaged now, or was damaged in the run and is not now"
            changes.append(
                f"position {sample['position']:,}: image {image} in place of that of the run: {why}"
            )
    found = {"run": run, "step": step, "samples": samples, "changes": changes, "prompts": prompts.note}
    return found, tensors


def _readable(stream: Stream | Mix, piece: MicroBatch, changes: list[str]) -> Iterator[Batch]:
    """The batch of a micro-batch, or those of its samples that can be read; `changes` gets the others."""
    try:
        yield stream.submit(piece).finish()
    except (Sa1bError, OSError) as error:
        if piece.stop - piece.start == 1:
            changes.append(f"position {piece.start:,}: not rebuilt: {error}")
        else:
            for at in range(piece.start, piece.stop):
                yield from _readable(stream, MicroBatch(at, at + 1, at + 1), changes)


def _sample(batch: Batch, i: int, masks: list[Document], tensors: dict[str, Tensor]) -> Document:
    """Sample i of a batch, whose tensors are added to `tensors`; `masks`: what is known of each mask."""
    assert batch.dense is not None
    of_image, position = batch.masks.image == i, int(batch.positions[i])
    own = {
        "image": batch.images[i].contiguous(),
        "boxes": batch.boxes[of_image],
        "points": batch.points[of_image],
        "mask_ids": batch.mask_ids[of_image],
        "mask_index": batch.mask_index[of_image],
        "masks": batch.dense[of_image],
    }
    tensors |= {f"{position}/{name}": tensor for name, tensor in own.items()}
    sample: Document = {
        "position": position,
        "source": batch.source[i] if batch.source else None,
        "image_id": int(batch.ids[i]),
        "window": batch.windows[i].tolist(),
        "mirrored": bool(batch.flipped[i]),
        "sha256": hashlib.sha256(b"".join(part.numpy().tobytes() for part in own.values())).hexdigest(),
        "masks": [
            {"mask_id": int(batch.mask_ids[mask]), "mask_index": int(batch.mask_index[mask]), **masks[mask]}
            for mask in of_image.nonzero().flatten().tolist()
        ],
    }
    if losses := [mask["loss"] for mask in sample["masks"] if "loss" in mask]:
        sample["loss"] = None if None in losses else sum(losses) / len(losses)
    return sample


def table(replay: Document) -> list[str]:
    """A line for each change since the run and for each sample."""
    lines = [f"warning: {change}" for change in replay["changes"]]
    lines += [f"prompts: {replay['prompts']}"] if replay["prompts"] else []
    lines.append(f"{replay['run']}, step {replay['step']:,}: {counted(len(replay['samples']), 'image')}")
    for sample in replay["samples"]:
        source = f"{sample['source']}: " if sample["source"] else ""
        text = f"{source}image {sample['image_id']}, {counted(len(sample['masks']), 'mask')}"
        text += ", mirrored" if sample["mirrored"] else ""
        if losses := [mask for mask in sample["masks"] if "loss" in mask]:
            worst = max(losses, key=lambda mask: math.inf if mask["loss"] is None else mask["loss"])
            text += f", loss {number_text(sample['loss'])}; highest: mask {worst['mask_id']} with loss "
            text += f"{number_text(worst['loss'])}, IoU {worst['ious'][-1]:.3f}"
        lines.append(f"{sample['position']:>12,}  {text}")
    return lines


def number_text(value: float | None) -> str:
    """A figure with four digits; None: it is not finite."""
    return "not finite" if value is None else f"{value:.4f}"


def _changes_of(start: Document) -> list[str]:
    """Code and libraries that may change samples since a start of a run."""
    now = {"code": code_digest(), "torch": torch.__version__, **versions()}
    before = {**start["libraries"], "torch": start["torch"], "code": start["code"]}
    changed = [f"{name} {old}, now {now[name]}" for name, old in before.items() if now.get(name, old) != old]
    return [f"changed since the run: {'; '.join(changed)}: samples and prompts may differ"] if changed else []


class Prompts:
    """The prompts of one step. `note`: which of them are those of the run.

    Prompts of the first iteration are a function of the seed. Later clicks are on errors of the predictions:
    they are those of the run only with the weights that the step began with. UsageError: there are no such
    weights, or the run trained no SAM.
    """

    def __init__(self, run: str, span: Span, step: int, weights: str | None) -> None:
        config = self._config = span.start["config"]
        self._recipe: Recipe | None = None
        self._module: Interactive | None = None
        self.note = ""
        if "box_probability" not in config.get("recipe", {}) or "distill" in config:
            if weights is not None:
                raise UsageError(f"--weights: --preset {config['preset']} has no SAM; drop it")
            return
        self._recipe = Recipe(**config["recipe"])
        on_gpu = weights and span.start["device"] != "cpu" and torch.cuda.is_available()
        self._device = torch.device("cuda" if on_gpu else "cpu")
        if weights is None:
            self.note = "those of the first iteration, as in the run; --weights RUN shows all"
            return
        where, known = nearest_checkpoint(weights, step - 1)
        is_own = os.path.realpath(where).startswith(f"{os.path.realpath(run)}/")
        where, tensors = find_weights(where, read_initial_weights, mean=False)
        sizes = ModelConfig.saved({**config["model"], **_PLAIN})
        self._module = Interactive(Sam(sizes), self._recipe)
        try:
            self._module.model.load_state_dict(tensors)  # as they are, also low-rank changes
        except RuntimeError:  # of another model
            self._module.load_weights(tensors)
        self._module.traced = True
        self._module.to(self._device).train()
        text = f"weights after step {known}; {_ONLY}" if is_own else f"weights of an unknown step; {_ONLY}"
        if is_own and known == step - 1:
            text = "the weights that the step began with: all prompts are those of the run"
            text += ", up to rounding on another device or without torch.compile"
        self.note = f"{where}: {text}"

    def of(self, batch: Batch) -> list[Document]:
        """The prompts of each mask of a batch with dense masks, in its order; with weights also "ious", one
        after each iteration, and "loss", None: not finite. A mask without a pixel has no loss.

        Coordinates are pixels of the padded square; the centre of its first pixel is 0, 0.
        """
        if self._recipe is None:
            return [{} for _ in range(len(batch.masks))]
        inputs = inputs_of(batch.to(self._device), self._config["seed"])
        if self._module is None:
            return _listed(*first_prompts(self._recipe, inputs[1], batch.images.shape[-1]))
        precision = self._config["parallel"]["precision"]
        set_float32(precision, self._device)
        with torch.no_grad(), autocast(precision, self._device):
            outputs = self._module(*inputs)
        masks = _listed(outputs["points"], outputs["labels"])
        losses = outputs["losses"].where(outputs["losses"].isfinite(), torch.nan)
        for mask, counts, ious, loss in zip(masks, inputs[1].weights, outputs["ious"], losses, strict=True):
            mask["ious"] = ious.tolist()
            if counts:
                mask["loss"] = None if loss.isnan() else float(loss)
        return masks


def _listed(points: Tensor, labels: Tensor) -> list[Document]:
    """Points [M, P, 2] and labels [M, P] as iteration, kind and coordinates of each prompt of each mask."""
    masks = []
    for at, kinds in zip(points.tolist(), labels.tolist(), strict=True):
        prompts = [
            {
                "iteration": max(i, 1),
                "kind": "foreground" if kind == FOREGROUND else "background",
                "at": at[i],
            }
            for i, kind in enumerate(kinds)
            if kind != NOTHING and i != 1  # corners, or a point and nothing
        ]
        if kinds[0] == TOP_LEFT:
            prompts[0] = {"iteration": 1, "kind": "box", "at": at[0] + at[1]}
        masks.append({"prompts": prompts})
    return masks
