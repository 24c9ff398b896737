"""A rank of the training command: `python -m tests.train.rank MODEL MISHAP --flags`, MISHAP being JSON or null."""

import json
import sys

import torch

from sa1b import train
from tests.engine import reconstruction
from tests.train import mishap

if __name__ == "__main__":
    torch.set_num_threads(1)
    model, what = sys.argv.pop(1), json.loads(sys.argv.pop(1))
    if what is not None:
        mishap.arrange(what)
    train.exit_at_once(train.main(reconstruction.PRESETS if model == "reconstruction" else train.PRESETS))
