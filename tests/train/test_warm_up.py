"""The warm-up before the first step takes a micro-batch of the run: it compiles all that the steps need."""

import json
from pathlib import Path

import pytest

from tests.train.command import train_to_end

FLAGS = ("--model.compile-blocks", "--data.global-batch", "6", "--data.micro-batch", "3")


RECOMPUTE = ("--model.checkpoint-blocks", "all")
DECODER = ("--model.compile-decoder",)


@pytest.mark.parametrize(
    ("mode", "ranks", "more"),
    [
        *(
            pytest.param(*one, marks=pytest.mark.slow)  # quick: tests/engine/test_compile.py
            for one in (
                ("fsdp", 2, ()),
                *(("none", 1, ()), ("none", 1, RECOMPUTE), ("fsdp", 2, RECOMPUTE)),
                *(("ddp", 2, ()), ("ddp", 2, RECOMPUTE)),
                *(("ddp", 2, DECODER), ("fsdp", 2, DECODER)),
            )
        )
    ],
)
def test_no_step_compiles_anything(
    root: Path, tmp_path: Path, mode: str, ranks: int, more: tuple[str, ...]
) -> None:
    mishap = {"what": "record", "into": str(tmp_path), "compile": True}
    flags = (*FLAGS, *more, "--optim.steps", "3")
    train_to_end(root, tmp_path / "run", *flags, ranks=ranks, mode=mode, mishap=mishap)
    graphs = 4 if more == DECODER else 2  # windowed and global blocks; the first iteration and later ones
    for rank in range(ranks):
        lines = (tmp_path / f"{rank}.jsonl").read_text().splitlines()
        assert [json.loads(line)["graphs"] for line in lines] == [graphs] * 3
