"""The start of a run from its newest checkpoint: what is loaded, refused and printed."""

from collections.abc import Mapping, Sequence
from typing import Any
from warnings import catch_warnings, simplefilter

import torch

from sa1b.console import counted
from sa1b.engine.checkpoint.checkpoints import Checkpoints
from sa1b.engine.checkpoint.tensors import MismatchError
from sa1b.engine.config import Config, leaves
from sa1b.engine.ranks.agreement import agree_on_weights
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import ParallelConfig
from sa1b.engine.step.feed import Feed
from sa1b.engine.step.gradients import TrainStep
from sa1b.errors import UsageError
from sa1b.stream.plan import ResumeError

Settings = Mapping[str, Any]  # result of `Config.document`

# The settings that determine the sequence of images and their masks.
_SEQUENCE = ("seed", "data.view", "data.layers", "data.block-size")
_OF_TRAINING = (
    *("data.global-batch", "data.target-size", "data.masks", "data.strategy", "data.flip", "data.min-pixels"),
    *("data.text", "data.text-column", "data.text-key", "data.text-tokens", "data.text-width"),
    *("data.tokenizer", "parallel.precision", "parallel.compress", "parallel.reduce"),
)
_OTHER_PARTS = ("data.", "parallel.", "checkpoint.", "evaluation.", "health.", "logging.")


def restore(
    config: Config, checkpoints: Checkpoints, training: TrainStep, feed: Feed
) -> tuple[int, dict[str, Any] | None, list[str]]:
    """Load the newest good checkpoint, if any: its step, its metrics, and what to print."""
    out, current = config.out, config.document()
    if config.resume == "no" and checkpoints.steps():
        raise UsageError(f"--resume no: --out {out} has checkpoints; pass another --out, or move it away")
    try:
        state = checkpoints.resume(training.module, training.optimizer)
    except MismatchError as error:
        _refuse(error.state["config"], current, out, "preset")
        _refuse(error.state["config"], current, out, "model.", "optim.freeze")
        raise
    if state is None:
        return 0, None, []
    agree_on_weights(training.module, training.rank_info)
    saved, step, position = state["config"], int(state["step"]), state["stream"]["position"]
    _refuse(saved, current, out, "optim.freeze")
    if (mean := saved["optim"].get("ema")) and not config.optim.ema:
        raise UsageError(
            f"--out {out}: was trained with --optim.ema {mean}, this run has none; pass --optim.ema {mean}, "
            f"or another --out with --init {out}"
        )
    try:
        with catch_warnings(record=True) as noted:
            simplefilter("always")
            feed.load_state_dict({"history": [[0, 0, saved["data"]["global_batch"]]], **state["stream"]})
    except ResumeError as error:
        _refuse(saved, current, out, *_SEQUENCE)
        raise UsageError(f"--out {out}: {error}; or pass another --out with --init {out}") from None
    if state["scaler"]:  # empty unless the checkpoint is of fp16; the scale then starts anew
        training.scaler.load_state_dict(state["scaler"])
    steps = config.optim.steps
    if step >= steps:
        more = "" if step == steps else f" and is at step {step:,}"
        said = [f"{out} has all {counted(steps, 'step')}{more}: raise --optim.steps to continue training"]
    else:
        said = [f"resuming after step {step:,} at position {position:,}", *changes(saved, current, step)]
    return step, state["metrics"], [*said, *(f"warning: {warning.message}" for warning in noted)]


def start(rank_info: RankInfo, machines: Sequence[str], parallel: ParallelConfig, step_images: str) -> str:
    """Ranks and their `machines`, the batch, and the GPUs of this machine that no rank uses, in one line."""
    device, ranks = rank_info.device, len(machines)
    on_gpu, visible = device.type == "cuda", torch.cuda.device_count()
    place = f"{'each ' if ranks > 1 else ''}on {torch.cuda.get_device_name(device) if on_gpu else 'cpu'}"
    where = f"{counted(ranks, 'rank')} on {counted(len(set(machines)), 'machine')}, {place}"
    line = f"{where}, mode {parallel.mode}, precision {parallel.precision}; global batch {step_images}"
    first = machines.count(machines[rank_info.rank]) if on_gpu else 0
    if visible <= first:
        return line
    unused = f"cuda:{first}" + (f" to cuda:{visible - 1}" if visible - first > 1 else "")
    return f"{line}; not used: {unused} (torchrun --nproc_per_node={visible} starts a rank for each GPU)"


def changes(saved: Settings, current: Settings, step: int) -> list[str]:
    """Lines to print: settings that affect training and differ from those of the checkpoint."""
    differing = {
        name: values
        for name, values in _differences(saved, current).items()
        if name in _OF_TRAINING or ("." in name and not name.startswith(_OTHER_PARTS))
    }
    named = [f"--{name} {_shown(before)} -> {_shown(now)}" for name, (before, now) in differing.items()]
    lines = [f"settings that differ from those of step {step:,}: {', '.join(named)}"] if named else []
    if differing.get("optim.ema", (None, None))[0] == 0:
        lines.append(f"the running mean (--optim.ema) starts from the weights of step {step:,}")
    return lines


def _refuse(saved: Settings, current: Settings, out: str, *names: str) -> None:
    """UsageError if settings whose names begin with one of `names` differ."""
    differing = {
        name: values for name, values in _differences(saved, current).items() if name.startswith(names)
    }
    if differing:
        old, new = (", ".join(_given(name, two[i]) for name, two in differing.items()) for i in (0, 1))
        remedies = [
            f"drop --{name}" if before in (None, []) else f"pass {_given(name, before)}"
            for name, (before, _) in differing.items()
        ]
        raise UsageError(
            f"--out {out}: was trained with {old}, this run has {new}; {', '.join(remedies)}, or pass "
            f"another --out with --init {out}"
        )


def _differences(saved: Settings, current: Settings) -> dict[str, tuple[Any, Any]]:
    """Saved and current value of each setting that both have, by its flag."""
    before, now = dict(leaves(saved)), dict(leaves(current))
    found = {name: (before.get(name, value), value) for name, value in now.items()}
    if sorted(found["optim.freeze"][0]) == sorted(found["optim.freeze"][1]):
        del found["optim.freeze"]  # at most in another order
    return {name: (old, new) for name, (old, new) in found.items() if old != new}


def _given(name: str, value: Any) -> str:
    return f"no --{name}" if value in (None, []) else f"--{name} {_shown(value)}"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) or "(none)" if isinstance(value, list) else str(value)
