"""The warm-up before the first step takes a micro-batch of the run: it compiles all that the steps need."""

import json
from pathlib import Path

import pytest

from tests.train.command import train_to_end
from tests.train.mishap import Mishap

FLAGS = ("--model.compile-blocks", "--data.global-batch", "6", "--data.micro-batch", "3")


RECOMPUTE = ("--model.checkpoint-blocks", "all")
CASES = [(*ranks, more) for ranks in (("none", 1), ("ddp", 2), ("fsdp", 2)) for more in ((), RECOMPUTE)]


@pytest.mark.slow  # quick: tests/engine/test_compile.py
@pytest.mark.parametrize(("mode", "ranks", "more"), CASES)
def test_no_step_compiles_anything(
    root: Path, tmp_path: Path, mode: str, ranks: int, more: tuple[str, ...]
) -> None:
    mishap = Mishap({"what": "record", "into": str(tmp_path), "compile": True})
    flags = (*FLAGS, *more, "--optim.steps", "3")
    train_to_end(root, tmp_path / "run", *flags, ranks=ranks, mode=mode, mishap=mishap)
    for rank in range(ranks):
        lines = (tmp_path / f"{rank}.jsonl").read_text().splitlines()
        assert [json.loads(line)["graphs"] for line in lines] == [2] * 3  # windowed and global blocks
