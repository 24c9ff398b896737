"""The annotation file as columns: exact for any input; a seeded part of the mutations (annotation_fuzz.py)."""

import pytest

from tests.shards import annotation_fuzz


@pytest.mark.parametrize("mutations", [1_500, pytest.param(15_000, marks=pytest.mark.slow)])
def test_mutated_files_are_refused_or_given_back_exactly(mutations: int) -> None:
    verdicts = annotation_fuzz.fuzz(mutations, seed=1)
    # The mutations reach every kind of verdict.
    assert {"valid", "odd", "invalid_json", "bad_rle", "missing_key", "wrong_type", "mask_size"} <= set(
        verdicts
    )
    assert min(verdicts["valid"], verdicts["odd"], verdicts["bad_rle"]) > mutations / 50
