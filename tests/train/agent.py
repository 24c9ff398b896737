"""torchrun with forked ranks: `python -m tests.train.agent FLAGS_OF_TORCHRUN MISHAP --flags`, MISHAP being JSON.

The agent is torchrun's. Only the ranks differ: they are forked from it, which saves 3 s of processor time for
each start of a rank, and train the second model.
"""

import json
import os
import signal
import sys
from dataclasses import replace

import torch
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from sa1b import train
from sa1b.engine.watch.control import Control
from tests.engine import reconstruction
from tests.train import mishap


def rank(what: str, *flags: str) -> None:
    """Train. After a success, torch lets the process wait for the end of the others until SIGTERM kills it."""
    asked = []
    on_signal = Control._on_signal

    def noted(self: Control, number: int, frame: object) -> None:
        asked.append(number)
        on_signal(self, number, frame)

    Control._on_signal = noted
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent's handler was inherited
    torch.set_num_threads(1)
    mishap.arrange(json.loads(what))
    code = train.main(reconstruction.PRESETS, arguments=flags)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # After SIGUSR1 the agent waits for the result of this function. After the others, which it got too, it waits
    # 30 s for a rank that does not end.
    if code or {signal.SIGTERM, signal.SIGINT} & set(asked):
        train.exit_at_once(code)
    sys.stdout.flush()


if __name__ == "__main__":
    # For a log that nobody reads, torch looks up its caller by inspect.stack(), which takes up to a second with
    # the modules of a test process. Meanwhile the other agents change the state, so it is done again and again.
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see docs/clusters.md
    given = parse_args(sys.argv[1:])
    config = replace(config_from_args(given)[0], start_method="fork")
    elastic_launch(config, rank)(given.training_script, *given.training_script_args)
