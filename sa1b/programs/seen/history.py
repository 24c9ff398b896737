"""The images that a run has used, from the starts in its metrics.jsonl, and the samples of a step, rebuilt.

Each start records the step and position at which it begins, and the state of its stream. The order is a
formula of that state, so the images of every step can be computed; nothing is logged for each image.
"""

import hashlib
import json
import math
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import sa1b
from sa1b.console import counted
from sa1b.engine.precision import autocast, set_float32
from sa1b.engine.weights import find_weights, nearest_checkpoint
from sa1b.errors import Sa1bError, UsageError
from sa1b.sam.clicks import FOREGROUND, NOTHING, TOP_LEFT
from sa1b.sam.interactive import Interactive
from sa1b.sam.iteration import first_prompts
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.published import read_tensors
from sa1b.sam.recipe import Recipe
from sa1b.sam.targets import inputs_of
from sa1b.shards.manifest import versions
from sa1b.storage.open import open_store
from sa1b.stream.batch import Batch
from sa1b.stream.pending import MAX_SUBSTITUTES
from sa1b.stream.plan import MicroBatch, ResumeError
from sa1b.version import code_digest
from sa1b.views.view import write_view

Int64 = npt.NDArray[np.int64]
Document = dict[str, Any]
_CHUNK = 1 << 22  # positions that are computed at a time
_TOGETHER = 64  # samples whose masks are read at a time
_PLAIN = {"compile_blocks": False, "cuda_graphs": False, "kernels": "auto"}
_ONLY = "only the prompts of the first iteration are certainly those of the run"


class Opened(NamedTuple):
    """The stream of a start of a run, those of its datasets, and what has changed in these since."""

    stream: sa1b.Stream | sa1b.Mix
    streams: dict[str, sa1b.Stream]
    ids: list[Int64]  # of each dataset, the images of the rows of its view
    changes: list[str]


@dataclass(frozen=True, slots=True)
class Span:
    """Steps [first, stop) of one start of a run; `start` is its line in metrics.jsonl."""

    first: int
    stop: int
    start: Document
    damage: dict[int, set[int]]  # position -> ids of the samples that were damaged there, of the whole run
    open: Callable[[str], Opened]  # `_opened`, once for all starts with the same datasets

    def positions(self, first: int, stop: int) -> range:
        begin, batch = self.start["data"]["stream"]["position"], self.start["data"]["global_batch"]
        return range(begin + (first - self.first) * batch, begin + (stop - self.first) * batch)

    def opened(self) -> Opened:
        """The stream. UsageError: a dataset directory or view is no longer that of the run."""
        data = self.start["data"]
        state = {**data["stream"], "position": 0, "history": None}
        return self.open(json.dumps((data["sources"], state, data["global_batch"])))

    def rows(self, positions: Int64) -> tuple[Int64, Int64]:
        """For each position, the number of its dataset and the row of its view, or of a substitute."""
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
    return open_store(run).read("metrics.jsonl").split(b"\n")[:-1]


def spans_of(run: str, before: int | None = None) -> list[Span]:
    """The starts of a run, up to step `before`. UsageError: there is no such step, or the file is damaged."""
    lines, damage, store = read_lines(run), defaultdict[int, set[int]](set), open_store(run)
    for name in store.names("", ".jsonl"):  # each machine has one
        for line in store.read(name).splitlines() if name.startswith("damaged") else ():
            with suppress(ValueError, KeyError, TypeError):  # cut by a kill or a full disk
                document = json.loads(line)
                damage[document["position"]].add(document["image_id"])
    try:
        starts = [json.loads(line)["run"] for line in lines if line.startswith(b'{"run": ')]
        done = next((json.loads(line)["step"] for line in lines[::-1] if line.startswith(b'{"step": ')), 0)
        last = done if before is None else before
        if last > done:
            raise UsageError(f"--before-step {before}: the run has {done} steps; pass a number up to {done}")
        stops, opened = [*(start["step"] for start in starts[1:]), last], cache(_opened)
        pairs = zip(starts, stops, strict=True)
        spans = [Span(start["step"], min(stop, last), start, damage, opened) for start, stop in pairs]
        return [span for span in spans if span.positions(span.first, span.stop)]
    except (ValueError, LookupError, TypeError) as error:
        what = f"damaged, or of another version ({error!r:.200})"
        raise UsageError(f"{run}/metrics.jsonl: {what}; restore it from a copy") from None


def _opened(data: str) -> Opened:
    sources, state, batch = json.loads(data)
    states = state.get("sources", dict.fromkeys(sources, state))
    with TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        view = Path(folder, "view.json")
        streams = {name: _stream(source, states[name], batch, view) for name, source in sources.items()}
    stream: sa1b.Stream | sa1b.Mix = next(iter(streams.values()))
    if "phases" in state:
        (_, weights), *later = state["phases"]
        stream = sa1b.Mix({name: (streams[name], weights[name]) for name in streams}, schedule=dict(later))
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
                        pending.pick(0, 1, pending.busy)
                        (masks,), name = pending.samples, [*opened.streams][pending.which[0]]
                        pairs = zip(masks.mask_ids.tolist(), masks.mask_index.tolist(), strict=True)
                        times.update((name, masks.image_id, *pair) for pair in pairs)
    names = "source", "image_id", "mask_id", "mask_index", "times"
    return [dict(zip(names, (*key, count), strict=True)) for key, count in sorted(times.items())]


def replayed(
    run: str, spans: list[Span], step: int, weights: str | None, position: int | None = None
) -> tuple[Document, dict[str, Tensor]]:
    """The samples of a step, or the one at a position of it, and their tensors by "POSITION/NAME"."""
    span = next((span for span in reversed(spans) if span.first < step <= span.stop), None)
    if span is None:
        raise UsageError(f"--step {step}: the run has no such step; pass one that its metrics.jsonl has")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of torch about a single process
        module, note = _model(run, span, step, weights)
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
            prompts = _prompts(span.start["config"], module, batch) if note else [{}] * len(batch.masks)
            own = {name: getattr(batch, name) for name in ("boxes", "points", "mask_ids", "mask_index")}
            own = {"image": batch.images[0], **own, "masks": batch.dense}
            own = {name: tensor.contiguous() for name, tensor in own.items()}
            tensors |= {f"{at}/{name}": tensor for name, tensor in own.items()}
            ids = zip(batch.mask_ids.tolist(), batch.mask_index.tolist(), prompts, strict=True)
            sample = {
                "position": at,
                "source": batch.source[0] if batch.source else None,
                "image_id": int(batch.ids[0]),
                "window": batch.windows[0].tolist(),
                "mirrored": bool(batch.flipped[0]),
                "sha256": hashlib.sha256(b"".join(one.numpy().tobytes() for one in own.values())).hexdigest(),
                "masks": [{"mask_id": mask_id, "mask_index": index, **mask} for mask_id, index, mask in ids],
            }
            if losses := [mask["loss"] for mask in prompts if "loss" in mask]:
                sample["loss"] = None if None in losses else sum(losses) / len(losses)
            samples.append(sample)
            if (image := sample["image_id"]) != (of_run := int(opened.ids[source][row])):
                changes.append(f"position {at:,}: image {image}, not {of_run} of the run: damage changed")
    return {"run": run, "step": step, "samples": samples, "changes": changes, "prompts": note}, tensors


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


def _model(run: str, span: Span, step: int, weights: str | None) -> tuple[Interactive | None, str]:
    """The model that computes the prompts after the first iteration, None without weights, and a note which
    prompts are those of the run, "" without a SAM: later clicks are on errors of the predictions.
    """
    config = span.start["config"]
    if "box_probability" not in config.get("recipe", {}) or "distill" in config:
        if weights is not None:
            raise UsageError(f"--weights: --preset {config['preset']} has no SAM; drop it")
        return None, ""
    if weights is None:
        return None, "those of the first iteration, as in the run; --weights RUN shows all"
    where, known = nearest_checkpoint(weights, step - 1)
    is_own = os.path.realpath(where).startswith(f"{os.path.realpath(run)}/")
    where, tensors = find_weights(where, read_tensors, mean=False)
    module = Interactive(Sam(ModelConfig.saved({**config["model"], **_PLAIN})), Recipe(**config["recipe"]))
    try:
        module.model.load_state_dict(tensors)  # as they are, also low-rank changes
    except RuntimeError:  # of another model
        module.load_weights(tensors)
    on_gpu = span.start["device"] != "cpu" and torch.cuda.is_available()
    module.traced = True
    module.to("cuda" if on_gpu else "cpu").train()
    text = f"weights after step {known}; {_ONLY}" if is_own else f"weights of an unknown step; {_ONLY}"
    if is_own and known == step - 1:
        text = "the weights that the step began with: all prompts are those of the run"
        text += ", up to rounding on another device or without torch.compile"
    return module, f"{where}: {text}"


def _prompts(config: Document, module: Interactive | None, batch: Batch) -> list[Document]:
    """The prompts of each mask, in pixels of the padded square; with a model, also "ious", one after each
    iteration, and "loss", None: not finite. A mask without a pixel has no loss.
    """
    if module is None:
        targets = inputs_of(batch, config["seed"])[1]
        prompts = first_prompts(Recipe(**config["recipe"]), targets, batch.images.shape[-1])
        return [{"prompts": _listed(*of_mask)} for of_mask in zip(*prompts, strict=True)]
    device, precision = next(module.parameters()).device, config["parallel"]["precision"]
    inputs = inputs_of(batch.to(device), config["seed"])
    set_float32(precision, device)
    with torch.no_grad(), autocast(precision, device):
        found = module(*inputs)
    masks, losses = [], found["losses"].tolist()
    for i, (points, labels) in enumerate(zip(found["points"], found["labels"], strict=True)):
        mask: Document = {"prompts": _listed(points, labels), "ious": found["ious"][i].tolist()}
        if inputs[1].weights[i]:
            mask["loss"] = losses[i] if math.isfinite(losses[i]) else None
        masks.append(mask)
    return masks


def _listed(points: Tensor, labels: Tensor) -> list[Document]:
    """Points [P, 2] and labels [P] of a mask as iteration, kind and coordinates of each prompt."""
    at, kinds = points.tolist(), labels.tolist()
    prompts = [
        {"iteration": max(i, 1), "kind": "foreground" if kind == FOREGROUND else "background", "at": at[i]}
        for i, kind in enumerate(kinds)
        if kind != NOTHING and i != 1  # corners, or a point and nothing
    ]
    if kinds[0] == TOP_LEFT:
        prompts[0] = {"iteration": 1, "kind": "box", "at": at[0] + at[1]}
    return prompts
