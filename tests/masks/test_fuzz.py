"""Mutated strings compared with the oracle; the full count: `python -m tests.masks.fuzz --count 1000000`."""

from tests.masks.fuzz import fuzz


def test_twenty_thousand_mutations_get_the_verdicts_of_the_oracle():
    tally = fuzz(20_000, seed=20)
    assert set(tally.verdicts) == {
        "valid",
        "bad_character",
        "bad_size",
        "cut_number",
        "negative_run",
        "number_too_long",
        "run_overflow",
        "sum_mismatch",
        "wrong_type",
    }
    assert min(tally.verdicts.values()) > tally.cases / 500
