"""What `sa1b replay --weights` says about the prompts after the first iteration."""

import pytest

from sa1b.programs.seen.prompts import _distance

ONLY = "only the prompts of the first iteration are certainly those of the run"


@pytest.mark.parametrize(
    ("known", "other", "expected"),
    [
        (4, "", "the weights that the step began with: all prompts are those of the run"),
        (
            4,
            "because",
            "the weights that the step began with: all prompts are those of the run, up to rounding: because",
        ),
        (3, "", f"1 step before those that the step began with; {ONLY}"),
        (7, "", f"3 steps after those that the step began with; {ONLY}"),
        (None, "", f"weights of an unknown step; {ONLY}"),
    ],
)
def test_the_distance_of_the_weights_is_said(known: int | None, other: str, expected: str) -> None:
    assert _distance(known, 5, other) == expected
