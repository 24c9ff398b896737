"""Runs that are killed at a random instant and resume in another mode, compared with one process.

    python -m tests.train.matrix --count 200 --seed 1

A cell is a pair of modes, each with its number of ranks and its precision, and settings that both have: a running
mean, frozen parts, accumulation, recomputed and compiled blocks. It trains three steps. In the first mode one
rank or all are killed after a random time in a random step; the second mode resumes. Losses, weights and running
mean are then those of one process: to 1e-4 in fp32, and as far as 16-bit numbers allow otherwise. All ordered pairs of modes and of precisions come before one is repeated.
"""

import argparse
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.command import losses, make_root, newest, start, tensors, train_to_end

STEPS = 3
FLAGS = (
    *("--model.depth", "3", "--optim.steps", str(STEPS), "--optim.warmup", "1", "--checkpoint.every", "1"),
    # A key's bias has a gradient of rounding errors alone: Adam would take full steps of them.
    *("--optim.epsilon", "1e-4"),
)
# Mode, its flags, and those of each number of ranks.
MODES: dict[str, tuple[str, tuple[str, ...], dict[int, tuple[str, ...]]]] = {
    "none": ("none", (), {1: ()}),
    "ddp": ("ddp", (), {2: (), 3: ()}),
    "fsdp": ("fsdp", (), {2: (), 3: ()}),
    "grad_op": ("fsdp", ("--parallel.shard", "grad_op"), {2: (), 3: ()}),
    "hybrid": ("fsdp", ("--parallel.replicas", "2"), {4: ()}),
}
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Cell:
    """Attributes: before, after: mode, ranks, precision; step, seconds, victim: when who is killed; -1: all."""

    before: tuple[str, int, str]
    after: tuple[str, int, str]
    ema: bool
    freeze: str
    accumulate: bool
    recompute: bool
    compiled: bool
    step: int
    seconds: float
    victim: int

    def __str__(self) -> str:
        on = [name for name in ("ema", "accumulate", "recompute", "compiled") if getattr(self, name)]
        on += [f"without {self.freeze}"] if self.freeze else []
        both = " to ".join(
            f"{mode} {ranks} {precision}" for mode, ranks, precision in (self.before, self.after)
        )
        killed = "all" if self.victim < 0 else f"rank {self.victim}"
        return ", ".join([both, *on, f"{killed} killed {self.seconds:.2f} s into step {self.step}"])

    @property
    def modes(self) -> tuple[str, str]:
        return self.before[0], self.after[0]

    def settings(self) -> tuple[str, ...]:
        """Flags that both runs and that of one process have."""
        flags = FLAGS
        if self.ema:
            flags += ("--optim.ema", "0.5")
        if self.freeze:
            flags += ("--optim.freeze", self.freeze)
        if self.recompute:
            flags += ("--model.checkpoint-blocks", "all")
        if self.compiled:
            flags += ("--model.compile-blocks",)
        return flags


def cells(seed: int) -> Iterator[Cell]:
    """Random cells without end."""
    rng = random.Random(seed)
    modes: list[tuple[str, str]] = []
    precisions: list[tuple[str, str]] = []
    while True:
        if not modes:
            modes = list(permutations(MODES, 2))
            rng.shuffle(modes)
        if not precisions:
            precisions = list(product(PRECISIONS, repeat=2)) + [("fp32", "fp32")] * 3
            rng.shuffle(precisions)
        before, after = modes.pop()
        formats = list(precisions.pop())
        ranks = rng.choice(list(MODES[before][2]))
        others = [number for number in MODES[after][2] if number != ranks]
        yield Cell(
            before=(before, ranks, formats[0]),
            after=(after, rng.choice(others), formats[1]),
            ema=rng.random() < 0.5,
            freeze=rng.choice(("", "prompt_encoder", "image_encoder")),
            accumulate=rng.random() < 0.5,
            recompute=rng.random() < 0.3,
            compiled=rng.random() < 0.2,
            step=rng.randrange(STEPS),
            seconds=rng.choice((0.0, 0.02, 0.1, 0.5)) * rng.random(),
            victim=rng.randrange(-1, ranks),
        )


def _flags(cell: Cell, mode: str, ranks: int, precision: str) -> tuple[str, ...]:
    _, flags, of_ranks = MODES[mode]
    micro_batch = "1" if cell.accumulate else "5"
    return (
        *cell.settings(), *flags, *of_ranks[ranks],
        *("--parallel.precision", precision, "--data.micro-batch", micro_batch),
    )  # fmt: skip


def reference(cell: Cell) -> tuple[str, ...]:
    """Flags of one process without an interruption."""
    precisions = {cell.before[2], cell.after[2]}
    return (*cell.settings(), "--parallel.precision", precisions.pop() if len(precisions) == 1 else "fp32")


def check(cell: Cell, root: Path, out: Path, whole: Callable[[tuple[str, ...]], Path]) -> bool:
    """Run a cell in a new folder; returns whether the kill came before the end.

    Args:
        whole: the folder of an uninterrupted run of one process with these flags.
    """
    mishap: dict[str, Any] = {
        "what": "kill",
        "step": cell.step,
        "after": cell.seconds,
        "compile": cell.compiled,
    }
    mishap |= {"all": True} if cell.victim < 0 else {"rank": cell.victim}
    mode, ranks, precision = cell.before
    ended = start(root, out, *_flags(cell, *cell.before), ranks=ranks, mode=MODES[mode][0], mishap=mishap)
    assert set(ended.codes) <= {0, 1, -9}, "\n".join(ended.outputs)
    assert "Traceback" not in "".join(ended.outputs), "\n".join(ended.outputs)
    killed = -9 in ended.codes
    assert killed or ended.codes == [0] * ranks, "\n".join(ended.outputs)
    mode, ranks, precision = cell.after
    mishap = {"what": "record", "compile": cell.compiled}
    train_to_end(root, out, *_flags(cell, *cell.after), ranks=ranks, mode=MODES[mode][0], mishap=mishap)
    one = whole(reference(cell))
    exact = {cell.before[2], precision} == {"fp32"}
    found, expected = losses(out), losses(one)
    assert len(found) == STEPS
    assert found == pytest.approx(expected, rel=1e-4 if exact else 0.05)
    assert_close_state(one, out, exact=exact)
    return killed


def assert_close_state(one: Path, other: Path, *, exact: bool) -> None:
    """Two runs ended with the same weights and running mean, up to rounding."""
    first, second = tensors(newest(one)), tensors(newest(other))
    assert any(name.startswith("model.") for name in first)
    assert first.keys() == second.keys()
    kept = [name for name in first if name.startswith("model.") or name.endswith(".ema")]
    if exact:
        for name in kept:
            torch.testing.assert_close(second[name], first[name], rtol=1e-3, atol=2e-5, msg=name.__add__)
    else:  # Adam's first steps of small gradients depend on their rounding
        apart = torch.stack([(second[name] - first[name]).norm() for name in kept]).norm()
        assert apart <= 0.03 * torch.stack([first[name].norm() for name in kept]).norm()


def main(count: int, seed: int) -> int:
    bad = kills = 0
    with tempfile.TemporaryDirectory(prefix="matrix-") as name:
        folder = Path(name)
        root = make_root(folder)
        made: dict[tuple[str, ...], Path] = {}

        def whole(flags: tuple[str, ...]) -> Path:
            if flags not in made:
                mishap = {"what": "record", "compile": True}
                made[flags] = train_to_end(root, folder / f"whole-{len(made)}", *flags, mishap=mishap)
            return made[flags]

        for number, cell in zip(range(count), cells(seed), strict=False):
            try:
                kills += check(cell, root, folder / f"cell-{number}", whole)
                print(f"{number}: {cell}: equal", flush=True)
            except AssertionError:
                bad += 1
                print(f"{number}: {cell}: DIFFERENT\n{traceback.format_exc()}", flush=True)
    print(f"{count} cells, seed {seed}: {bad} differ; {kills} runs were killed before their end")
    return int(bad > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    sys.exit(main(given.count, given.seed))
