"""The prompts of the masks of a step, and with weights the loss and IoU of each mask.

Prompts of the first iteration are a function of the seed. Later clicks are on errors of the predictions: they
are those of the run only with the weights that the step began with.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sa1b.console import counted
from sa1b.engine.settings import autocast, set_float32
from sa1b.engine.weights import find_weights, nearest_checkpoint, state_digest
from sa1b.errors import UsageError
from sa1b.programs.seen.history import Span
from sa1b.sam.clicks import FOREGROUND, NOTHING, TOP_LEFT
from sa1b.sam.initial_weights import read_initial_weights
from sa1b.sam.interactive import Interactive
from sa1b.sam.iteration import first_prompts
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.recipe import Recipe
from sa1b.sam.targets import inputs_of
from sa1b.storage.protocols import protocol_of
from sa1b.stream.batch import Batch

_PLAIN = {
    "compile_blocks": False,
    "compile_decoder": False,
    "cuda_graphs": False,
    "checkpoint_blocks": "none",
}


class Prompts:
    """The prompts of one step. `note`: which of them are those of the run; `weights`: where they are from.

    UsageError: there are no such weights, or the run trained no SAM.
    """

    def __init__(self, run: str, span: Span, step: int, weights: str | None) -> None:
        config = span.start.get("config") or {}
        self._module: Interactive | None = None
        self.weights: str | None = None
        self._known = "box_probability" in config.get("recipe", {}) and "distill" not in config
        if not self._known:
            if weights is not None:
                kind = (
                    f"a run of --preset {config.get('preset')}" if config else "a run of an earlier version"
                )
                raise UsageError(f"--weights {weights}: {kind} has no prompts of SAM; drop --weights")
            self.note = ""
            return
        self._config, self._recipe = config, Recipe(**config["recipe"])
        of_run = span.start.get("device", "cpu")
        gpu = weights is not None and of_run != "cpu" and torch.cuda.is_available()
        self._device = torch.device("cuda" if gpu else "cpu")
        if weights is None:
            self.note = "those of the first iteration, as in the run; --weights RUN shows all"
            return
        where, known = nearest_checkpoint(weights, step - 1)
        known = known if _is_of(run, where) else None
        self.weights, tensors = find_weights(where, read_initial_weights, mean=False)
        sizes: dict[str, Any] = {**config["model"], **_PLAIN}
        sizes["global_blocks"] = tuple(sizes["global_blocks"])
        self._module = Interactive(Sam(ModelConfig(**sizes)), self._recipe)
        initial = self._module.model.state_dict()
        if {name: tensor.shape for name, tensor in initial.items()} == {
            name: tensor.shape for name, tensor in tensors.items()
        }:
            self._module.model.load_state_dict(tensors)  # as they are, also low-rank changes
        else:
            self._module.load_weights(tensors)
        if known is None and span.start.get("weights") == state_digest(self._module.model):
            known = 0  # those of --init
        self._module.traced = True
        self._module.to(self._device).train()
        here = torch.cuda.get_device_name() if gpu else "cpu"
        reasons = [f"the run was on {of_run} and this is {here}"] if here != of_run else []
        if config["model"]["compile_blocks"] or config["model"]["compile_decoder"]:
            reasons.append("the run compiled its model")
        self.note = f"{self.weights}: {_distance(known, step, ' and '.join(reasons))}"

    def of(self, batch: Batch) -> list[dict[str, Any]]:
        """The prompts of each mask of a batch with dense masks, in its order; with weights also "ious", one
        after each iteration, and "loss", None: not finite. A mask without a pixel has no loss.

        Coordinates are pixels of the padded square; the centre of its first pixel is 0, 0.
        """
        if not self._known:
            return [{} for _ in range(len(batch.masks))]
        inputs = inputs_of(batch.to(self._device), self._config["seed"])
        if self._module is None:
            points, labels = first_prompts(self._recipe, inputs[1], batch.images.shape[-1])
            return [{"prompts": prompts} for prompts in prompts_of(points, labels)]
        precision = self._config["parallel"]["precision"]
        set_float32(precision, self._device)
        with torch.no_grad(), autocast(precision, self._device):
            outputs = self._module(*inputs)
        weights, ious, losses = (
            values.tolist() for values in (inputs[1].weights, outputs["ious"], outputs["losses"])
        )
        masks: list[dict[str, Any]] = []
        for i, prompts in enumerate(prompts_of(outputs["points"], outputs["labels"])):
            loss = {"loss": losses[i] if math.isfinite(losses[i]) else None} if weights[i] else {}
            masks.append({"prompts": prompts, "ious": ious[i], **loss})
        return masks


def _is_of(run: str, checkpoint: str) -> bool:
    """Whether a checkpoint is one of this run, and not of another, whose steps are other ones."""
    parent = checkpoint.rpartition("/checkpoints/")[0]
    if protocol_of(run) or protocol_of(checkpoint):
        return parent == run.rstrip("/")
    return bool(parent) and Path(parent).resolve() == Path(run).resolve()


def _distance(known: int | None, step: int, other: str) -> str:
    """What the prompts are with the weights after `known` steps; None: the number is unknown. `other`: why
    sums are rounded differently than in the run.
    """
    only = "only the prompts of the first iteration are certainly those of the run"
    if known is None:
        return f"weights of an unknown step; {only}"
    if known == step - 1:
        rest = f", up to rounding: {other}" if other else ""
        return f"the weights that the step began with: all prompts are those of the run{rest}"
    distance = f"{counted(abs(step - 1 - known), 'step')} {'before' if known < step - 1 else 'after'}"
    return f"{distance} those that the step began with; {only}"


def prompts_of(points: Tensor, labels: Tensor) -> list[list[dict[str, Any]]]:
    """Points [M, P, 2] and labels [M, P] as iteration, kind and coordinates of each prompt."""
    prompts = []
    for at, kinds in zip(points.tolist(), labels.tolist(), strict=True):
        first = {"iteration": 1, "kind": "box", "at": [*at[0], *at[1]]}
        if kinds[0] != TOP_LEFT:
            first = {"iteration": 1, "kind": "foreground", "at": at[0]}
        later = [
            {"iteration": i, "kind": "foreground" if kind == FOREGROUND else "background", "at": at[i]}
            for i, kind in enumerate(kinds[2:], 2)
            if kind != NOTHING
        ]
        prompts.append([first, *later])
    return prompts
