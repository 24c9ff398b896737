"""The commands that compute on a device, as a user types them: presets, and all others with a small model."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from statistics import fmean
from typing import Any

from benchmarks.gpu.material import phrases, roots
from benchmarks.gpu.part import Record, Setting
from benchmarks.gpu.training import FEW, at_once, common, largest_difference, of_run

_AT_ONCE = 4
# Largest relative differences of losses in bfloat16 that rounding explains: of the first step, of the last.
FIRST, LAST = 0.01, 0.1


def work(setting: Setting, record: Record) -> None:
    """Train a model; then evaluate it, label images with it, adapt it, distil it and replay a step of it."""
    root, folder = roots(setting)["1024"], setting.folder / "commands"
    run = folder / "run"
    small = (*common(setting, run), *FEW, *setting.pick(("--preset", "tiny"), ()), "--optim.steps", 4)
    points = ("--points-per-side", 4, "--points-per-batch", 16, "--part", "0/24", "--device", setting.device)
    cache = ("--embeddings.cache", folder / "cache", "--embeddings.cache-bytes", 10**9)
    bf16, fp16 = (("--parallel.precision", name) for name in ("bf16", "fp16"))

    def started(name: str, *flags: object) -> tuple[str, tuple[object, ...]]:
        return name, ("train", *small, "--out", folder / name, *flags)

    before: tuple[tuple[str, tuple[object, ...]], ...] = (
        ("doctor", ("doctor", root, *(f"--only={name}" for name in ("versions", "device", "dataset")))),
        ("view", ("view", root, "--held-out", "50%", "--name", "train")),
        ("train", ("train", *small, "--checkpoint.every", 4)),
    )
    after = (
        ("evaluate", ("train", *small, "--evaluate-only", "--evaluation.view", "train")),
        ("annotate", ("annotate", root, "--weights", run, "--out", folder / "labelled", *points)),
        ("replay", ("replay", run, "--step", 4, "--weights", run, "--out", folder / "page")),
        started("lora", "--init", run, "--model.lora-rank", 4, *bf16),
        started("frozen", "--init", run, "--optim.freeze", "image_encoder", *cache),
        started("distil", "--preset", "distill_tiny", "--distill.teacher", run),
        started("accumulate", *("--data.global-batch", 4, "--data.micro-batch", 1), *fp16),
        started("jpeg", "--data.decode", "gpu"),
    )
    for name, command in before:
        _run(setting, record, name, command)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda one: _run(setting, record, *one), after[: setting.pick(None, 2)]))


def presets(setting: Setting, record: Record) -> None:
    """Presets with the kernels that are right on this GPU, beside the operators of torch: equal losses."""
    steps = setting.pick(20, 2)
    flags: dict[str, tuple[object, ...]] = {
        "vit_b": (),
        "sam2": ("--optim.cooldown", 1),
        "repvit": ("--parallel.mode", "ddp", "--parallel.sync-batchnorm"),
        "grounding": ("--data.text", phrases(setting)),
        "distill": ("--distill.teacher", setting.folder / "vit_b auto"),
    }
    chosen = [name for name in setting.pick([*flags], ["vit_b"]) if name != "repvit" or find_spec("timm")]
    common_flags = (*FEW, *setting.pick(("--parallel.precision", "bf16"), ()))
    every = {
        f"{preset} {kernels}": (*flags[preset], *common_flags, "--preset", preset, "--model.kernels", kernels)
        for preset in chosen
        for kernels in ("auto", "none")
    }
    late = {name: every.pop(name) for name in [*every] if name.startswith("distill")}  # after their teacher
    for some in filter(None, (every, late)):
        runs = at_once(setting, some, steps)
        for preset in dict.fromkeys(name.split()[0] for name in some):
            with record.attempt(preset):
                both = (of_run(runs, f"{preset} {kernels}") for kernels in ("auto", "none"))
                _compare(record, preset, steps, *both)


def _compare(record: Record, preset: str, steps: int, one: list[Any], other: list[Any]) -> None:
    record.check(f"{preset}: all steps", len(one) == len(other) == steps, (len(one), len(other)))
    begin = largest_difference(one[:1], other[:1], ("loss",))
    record.check(f"{preset}: the first loss is that without kernels", begin <= FIRST, begin)
    means = [fmean(line["loss"] for line in found[-5:]) for found in (one, other)]
    record.figure(f"{preset}: mean loss of the last steps", means[0])
    record.figure(f"{preset}: mean loss of the last steps, without kernels", means[1])
    near = abs(means[0] - means[1]) <= LAST * abs(means[1])
    record.check(f"{preset}: the last losses are near those without kernels", near, means)


def _run(setting: Setting, record: Record, name: str, command: Sequence[object]) -> None:
    done = setting.run(name, "-m", "sa1b", *command)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    record.check(name, done.returncode == 0, last[:300])
    if done.returncode:
        record.text(name, done.stdout[-3000:])
