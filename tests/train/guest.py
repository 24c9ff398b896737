"""Runs of the training loop in a thread of a process that belongs to another program, which has made the group."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sa1b import train
from sa1b.engine import config as settings
from sa1b.engine.watch.signals import SIGNALS
from tests.engine.reconstruction import PRESETS
from tests.train.command import SECOND_FLAGS

# The learning rate does not depend on the number of steps.
CONSTANT = ("--optim.schedule", "step", "--optim.milestones", "100", "--optim.min-lr-ratio", "0")


def train_in_a_thread(root: Path, runs: list[tuple[Path, int]]) -> dict[str, Any]:
    """Train to each `--out` and number of steps in turn; what is left of the process afterwards."""
    dist.init_process_group("gloo")
    group, numbers = dist.group.WORLD, SIGNALS
    handlers = [signal.getsignal(number) for number in numbers]
    with ThreadPoolExecutor(1) as pool:
        codes = [pool.submit(_train, root, out, steps).result() for out, steps in runs]
    total = torch.ones(())
    if dist.is_initialized():
        dist.all_reduce(total)
    return {
        "codes": codes,
        "group": dist.is_initialized() and dist.group.WORLD is group,
        "sum": float(total),
        "handlers": [signal.getsignal(number) for number in numbers] == handlers,
        "threads": [one.name for one in threading.enumerate() if one.name.startswith("sa1b")],
    }


def _train(root: Path, out: Path, steps: int) -> int:
    flags = (
        "--data.root",
        str(root),
        "--out",
        str(out),
        *SECOND_FLAGS,
        *CONSTANT,
        "--parallel.mode",
        "ddp",
        "--optim.steps",
        str(steps),
    )
    return train.run(settings.parse(flags, None, PRESETS, "guest"))
