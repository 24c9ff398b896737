"""Training on the device: the image encoder, the full recipe, modes, precisions, checkpoints, and a failure.

Except for the encoder, every measurement is the training command with its own records: metrics.jsonl and the
trace of `--logging.profile`.
"""

import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.profiler import profile, record_function

from benchmarks.account import profiled_steps
from benchmarks.gpu import attention, timing
from benchmarks.gpu.material import roots
from benchmarks.gpu.part import Record, Setting
from sa1b.engine import config as settings
from sa1b.engine.planner import measure
from sa1b.engine.precision import autocast, set_float32
from sa1b.engine.watch.hardware import peak_flops
from sa1b.recipes import presets
from sa1b.sam.kernel_proof import use_kernels
from sa1b.sam.model import PRESETS, ModelConfig, Sam
from sa1b.sam.recipe import encoder_flops

# A model of a few thousand parameters, for CPUs.
TINY = (
    *("--preset", "tiny", "--model.image-size", "64", "--model.width", "32", "--model.heads", "2"),
    *("--model.window", "2", "--model.channels", "32", "--model.pixel-features", "8", "--data.masks", "4"),
)
FEW = ("--data.processes", 1, "--data.threads", 2)  # of runs beside others
# Enough for the weights to change by more than rounding.
STEPS = 6
TOLERANCE = 1e-3  # of losses and gradient norms of the modes; of a step's first forward pass 1e-5
# Largest relative difference of the first loss to that of fp32.
PRECISIONS = {"tf32": 0.01, "bf16": 0.05, "fp16": 0.02}
LONG_WAITS = "waits of the host over 0.1 ms per step"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
_FAILS_WITHIN = 10.0  # seconds
# Of one of eight GPUs, each with one image a second, that train the published recipe.
HOURS = 180_000 * 128 / 8 / 3600


class CommandFailed(Exception):
    """A training command ended with another exit code than 0."""


def train(setting: Setting, name: str, *flags: object) -> list[dict[str, Any]]:
    """Run the training command; return the lines of its steps.

    Args:
        name: name of its folder.
        flags: further flags; later ones replace earlier ones.
    """
    out = setting.folder / name
    done = setting.run(name, "-m", "sa1b.train", *common(setting, out), *flags)
    if done.returncode:
        last = (done.stdout.strip().splitlines() or ["no output"])[-1]
        raise CommandFailed(f"{name}: exit code {done.returncode}: {last[:300]}")
    return lines(out)


def common(setting: Setting, out: Path) -> tuple[object, ...]:
    """The flags of all runs."""
    return (
        *(TINY if setting.tiny else ()),
        *("--data.root", roots(setting)["1024"], "--out", out, "--parallel.device", setting.device),
        *("--logging.tensorboard", "False", "--data.global-batch", 2, "--checkpoint.every", 1_000_000),
        *("--optim.warmup", 1),
        *(("--data.threads", 1) if setting.tiny else ()),
    )


def lines(out: Path) -> list[dict[str, Any]]:
    """The lines of the steps in metrics.jsonl."""
    path = out / "metrics.jsonl"
    found = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return [line for line in found if "loss" in line]


def encoder_step(setting: Setting, *, compiled: bool = False) -> Callable[[Tensor], None]:
    """A forward and backward pass of the image encoder of ViT-B, in bf16."""
    device = torch.device(setting.device)
    set_float32("bf16" if setting.on_gpu else "fp32", device)
    torch.manual_seed(0)
    preset = replace(encoder_config(setting), compile_blocks=compiled)
    model = Sam(preset).to(device)
    weight = torch.randn(preset.channels, 1, 1, device=device)

    def step(images: Tensor) -> None:
        with autocast("bf16", device):
            use_kernels(model)
            found = model.embed(images)
        (found.float() * weight).mean().backward()
        model.zero_grad(set_to_none=True)

    return step


def encoder_config(setting: Setting) -> ModelConfig:
    """The model of measurements of the encoder alone."""
    small = replace(PRESETS["tiny"], image_size=64, width=32, heads=2, window=2, pixel_features=0)
    return setting.pick(PRESETS["vit_b"], small)


def encoder(setting: Setting, record: Record) -> None:
    """Forward and backward passes of the image encoder alone, by micro-batch and form of the attention."""
    for batch in setting.pick((8, 4, 16), (2,)):
        _encoder(setting, record, f"batch {batch}", batch)
    if setting.on_gpu and not setting.tiny:
        with attention.with_tiles():
            _encoder(setting, record, "batch 8, attention in tiles", 8)


def compiled(setting: Setting, record: Record) -> None:
    """The same with compiled blocks, which takes minutes on a CPU."""
    _encoder(setting, record, "batch 8, blocks compiled", setting.pick(8, 1), compiled=not setting.tiny)
    if setting.on_gpu and not setting.tiny:
        with attention.with_tiles():
            _encoder(setting, record, "batch 8, in tiles, blocks compiled", 8, compiled=True)


def _encoder(setting: Setting, record: Record, label: str, batch: int, *, compiled: bool = False) -> None:
    with record.attempt(label):
        preset = encoder_config(setting)
        shape = batch, 3, preset.image_size, preset.image_size
        images = torch.randint(0, 256, shape, dtype=torch.uint8, device=setting.device)
        step = partial(encoder_step(setting, compiled=compiled), images)
        record.figure(f"{label}: first step", timing.between(step, setting.device) / 1e3, "s")
        if setting.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        ms = median(timing.between(step, setting.device) for _ in range(setting.pick(6, 1)))
        goal = 100 if batch == 8 else None
        record.figure(f"{label}: forward and backward", 1e3 * batch / ms, "images/s", at_least=goal)
        if setting.on_gpu:
            if (peak := peak_flops(torch.device("cuda", 0), "bf16")) is not None:
                record.figure(f"{label}: MFU", 3e3 * encoder_flops(preset) * batch / ms / peak)
            record.figure(f"{label}: peak memory", torch.cuda.max_memory_allocated() / 1e9, "GB")
            if not setting.tiny:
                record.text(f"{label}: costliest kernels", costliest_kernels(profiled(step)))


def profiled(work: Callable[[], object]) -> list[dict[str, Any]]:
    """The events of torch's profiler during some work, as one step of a trace."""
    with profile() as profiler, record_function("ProfilerStep#0"):
        work()
        timing.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events: list[dict[str, Any]] = json.loads(Path(file.name).read_bytes())["traceEvents"]
    return events


def recipe(setting: Setting, record: Record) -> None:
    """The full recipe of ViT-B by the training command."""
    steps, first = setting.pick((16, 10), (4, 2))
    sizes = setting.pick(("--preset", "vit_b", "--data.global-batch", 8, "--parallel.precision", "bf16"), ())
    found = train(setting, "recipe", *sizes, "--optim.steps", steps, "--logging.profile", first, first + 1)
    warm = [line for line in found if first // 2 < line["step"] <= first - 2] or found[1:2]
    record.check("all steps have finite losses", all(map(_is_finite, found)), steps)
    record.check("no step is missing", len(found) == steps, f"{len(found)} of {steps}")
    rate = median(line["images_per_s"] for line in warm)
    record.figure("images a second", rate, "/s", at_least=setting.pick(40.0, None))
    record.figure("180,000 steps of 128 images on 8 GPUs, without communication", HOURS / rate, "h")
    record.figure("masks a second", median(line["masks_per_s"] for line in warm), "/s")
    record.figure("seconds of a step", median(line["seconds"] for line in warm), "s")
    record.figure("first step", found[0]["seconds"], "s")
    if "mfu" in warm[-1]:
        record.figure("MFU", median(line["mfu"] for line in warm))
    record.figure("peak memory", max(line["peak_memory_gb"] for line in found), "GB")
    record.figure("data wait, share of the step", median(line["data_wait"] for line in warm), at_most=0.01)
    for part in ("data", "compute", "sync", "update"):
        record.figure(f"seconds of {part}", median(line[f"seconds_{part}"] for line in warm), "s")
    out = setting.folder / "recipe"
    if setting.on_gpu:
        for name in ("gpu_utilisation_mean", "gpu_power_w_mean"):
            record.check(f"{name} is recorded", name in found[-1], "needs the package nvidia-ml-py")
    with record.attempt("trace"):
        record.text("costliest operations", (out / "operations-0.txt").read_text())
        events = json.loads((out / "trace-0.json").read_bytes())["traceEvents"]
        record.text("costliest kernels", costliest_kernels(events))
        for name, value in of_trace(events).items():
            record.figure(name, value, at_most=1 if name == LONG_WAITS and not setting.tiny else None)
    with record.attempt("estimated memory"):
        given = map(str, (*common(setting, out), *sizes))
        estimate = measure(settings.parse([*given], None, presets.PRESETS, "train"), 1).peak
        record.figure("peak memory of tensors, estimated", estimate / 1e9, "GB")
    shutil.rmtree(out, ignore_errors=True)


def of_trace(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Per profiled step: waits of the main thread for the device, kernels, share of the time they run."""
    events = list(events)
    steps, begin, end = profiled_steps(events)
    thread = steps[0]["pid"], steps[0]["tid"]
    inside = [event for event in events if begin <= event.get("ts", -1) < end]
    waits = [event for event in inside if event["name"] in WAITS and (event["pid"], event["tid"]) == thread]
    kernels = sorted((event["ts"], event["dur"]) for event in inside if event.get("cat") == "kernel")
    busy, until = 0.0, begin
    for start, took in kernels:
        busy += max(0.0, start + took - max(start, until))
        until = max(until, start + took)
    found = {
        "waits of the host per step": len(waits) / len(steps),
        LONG_WAITS: sum(event["dur"] > 100 for event in waits) / len(steps),
        "kernels per step": len(kernels) / len(steps),
        "share of the time in which a kernel runs": busy / (end - begin),
    }
    for name in WAITS:
        if number := sum(event["name"] == name for event in waits):
            found[f"{name} per step"] = number / len(steps)
    return found


def costliest_kernels(events: Iterable[Mapping[str, Any]], most: int = 22) -> str:
    """Kernels by their time in all profiled steps, also those of CUDA graphs: ms, calls, name."""
    found: dict[str, tuple[float, int]] = {}
    for event in events:
        if event.get("cat") == "kernel":
            ms, calls = found.get(event["name"], (0.0, 0))
            found[event["name"]] = ms + event["dur"] / 1000, calls + 1
    names = sorted(found, key=lambda name: found[name], reverse=True)[:most]
    return "\n".join(f"{found[name][0]:9.2f} {found[name][1]:7,} {name[:150]}" for name in names)


def modes(setting: Setting, record: Record) -> None:
    """One process, twice, and a group of one rank in each mode: equal within rounding."""
    names = {"none": "none", "none again": "none", "ddp": "ddp", "fsdp": "fsdp"}
    flags = {label: (*_small(setting), "--parallel.mode", mode) for label, mode in names.items()}
    runs = at_once(setting, flags)
    reference = runs["none"]
    for label in list(names)[1:]:
        with record.attempt(f"mode {label}"):
            one, other = of_run(runs, label), of_run(runs, "none")
            record.check(f"{label}: all steps", len(one) == STEPS, f"{len(one)} of {STEPS}")
            differ = largest_difference(one, other, ("loss", "grad_norm"))
            first = largest_difference(one[:1], other[:1], ("loss",))
            record.figure(f"{label}: largest relative difference to none", differ)
            record.check(f"{label}: losses and norms equal those of none", differ <= TOLERANCE, differ)
            record.check(f"{label}: first loss equals that of none", first <= 1e-5, first)
    record.check(
        "none ended well", isinstance(reference, list), reference if isinstance(reference, str) else ""
    )


def precision(setting: Setting, record: Record) -> None:
    """The first losses in each number format beside fp32."""
    names = ["fp32", *(PRECISIONS if setting.on_gpu else ("bf16",))]
    runs = at_once(setting, {name: (*_small(setting), "--parallel.precision", name) for name in names})
    for name in names[1:]:
        with record.attempt(f"precision {name}"):
            one, other = of_run(runs, name), of_run(runs, "fp32")
            record.check(
                f"{name}: all steps are finite", len(one) == STEPS and all(_is_finite(line) for line in one)
            )
            differ = largest_difference(one[:1], other[:1], ("loss",))
            record.figure(f"{name}: relative difference of the first loss to fp32", differ)
            record.check(f"{name}: the first loss is near that of fp32", differ <= PRECISIONS[name], differ)
            last = largest_difference(one[-1:], other[-1:], ("loss",))
            record.figure(f"{name}: relative difference of the last loss to fp32", last)


def at_once(
    setting: Setting, flags: Mapping[str, Sequence[object]], steps: int = STEPS
) -> dict[str, list[dict[str, Any]] | str]:
    """Several runs at the same time, by the names of their folders: the lines of each, or its error."""

    def run(name: str) -> list[dict[str, Any]] | str:
        try:
            return train(setting, name, "--optim.steps", steps, *flags[name])
        except CommandFailed as error:
            return str(error)

    with ThreadPoolExecutor(len(flags) or 1) as pool:
        return dict(zip(flags, pool.map(run, flags), strict=True))


def _small(setting: Setting) -> tuple[object, ...]:
    # Kernels for the sizes of this model would have to be compared first.
    small = (*FEW, "--preset", "tiny", "--data.global-batch", 8, "--model.kernels", "none")
    return setting.pick(small, ())


def of_run(runs: Mapping[str, list[dict[str, Any]] | str], label: str) -> list[dict[str, Any]]:
    """The lines of a run; its error is raised."""
    found = runs[label]
    if isinstance(found, str):
        raise CommandFailed(found)
    return found


def _is_finite(line: Mapping[str, Any]) -> bool:
    return line["loss"] is not None and math.isfinite(line["loss"])


def largest_difference(
    one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> float:
    """Largest relative difference of figures of two runs, infinite if a figure is not finite or missing."""
    if len(one) != len(other) or not one:
        return math.inf
    found = [
        abs(a[name] - b[name]) / max(abs(b[name]), 1e-12)
        if None not in (a[name], b[name]) and math.isfinite(a[name]) and math.isfinite(b[name])
        else math.inf
        for a, b in zip(one, other, strict=True)
        for name in names
    ]
    return max(found)


def checkpoint(setting: Setting, record: Record) -> None:
    """How long a save stops training, and whether a resumed run continues like the uninterrupted one."""
    steps, every = setting.pick((60, 30), (4, 2))
    sizes = (
        ("--preset", "vit_b", "--parallel.precision", "bf16", "--data.masks", 4) if not setting.tiny else ()
    )
    short = ("--recipe.clicks", 1, "--recipe.unprompted", 0, "--checkpoint.every", every)
    for label, flag in (("asynchronous", ()), ("synchronous", ("--checkpoint.no-asynchronous",))):
        with record.attempt(label):
            found = train(setting, label, *sizes, *short, "--optim.steps", steps, *flag)
            saves = [line["seconds_checkpoint"] for line in found if line["step"] % every == 0]
            record.check(f"{label}: all saves", len(saves) == steps // every, saves)
            for number, seconds in enumerate(saves, 1):
                record.figure(f"{label}: save {number} stops training for", seconds, "s")
        shutil.rmtree(setting.folder / label, ignore_errors=True)
    with record.attempt("resume"):
        _resume(setting, record)


def _resume(setting: Setting, record: Record) -> None:
    flags = (*_small(setting), "--optim.steps", STEPS, "--checkpoint.every", STEPS // 2)
    whole = train(setting, "resumed", *flags)
    out = setting.folder / "resumed"
    newest = out / "checkpoints" / f"step-{STEPS:08d}"
    if not newest.is_dir():
        raise CommandFailed(f"{newest}: the run has saved no checkpoint there")
    shutil.rmtree(newest)
    again = train(setting, "resumed", *flags)
    record.check("a resumed run has all steps", len(again) == STEPS, f"{len(again)} of {STEPS}")
    differ = largest_difference(again, whole, ("loss", "grad_norm"))
    record.figure("resumed: largest relative difference", differ)
    record.check("a resumed run continues like the uninterrupted one", differ <= TOLERANCE, differ)


def failure(setting: Setting, record: Record) -> None:
    """A run out of memory ends quickly, with its reason and exit code 1, alone and in a group."""
    for mode in ("none", "ddp"):
        with record.attempt(f"failure, {mode}"):
            out, moment = setting.folder / f"failure {mode}", setting.folder / f"failure {mode}.time"
            small = () if setting.tiny else ("--preset", "tiny")
            flags = (*common(setting, out), *small, "--optim.steps", STEPS, "--parallel.mode", mode)
            command = ("-m", "benchmarks.gpu.out_of_memory", moment, *flags)
            done = setting.run(f"failure {mode}", *command)
            seconds = time.time() - float(moment.read_text())
            record.check(f"{mode}: exit code 1", done.returncode == 1, done.returncode)
            reason = "out of memory (CUDA out of memory" if setting.on_gpu else "can't allocate memory"
            record.check(f"{mode}: the reason is printed", reason in done.stdout, done.stdout[-300:])
            record.figure(f"{mode}: from the error to the end of the process", seconds, "s")
            # On a CPU other processes may slow this one down.
            within = seconds <= _FAILS_WITHIN or not setting.on_gpu
            record.check(f"{mode}: within {_FAILS_WITHIN:g} s", within, f"{seconds:.1f} s")
