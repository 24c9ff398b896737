"""Counts the graphs and graph breaks of torch.compile in a run, by mode."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sa1b.engine.settings import ParallelConfig
from sa1b.sam.interactive import Interactive
from tests.engine import training
from tests.engine.launch import group


def counted(config: ParallelConfig, recompute: bool) -> dict[str, Any]:
    """Two steps with compiled blocks, after a warm-up with two images."""
    # This imports triton, which complains at the end of a process that imported it before `gc.freeze`.
    from torch._dynamo.utils import counters

    compile_before, model_before, build = torch.compile, training.MODEL, training.build
    sizes = {2}

    def watched(seed: int = 0) -> Interactive:
        interactive = build(seed)
        interactive.register_forward_pre_hook(lambda _, inputs: sizes.add(len(inputs[0])))
        return interactive

    # The graphs do not depend on the back end that compiles them.
    torch.compile, training.build = partial(compile_before, backend="aot_eager"), watched
    training.MODEL = replace(
        model_before, compile_blocks=True, checkpoint_blocks="all" if recompute else "none"
    )
    torch._dynamo.reset()
    counters.clear()
    try:
        with group(config) as rank_info:
            run = training.begin(rank_info, config)
            warmed = counters["stats"]["unique_graphs"]
            for number in range(2):
                run.step(number)
            return {
                "breaks": dict(counters["graph_break"]),
                "graphs": counters["stats"]["unique_graphs"],
                "warmed": warmed,
                "sizes": sizes,
                "losses": run.losses,
                "norms": run.norms,
            }
    finally:
        torch.compile, training.MODEL, training.build = compile_before, model_before, build
