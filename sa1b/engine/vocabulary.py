"""Flags as users pass them: names of other training programs, and defaults that depend on other flags."""

import contextlib
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from sa1b.console import counted
from sa1b.engine.settings import OptimConfig
from sa1b.errors import UsageError
from sa1b.stream.plan import process_rank

_BATCH = (
    "pass --data.global-batch, the images of a step over all ranks, and --data.micro-batch, the images that "
    "a rank computes at a time"
)
_RANKS = (
    "start the ranks with torchrun --nproc_per_node=N -m sa1b.train, and pass --parallel.mode ddp or fsdp"
)
_STRATEGY = "pass --parallel.mode none, ddp or fsdp; for fsdp, also --parallel.shard full or grad_op"
_WORKERS = "pass --data.threads, threads that read and decode on each rank"
_ANSWERS = {
    "epochs|num-epochs|max-epochs|num-train-epochs|n-epochs": "pass --optim.epochs",
    "steps|max-steps|num-steps|total-steps": "pass --optim.steps",
    "batch|batch-size|bs|train-batch-size|per-device-train-batch-size|per-device-batch-size": _BATCH,
    "accumulation-steps|gradient-accumulation-steps|grad-accumulation-steps|grad-accum|accum-steps|"
    "accumulate-grad-batches": (
        "pass --data.micro-batch; a step has --data.global-batch / (ranks x micro-batch) micro-batches"
    ),
    "lr|learning-rate|base-lr": "pass --optim.lr, and --optim.reference-batch, the batch that it is for",
    "weight-decay|wd": "pass --optim.weight-decay",
    "warmup|warmup-steps|num-warmup-steps": "pass --optim.warmup",
    "scheduler|lr-scheduler|lr-scheduler-type": "pass --optim.schedule",
    "clip-grad|grad-clip|max-grad-norm|clip-grad-norm|gradient-clip-val": "pass --optim.grad-clip",
    "ema-decay|ema": "pass --optim.ema",
    "save-interval|save-every|save-steps|checkpoint-interval|save-freq": "pass --checkpoint.every",
    "save-total-limit|keep-checkpoints": "pass --checkpoint.keep-last",
    "log-interval|log-every|logging-steps|print-freq": "pass --logging.every",
    "eval-interval|eval-every|eval-steps": "pass --evaluation.every and --evaluation.view",
    "strategy|sharding-strategy|fsdp|ddp|deepspeed|zero-stage|distributed": _STRATEGY,
    "amp|use-amp|fp16|bf16|precision|mixed-precision|half|dtype": "pass --parallel.precision bf16 or fp16",
    "gradient-checkpointing|activation-checkpointing|checkpoint-activations": (
        "pass --model.checkpoint-blocks all"
    ),
    "compile|torch-compile": "pass --model.compile-blocks and --model.compile-decoder",
    "find-unused-parameters": (
        "pass --parallel.find-unused for a model with a branch that only some steps use; SAM has none"
    ),
    "broadcast-buffers": "pass --parallel.broadcast-buffers for a model with BatchNorm",
    "sync-bn|sync-batchnorm": "pass --parallel.sync-batchnorm",
    "workers|num-workers|j": _WORKERS,
    "pin-memory|persistent-workers|prefetch-factor": f"drop it: the loader does this; or {_WORKERS}",
    "shuffle|drop-last": "drop it: every epoch is shuffled, and every sample is used once",
    "gpus|devices|nproc|num-gpus|ngpus|nodes|num-nodes|world-size|dist-url|dist-backend": _RANKS,
    "backend": "drop it: NCCL connects GPUs, gloo connects CPUs; --parallel.network chooses the network",
    "wandb|use-wandb|tensorboard": "pass --logging.tensorboard True; OUT/metrics.jsonl has the same figures",
    "evaluate|eval-only|test-only": "pass --evaluate-only",
    "local-rank|rank": "drop it, and start the ranks with torchrun, which passes the rank by its environment",
    "data|data-dir|data-path|dataset|root": "pass --data.root",
    "output|output-dir|out-dir|save-dir|checkpoint-dir|ckpt-dir|logdir|log-dir|root-dir": "pass --out",
    "resume-from|resume-from-checkpoint|load-checkpoint": (
        "pass --out of the run: the same command resumes it; or --init for its weights only"
    ),
    "pretrained|weights|checkpoint|ckpt": "pass --init",
    "img-size|image-size|input-size|resolution": "pass --model.image-size",
    "arch|model-name|model-type|backbone": "pass --preset",
}


def refuse_other_names(arguments: Sequence[str], allowed: Collection[str] = ()) -> None:
    """UsageError for flags of other programs, with the flag to pass instead; `allowed`: names to accept."""
    if passed(arguments).get("parallel.shard") == "hybrid":
        ranks = process_rank()[1]
        fit = [str(number) for number in range(2, ranks // 2 + 1) if ranks % number == 0]
        raise UsageError(
            "--parallel.shard hybrid: pass --parallel.replicas N, the number of copies of the model; with "
            f"{counted(ranks, 'rank')}, "
            + (f"N is {' or '.join(fit)}" if fit else "none fits: N and the ranks of a copy are at least 2")
        )
    for word in arguments:
        match = re.fullmatch(r"--?([A-Za-z][\w-]*)(=.*)?", word)
        if match is None:
            continue
        name = match[1].replace("_", "-").lower()
        if name.replace("-", "_") in allowed:
            continue
        for names, answer in _ANSWERS.items():
            if name in names.split("|"):
                raise UsageError(f"{word.partition('=')[0]}: no such flag; {answer}")


def passed(arguments: Sequence[str]) -> dict[str, str]:
    """The flags of a command line, without the dashes before them, and the value or next word of each."""
    values = {}
    for word, following in pairwise([*arguments, ""]):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            values[name[2:].replace("_", "-")] = value if equals else following
    return values


def fitted(optim: OptimConfig, flags: Mapping[str, str]) -> tuple[OptimConfig, list[str]]:
    """The preset's schedule for the passed steps or epochs (`passed`), and lines that describe what changed.

    Warm-up and cooldown that are not passed and do not fit are shortened in proportion to the steps, with
    --optim.epochs once the number of images is known.
    """
    steps = flags.get("optim.steps", "")
    fitting = tuple(name for name in ("warmup", "cooldown") if f"optim.{name}" not in flags)
    if "optim.epochs" in flags:
        return replace(optim, fitting=fitting), []
    if not steps.isdecimal() or int(steps) > optim.warmup + optim.cooldown:
        return optim, []
    with contextlib.suppress(UsageError):  # a passed flag does not fit, and its own message follows
        return optim.fitted(int(steps), fitting)
    return optim, []


def program() -> str:
    """The command that started this process: "torchrun -m sa1b.train", "python sa1b/train.py"."""
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "python"
    spec = sys.modules["__main__"].__spec__  # set by -m; then argv has the path of the module
    return f"{launcher} {sys.argv[0] if spec is None else f'-m {spec.name}'}"
