"""A rank of the training command: `python -m tests.train.rank MODEL MISHAP --flags`, MISHAP being JSON or null.

`python -m tests.train.rank several RUNS`, RUNS being the flags of each run as JSON: one after another, each with a
last line that has its exit code.
"""

import json
import sys
from importlib import import_module

import torch

from sa1b import train
from tests.engine import reconstruction
from tests.train import mishap

if __name__ == "__main__":
    torch.set_num_threads(1)
    model, what = sys.argv.pop(1), json.loads(sys.argv.pop(1))
    if model == "several":
        for flags in what:
            print(f"exit code {train.main(arguments=flags)}", flush=True)
        train.exit_at_once(0)
    if model == "backbone":
        sys.modules["timm"] = import_module("tests.sam.timm_stand_in")
    if what is not None:
        mishap.arrange(what)
    train.exit_at_once(train.main(reconstruction.PRESETS if model == "reconstruction" else train.PRESETS))
