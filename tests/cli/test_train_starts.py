"""All ways to start training are the same command.

A module of the package is started in a forked process. A script is started in a new interpreter, and by torchrun too:
its folder is first in Python's path, and must not hide other packages.
"""

import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests import processes

REPOSITORY = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]


@pytest.mark.parametrize(
    ("start", "usage"),
    [
        (["-m", "sa1b", "train"], "-m sa1b train [-h]"),
        (["-m", "sa1b.train"], "usage: python -m sa1b.train [-h]"),
        (["sa1b/train.py"], "usage: python sa1b/train.py [-h]"),
        pytest.param(
            [*TORCHRUN, "-m", "sa1b.train"], "usage: torchrun -m sa1b.train [-h]", marks=pytest.mark.slow
        ),
        pytest.param(
            [*TORCHRUN, "sa1b/train.py"], "usage: torchrun sa1b/train.py [-h]", marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_every_way_to_start_has_the_flags_and_the_package_that_is_installed(
    start: list[str], usage: str
) -> None:
    command = [sys.executable, *start, "--help"]
    run = processes.run if start[0] == "-m" else subprocess.run
    done = run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert usage in done.stdout.splitlines()[0]
    assert "--data.root" in done.stdout
    assert "sa1b train --preset tiny" in done.stdout


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_variable_of_the_launcher_that_is_no_number_is_refused_by_name(name: str) -> None:
    done = processes.run(
        [sys.executable, "-m", "sa1b", "train"],
        env={**os.environ, name: "$SLURM_X"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {name}=$SLURM_X: must be a whole number; torchrun sets it\n"


def test_a_flag_that_went_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    words = ["train", "--logging.mlflow", "experiment", "--out", "run"]
    done = processes.run(
        [sys.executable, "-m", "sa1b", *words], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 2
    assert "--logging.mlflow" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_module_beside_the_script_hides_one_of_another_package() -> None:
    # `torchrun sa1b/train.py` puts the script's folder at the start of Python's path.
    beside = {path.stem for path in (REPOSITORY / "sa1b").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert "train" in beside
    installed = {name for name, packages in packages_distributions().items() if packages != ["sa1b"]}
    assert beside & installed == set()
