"""The masks of a visit: at most K, none twice, by the strategy's definition, the same in every process."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sa1b.shards import annotation
from sa1b.shards.annotation import Annotations
from sa1b.stream.sample import STRATEGIES, choose
from tests.shards import tiny

ONE = annotation.parse_annotation(tiny.pair(5)[1], 5).annotations


def image(count: int, image_id: int = 5) -> Annotations:
    """`count` masks of growing area; the scores of the first half are worse."""
    good = np.arange(count) >= count // 2
    return replace(
        ONE,
        image_id=image_id,
        area=np.arange(count) + 1,
        predicted_iou=np.where(good, 1.0, 0.1),
        stability_score=np.ones(count),
        mask_id=np.arange(count),
    )


@given(
    count=st.integers(0, 60),
    limit=st.integers(1, 40),
    strategy=st.sampled_from(STRATEGIES),
    epoch=st.integers(0, 1000),
    seed=st.integers(0, 2**63),
    data=st.data(),
)
def test_a_choice_is_a_set_of_usable_masks_of_the_right_size(
    count, limit, strategy, epoch, seed, data
) -> None:
    usable = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), np.bool_)
    chosen = choose(image(count), usable, limit, strategy, seed, epoch)
    assert chosen.dtype == np.int64
    assert len(chosen) == min(limit, usable.sum())
    assert (np.diff(chosen) > 0).all()
    assert usable[chosen].all()
    assert (choose(image(count), usable, limit, strategy, seed, epoch) == chosen).all()


@given(count=st.integers(1, 70), limit=st.integers(1, 40), cycle=st.integers(0, 50))
def test_coverage_sees_every_mask_once_a_cycle(count: int, limit: int, cycle: int) -> None:
    visits = -(-count // limit)
    usable = np.ones(count, np.bool_)
    seen = [choose(image(count), usable, limit, "coverage", 3, cycle * visits + v) for v in range(visits)]
    assert set(np.concatenate(seen).tolist()) == set(range(count))


def test_uniform_is_uniform() -> None:
    taken = np.zeros(20)
    for epoch in range(3000):
        taken[choose(image(20), np.ones(20, np.bool_), 5, "uniform", 0, epoch)] += 1
    assert taken == pytest.approx(np.full(20, 750), rel=0.12)


def test_area_takes_one_of_each_class() -> None:
    for epoch in range(50):
        chosen = choose(image(40), np.ones(40, np.bool_), 8, "area", 0, epoch)
        assert (chosen // 5 == np.arange(8)).all()


def test_quality_prefers_good_masks() -> None:
    taken = np.zeros(20)
    for epoch in range(1000):
        taken[choose(image(20), np.ones(20, np.bool_), 2, "quality", 0, epoch)] += 1
    assert taken[10:].sum() > 8 * taken[:10].sum()


def test_choices_differ_between_epochs_images_and_seeds() -> None:
    usable = np.ones(50, np.bool_)
    for strategy in STRATEGIES:
        one = choose(image(50), usable, 10, strategy, 0, 0)
        for other in ((image(50), 0, 1), (image(50, image_id=6), 0, 0), (image(50), 1, 0)):
            assert (choose(other[0], usable, 10, strategy, *other[1:]) != one).any()
