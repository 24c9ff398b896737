"""The source pixel that a target pixel reads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sa1b.masks import SizeError, grid
from tests.masks.samples import examples

lengths = st.one_of(st.integers(1, 8), st.integers(1, 400))


def frame_sources(length, longer, image_size, size):
    """The documented formula of the frame: source pixels, -1 for background."""
    taken = max(1, (2 * length * image_size + longer) // (2 * longer))
    return [
        ((2 * dst + 1) * image_size * length) // (2 * size * taken)
        if (2 * dst + 1) * image_size < 2 * size * taken
        else -1
        for dst in range(size)
    ]


@examples
@given(lengths, lengths, lengths, lengths)
def test_resized_axes_read_the_pixel_under_the_centre(height, width, target_height, target_width):
    axes = grid.resized((height, width), (target_height, target_width))
    for axis, n, m in zip(axes, (height, width), (target_height, target_width), strict=True):
        assert axis.sources().tolist() == [((2 * dst + 1) * n) // (2 * m) for dst in range(m)]


@examples
@given(lengths, lengths, lengths, lengths)
def test_framed_axes_follow_the_formula(height, width, image_size, size):
    rows, columns = grid.framed((height, width), image_size, size)
    longer = max(height, width)
    assert rows.sources().tolist() == frame_sources(height, longer, image_size, size)
    assert columns.sources().tolist() == frame_sources(width, longer, image_size, size)


@examples
@given(lengths, lengths, lengths, lengths)
def test_firsts_are_where_the_sources_begin(height, width, image_size, size):
    for axis in (
        *grid.resized((height, width), (image_size, size)),
        *grid.framed((height, width), image_size, size),
    ):
        sources = axis.sources()
        read = sources[sources >= 0]
        np.testing.assert_array_equal(grid.firsts(axis), np.searchsorted(read, np.arange(axis.source + 1)))


@examples
@given(lengths, lengths, st.integers(1, 600))
def test_the_frame_seen_at_its_own_size_holds_the_image_at_its_framed_size(height, width, image_size):
    taken = grid.framed_size(height, width, image_size)
    framed = grid.framed((height, width), image_size, image_size)
    resized = grid.resized((height, width), taken)
    assert max(taken) == image_size
    for frame_axis, image_axis in zip(framed, resized, strict=True):
        sources = frame_axis.sources()
        np.testing.assert_array_equal(sources[: image_axis.target], image_axis.sources())
        assert (sources[image_axis.target :] == -1).all()


def test_the_size_of_an_image_in_its_frame():
    assert grid.framed_size(1500, 2250, 1024) == (683, 1024)
    assert grid.framed_size(2250, 1500, 1024) == (1024, 683)
    assert grid.framed_size(1, 5000, 1024) == (1, 1024)


def test_impossible_sizes_are_refused():
    for size in ((0, 3), (3, -1), (2.0, 2)):
        with pytest.raises(SizeError):
            grid.resized(size, (3, 3))
        with pytest.raises(SizeError):
            grid.resized((3, 3), size)
    with pytest.raises(SizeError):
        grid.framed((3, 3), 0, 3)
    with pytest.raises(ValueError, match="too large"):
        grid.resized((2**32 - 1, 1), (2**32 - 5, 1))


def test_the_tables_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        grid.firsts(grid.resized((3, 3), (5, 5))[0])[0] = 1
