"""Counter-based random values: known results, equal results of both forms, uniformity."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sa1b.hashing import Purpose, below, permutation, random_word, random_words, uniforms

examples = settings(max_examples=100, deadline=None, derandomize=True)
words = st.integers(0, 2**64 - 1)


def test_the_published_sequence():
    # SplitMix64 from seed 1234567.
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [random_word(1234567, i) for i in range(5)] == expected
    assert random_words(1234567, np.arange(5)).tolist() == expected


def test_a_further_number_goes_on_from_the_draw():
    assert random_word(1, 2, 3) == random_word(random_word(1, 2), 3)
    assert random_word(5) == 5
    assert random_word(-1, -2) == random_word(2**64 - 1, 2**64 - 2)


def test_purposes_keep_their_numbers():
    assert {purpose.name: int(purpose) for purpose in Purpose} == {
        "SUBSTITUTE": 1,
        "MASKS": 2,
        "COVERAGE": 3,
        "FLIP": 4,
        "TRANSFORM": 5,
        "POINT": 6,
        "PROMPT": 7,
        "SUBSET": 8,
        "VISIT": 9,
        "FIRST_PROMPT": 17,
        "BOX_NOISE": 18,
        "REST": 19,
        "CLICK": 20,
        "DROP_PATH": 21,
        "GALLERY": 22,
        "CACHE": 23,
        "TEXT": 24,
        "MASK_ID": 25,
        "GENERATOR": 26,
    }


@examples
@given(words, words, st.lists(words, max_size=5), st.lists(words, max_size=5), words)
def test_arrays_are_single_draws_broadcast(seed, first, rows, columns, last):
    down = np.array(rows, np.uint64).reshape(-1, 1)
    along = np.array(columns, np.uint64)
    found = random_words(seed, first, down, along, last)
    assert found.shape == (len(rows), len(columns))
    assert found.dtype == np.uint64
    assert found.tolist() == [
        [random_word(seed, first, row, column, last) for column in columns] for row in rows
    ]


def test_negative_and_narrow_arrays_count_like_numbers():
    for dtype in (np.int64, np.int32, np.int8):
        assert random_words(3, np.array([-1, 5], dtype)).tolist() == [random_word(3, -1), random_word(3, 5)]
    assert int(random_words(3, 4)) == random_word(3, 4)


@examples
@given(words, st.integers(1, 2**40))
def test_bounds_hold(seed, bound):
    found = below(random_words(seed, np.arange(50)), bound)
    assert found.dtype == np.int64
    assert ((found >= 0) & (found < bound)).all()


def test_a_bound_for_each_draw():
    bounds = np.array([1, 2, 3, 1000])
    assert (below(random_words(0, np.arange(4)), bounds) < bounds).all()


def test_draws_are_even_along_every_number_of_a_key():
    for found in (
        uniforms(0, np.arange(100_000)),
        uniforms(0, Purpose.FLIP, np.arange(100_000), 3),
        uniforms(0, Purpose.POINT, 7, np.arange(100_000)),
        np.array([uniforms(seed, 1, 2) for seed in range(2000)]),
    ):
        assert found.min() > 0
        assert found.max() < 1
        counts = np.histogram(found, 20, (0, 1))[0]
        expected = len(found) / 20
        assert ((counts - expected) ** 2 / expected).sum() < 50  # 19 degrees of freedom: probability 1e-4
        assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 5 / len(found) ** 0.5


@examples
@given(st.integers(0, 200), words, words)
def test_a_permutation_is_one(count, seed, image_id):
    found = permutation(count, seed, Purpose.MASKS, image_id, 0)
    assert sorted(found.tolist()) == list(range(count))
    if count > 20:
        assert (found != permutation(count, seed, Purpose.MASKS, image_id, 1)).any()
