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
_OTHER_PARTS = ("data", "parallel", "checkpoint", "evaluation", "health", "logging")


def restore(
    config: Config, checkpoints: Checkpoints, training: TrainStep, feed: Feed
) -> tuple[int, dict[str, Any] | None, list[str]]:
    """Load the newest good checkpoint, if any: its step, its metrics, and what to print."""
    if config.resume == "no" and checkpoints.steps():
        raise UsageError(
            f"--resume no: --out {config.out} has checkpoints; pass another --out, or move it away"
        )
    current = config.document()
    try:
        state = checkpoints.resume(training.module, training.optimizer)
    except MismatchError as error:
        saved = error.state.get("config", {})
        _refuse(saved, current, config.out, ("preset",))
        _refuse(saved, current, config.out, ("model.", "optim.freeze"))
        raise
    agree_on_weights(training.module, training.rank_info)
    if state is None:
        return 0, None, []
    saved, step, position = state.get("config", {}), int(state["step"]), state["stream"]["position"]
    _refuse(saved, current, config.out, ("optim.freeze",))
    if (mean := saved.get("optim", {}).get("ema")) and not config.optim.ema:
        raise UsageError(
            f"--out {config.out}: was trained with --optim.ema {mean}, this run has none; pass --optim.ema "
            f"{mean}, or another --out with --init {config.out}"
        )
    try:
        with catch_warnings(record=True) as noted:
            simplefilter("always")
            batch = saved.get("data", current["data"])["global_batch"]
            feed.load_state_dict({"history": [[0, 0, batch]]} | state["stream"])
    except ResumeError as error:
        _refuse(saved, current, config.out, _SEQUENCE)
        raise UsageError(
            f"--out {config.out}: {error}; the flag of the view is --data.view; to train on the images that "
            f"are there now, pass another --out with --init {config.out}"
        ) from None
    if state["scaler"]:  # empty unless the checkpoint is of fp16; the scale then starts anew
        training.scaler.load_state_dict(state["scaler"])
    steps = config.optim.steps
    if step >= steps:
        more = "" if step == steps else f" and is at step {step:,}"
        has = f"{config.out} has all {counted(steps, 'step')}{more}"
        said = [f"{has}: raise --optim.steps to continue training"]
    else:
        said = [f"resuming after step {step:,} at position {position:,}", *changes(saved, current, step)]
    # On all ranks, as warnings, they would be printed many times.
    return step, state.get("metrics"), [*said, *(f"warning: {warning.message}" for warning in noted)]


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
    differing = {name: values for name, values in _differences(saved, current).items() if _of_training(name)}
    named = [f"--{name} {_shown(before)} -> {_shown(now)}" for name, (before, now) in differing.items()]
    lines = [f"settings that differ from those of step {step:,}: {', '.join(named)}"] if named else []
    if differing.get("optim.ema", (None, None))[0] == 0:
        lines.append(f"the running mean (--optim.ema) starts from the weights of step {step:,}")
    return lines


def _of_training(name: str) -> bool:
    part, dot, _ = name.partition(".")
    return name in _OF_TRAINING or bool(dot and part not in _OTHER_PARTS)


def _refuse(saved: Settings, current: Settings, out: str, names: tuple[str, ...]) -> None:
    """UsageError if settings whose names begin with one of `names` differ; it has flags and both values."""
    differing = {
        name: values
        for name, values in _differences(saved, current).items()
        if name.startswith(names) and (name != "optim.freeze" or sorted(values[0]) != sorted(values[1]))
    }
    if differing:
        given = [", ".join(_given(name, values[i]) for name, values in differing.items()) for i in (0, 1)]
        remedies = [
            f"drop --{name}" if before in (None, []) else f"pass {_given(name, before)}"
            for name, (before, _) in differing.items()
        ]
        raise UsageError(
            f"--out {out}: was trained with {given[0]}, this run has {given[1]}; {', '.join(remedies)}, or "
            f"pass another --out with --init {out}"
        )


def _differences(saved: Settings, current: Settings) -> dict[str, tuple[Any, Any]]:
    """Saved and current value of each setting that both have, by its flag."""
    before, now = dict(leaves(saved)), dict(leaves(current))
    now.pop("model.kernels", None)  # was a switch
    return {name: (before[name], now[name]) for name in now if before.get(name, now[name]) != now[name]}


def _given(name: str, value: Any) -> str:
    return f"no --{name}" if value in (None, []) else f"--{name} {_shown(value)}"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) or "(none)" if isinstance(value, list) else str(value)
