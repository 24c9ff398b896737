"""The mutants fit today's code: each can be applied, and is Python."""

from collections import Counter

import pytest

from tests.mutants.run import REPOSITORY, USUAL, Mutant, mutants

MUTANTS = mutants()
USUAL_ONES = [one for one in MUTANTS if one.number <= USUAL]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.number}")
def test_a_mutant_changes_text_that_occurs_once(mutant: Mutant) -> None:
    for file, (text, changed) in mutant.texts(REPOSITORY).items():
        assert changed != text
        compile(changed, file, "exec")
    assert [room for room in mutant.rooms if not (REPOSITORY / "tests" / room).exists()] == []


def test_there_are_fifty_with_their_own_numbers_and_behaviours() -> None:
    assert [one.number for one in USUAL_ONES] == [*range(1, USUAL + 1)]
    assert [one.number for one in MUTANTS] == sorted({one.number for one in MUTANTS})
    assert len({one.behaviour for one in MUTANTS}) == len(MUTANTS)


def test_ten_and_more_drop_a_flush_and_change_a_random_value() -> None:
    counts = Counter(one.kind for one in USUAL_ONES)
    assert counts.keys() == {"fsync", "draw", "logic"}
    assert min(counts["fsync"], counts["draw"]) >= 10
