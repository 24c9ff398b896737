"""Division of steps among ranks and micro-batches: each sample once, equal numbers, complete steps on resume."""

import math
from itertools import islice

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sa1b.stream.order import Order, Sequential
from sa1b.stream.plan import MicroBatch, Plan

examples = settings(deadline=None, max_examples=60)


def plans(order: Order | Sequential, batch: int, micro: int, world_size: int) -> list[Plan]:
    return [Plan(order, batch, micro, rank, world_size) for rank in range(world_size)]


def steps(ranks: list[Plan], position: int, count: int) -> list[list[list[MicroBatch]]]:
    """The micro-batches of each step and rank: found[step][rank]."""
    pieces = pieces_of(ranks[0])
    taken = [list(islice(plan.micro_batches(position), count * pieces)) for plan in ranks]
    return [[rank[step * pieces : (step + 1) * pieces] for rank in taken] for step in range(count)]


def pieces_of(plan: Plan) -> int:
    """Micro-batches of a rank in a step: as many as the largest slice of any rank needs."""
    return math.ceil(math.ceil(plan.global_batch / plan.world_size) / plan.micro_batch)


def union(step: list[list[MicroBatch]]) -> list[int]:
    return [position for rank in step for piece in rank for position in range(piece.start, piece.stop)]


def test_every_small_step_is_the_same_for_every_number_of_ranks_and_micro_batches() -> None:
    order = Order(29, "d", 0)
    for batch in range(1, 14):
        for world_size in range(1, batch + 1):
            for micro in range(1, batch + 2):
                for i, step in enumerate(steps(plans(order, batch, micro, world_size), 5, 3)):
                    assert union(step) == list(range(5 + i * batch, 5 + (i + 1) * batch))
                    assert len({len(rank) for rank in step}) == 1


@examples
@given(st.integers(1, 300), st.integers(0, 2**40), st.data())
@example(256, 0, None)
@example(7, 11, None)
def test_any_step_is_the_same_for_any_number_of_ranks_and_micro_batches(
    batch: int, position: int, data: st.DataObject | None
) -> None:
    """Without data: 256 and 7 samples over 3 ranks, two at a time."""
    world_size = 3 if data is None else data.draw(st.integers(1, batch))
    micro = 2 if data is None else data.draw(st.integers(1, batch + 3))
    ranks = plans(Order(1000, "d", 0), batch, micro, world_size)
    for i, step in enumerate(steps(ranks, position, 2)):
        begin, end = position + i * batch, position + (i + 1) * batch
        assert union(step) == list(range(begin, end))
        for rank in step:
            assert len(rank) == pieces_of(ranks[0])
            assert all(piece.stop - piece.start <= micro for piece in rank)
            # The state is at the start of the step until the step is complete.
            assert [piece.position for piece in rank] == [begin] * (len(rank) - 1) + [end]


@examples
@given(st.integers(1, 60), st.integers(0, 200), st.data())
def test_from_any_batch_on_a_plan_goes_on_as_if_never_stopped(
    batch: int, stopped: int, data: st.DataObject
) -> None:
    world_size = data.draw(st.integers(1, batch))
    rank = data.draw(st.integers(0, world_size - 1))
    plan = Plan(Order(53, "d", 1), batch, data.draw(st.integers(1, batch)), rank, world_size)
    pieces = pieces_of(plan)
    whole = list(islice(plan.micro_batches(0), stopped + 2 * pieces))
    again = list(islice(plan.micro_batches(whole[stopped].position), pieces))
    first = (stopped + 1) // pieces * pieces  # an unfinished step is repeated completely
    assert again == whole[first : first + pieces]


@examples
@given(st.integers(20, 200), st.data())
def test_four_ranks_then_two_then_three_with_other_batches_lose_and_repeat_nothing(
    count: int, data: st.DataObject
) -> None:
    order = Order(count, "d", 2)
    position, taken = 0, list[int]()
    for world_size in (4, 2, 3, 1):
        batch = data.draw(st.integers(world_size, 40))
        ranks = plans(order, batch, data.draw(st.integers(1, 9)), world_size)
        done = steps(ranks, position, data.draw(st.integers(1, 4)) if world_size > 1 else 1 + count // batch)
        taken += [p for step in done for p in union(step)]
        (position,) = {rank[-1].position for rank in done[-1]}  # every rank is at the same position
    assert taken == list(range(position))
    assert sorted(order.rows(np.array(taken[:count])).tolist()) == list(range(count))


@examples
@given(st.integers(1, 100), st.integers(1, 40), st.data())
def test_an_evaluation_ends_on_every_rank_after_the_same_number_of_micro_batches(
    count: int, batch: int, data: st.DataObject
) -> None:
    world_size = data.draw(st.integers(1, batch))
    ranks = plans(Sequential(count), batch, data.draw(st.integers(1, batch)), world_size)
    taken = [list(plan.micro_batches(0)) for plan in ranks]
    assert len({len(rank) for rank in taken}) == 1
    seen = sorted(p for rank in taken for piece in rank for p in range(piece.start, piece.stop))
    assert seen == list(range(-(-count // batch) * batch))


def test_ranks_without_a_sample_are_refused() -> None:
    with pytest.raises(ValueError, match="global_batch=4: has 4 samples for 5 ranks"):
        next(Plan(Order(9, "d", 0), 4, 1, 0, 5).micro_batches(0))
