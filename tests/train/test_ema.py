"""The running mean of the weights: the same in all modes, exact after a resume, evaluated and exported."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sa1b.engine.weights import find_weights
from sa1b.sam.published import read_tensors
from tests.train.command import assert_same_state, losses, newest, start, tensors, train_to_end

# A key's bias has a gradient of rounding errors alone: a large epsilon keeps Adam from full steps of them.
SETTINGS = ("--optim.epsilon", "1e-4")
EMA = ("--optim.ema", "0.5", *SETTINGS)
Run = Callable[[str, int], Path]
MODES = [("none", 1), ("fsdp", 2), pytest.param("ddp", 2, marks=pytest.mark.slow)]


@pytest.fixture(scope="session")
def run(whole: Callable[..., Path]) -> Run:
    return lambda mode, ranks: whole(mode, ranks, "reconstruction", *EMA)


def means(out: Path) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors(newest(out)).items() if name.endswith(".ema")}


@pytest.mark.parametrize(("mode", "ranks"), MODES)
def test_it_is_the_same_in_all_modes_and_the_training_is_not_changed_by_it(
    root: Path, run: Run, tmp_path: Path, mode: str, ranks: int
) -> None:
    own, single = means(run(mode, ranks)), means(run("none", 1))
    assert own.keys() == single.keys() != set()
    for name, mean in own.items():
        torch.testing.assert_close(mean, single[name], rtol=1e-4, atol=1e-6)
    without = train_to_end(root, tmp_path / "run", *SETTINGS, ranks=ranks, mode=mode, model="reconstruction")
    assert losses(without) == losses(run(mode, ranks))
    assert means(without) == {}


# One process: test_a_run_that_has_it_does_not_go_on_without_it.
@pytest.mark.parametrize(("mode", "ranks"), MODES[1:])
def test_it_goes_on_bit_for_bit(root: Path, run: Run, tmp_path: Path, mode: str, ranks: int) -> None:
    out = tmp_path / "run"
    given = {"ranks": ranks, "mode": mode, "model": "reconstruction"}
    train_to_end(root, out, *EMA, mishap={"what": "stop", "rank": ranks - 1, "step": 2}, **given)
    train_to_end(root, out, *EMA, **given)
    assert_same_state(out, run(mode, ranks))


def test_it_is_what_a_checkpoint_exports(run: Run) -> None:
    out = run("none", 1)
    saved = tensors(newest(out))
    _, found = find_weights(out, read_tensors)
    for name, weight in found.items():
        assert torch.equal(weight, saved[f"optimizer.{name}.ema"])
    assert any(not torch.equal(weight, saved[f"model.{name}"]) for name, weight in found.items())


def test_a_run_that_has_it_does_not_go_on_without_it(root: Path, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train_to_end(root, out, *EMA, mishap={"what": "stop", "step": 2}, model="reconstruction")
    ended = start(root, out, *SETTINGS, model="reconstruction")
    assert ended.codes == [2]
    assert ended.outputs[0].strip().splitlines()[-1] == (
        f"error: --out {out}: was trained with --optim.ema 0.5, this run has none; pass --optim.ema 0.5, or another "
        f"--out with --init {out}"
    )
    assert means(out) != {}
    train_to_end(root, out, *EMA, model="reconstruction")
    assert_same_state(out, run("none", 1))


def test_a_run_without_it_may_go_on_with_it_and_says_so(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train_to_end(root, out, *SETTINGS, mishap={"what": "stop", "step": 2}, model="reconstruction")
    changed = ("--optim.lr", "0.002", "--data.flip", "0.75")
    ended = start(root, out, *EMA, *changed, model="reconstruction", ranks=2, mode="ddp")
    assert ended.codes == [0, 0]
    (line,) = (line for line in ended.outputs[0].splitlines() if line.startswith("settings that differ"))
    assert line.startswith("settings that differ from those of step 3: ")
    for part in ("--data.flip 0.0 -> 0.75", "--optim.lr ", "--optim.ema 0.0 -> 0.5"):
        assert part in line
    assert (
        "\nwarning: the state was saved by a stream with other options: flip 0.0, now 0.75. The "
        in ended.outputs[0]
    )
    assert ended.outputs[1] == ""
    assert "the running mean (--optim.ema) starts from the weights of step 3\n" in ended.outputs[0]
    assert means(out) != {}


def test_a_decay_of_one_is_refused(root: Path, tmp_path: Path) -> None:
    ended = start(root, tmp_path / "run", "--optim.ema", "1", model="reconstruction")
    assert ended.codes == [2]
    assert "--optim.ema 1: must be from 0 to below 1" in ended.outputs[0]
