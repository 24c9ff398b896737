"""Ingest, and the writer of a layer, killed, on a full and on a failing disk: what is there is right, and goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import faults, processes
from tests.shards import tiny

SCENARIOS = {"shards", "layer", "replaced layer"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "sa_000000.tar"
    tiny.synthesize(path, images=20, first_id=1, long_side=96)
    return path


def drive(source: Path, work: Path, what: str, *options: str) -> dict[str, Any]:
    """The results of the driver, by kind of fault."""
    library = faults.build(source.parent)
    if library is None:
        pytest.skip("needs a C compiler (cc) to build tests/faults/faults.c")
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.driver", what, source, work, *options],
        env=faults.environment(library),
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "Exception ignored" not in done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def results(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one process with the library, which takes seconds to start."""
    work = tmp_path_factory.mktemp("driver")
    return drive(source, work, "crash,full,eio", "--count", "5", "--step", "81920")


def test_killed_at_any_write_flush_or_rename_the_next_run_gives_the_same_bytes(
    results: dict[str, Any],
) -> None:
    assert results["crash"] == {name: {"killed": 5, "different": []} for name in SCENARIOS}


@pytest.mark.slow
def test_killed_at_many_steps_the_next_run_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    found = drive(source, tmp_path, "crash", "--count", "40")["crash"]
    assert found == {name: {"killed": 40, "different": []} for name in SCENARIOS}


@pytest.mark.parametrize(("what", "failures"), [("full", 3), ("eio", 1)])
def test_a_full_or_failing_disk_is_named_and_never_gives_wrong_bytes(
    results: dict[str, Any], what: str, failures: int
) -> None:
    assert results[what].keys() == SCENARIOS
    for found in results[what].values():
        assert found["failed"] >= failures
        assert found["corrupt"] == []
        assert found["unnamed"] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_really_full_file_system(source: Path, tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount], check=False).returncode:
        pytest.skip("mounting tmpfs is not allowed here")
    try:
        (mount / "ballast").write_bytes(bytes(1_000_000))
        command = [sys.executable, "tools/reshard.py", str(source), "--out", str(mount / "root")]
        run = processes.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 2, run.stderr
        assert "free" in run.stderr
        assert "--out" in run.stderr
        (mount / "ballast").unlink()
        run = processes.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
    finally:
        subprocess.run(["umount", mount], check=True)
