"""The commands that compute on a device, as a user types them, with a small model: each of them ends well."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.gpu.material import roots
from benchmarks.gpu.part import Record, Setting
from benchmarks.gpu.training import common

_AT_ONCE = 4


def work(setting: Setting, record: Record) -> None:
    """Train a model; then evaluate it, label images with it, adapt it, distil it and replay a step of it."""
    root, folder = roots(setting)["1024"], setting.folder / "commands"
    run, source, drawn = (folder / name for name in ("run", "source", "drawn"))
    small = (*common(setting, run), *setting.pick(("--preset", "tiny"), ()), "--optim.steps", 4)
    points = ("--points-per-side", 4, "--points-per-batch", 16, "--part", "0/24", "--device", setting.device)
    cache = ("--embeddings.cache", folder / "cache", "--embeddings.cache-bytes", 10**9)
    bf16 = ("--parallel.precision", "bf16")

    def train(name: str, *flags: object) -> tuple[str, tuple[object, ...]]:
        return name, ("train", *small, "--out", folder / name, *flags)

    before: tuple[tuple[str, tuple[object, ...]], ...] = (
        ("view", ("view", root, "--held-out", "50%", "--name", "train")),
        ("train", ("train", *small, "--checkpoint.every", 4)),
        ("synthesize", ("synthesize", source, "--tars", 1, "--long-side", 256, "--phrases")),
        ("reshard", ("reshard", source, "--out", drawn, "--ignore", "*.parquet")),
    )
    after = (
        ("evaluate", ("train", *small, "--evaluate-only", "--evaluation.view", "train")),
        ("annotate", ("annotate", root, "--weights", run, "--out", folder / "labelled", *points)),
        ("replay", ("replay", run, "--step", 4, "--weights", run, "--out", folder / "page")),
        train("lora", "--init", run, "--model.lora-rank", 4, *bf16),
        train("frozen", "--init", run, "--optim.freeze", "image_encoder", *cache),
        train("distil", "--preset", "distill_tiny", "--distill.teacher", run),
        train("repvit", "--preset", "repvit", "--parallel.mode", "ddp", "--parallel.sync-batchnorm", *bf16),
        train(
            *("grounding", "--preset", "grounding_tiny", "--data.root", drawn),
            *("--data.text", source / "phrases.parquet"),
        ),
        train(
            "accumulate", "--data.global-batch", 4, "--data.micro-batch", 1, "--parallel.precision", "fp16"
        ),
        train("jpeg", "--data.decode", "gpu"),
    )
    for name, command in before:
        _run(setting, record, name, command)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda one: _run(setting, record, *one), after[: setting.pick(None, 2)]))


def _run(setting: Setting, record: Record, name: str, command: Sequence[object]) -> None:
    done = setting.run(name, "-m", "sa1b", *command)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    record.check(name, done.returncode == 0, last[:300])
    if done.returncode:
        record.text(name, done.stdout[-3000:])
