"""A step of a run, rebuilt: its samples in the order of their positions, their prompts and their losses."""

import hashlib
import math
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

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
        prompts, note = _prompts(run, span, step, weights)
    opened, samples, tensors = span.opened(), list[Document](), dict[str, Tensor]()
    changes = [*_changes_of(span.start), *opened.changes]
    size = span.start["config"]["data"]["target_size"] or opened.stream.options.image_size // 4
    here = np.array(span.positions(step - 1, step) if position is None else [position], np.int64)
    with closing(opened.stream) as stream:
        for at, source, row in zip(here.tolist(), *span.rows(here), strict=True):
            try:
                read = stream.submit(MicroBatch(at, at + 1, at + 1)).finish()
            except (Sa1bError, OSError) as error:
                changes.append(f"position {at:,}: not rebuilt: {error}")
                continue
            batch = replace(read, images=read.images.cpu(), dense=read.masks.dense(size))
            samples.append(_sample(batch, prompts(batch), tensors))
            image, of_run = samples[-1]["image_id"], int(opened.ids[source][row])
            if image != of_run:
                why = f"image {of_run} is damaged now, or was damaged in the run and is not now"
                changes.append(f"position {at:,}: image {image} in place of that of the run: {why}")
    return {"run": run, "step": step, "samples": samples, "changes": changes, "prompts": note}, tensors


def _sample(batch: Batch, masks: Sequence[Document], tensors: dict[str, Tensor]) -> Document:
    """The sample of a batch, whose tensors are added to `tensors`; `masks`: what is known of each mask."""
    assert batch.dense is not None
    own = {"image": batch.images[0], "boxes": batch.boxes, "points": batch.points}
    own |= {"mask_ids": batch.mask_ids, "mask_index": batch.mask_index, "masks": batch.dense}
    own, position = {name: tensor.contiguous() for name, tensor in own.items()}, int(batch.positions[0])
    tensors |= {f"{position}/{name}": tensor for name, tensor in own.items()}
    ids = zip(batch.mask_ids.tolist(), batch.mask_index.tolist(), masks, strict=True)
    sample: Document = {
        "position": position,
        "source": batch.source[0] if batch.source else None,
        "image_id": int(batch.ids[0]),
        "window": batch.windows[0].tolist(),
        "mirrored": bool(batch.flipped[0]),
        "sha256": hashlib.sha256(b"".join(part.numpy().tobytes() for part in own.values())).hexdigest(),
        "masks": [{"mask_id": mask_id, "mask_index": index, **mask} for mask_id, index, mask in ids],
    }
    if losses := [mask["loss"] for mask in masks if "loss" in mask]:
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
    return "not finite" if value is None else f"{value:.4f}"


def _changes_of(start: Document) -> list[str]:
    """Code and libraries that may change samples since a start of a run."""
    now = {"code": code_digest(), "torch": torch.__version__, **versions()}
    before = {**start["libraries"], "torch": start["torch"], "code": start["code"]}
    changed = [f"{name} {old}, now {now[name]}" for name, old in before.items() if now.get(name, old) != old]
    return [f"changed since the run: {'; '.join(changed)}: samples and prompts may differ"] if changed else []


def _prompts(
    run: str, span: Span, step: int, weights: str | None
) -> tuple[Callable[[Batch], list[Document]], str]:
    """The prompts of each mask of a batch with dense masks, and a note which of them are those of the run.

    Prompts of the first iteration are a function of the seed. Later clicks are on errors of the predictions:
    they are those of the run only with the weights that the step began with. With weights, a mask has also
    "ious", one after each iteration, and "loss", None: not finite; a mask without a pixel has no loss.
    Coordinates are pixels of the padded square; the centre of its first pixel is 0, 0.
    """
    config = span.start["config"]
    if "box_probability" not in config.get("recipe", {}) or "distill" in config:
        if weights is not None:
            raise UsageError(f"--weights: --preset {config['preset']} has no SAM; drop it")
        return lambda batch: [{} for _ in range(len(batch.masks))], ""
    recipe, seed, precision = Recipe(**config["recipe"]), config["seed"], config["parallel"]["precision"]
    if weights is None:

        def first(batch: Batch) -> list[Document]:
            return _listed(*first_prompts(recipe, inputs_of(batch, seed)[1], batch.images.shape[-1]))

        return first, "those of the first iteration, as in the run; --weights RUN shows all"
    where, known = nearest_checkpoint(weights, step - 1)
    is_own = os.path.realpath(where).startswith(f"{os.path.realpath(run)}/")
    where, tensors = find_weights(where, read_initial_weights, mean=False)
    module = Interactive(Sam(ModelConfig.saved({**config["model"], **_PLAIN})), recipe)
    try:
        module.model.load_state_dict(tensors)  # as they are, also low-rank changes
    except RuntimeError:  # of another model
        module.load_weights(tensors)
    on_gpu = span.start["device"] != "cpu" and torch.cuda.is_available()
    device, module.traced = torch.device("cuda" if on_gpu else "cpu"), True
    module.to(device).train()

    def every(batch: Batch) -> list[Document]:
        inputs = inputs_of(batch.to(device), seed)
        set_float32(precision, device)
        with torch.no_grad(), autocast(precision, device):
            outputs = module(*inputs)
        masks = _listed(outputs["points"], outputs["labels"])
        for mask, counts, ious, loss in zip(
            masks, inputs[1].weights, outputs["ious"], outputs["losses"].tolist(), strict=True
        ):
            mask["ious"] = ious.tolist()
            if counts:
                mask["loss"] = loss if math.isfinite(loss) else None
        return masks

    text = f"weights after step {known}; {_ONLY}" if is_own else f"weights of an unknown step; {_ONLY}"
    if is_own and known == step - 1:
        text = "the weights that the step began with: all prompts are those of the run"
        text += ", up to rounding on another device or without torch.compile"
    return every, f"{where}: {text}"


def _listed(points: Tensor, labels: Tensor) -> list[Document]:
    """Points [M, P, 2] and labels [M, P] as iteration, kind and coordinates of each prompt of each mask."""
    masks = []
    for at, kinds in zip(points.tolist(), labels.tolist(), strict=True):
        names = ["foreground" if kind == FOREGROUND else "background" for kind in kinds]
        prompts = [
            {"iteration": max(i, 1), "kind": names[i], "at": at[i]}
            for i, kind in enumerate(kinds)
            if kind != NOTHING and i != 1  # corners, or a point and nothing
        ]
        if kinds[0] == TOP_LEFT:
            prompts[0] = {"iteration": 1, "kind": "box", "at": at[0] + at[1]}
        masks.append({"prompts": prompts})
    return masks
