"""The runner that looks for tests whose result depends on the machine."""

import json
import sys
from pathlib import Path

import pytest

from tests import processes

TESTS = """
import os, time

def test_good():
    pass

def test_of_a_quiet_machine():
    assert "SA1B_TEST_HUNT" not in os.environ

def test_broken():
    raise ValueError

def test_the_clock_jumps():
    ahead = {round(time.time() - time.monotonic(), 1)}
    while len(ahead) < 2 and "SA1B_TEST_CLOCK" in os.environ:
        ahead.add(round(time.time() - time.monotonic(), 1))
"""


@pytest.mark.parametrize("kind", ["clock", pytest.param("load", marks=pytest.mark.slow)])
def test_tests_that_depend_on_the_machine_are_told_from_broken_ones(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "tests.hunt",
        "--kinds",
        kind,
        "--json",
        "--",
        "-n0",
        "--rootdir",
        tmp_path,
        file,
    ]
    done = processes.run(command, capture_output=True, text=True, cwd=processes.REPOSITORY)
    assert done.returncode == 1, done.stderr
    assert f"{kind}, run 1, seed " in done.stderr
    found = {Path(test).name: result for test, result in json.loads(done.stdout).items()}
    assert found == {
        "test_it.py::test_broken": {"failed": [kind], "fails_alone": True},
        "test_it.py::test_of_a_quiet_machine": {"failed": [kind], "fails_alone": False},
    }
