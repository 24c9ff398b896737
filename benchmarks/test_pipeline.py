"""How long the stages of a pipeline wait: `pytest benchmarks/test_pipeline.py -s`, two minutes.

Two and three ranks train a model of six equal blocks, whose forward pass sleeps 20 ms and whose backward pass
sleeps 40 ms. So ranks that share a processor do not slow each other down, and what is measured is the waiting
and the messages of the schedule. The formula is (S - 1) / (M + S - 1) for S stages and M micro-batches.
`sa1b bench scaling --modes pipeline` measures a real model, whose stages are not equal.
"""

from statistics import mean, median

import pytest

from sa1b.engine.settings import ParallelConfig
from tests.engine import pipeline_ranks
from tests.engine.launch import launch

SECONDS, STEPS = 0.02, 3
COUNTS = [2, 4, 8, 16]  # micro-batches of a step
SCHEDULES = {
    "gpipe": ParallelConfig(mode="pipeline", schedule="gpipe", device="cpu"),
    "1f1b": ParallelConfig(mode="pipeline", schedule="1f1b", device="cpu"),
}


@pytest.mark.parametrize("stages", [2, 3])
def test_waiting(stages: int, figures: dict[str, dict[str, object]]) -> None:
    counts = [count for count in COUNTS if count >= stages]
    ranks = launch(pipeline_ranks.waiting, stages, SCHEDULES, counts, SECONDS, STEPS)
    print()
    for count in counts:
        formula = (stages - 1) / (count + stages - 1)
        row: dict[str, object] = {"formula": formula}
        for name in SCHEDULES:
            waits, kept = zip(*(rank[name, count] for rank in ranks), strict=True)
            row |= {name: median(map(mean, zip(*waits, strict=True))), f"{name}, kept": max(kept)}
        figures.setdefault("pipeline", {})[f"{stages} stages, {count} micro-batches"] = row
        print(f"{stages} stages, {count:2} micro-batches: {row}")
