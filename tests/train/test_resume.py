"""A stopped run resumes exactly; and the same run in all modes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.command import assert_same_state, checkpoint_steps, losses, output_of, torchrun, train_to_end

Whole = Callable[[str, int], Path]
SAME = [("none", 1), ("fsdp", 2), ("ddp", 2), ("ddp", 3), ("ddp", 4), ("fsdp", 3)]


@pytest.mark.parametrize(
    ("mode", "ranks"),
    [
        ("ddp", 2),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("ddp", 3), ("fsdp", 2), ("fsdp", 3))),
    ],
)
def test_losses_are_those_of_a_single_process_with_uneven_slices_and_accumulation(
    whole: Whole, mode: str, ranks: int
) -> None:
    assert losses(whole(mode, ranks)) == pytest.approx(losses(whole("none", 1)), rel=1e-5, abs=0)


# Quick ones: test_second_model.py, test_ema.py and test_killed.py, and with distillation and grounding.
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "ranks"), SAME)
def test_a_stopped_run_goes_on_bit_for_bit(
    root: Path, whole: Whole, tmp_path: Path, mode: str, ranks: int
) -> None:
    out = tmp_path / "run"
    mishap = {"what": "stop", "rank": ranks - 1, "step": 2}
    train_to_end(root, out, ranks=ranks, mode=mode, mishap=mishap)
    assert checkpoint_steps(out)[-1] == 3
    train_to_end(root, out, ranks=ranks, mode=mode)
    assert losses(out) == losses(whole(mode, ranks))
    assert_same_state(out, whole(mode, ranks))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_under_torchrun_too_a_stopped_run_goes_on_bit_for_bit(
    root: Path, tmp_path: Path, mode: str, ranks: int
) -> None:
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "run"
    for folder, mishap in (
        (undisturbed, None),
        (out, {"what": "stop", "rank": ranks - 1, "step": 2}),
        (out, None),
    ):
        process = torchrun(root, folder, ranks=ranks, mode=mode, mishap=mishap)
        output = output_of(process, folder)
        assert process.returncode == 0, output
    assert losses(out) == losses(undisturbed)
    assert_same_state(out, undisturbed)
