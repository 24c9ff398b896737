"""The order: a random bijection for any size, divided among any number of ranks without loss or repetition."""

import hashlib
import math
import subprocess
import sys
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sa1b.stream import order_kernels
from sa1b.stream.order import (
    Order,
    Sequential,
    _epoch,
    check_global_batch,
    micro_batch_count,
    rank_slice,
)
from sa1b.stream.plan import Plan

ROOT = Path(__file__).parents[2]
examples = settings(max_examples=50, deadline=None, derandomize=True)
counts = st.one_of(
    st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 64, 97, 101, 255, 256, 257, 1009, 1024, 4095, 4096]),
    st.integers(1, 3000),
)
runs = st.sampled_from([1, 2, 3, 7, 8, 32])


def span(start, stop):
    return np.arange(start, stop, dtype=np.int64)


# The bijection


@examples
@given(counts, st.integers(0, 2**40), st.integers(-(2**63), 2**63), runs, st.booleans())
def test_every_epoch_holds_every_row_once(count, epoch, seed, run, endless):
    rows = Order(count, "d", seed, run, endless).rows(span(epoch * count, (epoch + 1) * count))
    assert rows.dtype == np.int64
    np.testing.assert_array_equal(np.sort(rows), np.arange(count))


@pytest.mark.parametrize("count", [65535, 65536, 65537, 99_991, 1 << 20])
def test_large_sizes_are_bijections_too(count):
    rows = Order(count, "d", 1).rows(span(5 * count, 6 * count))
    assert (np.bincount(rows, minlength=count) == 1).all()


def test_the_largest_size_stays_in_range():
    count = 1 << 32
    positions = np.linspace(0, count - 1, 10_000).astype(np.int64)
    rows = Order(count, "d", 1).rows(positions)
    assert rows.min() >= 0
    assert rows.max() < count
    assert len(np.unique(rows)) == len(rows)


@examples
@given(counts, runs, st.integers(0, 20), st.data())
def test_a_call_may_span_epochs_and_take_any_shape(count, run, epoch, data):
    order = Order(count, "d", 3, run)
    start = epoch * count + data.draw(st.integers(0, count - 1))
    positions = span(start, start + data.draw(st.integers(0, 3 * count)))
    one_by_one = [int(order.rows(positions[i : i + 1])[0]) for i in range(min(len(positions), 40))]
    np.testing.assert_array_equal(order.rows(positions)[:40], one_by_one)
    np.testing.assert_array_equal(
        order.rows(positions[::-1].reshape(-1, 1)), order.rows(positions)[::-1, None]
    )


def rows_by_arrays(positions, keys, sizes):
    """The same rows by operations on arrays."""
    count, block, head, units, tall, wide, shift = sizes
    rows = positions.copy()
    inside = (rows >= head) & (rows - head < units * block)
    unit, within = np.divmod(rows[inside] - head, block)
    walking = np.arange(len(unit))
    while len(walking):
        left, right = np.divmod(unit[walking], wide)
        for turn in range(0, order_kernels.ROUNDS, 2):
            left += scatter_by_arrays(right, keys[turn], tall)
            left -= np.where(left >= tall, tall, 0).astype(np.uint64)
            if turn + 1 < order_kernels.ROUNDS:
                right += scatter_by_arrays(left, keys[turn + 1], wide)
                right -= np.where(right >= wide, wide, 0).astype(np.uint64)
        unit[walking] = left * wide + right
        walking = walking[unit[walking] >= units]
    rows[inside] = head + unit * block + within
    rows += shift
    rows -= np.where(rows >= count, count, 0).astype(np.uint64)
    return rows.astype(np.int64)


def scatter_by_arrays(half, key, size):
    thirty_two, factor = np.uint64(32), np.uint64(0xD6E8FEB86659FD93)
    word = half + key
    for _ in range(2):
        word ^= word >> thirty_two
        word *= factor
    return ((word >> thirty_two) * size) >> thirty_two


@examples
@given(counts, runs, st.integers(0, 2**40))
def test_the_compiled_loop_returns_what_operations_on_arrays_return(count, run, epoch):
    keys, place = _epoch(Order(count, "d", 9, run), epoch)
    positions = np.arange(count, dtype=np.uint64)
    loop = np.empty(count, np.int64)
    order_kernels.rows(positions, keys, place, loop)
    np.testing.assert_array_equal(loop, rows_by_arrays(positions, keys, place))


def test_the_order_never_changes_between_versions():
    assert Order(10, "ab", 0).rows(span(0, 20)).tolist() == [
        1,
        9,
        2,
        5,
        6,
        3,
        7,
        0,
        8,
        4,
        0,
        6,
        9,
        2,
        3,
        5,
        1,
        4,
        8,
        7,
    ]
    assert Order(11_185_362, "ab", 7, 1).rows(span(10**12, 10**12 + 6)).tolist() == [
        5049418,
        9561397,
        6842662,
        8103012,
        7325683,
        10219878,
    ]
    assert Order(100, "ab", 0, 8).rows(span(96, 116)).tolist() == [
        84,
        85,
        86,
        87,
        81,
        82,
        83,
        84,
        57,
        58,
        59,
        60,
        61,
        62,
        63,
        64,
        25,
        26,
        27,
        28,
    ]


def test_orders_of_few_samples_never_change_between_versions_either():
    digest = hashlib.sha256()
    for count in range(1, 41):
        for block_size in (1, 3, 8):
            for endless in (True, False):
                rows = Order(count, "ab", 3, block_size, endless).rows(span(0, 6 * count))
                digest.update(rows.astype("<i8").tobytes())
    assert digest.hexdigest() == "715fbc5c19f2c6919c62a8e123ca13f6252816065d751e6c75fd64aa5e167d0d"


def test_digest_seed_and_epoch_each_give_another_order():
    count = 1000
    rows = Order(count, "a", 0).rows(span(0, count))
    for other in (
        Order(count, "b", 0).rows(span(0, count)),
        Order(count, "a", 1).rows(span(0, count)),
        Order(count, "a", 0).rows(span(count, 2 * count)),
    ):
        assert (rows == other).mean() < 0.01


def test_substitutes_are_rows_that_depend_on_position_and_attempt():
    order = Order(1000, "d", 4)
    taken = [order.substitute(position, attempt) for position in range(50) for attempt in range(4)]
    assert set(taken) <= set(range(1000))
    assert len(set(taken)) > 150
    assert order.substitute(7, 1) == order.substitute(7, 1)


# Ranks and micro-batches


def test_the_worked_example():
    slices = [rank_slice(0, 8, rank, 3) for rank in range(3)]
    assert slices == [(0, 2), (2, 5), (5, 8)]
    assert micro_batch_count(8, 3, 1) == 3
    pieces = Plan(Order(29, "d", 0), 8, 1, 0, 3).micro_batches(0)
    assert [(piece.start, piece.stop) for piece in islice(pieces, 3)] == [(0, 1), (1, 2), (2, 2)]
    assert [rank_slice(256, 256, rank, 8) for rank in (0, 7)] == [(256, 288), (480, 512)]
    assert micro_batch_count(256, 8, 16) == 2
    assert [stop - start for start, stop in (rank_slice(0, 256, rank, 3) for rank in range(3))] == [
        85,
        85,
        86,
    ]
    assert micro_batch_count(256, 3, 16) == 6


@examples
@given(st.integers(0, 2**50), st.integers(1, 600), st.data())
@example(0, 256, None)
@example(11, 7, None)
def test_all_slices_together_are_the_batch_and_all_ranks_run_alike(position, batch, data):
    world_size = 3 if data is None else data.draw(st.integers(1, batch))
    size = 2 if data is None else data.draw(st.integers(1, batch + 5))
    count = micro_batch_count(batch, world_size, size)
    positions = []
    for rank in range(world_size):
        start, stop = rank_slice(position, batch, rank, world_size)
        assert (start, stop) == (
            position + rank * batch // world_size,
            position + (rank + 1) * batch // world_size,
        )
        assert stop - start <= size * count
        positions += range(start, stop)
    assert positions == list(range(position, position + batch))
    assert count == 1 or size * (count - 1) < -(-batch // world_size)  # not one more than needed


@examples
@given(st.integers(1, 40), st.sampled_from([2, 8, 32]), st.integers(0, 2**30), st.data())
def test_slices_never_cut_a_run(units, run, start, data):
    world_size = data.draw(st.integers(1, units))
    slices = [
        rank_slice(start * run, units * run, rank, world_size, block_size=run) for rank in range(world_size)
    ]
    assert slices[0][0] == start * run
    assert slices[-1][1] == (start + units) * run
    assert all(one[1] == other[0] for one, other in pairwise(slices))
    lengths = [stop - first for first, stop in slices]
    assert all(length % run == 0 for length in lengths)
    assert max(lengths) - min(lengths) in (0, run)
    size = data.draw(st.integers(1, 2 * run))
    assert size * micro_batch_count(units * run, world_size, size, block_size=run) >= max(lengths)


def test_slices_that_cannot_be_are_refused():
    for arguments, message in (
        ((3, 4), "global_batch=3: has 3 samples for 4 ranks.*fewer ranks"),
        ((24, 4, 8), "global_batch=24: has 3 blocks of 8 samples for 4 ranks"),
        ((20, 2, 8), "global_batch=20 must be a multiple of block_size=8"),
    ):
        with pytest.raises(ValueError, match=message):
            check_global_batch(*arguments)
    check_global_batch(4, 4)
    check_global_batch(32, 4, 8)
    with pytest.raises(ValueError, match="rank=3 must"):
        rank_slice(0, 8, 3, 3)
    for order, position in ((Order(30, "d", 0, 8), 4), (Order(30, "d", 0, 8, endless=False), 32)):
        with pytest.raises(ValueError, match=f"position={position} must be at the border of two blocks of 8"):
            order.check_step(position)
    Order(30, "d", 0, 8).check_step(0)
    Order(30, "d", 0, 8).check_step(32)
    Order(30, "d", 0, 8, endless=False).check_step(38)


def trained(order, position, stop, batch, world_size, size):
    """The rows of whole steps until `stop`, rank by rank and micro-batch by micro-batch; and the position."""
    rows = []
    while position < stop:
        count = micro_batch_count(batch, world_size, size, block_size=order.block_size)
        for rank in range(world_size):
            first, last = rank_slice(position, batch, rank, world_size, block_size=order.block_size)
            assert last - first <= size * count
            for start in range(first, last, size):
                rows += order.rows(span(start, min(start + size, last))).tolist()
        position += batch
    return rows, position


@examples
@given(st.integers(1, 300), runs, st.data())
def test_resume_at_any_position_is_the_suffix(count, run, data):
    order = Order(count, "d", 5, run)
    whole = order.rows(span(0, 3 * count))
    position = data.draw(st.integers(0, 3 * count))
    again = Order(count, "d", 5, run)
    np.testing.assert_array_equal(again.rows(span(position, 3 * count)), whole[position:])


@examples
@given(st.integers(20, 400), runs, st.integers(0, 2**32), st.data())
def test_other_ranks_and_batches_mid_epoch_lose_and_repeat_nothing(count, run, seed, data):
    order = Order(count, "d", seed, run)
    position, rows = 0, []
    for world_size in (4, 2, 3):
        batch = run * data.draw(st.integers(world_size, 20))
        steps = data.draw(st.integers(1, 6))
        part, position = trained(
            order, position, position + steps * batch, batch, world_size, data.draw(st.integers(1, 9))
        )
        rows += part
    part, position = trained(order, position, count, 7 * run, 3, 2)
    rows += part
    assert rows == order.rows(span(0, position)).tolist()
    assert sorted(rows[:count]) == list(range(count))


# Runs


@examples
@given(st.integers(1, 2000), st.sampled_from([2, 3, 8, 32]), st.integers(0, 1000))
def test_runs_follow_one_another_at_aligned_positions(count, run, epoch):
    first, stop = epoch * count, (epoch + 1) * count
    rows = Order(count, "d", 2, run).rows(span(first, stop))
    inside = (span(first, stop)[:-1] // run) == (span(first, stop)[1:] // run)
    follows = (rows[1:] - rows[:-1]) % count == 1 % count
    assert follows[inside].all()


def test_runs_themselves_are_shuffled_and_cut_elsewhere_each_epoch():
    count, run = 8000, 8
    order = Order(count, "d", 2, run)
    starts = [order.rows(span(epoch * count, (epoch + 1) * count))[::run] for epoch in range(8)]
    assert len({int(one[0] % run) for one in starts}) > 2
    for one in starts:
        assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 5 / math.sqrt(len(one))


def test_how_many_shards_a_batch_spans():
    shards, images = 11_000, 1018
    spans = {}
    for run in (1, 8, 32):
        order = Order(shards * images, "d", 3, run)
        batches = order.rows(span(0, 256 * 100)).reshape(100, 256) // images
        spans[run] = np.mean([len(np.unique(batch)) for batch in batches])
    assert spans[1] == pytest.approx(253, abs=1)
    assert spans[8] == pytest.approx(32.2, abs=1)
    assert spans[32] == pytest.approx(8.2, abs=0.5)


# Evaluation


@examples
@given(st.integers(1, 500), st.integers(1, 64), st.data())
def test_sequential_takes_every_sample_exactly_once(count, batch, data):
    world_size = data.draw(st.integers(1, batch))
    order = Sequential(count)
    seen, lengths = [], []
    for rank in range(world_size):
        mine = []
        for step in range(-(-count // batch)):
            _, rows, valid = order.locate(span(*rank_slice(step * batch, batch, rank, world_size)))
            assert (rows[~valid] == count - 1).all()
            mine += valid.tolist()
            seen += rows[valid].tolist()
        lengths.append(len(mine))
    assert sorted(seen) == list(range(count))
    assert sum(lengths) == -(-count // batch) * batch < count + batch


def test_sequential_by_example():
    order = Sequential(7)
    _, rows, valid = order.locate(span(6, 8))
    assert rows.tolist() == [6, 6]
    assert valid.tolist() == [True, False]


# Randomness: each statistic of 20 seeds has a probable value


def normal(statistic, degrees):
    """A chi-square statistic in standard deviations from its mean."""
    return (statistic - degrees) / math.sqrt(2 * degrees)


def chi_square(table):
    expected = table.sum() / table.size
    return ((table - expected) ** 2 / expected).sum()


@pytest.mark.parametrize("count", [4096, 99_991])
def test_positions_and_rows_are_independent(count):
    positions = np.arange(count)
    found = {"place": [], "low digits": [], "epochs": [], "steps": [], "neighbours": []}
    for seed in range(20):
        order = Order(count, "d", seed)
        rows, later = order.rows(positions), order.rows(positions + count)
        for name, one, other in (
            ("place", positions * 16 // count, rows * 16 // count),
            ("low digits", positions % 16, rows % 16),
            ("epochs", np.argsort(rows) * 16 // count, np.argsort(later) * 16 // count),
        ):
            found[name].append(normal(chi_square(np.bincount(one * 16 + other, minlength=256)), 225))
        steps = (rows[1:] - rows[:-1]) % count
        found["steps"].append(normal(chi_square(np.bincount(steps * 64 // count, minlength=64)), 63))
        found["neighbours"].append(np.corrcoef(rows[:-1], rows[1:])[0, 1] * math.sqrt(count))
    for name, values in found.items():
        assert np.abs(values).max() < 5, name
        assert abs(np.mean(values)) < 5 / math.sqrt(20), name


def test_small_sets_reach_every_permutation():
    for count in (2, 3, 4, 5):
        rows = Order(count, "d", 0).rows(span(0, 3_000 * count)).reshape(-1, count)
        assert len(np.unique(rows, axis=0)) == math.factorial(count)


def test_the_order_imports_no_torch():
    code = "import sys, sa1b.stream.order, sa1b.views.view, sa1b.views.selection; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
