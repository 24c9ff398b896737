"""Pixels to runs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sa1b.masks import Runs, raster


@given(st.data())
def test_runs_of_pixels_draw_the_pixels(data):
    shape = tuple(data.draw(st.tuples(st.integers(0, 4), st.integers(1, 9), st.integers(1, 9))))
    drawn = data.draw(st.binary(min_size=math.prod(shape), max_size=math.prod(shape)))
    pixels = (np.frombuffer(drawn, np.uint8) & 1).astype(bool).reshape(shape)
    runs = Runs.from_pixels(pixels).check()
    assert (raster.rasterize(runs).astype(bool) == pixels).all()
    # Canonical: only the first run may have the length 0.
    assert all((mask[1:] > 0).all() for mask in runs)


def test_what_has_no_pixels_is_refused():
    with pytest.raises(ValueError, match=r"\[3, 4\]"):
        Runs.from_pixels(np.zeros((3, 4), bool))
