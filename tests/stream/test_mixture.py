"""The formula of a mixture: its shares at every prefix, its inverse, and schedules."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sa1b.arguments import BadValue
from sa1b.stream.order import MAX_PERIOD, Mixture, Phase, Sequential, whole_weights
from sa1b.stream.plan import Plan

WEIGHTS = st.lists(st.integers(0, 40), min_size=1, max_size=7).filter(any).map(whole_weights)


def mixture(*weights: tuple[int, ...], starts: tuple[int, ...] = (0,), **options: object) -> Mixture:
    phases = tuple(Phase(start, one) for start, one in zip(starts, weights, strict=True))
    return Mixture((10,) * len(weights[0]), phases, **options)


@settings(max_examples=200, deadline=None)
@given(WEIGHTS)
def test_each_source_has_its_share_of_every_prefix_within_one_sample(weights: tuple[int, ...]) -> None:
    total = sum(weights)
    source, local, valid = mixture(weights).locate(np.arange(3 * total + 5))
    assert valid.all()
    numbers = np.arange(1, len(source) + 1)
    for one, weight in enumerate(weights):
        seen = np.cumsum(source == one)
        assert (np.abs(seen * total - numbers * weight) < total).all()
        assert local[source == one].tolist() == list(range(seen[-1]))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 100))
def test_any_slice_has_its_part_of_two_sources_rounded_down_or_up(a: int, b: int, length: int) -> None:
    weights = whole_weights([a, b])
    total = sum(weights)
    source, *_ = mixture(weights).locate(np.arange(2 * total + length))
    seen = np.concatenate([[0], np.cumsum(source == 0)])
    counts = set((seen[length:] - seen[:-length]).tolist())
    assert counts <= {length * weights[0] // total, -(-length * weights[0] // total)}


@settings(max_examples=100, deadline=None)
@given(WEIGHTS, st.integers(1, 80))
def test_any_slice_has_at_least_its_part_of_each_source_less_two(
    weights: tuple[int, ...], length: int
) -> None:
    total = sum(weights)
    source, *_ = mixture(weights).locate(np.arange(2 * total + length))
    for one, weight in enumerate(weights):
        seen = np.concatenate([[0], np.cumsum(source == one)])
        assert ((seen[length:] - seen[:-length]) * total > length * weight - 2 * total).all()


@settings(max_examples=500, deadline=None)
@given(
    weights=WEIGHTS,
    start=st.integers(0, 10**12),
    ranks=st.sampled_from([1, 3, 8]),
    per_rank=st.integers(1, 9),
    micro=st.integers(1, 9),
)
def test_the_ranks_of_a_step_have_its_samples_once_for_any_ranks_and_micro_batches(
    weights: tuple[int, ...], start: int, ranks: int, per_rank: int, micro: int
) -> None:
    order, size = mixture(weights), per_rank * ranks
    seen = []
    for rank in range(ranks):
        pieces, resumed = Plan(order, size, micro, rank, ranks).micro_batches(start), start
        while resumed == start:
            piece = next(pieces)
            seen += np.stack(order.locate(np.arange(piece.start, piece.stop))[:2], axis=1).tolist()
            resumed = piece.position
        assert resumed == start + size
    expected = np.stack(order.locate(np.arange(start, start + size))[:2], axis=1).tolist()
    assert seen == expected


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_positions_counts_and_their_inverse_agree_with_a_schedule(data: st.DataObject) -> None:
    sources = data.draw(st.integers(1, 4))
    some = st.lists(st.integers(0, 9), min_size=sources, max_size=sources).filter(any).map(whole_weights)
    starts = [0, *sorted(data.draw(st.sets(st.integers(1, 300), max_size=3)))]
    order = mixture(*(data.draw(some) for _ in starts), starts=tuple(starts))
    source, local, _ = order.locate(np.arange(400))
    for one in range(sources):
        assert local[source == one].tolist() == list(range(int((source == one).sum())))
    position = data.draw(st.integers(0, 399))
    assert order.seen(position) == tuple((source[:position] == one).sum() for one in range(sources))
    assert order.position_of(int(source[position]), int(local[position])) == position


def test_a_schedule_changes_the_weights_from_its_position_on() -> None:
    order = mixture((3, 1), (1, 1), starts=(0, 8))
    source, local, _ = order.locate(np.array([7, 0, 8, 9, 10, 11]))
    assert source.tolist() == [0, 0, 0, 1, 0, 1]
    assert local.tolist() == [5, 0, 6, 2, 7, 3]
    assert order.position_of(1, 2) == 9


def test_an_iteration_ends_with_the_first_source_or_with_all() -> None:
    phases = (Phase(0, (3, 1)),)
    endless = Mixture((6, 4), phases)
    assert (endless.endless, endless.count) == (True, 15)
    first, every = (Mixture((6, 4), phases, until) for until in ("first", "all"))
    assert (first.endless, first.count, every.count) == (False, 8, 15)
    assert first.seen(8) == (6, 2)
    assert every.seen(15)[1] == 4 != every.seen(14)[1]
    with pytest.raises(BadValue, match="until='all': source 1 has weight 0 before all its samples are used"):
        Mixture((6, 4), (Phase(0, (3, 1)), Phase(8, (1, 0))), "all")
    assert Mixture((6, 4), (Phase(0, (1, 0)),), "first").count == 6


def test_an_evaluation_reads_each_source_once_one_after_the_other() -> None:
    order = Sequential(5, (2, 3))
    source, local, valid = order.locate(np.arange(8))
    assert source.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert local.tolist() == [0, 1, 0, 1, 2, 2, 2, 2]
    assert valid.tolist() == [True] * 5 + [False] * 3
    assert [order.seen(position) for position in (0, 1, 4, 9)] == [(0, 0), (1, 0), (2, 2), (2, 3)]


def test_weights_are_read_as_they_are_printed_and_reduced() -> None:
    assert whole_weights([3, 1]) == whole_weights([0.75, "1/4"]) == (3, 1)
    assert whole_weights([0.1, 0.2, Fraction(7, 10)]) == (1, 2, 7)
    assert whole_weights([np.int64(4), np.float64(2)]) == (2, 1)
    for bad in (-1, "x", "1/0", float("nan"), float("inf"), True, None, [1]):
        with pytest.raises(BadValue, match=r"weights=1, .*: (must be from 0|.*; pass numbers)"):
            whole_weights([1, bad])
    with pytest.raises(BadValue, match="at least one above 0"):
        whole_weights([0, 0.0])
    with pytest.raises(BadValue, match=r"repeat after 1,123,456,789 positions, and the limit is 1,048,576"):
        whole_weights([0.123456789, 1])
    assert sum(whole_weights([MAX_PERIOD - 1, 1])) == MAX_PERIOD
