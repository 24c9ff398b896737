"""Checks of arguments: integers of any library are accepted, other values are refused by name."""

from typing import Any

import numpy as np
import pytest

from sa1b.arguments import number, path, whole_number


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_whole_numbers_become_ints(value: Any) -> None:
    assert type(whole_number("n", value)) is int
    assert whole_number("n", value, 3, 3) == 3
    assert number("n", value) == 3


@pytest.mark.parametrize(
    "value", [3.0, np.float32(3), True, np.True_, "3", None, [3], -1, 4, np.array([1, 2])]
)
def test_other_values_are_no_whole_numbers(value: Any) -> None:
    with pytest.raises(ValueError, match="^n=.* must be a whole number from 0 to 3$"):
        whole_number("n", value, 0, 3)


@pytest.mark.parametrize("value", [0, 1.5, float("nan"), True, "0.5", None, (1,), 1j])
def test_other_values_are_no_numbers(value: Any) -> None:
    with pytest.raises(ValueError, match="^n=.* must be a number above 0, up to 1$"):
        number("n", value, 0, 1, above=0)


@pytest.mark.parametrize("value", [None, 3, "", b"x"])
def test_other_values_are_no_paths(value: Any) -> None:
    with pytest.raises(ValueError, match="^root=.* must be a folder$"):
        path("root", value, "a folder")
