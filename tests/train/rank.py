"""A rank of the training command: `python -m tests.train.rank MODEL MISHAP --flags`, MISHAP being JSON or null.

`python -m tests.train.rank several RUNS`, RUNS being the flags of each run as JSON: one after another, each with a
last line that has its exit code.
"""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from sa1b.recipes.presets import PRESETS
from sa1b.train import exit_at_once, main
from tests.engine import reconstruction
from tests.train import outside


def run(arrange: Callable[[dict[str, Any]], None]) -> None:
    """Train, with a mishap that `arrange` prepares."""
    torch.set_num_threads(1)
    model, what = sys.argv.pop(1), json.loads(sys.argv.pop(1))
    if model == "several":
        for flags in what:
            print(f"exit code {main(arguments=flags)}", flush=True)
        exit_at_once(0)
    if model == "backbone":
        sys.modules["timm"] = import_module("tests.sam.timm_stand_in")
    if what is not None:
        arrange(what)
    exit_at_once(main(reconstruction.PRESETS if model == "reconstruction" else PRESETS))


if __name__ == "__main__":
    run(outside.arrange)
