"""Cells of the matrix of `tests.train.matrix`: a quick one, and 200 in the slow suite."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from tests.train.command import train_to_end
from tests.train.matrix import Cell, cells, check

SMALL = [one for one in islice(cells(1), 2000) if one.before[1] + one.after[1] <= 3 and not one.compiled]
EXACT = [one for one in SMALL if {one.before[2], one.after[2]} == {"fp32"}]
# Of the other modes, test_second_model.py has quick ones. Four ranks, of hybrid shards, are slow.
QUICK = [next(one for one in EXACT if mode in one.modes) for mode in ("ddp", "grad_op")]
QUICK += [one for one in SMALL if one not in EXACT][:1]


def test_the_cells_have_every_ordered_pair_of_modes_and_of_precisions() -> None:
    found = list(islice(cells(1), 200))
    assert len({one.modes for one in found}) == 5 * 4
    assert len({(one.before[2], one.after[2]) for one in found}) == 9
    assert all(one.before[1] != one.after[1] for one in found)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(QUICK[0], id="quick"),
        *(
            pytest.param(one, id=f"small-{number}", marks=pytest.mark.slow)
            for number, one in enumerate(QUICK[1:])
        ),
        *(
            pytest.param(one, id=str(number), marks=pytest.mark.slow)
            for number, one in enumerate(islice(cells(1), 200))
        ),
    ],
)
def test_a_killed_run_resumes_in_another_mode_and_equals_one_process(
    root: Path, shared: Callable[[str, Callable[[Path], object]], Path], tmp_path: Path, cell: Cell
) -> None:
    def whole(flags: tuple[str, ...]) -> Path:
        def make(folder: Path) -> None:
            train_to_end(root, folder / "run", *flags, mishap={"what": "record", "compile": True})

        return shared("".join(flags).replace("/", ""), make) / "run"

    check(cell, root, tmp_path / "run", whole)
