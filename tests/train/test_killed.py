"""Killed ranks with torchrun's restarts: the result equals that of an uninterrupted run."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Process
from tests.train.command import (
    PATIENCE,
    assert_same_state,
    checkpoint_steps,
    lines,
    losses,
    output_of,
    processes_of,
    start,
    torchrun,
    train_to_end,
)

Whole = Callable[..., Path]


def ranks_of(process: Process) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def wait(process: Process, until: Callable[[], bool]) -> bool:
    """Whether the kill happened before the end of the run."""
    end = time.monotonic() + PATIENCE
    while not until():
        if process.poll() is not None:
            return False
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.002)
    return True


def done(out: Path) -> int:
    """Steps that are done; a line may be under way."""
    try:
        return int(lines(out)[-1]["step"])
    except (OSError, ValueError, IndexError):
        return 0


def file_of(out: Path) -> int:
    """The inode of the metrics file; 0 if there is none yet."""
    path = out / "metrics.jsonl"
    return path.stat().st_ino if path.exists() else 0


def saving(out: Path) -> bool:
    return (out / "checkpoints").is_dir() and any((out / "checkpoints").glob("*.partial*"))


def kill_one(process: Process, choice: random.Random) -> int:
    """Kill a rank, if there is one at this moment; how many were killed."""
    if not (ranks := ranks_of(process)):
        return 0
    try:
        os.kill(choice.choice(ranks), signal.SIGKILL)
    except ProcessLookupError:
        return 0
    return 1


def disturb(root: Path, out: Path, mode: str, steps: int, kills: int, seed: int) -> tuple[int, int, str]:
    """A run that is killed at rising steps, every third time while a checkpoint is being written.

    Returns how many kills there were, how many of them during a write, and what was printed.
    """
    choice = random.Random(seed)
    process = torchrun(root, out, "--optim.steps", str(steps), ranks=2, mode=mode, restarts=kills + 2)
    happened = in_save = inode = 0
    for number in range(kills):
        least = 1 + number * (steps - 4) // kills
        # A run that begins again writes the file anew, without the steps that no checkpoint holds.
        if not wait(process, lambda before=inode, least=least: file_of(out) != before and done(out) >= least):
            break
        inode = file_of(out)
        in_a_save = number % 3 == 1
        if in_a_save:
            if not wait(process, lambda: saving(out)):
                break
        else:
            time.sleep(choice.uniform(0, 0.1))
        killed = kill_one(process, choice)
        happened += killed
        in_save += killed * in_a_save
    output = output_of(process, out)
    assert process.returncode == 0, output
    return happened, in_save, output


def assert_as_if_nothing_had_happened(out: Path, undisturbed: Path) -> None:
    assert losses(out) == losses(undisturbed)
    assert_same_state(out, undisturbed)
    assert checkpoint_steps(out) == checkpoint_steps(undisturbed)
    left = {path.relative_to(out) for path in out.rglob("*")}
    assert left == {path.relative_to(undisturbed) for path in undisturbed.rglob("*")}
    assert processes_of(out) == []


def kills_that_cost_nothing(
    root: Path, folder: Path, mode: str, steps: int, kills: int, seed: int
) -> tuple[int, int]:
    """How many happened, and how many of them during a write; the run is as one without any."""
    undisturbed = train_to_end(root, folder / "undisturbed", "--optim.steps", str(steps), ranks=2, mode=mode)
    happened, in_save, _ = disturb(root, folder / "run", mode, steps, kills=kills, seed=seed)
    assert_as_if_nothing_had_happened(folder / "run", undisturbed)
    return happened, in_save


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_killed_ranks_cost_nothing_under_torchrun(root: Path, tmp_path: Path, mode: str) -> None:
    assert kills_that_cost_nothing(root, tmp_path, mode, steps=30, kills=2, seed=1) == (2, 1)


@pytest.mark.parametrize(
    ("mode", "rank", "moment"),
    [
        ("ddp", 1, "step"),
        ("fsdp", 0, "save"),
        *(
            pytest.param(mode, rank, moment, marks=pytest.mark.slow)
            for mode, rank, moment in (("ddp", 0, "save"), ("fsdp", 1, "save"), ("fsdp", 1, "step"))
        ),
    ],
)
def test_a_run_whose_rank_was_killed_goes_on_bit_for_bit(
    root: Path, whole: Whole, tmp_path: Path, mode: str, rank: int, moment: str
) -> None:
    out = tmp_path / "run"
    mishap = {"what": "kill", "rank": rank, "step": 3, "once": str(tmp_path / "killed")}
    if moment == "save":
        mishap["file"] = str(out / "checkpoints" / "*4.partial*" / "*")
    given: dict[str, Any] = {"ranks": 2, "mode": mode, "model": "reconstruction"}
    ended = start(root, out, mishap=mishap, **given)
    assert ended.codes[rank] == -signal.SIGKILL
    assert ended.codes[1 - rank] not in (0, -signal.SIGKILL)  # it notices
    train_to_end(root, out, **given)
    assert_as_if_nothing_had_happened(out, whole(mode, 2, "reconstruction"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_twenty_killed_ranks_cost_nothing(root: Path, tmp_path: Path, mode: str) -> None:
    happened, in_save = kills_that_cost_nothing(root, tmp_path, mode, steps=200, kills=22, seed=2)
    print(f"{mode}: {happened} kills, {in_save} of them during a write")
    assert happened >= 20
    assert in_save >= 5


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("moment", ["step", "save"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_killed_in_a_step_or_a_save_costs_nothing_on_three_ranks(
    root: Path, whole: Whole, tmp_path: Path, mode: str, moment: str, rank: int
) -> None:
    out, once = tmp_path / "run", tmp_path / "killed"
    mishap = {"what": "kill", "rank": rank, "step": 3, "once": str(once)}
    if moment == "save":
        mishap["file"] = str(out / "checkpoints" / "*4.partial*" / "*")
    process = torchrun(root, out, ranks=3, mode=mode, restarts=1, mishap=mishap)
    output = output_of(process, out)
    assert process.returncode == 0, output
    assert once.exists()
    assert_as_if_nothing_had_happened(out, whole(mode, 3))
