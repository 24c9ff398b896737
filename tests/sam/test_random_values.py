"""Counter-based random values on tensors: equal to sa1b.hashing bit for bit, uniform, different for each mask."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sa1b import hashing
from sa1b.sam.clicks import below, kept_branches, normals, random_words, uniforms

examples = settings(max_examples=100, deadline=None, derandomize=True)
words = st.integers(-(2**63), 2**63 - 1)


def some_keys(count: int) -> torch.Tensor:
    return random_words(torch.zeros((), dtype=torch.int64), torch.arange(count))


@examples
@given(words, words, st.lists(words, max_size=5), st.lists(words, max_size=5), words)
def test_words_are_those_of_the_stream(key, first, rows, columns, last):
    down, along = torch.tensor(rows, dtype=torch.int64).reshape(-1, 1), torch.tensor(columns).long()
    found = random_words(torch.tensor(key), first, down, along, last)
    expected = hashing.random_words(key, first, down.numpy(), along.numpy(), last)
    assert found.dtype == torch.int64
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found.numpy().view(np.uint64), expected)


@examples
@given(st.lists(words, max_size=5), words)
def test_every_key_has_its_own_values(keys, number):
    found = random_words(torch.tensor(keys, dtype=torch.int64), number).numpy().view(np.uint64)
    assert found.tolist() == [hashing.random_word(key, number) for key in keys]


def test_uniforms_lie_strictly_between_0_and_1():
    ends = uniforms(torch.tensor([0, -1, 2**63 - 1, -(2**63)]))
    assert ends.dtype == torch.float32
    assert ends.tolist() == [2.0**-24, 1 - 2.0**-24, 0.5 - 2.0**-24, 0.5 + 2.0**-24]


def test_uniforms_are_even():
    found = uniforms(some_keys(100_000)).numpy()
    counts = np.histogram(found, 20, (0, 1))[0]
    assert ((counts - 5000) ** 2 / 5000).sum() < 50  # 19 degrees of freedom: probability 1e-4
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 5 / len(found) ** 0.5


@examples
@given(st.lists(st.tuples(words, st.integers(1, 2**62)), min_size=1, max_size=8))
def test_bounded_values_are_the_remainder_of_63_bits(pairs):
    sampled, bounds = torch.tensor(pairs).T
    expected = [(word % 2**64 >> 1) % bound for word, bound in pairs]
    assert below(sampled, bounds).tolist() == expected


def test_normal_values_have_the_moments_of_the_normal_distribution():
    found = normals(some_keys(200_000), 3).double()
    assert abs(found.mean()) < 0.01
    assert abs(found.var() - 1) < 0.015
    assert abs((found**3).mean()) < 0.03
    assert (
        abs((found**4).mean() - 2.9) < 0.06
    )  # the sum of twelve uniform numbers; 3 for the normal distribution
    assert abs((found.abs() < 1).double().mean() - 0.6827) < 0.01


def test_an_image_goes_through_the_same_blocks_in_whatever_batch():
    keys = some_keys(12)
    together = kept_branches(keys, 8, 0.5)
    assert together.shape == (12, 8, 2)
    assert together.dtype == torch.bool
    order = torch.tensor([7, 3, 11])
    assert torch.equal(kept_branches(keys[order], 8, 0.5), together[order])


def test_branches_are_left_out_at_rates_that_grow_linearly_from_none():
    left_out = (~kept_branches(some_keys(20_000), 5, 0.4)).double().mean(dim=0)
    assert (left_out[0] == 0).all()
    rates = torch.tensor([0, 0.1, 0.2, 0.3, 0.4]).double()[:, None].expand(-1, 2)
    torch.testing.assert_close(left_out, rates, atol=0.015, rtol=0)
    assert kept_branches(some_keys(100), 1, 0.4).all()


def test_attention_and_mlp_are_left_out_independently():
    attention, mlp = (~kept_branches(some_keys(20_000), 5, 0.4)[:, -1]).double().unbind(dim=1)
    assert abs((attention * mlp).mean() - 0.16) < 0.01
