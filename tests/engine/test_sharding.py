"""The groups of parameters that FSDP gathers together."""

import pytest
from torch import nn

from sa1b.engine.ranks.parallel import units
from sa1b.errors import UsageError

FOUND: list[list[nn.Module]] = [
    [nn.Linear(10, 10, bias=False), nn.Linear(10, 5, bias=False)] for _ in range(5)
]


@pytest.mark.parametrize(
    ("groups", "lengths"),
    [
        ("block", [1, 1, 1, 1, 1]),
        ("size:1", [1, 1, 1, 1, 1]),
        ("size:150", [1, 1, 1, 1, 1]),
        ("size:151", [2, 2, 1]),
        ("size:0.3K", [2, 2, 1]),
        ("size:450", [3, 2]),
        ("size:1M", [5]),
        ("none", []),
    ],
)
def test_consecutive_units_are_joined_until_they_have_the_size(groups: str, lengths: list[int]) -> None:
    joined = units(FOUND, groups)
    assert [len(group) for group in joined] == lengths
    if lengths:
        assert [unit for group in joined for unit in group] == FOUND


@pytest.mark.parametrize(
    "groups", ["", "blocks", "size", "size:", "size:0", "size:-1M", "size:1T", "100M", "size: 1"]
)
def test_other_forms_are_refused(groups: str) -> None:
    with pytest.raises(UsageError, match=r"--parallel.wrap .*pass block, none, or a size such as size:100M"):
        units(FOUND, groups)
