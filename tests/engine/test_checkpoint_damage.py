"""A damaged checkpoint is noticed whatever is wrong with it, and the one before it is used."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import sa1b
from tests.train.command import unproved
from tests.train.damage import WAYS, spoil
from tests.train.inside import SAM, make_root, train


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset directory, and a run with the checkpoints 1 and 2."""
    folder = tmp_path_factory.mktemp("pristine")
    words = ("--data.root", make_root(folder), "--optim.steps", 2, "--checkpoint.every", 1)
    train(*SAM, "--optim.warmup", 0, *words, "--out", folder / "run")
    return folder


def newest(run: Path, step: int = 2) -> Path:
    return run / "checkpoints" / f"step-{step:08}"


def weights(run: Path) -> dict[str, torch.Tensor]:
    return dict(sa1b.load_model(run).state_dict())


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("mutations", [30, pytest.param(400, marks=pytest.mark.slow)])
def test_no_mutated_checkpoint_is_accepted(
    mutations: int, pristine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    older, done = weights(newest(pristine / "run", 1)), set()
    assert not equal(older, weights(pristine / "run"))
    for seed in range(mutations):
        shutil.copytree(pristine / "run", run)
        what = spoil(newest(run), newest(run, 1), Random(seed))
        caplog.clear()
        assert equal(weights(run), older), f"{seed}: {what}"
        (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert str(newest(run)) in warning.getMessage()
        done.add(what.split(":")[0].split(" ")[0])
        shutil.rmtree(run)
    assert len(done) >= 7


QUICK = ("_link", "_edit")
OF_RESUME = [pytest.param(way, marks=() if way.__name__ in QUICK else pytest.mark.slow) for way in WAYS[1:]]


@pytest.mark.parametrize("way", OF_RESUME)
def test_a_run_goes_on_from_the_checkpoint_before_a_mutated_one(
    way: Callable[..., str], pristine: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(pristine / "run", run)
    what = way(newest(run), newest(run, 1), Random(1))
    words: tuple[Any, ...] = ("--data.root", pristine / "root", "--optim.steps", 2, "--checkpoint.every", 1)
    done = train(*SAM, "--optim.warmup", 0, *words, "--out", run)
    assert "resuming after step 1 " in done.out, what
    assert not unproved(newest(run)), what  # the step is reached again
    assert equal(weights(run), weights(pristine / "run"))


def test_where_none_is_good_there_is_no_fresh_start_but_an_error_that_lists_them_all(
    pristine: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(pristine / "run", run)
    (newest(run, 1) / "__0_0.distcp").unlink()
    (newest(run) / ".metadata").write_bytes(b"")
    words = ("--data.root", pristine / "root", "--optim.steps", 3)
    for done in (train(*SAM, *words, "--out", run, code=1), train(*SAM, *words, "--init", run, code=2)):
        for part in ("step-00000001", "__0_0.distcp", "step-00000002", ".metadata"):
            assert part in done.err


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_checkpoint_does_not_push_out_the_good_one_before_it(
    keep: int, pristine: Path, tmp_path: Path
) -> None:
    """A run that falls back to step 1 and is killed before its next save still has step 1."""
    run = tmp_path / "run"
    shutil.copytree(pristine / "run", run)
    (newest(run) / "state.json").write_bytes(b"{}")
    shutil.copytree(newest(run), newest(run, 3))
    words = ("--data.root", pristine / "root", "--optim.steps", 2, "--checkpoint.every", 1)
    train(*SAM, "--optim.warmup", 0, *words, "--checkpoint.keep-last", keep, "--out", run)
    good = [step for step in (1, 2, 3) if newest(run, step).exists() and not unproved(newest(run, step))]
    assert good == [1, 2][-keep:]
