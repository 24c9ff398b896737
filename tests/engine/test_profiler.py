"""The profile of some steps: recorded after a warm-up, written as a trace and a table."""

import json
import re
from pathlib import Path

import pytest
import torch

from sa1b.engine.watch.control import Control
from sa1b.engine.watch.profiler import step_profiler
from sa1b.engine.watch.signals import WriteError
from tests.engine.stream_root import place_of


def profiled(folder: Path, steps: tuple[int, int], first: int, until: int, said: list[str]) -> list[str]:
    """Run steps under the profiler; returns the steps in the trace. Rank 1 of 2."""
    control = Control(place_of())
    profiler = step_profiler(steps, first, folder, place_of(1, 2), control, said.append)
    for step in range(first, until):
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        if profiler is not None:
            profiler.step()
    if profiler is not None:
        profiler.stop()
    control.check()
    path = folder / "trace-1.json"
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]] if said else []
    return sorted(name for name in set(names) if re.fullmatch(r"step \d+", name))


def test_the_first_and_last_step_are_those_of_the_flag_and_the_table_has_their_operations(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    assert profiled(tmp_path, (3, 5), 0, 8, said) == ["step 3", "step 4", "step 5"]
    assert said == [
        f"profile: costliest operations in {tmp_path}/operations-1.txt, trace in {tmp_path}/trace-1.json; "
        "each rank has its own"
    ]
    title, header, *rows, legend = (tmp_path / "operations-1.txt").read_text().splitlines()
    assert title == "the 10 costliest operations in 3 steps of rank 1, by their own time on the CPU"
    assert header.split() == ["operation", "calls", "own", "ms", "share", "total", "ms"]
    assert legend.startswith("own: without the operations that it calls")
    found = {row[:60].strip(): row[60:].split() for row in rows}
    assert found["aten::mm"][0] == found["aten::matmul"][0] == "3"  # one product in each step
    assert len(rows) <= 10
    own = [float(columns[1].replace(",", "")) for columns in found.values()]
    assert own == sorted(own, reverse=True)
    assert float(found["aten::matmul"][1]) < float(found["aten::matmul"][3])  # it calls aten::mm


@pytest.mark.parametrize(
    ("steps", "first", "until", "recorded"),
    [
        ((0, 1), 0, 4, ["step 1"]),  # no step before the first one can warm up
        ((3, 5), 4, 8, ["step 5"]),  # the run resumed at step 4
        ((3, 5), 5, 8, []),
        ((3, 5), 9, 12, []),
        ((3, 5), 0, 5, ["step 3", "step 4"]),  # the run was stopped
        ((3, 5), 0, 3, []),
    ],
)
def test_a_step_that_cannot_be_recorded_is_left_out(
    steps: tuple[int, int], first: int, until: int, recorded: list[str], tmp_path: Path
) -> None:
    said: list[str] = []
    assert profiled(tmp_path, steps, first, until, said) == recorded
    assert len(said) == (recorded != [])
    assert len(list(tmp_path.iterdir())) == (2 if recorded else 0)


def test_a_table_that_cannot_be_written_is_a_failed_write(tmp_path: Path) -> None:
    (tmp_path / "operations-1.txt").mkdir()
    with pytest.raises(WriteError, match=r"operations-1\.txt.* cannot be written"):
        profiled(tmp_path, (1, 1), 0, 2, [])
