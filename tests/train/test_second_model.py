"""The engine trains a model that it has never seen: same loop, same modes, no line of engine/ changed."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import sa1b.engine
from tests.train.command import (
    STEPS,
    assert_same_state,
    figures,
    ids_of_steps,
    losses,
    recorded,
    start,
    tensors,
    train_to_end,
)
from tests.train.mishap import Mishap

Run = Callable[[str, int], Path]
SLOW = [pytest.param(*one, marks=pytest.mark.slow) for one in (("ddp", 2), ("fsdp", 3))]


@pytest.fixture(scope="session")
def second(whole: Callable[..., Path]) -> Run:
    """The folder of an uninterrupted run of the second model."""
    return lambda mode, ranks: whole(mode, ranks, "reconstruction")


def test_it_learns_and_its_own_figures_are_recorded(second: Run) -> None:
    found = losses(second("none", 1))
    assert len(found) == STEPS
    assert found[-1] < 0.9 * found[0]
    assert [error for _, error in figures(second("none", 1), "error")] != found


@pytest.mark.parametrize(("mode", "ranks"), [("fsdp", 2), *SLOW])
def test_losses_are_those_of_a_single_process(second: Run, mode: str, ranks: int) -> None:
    assert losses(second(mode, ranks)) == pytest.approx(losses(second("none", 1)), rel=1e-5, abs=0)


# With fsdp, test_ema.py has a quick one, of this model too.
@pytest.mark.parametrize(
    ("mode", "ranks"), [("none", 1), pytest.param("fsdp", 2, marks=pytest.mark.slow), *SLOW]
)
def test_a_stopped_run_goes_on_bit_for_bit(
    root: Path, second: Run, tmp_path: Path, mode: str, ranks: int
) -> None:
    out = tmp_path / "run"
    given = {"ranks": ranks, "mode": mode, "model": "reconstruction"}
    train_to_end(root, out, mishap={"what": "stop", "rank": ranks - 1, "step": 2}, **given)
    assert len(losses(out)) == 3
    train_to_end(root, out, **given)
    assert losses(out) == losses(second(mode, ranks))
    assert_same_state(out, second(mode, ranks))


@pytest.mark.parametrize(("mode", "ranks"), [("none", 1), pytest.param("ddp", 2, marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_dropout_of_an_uninterrupted_one(
    root: Path, second: Run, tmp_path: Path, mode: str, ranks: int
) -> None:
    given = {"ranks": ranks, "mode": mode, "model": "reconstruction"}
    whole = train_to_end(root, tmp_path / "whole", "--dropout", "0.3", **given)
    out = tmp_path / "run"
    train_to_end(root, out, "--dropout", "0.3", mishap={"what": "stop", "rank": 0, "step": 2}, **given)
    train_to_end(root, out, "--dropout", "0.3", **given)
    assert losses(out) == losses(whole) != losses(second(mode, ranks))
    assert_same_state(out, whole)


def test_world_size_and_mode_may_change_where_it_goes_on(root: Path, second: Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    seen: dict[int, list[list[int]]] = {}
    for mode, ranks, stop in (("ddp", 2, 0), ("none", 1, 2), ("fsdp", 3, None)):
        into = tmp_path / f"seen by {ranks}"
        into.mkdir()
        what = {"what": "record"} if stop is None else {"what": "stop", "step": stop}
        mishap = Mishap({**what, "into": str(into)})
        flags = ("--parallel.timeout", "77", "--data.deadline", "30")
        train_to_end(root, out, *flags, ranks=ranks, mode=mode, mishap=mishap, model="reconstruction")
        # After the first step, also of a resumed run.
        assert (into / "0.timeouts").read_text() == "77.0\n" or ranks == 1
        of_ranks = recorded(into, ranks)
        assert {len(parts) for parts in of_ranks.values()} == {ranks}
        assert not seen.keys() & of_ranks.keys()
        seen |= of_ranks
    assert [[image_id for part in seen[step] for image_id in part] for step in range(STEPS)] == ids_of_steps(
        root, STEPS
    )
    assert losses(out) == pytest.approx(losses(second("none", 1)), rel=1e-5, abs=0)


BRANCH = ("--branch",)


def test_a_branch_that_only_some_steps_use_needs_a_flag_with_ddp(root: Path, tmp_path: Path) -> None:
    given = {"ranks": 2, "mode": "ddp", "model": "reconstruction"}
    alone = train_to_end(root, tmp_path / "alone", *BRANCH, model="reconstruction")
    found = train_to_end(root, tmp_path / "run", *BRANCH, "--parallel.find-unused", **given)
    assert losses(found) == pytest.approx(losses(alone), rel=1e-5, abs=0)


def test_statistics_of_batch_norms_are_shared_and_those_of_a_skipped_step_are_dropped(
    root: Path, tmp_path: Path
) -> None:
    flags = ("--norm", "--data.global-batch", "4", "--parallel.broadcast-buffers")
    flags += ("--optim.steps", "3", "--checkpoint.every", "1", "--checkpoint.keep-last", "3")
    mishap = Mishap({"what": "inf", "step": 1, "times": 1})
    given = {"ranks": 2, "mode": "ddp", "model": "reconstruction", "mishap": mishap}
    out = train_to_end(root, tmp_path / "run", *flags, **given)
    states = [tensors(out / "checkpoints" / f"step-{step:08d}") for step in (1, 2, 3)]
    counts = [int(state["model.norm.num_batches_tracked"]) for state in states]
    assert counts == [1, 1, 2]
    means = [state["model.norm.running_mean"] for state in states]
    assert torch.equal(means[0], means[1])
    assert not torch.equal(means[1], means[2])


def test_it_begins_with_weights_and_a_part_of_it_can_be_frozen(
    root: Path, second: Run, tmp_path: Path
) -> None:
    flags = ("--init", str(second("none", 1)), "--optim.freeze", "blocks", "--optim.layer-decay", "0.5")
    out = train_to_end(root, tmp_path / "run", *flags, model="reconstruction")
    assert losses(out)[0] < losses(second("none", 1))[0]
    ended = start(root, tmp_path / "plan", "--dry-run", model="reconstruction")
    assert ended.codes == [0]
    assert "M parameters at 64 x 64" in ended.outputs[0]


@pytest.mark.parametrize(
    "flags", [("--evaluate-only",), ("--evaluation.view", "v", "--evaluation.every", "2")]
)
def test_a_model_without_an_evaluation_refuses_to_be_evaluated(
    root: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    ended = start(root, tmp_path / "run", *flags, model="reconstruction")
    assert ended.codes == [2]
    assert "the model of ReconstructionConfig has no evaluation" in ended.outputs[0]


NAMES = r"sa1b\.sam|\bSam\b|Interactive|image_encoder\.|mask_decoder|prompt_encoder|focal|dice|\biou"


def test_the_engine_names_no_model() -> None:
    files = Path(str(sa1b.engine.__file__)).parent.rglob("*.py")
    assert {path.name: names for path in files if (names := re.findall(NAMES, path.read_text()))} == {}
