"""Counter-based draws: known answers, one form equal to the other, even enough."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sa1b.stream import compiled
from sa1b.stream.draws import Purpose, below, draw, draws, permutation, uniforms

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
    assert [draw(1234567, i) for i in range(5)] == expected
    assert draws(1234567, np.arange(5)).tolist() == expected


def test_a_further_number_goes_on_from_the_draw():
    assert draw(1, 2, 3) == draw(draw(1, 2), 3)
    assert draw(5) == 5
    assert draw(-1, -2) == draw(2**64 - 1, 2**64 - 2)


def test_purposes_keep_their_numbers():
    assert {purpose.name: int(purpose) for purpose in Purpose} == {
        "SUBSTITUTE": 1,
        "MASKS": 2,
        "COVERAGE": 3,
        "FLIP": 4,
        "CROP": 5,
        "POINT": 6,
        "PROMPT": 7,
        "SUBSET": 8,
        "VISIT": 9,
    }


@examples
@given(words, words, st.lists(words, max_size=5), st.lists(words, max_size=5), words)
def test_arrays_are_single_draws_broadcast(seed, first, rows, columns, last):
    down = np.array(rows, np.uint64).reshape(-1, 1)
    along = np.array(columns, np.uint64)
    found = draws(seed, first, down, along, last)
    assert found.shape == (len(rows), len(columns))
    assert found.dtype == np.uint64
    assert found.tolist() == [[draw(seed, first, row, column, last) for column in columns] for row in rows]


def test_negative_and_narrow_arrays_count_like_numbers():
    for dtype in (np.int64, np.int32, np.int8):
        assert draws(3, np.array([-1, 5], dtype)).tolist() == [draw(3, -1), draw(3, 5)]
    assert int(draws(3, 4)) == draw(3, 4)


@pytest.mark.skipif(not compiled.COMPILED, reason="nothing is compiled")
@examples
@given(st.lists(st.tuples(words, words), max_size=8))
def test_the_compiled_loop_and_the_arrays_agree(pairs):
    states, numbers = np.array(pairs, np.uint64).reshape(-1, 2).T.copy()
    loop, arrays = np.empty(len(pairs), np.uint64), np.empty(len(pairs), np.uint64)
    compiled._mix_loop(states, numbers, loop)
    compiled._mix_arrays(states, numbers, arrays)
    np.testing.assert_array_equal(loop, arrays)


@examples
@given(words, st.integers(1, 2**40))
def test_bounds_hold(seed, bound):
    found = below(draws(seed, np.arange(50)), bound)
    assert found.dtype == np.int64
    assert ((found >= 0) & (found < bound)).all()


def test_a_bound_for_each_draw():
    bounds = np.array([1, 2, 3, 1000])
    assert (below(draws(0, np.arange(4)), bounds) < bounds).all()


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
        assert ((counts - expected) ** 2 / expected).sum() < 50  # 19 degrees: chance 1e-4
        assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 5 / len(found) ** 0.5


@examples
@given(st.integers(0, 200), words, words)
def test_a_permutation_is_one(count, seed, image_id):
    found = permutation(count, seed, Purpose.MASKS, image_id, 0)
    assert sorted(found.tolist()) == list(range(count))
    if count > 20:
        assert (found != permutation(count, seed, Purpose.MASKS, image_id, 1)).any()
