"""The annotation file as columns: exact for any input; a seeded part of the mutations (annotation_fuzz.py)."""

from tests.shards import annotation_fuzz


def test_mutated_files_are_refused_or_given_back_exactly() -> None:
    verdicts = annotation_fuzz.fuzz(15_000, seed=1)
    # The mutations reach every kind of verdict.
    assert {"valid", "odd", "invalid_json", "bad_rle", "missing_key", "wrong_type", "mask_size"} <= set(
        verdicts
    )
    assert min(verdicts["valid"], verdicts["odd"], verdicts["bad_rle"]) > 300
