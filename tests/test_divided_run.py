"""A run in several processes reports what a run in one does, and a process that dies loses no other test."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests import processes

CONFTEST = """
import os
import pytest

@pytest.fixture(scope="session")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    yield folder
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"removed by {os.getpid()}\\n")
"""
TESTS = """
import os, warnings
import pytest

@pytest.mark.parametrize("number", range(3))
def test_good(made, number):
    print("not shown")
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{__name__} {number} by {os.getpid()}\\n")

def test_bad():
    print("said before")
    assert 1 == 2

@pytest.mark.skip(reason="of no use")
def test_skipped(): pass

def test_warning():
    warnings.warn("look out", UserWarning)
"""
DEADLY = """
import os, signal
import cv2
import numpy as np

IMAGE = np.zeros((2000, 2000))
cv2.GaussianBlur(IMAGE, (31, 31), 3)  # starts OpenCV's threads while the tests are collected

def test_before():
    cv2.setNumThreads(1)  # waits for them

def test_dies():
    if "KILL" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)

def test_after(): pass
"""


def run(folder: Path, *words: str, **environment: str) -> tuple[int, str, list[str]]:
    for number in range(3):
        (folder / f"test_{number}.py").write_text(TESTS)
    (folder / "test_deadly.py").write_text(DEADLY)
    (folder / "conftest.py").write_text(CONFTEST)
    notes = folder / "notes"
    notes.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "-p", "tests.divided_run", "-rA", "-c"]
    (folder / "pytest.ini").write_text("[pytest]\n")
    done = processes.run(
        [*command, folder / "pytest.ini", *words, folder],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "NOTES": str(notes), **environment},
    )
    assert notes.exists(), done.stdout + done.stderr
    return done.returncode, done.stdout, sorted(notes.read_text().splitlines())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cases").mkdir()
    return tmp_path / "cases"


def outcomes(printed: str) -> list[str]:
    return sorted(re.findall(r"^(?:PASSED|FAILED|SKIPPED) .*$", printed, re.MULTILINE))


def test_a_run_in_several_processes_reports_what_a_run_in_one_does(folder: Path) -> None:
    code, printed, notes = run(folder, "--processes", "2", f"--junitxml={folder / 'report.xml'}")
    expected_code, expected, _ = run(folder)
    assert code == expected_code == 1, printed
    assert outcomes(printed) == outcomes(expected)
    assert printed.count("said before") == expected.count("said before") == 6  # a section, and in the summary
    assert printed.splitlines()[-1].split(" in ")[0] == expected.splitlines()[-1].split(" in ")[0], printed
    assert "look out" in printed
    assert (folder / "report.xml").read_text().count("<testcase ") == 21
    of = [{line.split()[-1] for line in notes if line.startswith(f"test_{number}")} for number in range(3)]
    assert all(len(pids) == 1 for pids in of)  # the tests of a file in one process
    removals = [line for line in notes if line.startswith("removed")]
    assert len(removals) == len(set(removals)) == len(set.union(*of))  # a session fixture for each process


def test_a_test_whose_process_is_killed_fails_and_the_others_are_run(folder: Path) -> None:
    code, printed, _ = run(folder, "--processes", "2", KILL="1")
    assert code == 1
    assert "test_deadly.py::test_dies: its process ended with SIGKILL" in printed
    assert " 4 failed, 14 passed, 3 skipped, " in printed.splitlines()[-1]


def test_a_run_that_ends_early_leaves_no_process(folder: Path) -> None:
    code, printed, notes = run(folder, "--processes", "2", "--exitfirst")
    assert code == 1
    assert "stopping after " in printed
    for line in notes:
        assert not Path(f"/proc/{line.split()[-1]}").exists()
