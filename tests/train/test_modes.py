"""Runs with rounded gradients, and with another precision after a resume."""

from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest

from tests.train.command import STEPS, losses, train_to_end

Whole = Callable[..., Path]
MODEL = "reconstruction"


@pytest.mark.parametrize("compress", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_rounded_gradients_have_about_the_same_losses(
    root: Path, whole: Whole, tmp_path: Path, compress: str
) -> None:
    flags = ("--parallel.compress", compress)
    out = train_to_end(root, tmp_path / "run", *flags, ranks=2, mode="ddp", model=MODEL)
    expected = losses(whole("ddp", 2, MODEL))
    assert losses(out) != expected
    assert losses(out) == pytest.approx(expected, rel=0.02)


PRECISIONS = ("fp32", "bf16", "fp16")
CHANGES = [
    (one, other, ema) for one, other in permutations(PRECISIONS, 2) for ema in ((), ("--optim.ema", "0.5"))
]


@pytest.mark.parametrize(
    ("before", "after", "ema"),
    [pytest.param(*one, marks=() if one == ("fp32", "fp16", ()) else pytest.mark.slow) for one in CHANGES],
)
def test_a_run_resumes_with_another_precision(
    root: Path, whole: Whole, tmp_path: Path, before: str, after: str, ema: tuple[str, ...]
) -> None:
    out = tmp_path / "run"
    for precision, mishap in ((before, {"what": "stop", "rank": 0, "step": 2}), (after, None)):
        train_to_end(root, out, *ema, "--parallel.precision", precision, mishap=mishap, model=MODEL)
    assert losses(out)[:3] == pytest.approx(losses(whole("none", 1, MODEL))[:3], rel=0.05)
    assert len(losses(out)) == STEPS or "fp16" in (before, after)
