"""Pixels to runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from sa1b.masks import raster
from sa1b.masks.dense import runs_of


@given(st.data())
def test_runs_of_pixels_draw_the_pixels(data):
    shape = (data.draw(st.integers(0, 4)), *data.draw(array_shapes(min_dims=2, max_dims=2, max_side=9)))
    pixels = data.draw(arrays(np.bool_, shape))
    runs = runs_of(pixels).check()
    assert (raster.rasterize(runs).astype(bool) == pixels).all()
    # Canonical: only the first run may have the length 0.
    assert all((mask[1:] > 0).all() for mask in runs)


def test_what_has_no_pixels_is_refused():
    with pytest.raises(ValueError, match=r"\[3, 4\]"):
        runs_of(np.zeros((3, 4), bool))
