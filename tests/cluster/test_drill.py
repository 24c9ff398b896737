"""The failure drill, one run for each launcher and fault; `python -m tests.cluster.drill` makes more."""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.cluster import slurm_node
from tests.processes import REPOSITORY

FAULTS = [
    *[("processes", fault) for fault in ("worker", "driver", "holder")],
    *[("ray", fault) for fault in ("worker", "driver", "holder")],
    *[("nodes", fault) for fault in ("node", "driver")],
    *[("slurm", fault) for fault in ("driver", "holder", "finish")],
]


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "fault"), FAULTS)
def test_a_fault_loses_nothing(launcher: str, fault: str) -> None:
    if launcher == "slurm" and (why := slurm_node.missing()):
        pytest.skip(f"SLURM: {why}")
    if launcher in ("ray", "nodes") and importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    if fault == "holder" and os.geteuid():
        pytest.skip("needs root: another machine is a pid namespace of its own")
    command = [sys.executable, "-m", "tests.cluster.drill", "--launcher", launcher, "--fault", fault]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
