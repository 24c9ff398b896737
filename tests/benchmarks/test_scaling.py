"""`benchmarks/scaling.py`: real ranks, and what its figures say."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks import scaling
from tests import processes
from tests.train.command import FLAGS, make_root


def test_two_ranks_are_compared_with_one_in_a_table_and_a_picture(tmp_path: Path) -> None:
    root, picture = make_root(tmp_path / "data"), tmp_path / "scaling.png"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "benchmarks.scaling",
    ]
    own = ["--strong", "4", "--steps", "1", "--rounds", "2", "--picture", str(picture)]
    train = [*FLAGS, "--data.root", str(root), "--parallel.mode", "fsdp", "--parallel.device", "cpu"]
    done = processes.run(
        [*command, *own, *train],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(processes.REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    rows = [dict(zip(head.split(), map(float, line.split()), strict=True)) for line in lines]
    assert [(row["ranks"], row["images/step"]) for row in rows] == [(1, 4), (2, 4)]
    for row in rows:
        assert row["s/step"] > 0
        assert row["images/s"] == pytest.approx(4 / row["s/step"], rel=0.01)
        assert 0 <= row["communication"] < 1
    assert picture.read_bytes()[1:4] == b"PNG"
    assert not (tmp_path / "run").exists()  # it is no run


def test_figures_are_those_of_medians_and_of_the_fewest_ranks() -> None:
    times = {2: [[1.0, 1.0], [3.0, 2.0], [2.0, 2.5]], 8: [[4.0, 3.0], [4.0, 3.0], [9.0, 2.0]]}
    first, second = scaling.compared(times, {2: 4, 8: 16})
    assert (first["images/s"], first["speed-up"], first["efficiency"], first["communication"]) == (2, 2, 1, 0)
    assert (second["images/s"], second["speed-up"], second["efficiency"]) == (4, 4, 0.5)
    assert second["communication"] == 0.25
