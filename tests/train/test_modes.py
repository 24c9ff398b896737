"""Runs with a sharded optimizer and with compressed gradients: stopped, killed, resumed in other modes."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.command import (
    assert_same_state,
    checkpoint_steps,
    losses,
    newest,
    start,
    tensors,
    train_to_end,
)

Whole = Callable[[str, int], Path]
POWERSGD = ("--parallel.compress", "powersgd:2", "--parallel.compress-after", "2")


def test_zero1_has_the_losses_of_one_process(whole: Whole) -> None:
    assert losses(whole("zero1", 2)) == pytest.approx(losses(whole("none", 1)), rel=1e-5, abs=0)


def test_zero1_that_is_killed_resumes_bit_for_bit(root: Path, whole: Whole, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = start(
        root,
        out,
        ranks=2,
        mode="zero1",
        mishap={"what": "kill", "rank": 1, "step": 4, "once": str(tmp_path / "once")},
    )
    assert ended.codes[1] == -9
    assert ended.codes[0] == 1
    train_to_end(root, out, ranks=2, mode="zero1")
    assert losses(out) == losses(whole("zero1", 2))
    assert_same_state(out, whole("zero1", 2))


@pytest.mark.slow
@pytest.mark.parametrize("modes", [("zero1", 2, "fsdp", 3), ("fsdp", 3, "zero1", 2), ("zero1", 3, "none", 1)])
def test_zero1_resumes_from_other_modes_and_they_from_it(
    root: Path, whole: Whole, tmp_path: Path, modes: tuple[str, int, str, int]
) -> None:
    out = tmp_path / "run"
    train_to_end(root, out, ranks=modes[1], mode=modes[0], mishap={"what": "stop", "rank": 0, "step": 2})
    train_to_end(root, out, ranks=modes[3], mode=modes[2])
    assert losses(out) == pytest.approx(losses(whole("none", 1)), rel=1e-4, abs=0)


@pytest.fixture(scope="module")
def compressed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with PowerSGD on two ranks."""
    out = tmp_path_factory.mktemp("compressed") / "run"
    return train_to_end(root, out, *POWERSGD, ranks=2, mode="ddp")


def test_powersgd_resumes_bit_for_bit_with_the_errors_of_each_rank(
    root: Path, compressed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    train_to_end(root, out, *POWERSGD, ranks=2, mode="ddp", mishap={"what": "stop", "rank": 1, "step": 3})
    assert checkpoint_steps(out)[-1] == 4
    saved = tensors(newest(out))
    assert {f"compression.{rank}.error.0" for rank in (0, 1)} < set(saved)
    assert not saved["compression.0.error.0"].equal(saved["compression.1.error.0"])
    train_to_end(root, out, *POWERSGD, ranks=2, mode="ddp")
    assert losses(out) == losses(compressed)
    assert_same_state(out, compressed)


@pytest.mark.parametrize(
    ("ranks", "flags", "reason"),
    [
        (3, POWERSGD, "it was saved by another number of ranks"),
        (2, ("--parallel.compress", "powersgd:1"), "powersgd:2 --parallel.bucket 25"),
        pytest.param(1, ("--parallel.mode", "none"), None, marks=pytest.mark.slow),
    ],
)
def test_the_errors_are_dropped_with_a_message_where_they_do_not_fit(
    root: Path, compressed: Path, tmp_path: Path, ranks: int, flags: tuple[str, ...], reason: str | None
) -> None:
    out = tmp_path / "run"
    shutil.copytree(compressed, out)
    ended = start(
        root, out, *flags, "--optim.steps", "7", ranks=ranks, mode="none" if reason is None else "ddp"
    )
    assert ended.codes == [0] * ranks, "\n".join(ended.outputs)
    assert ("error feedback of PowerSGD is dropped" in ended.outputs[0]) == (reason is not None)
    if reason is not None:
        assert reason in ended.outputs[0]
    assert losses(out)[:6] == losses(compressed)


def test_unequal_shares_have_the_same_losses_and_resume_with_other_shares(
    root: Path, whole: Whole, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    mishap = {"what": "stop", "rank": 1, "step": 2}
    train_to_end(root, out, "--parallel.shares", "3,1", ranks=2, mode="ddp", mishap=mishap)
    train_to_end(root, out, "--parallel.shares", "1,2,1", ranks=3, mode="fsdp")
    assert losses(out) == pytest.approx(losses(whole("none", 1)), rel=1e-4, abs=0)
