"""The start of a run from its newest checkpoint: what is loaded, refused and printed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn
from warnings import catch_warnings, simplefilter

import torch

from sa1b.console import counted
from sa1b.engine.checkpoint.checkpoints import Checkpoints
from sa1b.engine.checkpoint.tensors import MismatchError
from sa1b.engine.config import Config
from sa1b.engine.ranks.agreement import agree_on_weights
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import ParallelConfig
from sa1b.engine.step.feed import Feed
from sa1b.engine.step.gradients import TrainStep
from sa1b.errors import Sa1bError, UsageError
from sa1b.stream.plan import ResumeError

Settings = Mapping[str, Any]  # result of `Config.document`

# The settings that determine the sequence of images and their masks.
_SEQUENCE = ("seed", "data.view", "data.layers", "data.block_size")
_OF_TRAINING = (
    *("data.global_batch", "data.target_size", "data.masks", "data.strategy", "data.flip", "data.min_pixels"),
    *("data.text", "data.text_column", "data.text_key", "data.text_tokens", "data.text_width"),
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
        check_model(error.state.get("config", {}), current, config.out)
        raise
    agree_on_weights(training.module, training.rank_info)
    if state is None:
        return 0, None, []
    saved, step, position = state.get("config", {}), int(state["step"]), state["stream"]["position"]
    check_trained(saved, current, config.out)
    try:
        with catch_warnings(record=True) as noted:
            simplefilter("always")
            batch = saved.get("data", current["data"])["global_batch"]
            feed.load_state_dict({"history": [[0, 0, batch]]} | state["stream"])
    except ResumeError as error:
        refuse_sequence(saved, current, config.out, error)
    if state["scaler"]:  # empty unless the checkpoint is of fp16; the scale then starts anew
        training.scaler.load_state_dict(state["scaler"])
    said = lines(saved, current, config.out, step=step, steps=config.optim.steps, position=position)
    # On all ranks, as warnings, they would be printed many times.
    said += [f"warning: {warning.message}" for warning in noted]
    return step, state.get("metrics"), said


def refuse_sequence(saved: Settings, current: Settings, out: str, error: Sa1bError) -> NoReturn:
    """UsageError for another order of images, described by `error`; it names the flags and saved values."""
    _refuse(saved, current, out, _SEQUENCE)
    raise UsageError(
        f"--out {out}: {error}; the flag of the view is --data.view; to train on the images that are there "
        f"now, pass another --out with --init {out}"
    )


def check_model(saved: Settings, current: Settings, out: str) -> None:
    """UsageError, with flags, if sizes of the model or frozen parts differ from the checkpoint's."""
    _refuse(saved, current, out, ("preset",))
    _refuse(saved, current, out, ("model.", "optim.freeze"))


def check_trained(saved: Settings, current: Settings, out: str) -> None:
    """UsageError: other parts are frozen, or the checkpoint has a running mean of the weights and this run
    none.
    """
    _refuse(saved, current, out, ("optim.freeze",))
    decays = [settings.get("optim", {}).get("ema", 0.0) for settings in (saved, current)]
    if decays[0] and not decays[1]:
        raise UsageError(
            f"--out {out}: was trained with --optim.ema {decays[0]}, this run has none; pass --optim.ema "
            f"{decays[0]}, or another --out with --init {out}"
        )


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


def lines(saved: Settings, current: Settings, out: str, step: int, steps: int, position: int) -> list[str]:
    """What is printed when a run resumes after `step` of `steps` steps."""
    if step >= steps:
        more = "" if step == steps else f" and is at step {step:,}"
        has = f"{out} has all {counted(steps, 'step')}{more}"
        return [f"{has}: raise --optim.steps to continue training"]
    return [f"resuming after step {step:,} at position {position:,}", *changes(saved, current, step)]


def changes(saved: Settings, current: Settings, step: int) -> list[str]:
    """Lines to print: settings that affect training and differ from those of the checkpoint."""
    differing = [one for one in _differences(saved, current) if _of_training(one[0])]
    named = [f"{_flag(name)} {_shown(before)} -> {_shown(now)}" for name, before, now in differing]
    lines = [f"settings that differ from those of step {step:,}: {', '.join(named)}"] if named else []
    if ("optim.ema", 0.0) in [(name, before) for name, before, _ in differing]:
        lines.append(f"the running mean (--optim.ema) starts from the weights of step {step:,}")
    return lines


def _of_training(name: str) -> bool:
    part, dot, _ = name.partition(".")
    return name in _OF_TRAINING or bool(dot and part not in _OTHER_PARTS)


def _refuse(saved: Settings, current: Settings, out: str, names: tuple[str, ...]) -> None:
    differing = [
        one
        for one in _differences(saved, current)
        if one[0].startswith(names) and (one[0] != "optim.freeze" or sorted(one[1]) != sorted(one[2]))
    ]
    if differing:
        before = ", ".join(_given(name, before) for name, before, _ in differing)
        now = ", ".join(_given(name, now) for name, _, now in differing)
        remedies = [
            f"pass {_given(name, before)}" if before not in (None, []) else f"drop {_flag(name)}"
            for name, before, _ in differing
        ]
        raise UsageError(
            f"--out {out}: was trained with {before}, this run has {now}; {', '.join(remedies)}, or pass "
            f"another --out with --init {out}"
        )


def _differences(saved: Any, current: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Name, saved value and current value of each setting that both have."""
    for name in [name for name in current if name in saved]:
        full = f"{path}{name}"
        if isinstance(current[name], dict) and isinstance(saved[name], dict):
            yield from _differences(saved[name], current[name], f"{full}.")
        elif saved[name] != current[name] and full != "model.kernels":  # which was a switch
            yield full, saved[name], current[name]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _given(name: str, value: Any) -> str:
    return f"no {_flag(name)}" if value in (None, []) else f"{_flag(name)} {_shown(value)}"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) or "(none)" if isinstance(value, list) else str(value)
