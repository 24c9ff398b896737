"""Kills, losses of power and full disks while a run writes checkpoints: the same command ends as if there were none."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import faults
from tests.processes import REPOSITORY


def disturbed(folder: Path, what: str, count: int, *flags: str) -> dict[str, Any]:
    """What happened: see disturbed.py."""
    library = faults.build(folder)
    if library is None:
        pytest.skip("needs a C compiler (cc) to build tests/faults/faults.c")
    command = [sys.executable, "-m", "tests.train.disturbed", what, folder / "work", "--count", str(count)]
    environment = faults.environment(library) | {"FSSPEC_LOCAL_AUTO_MKDIR": "1"}
    done = subprocess.run(
        [*command, *flags], check=False, env=environment, cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def many(count: int, *seeds: str) -> list[Any]:
    return [pytest.param(count, "--seed", seed, marks=pytest.mark.slow) for seed in seeds]


@pytest.mark.parametrize(("count", "flag", "seed"), [(4, "--seed", "0"), *many(60, "1")])
def test_a_run_that_is_killed_at_any_operation_on_a_checkpoint(
    tmp_path: Path, count: int, flag: str, seed: str
) -> None:
    found = disturbed(tmp_path, "kill", count, flag, seed)
    assert found["wrong"] == []
    assert found["hits"] >= 0.8 * (count or found["operations"])


@pytest.mark.parametrize(("count", "flag", "seed"), [(3, "--seed", "0"), *many(60, "1")])
def test_a_run_in_a_bucket_that_is_killed_at_any_operation(
    tmp_path: Path, count: int, flag: str, seed: str
) -> None:
    found = disturbed(tmp_path, "kill", count, flag, seed, "--bucket")
    assert found["wrong"] == []
    assert found["hits"] >= 0.8 * (count or found["operations"])


@pytest.mark.parametrize(("count", "flag", "seed"), [(6, "--seed", "0"), *many(60, "1", "2", "3")])
def test_a_loss_of_power_while_checkpoints_are_written(
    tmp_path: Path, count: int, flag: str, seed: str
) -> None:
    found = disturbed(tmp_path, "power", count, flag, seed)
    assert found["wrong"] == []
    assert found["hits"] >= count / 2


@pytest.mark.slow  # the quick one: the loss of what was flushed
def test_checkpoints_that_are_not_flushed_are_lost_with_the_power(tmp_path: Path) -> None:
    assert disturbed(tmp_path, "power", 40, "--forget-flushes")["wrong"]


@pytest.mark.parametrize(("count", "flag", "seed"), [(3, "--seed", "0"), *many(40, "1")])
def test_a_disk_of_any_size(tmp_path: Path, count: int, flag: str, seed: str) -> None:
    found = disturbed(tmp_path, "full", count, flag, seed)
    assert found["wrong"] == []
    assert found["hits"] >= count / 2
