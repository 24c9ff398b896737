"""Ingest killed, on a full disk and on a failing disk: what is there afterwards is right, and goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sa1b.programs.synthetic import source_tars as synthetic
from tests import faults, processes


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "sa_000000.tar"
    synthetic.write_tar(path, images=20, first_id=1, long_side=96)
    return path


def drive(source: Path, work: Path, *arguments: str) -> dict[str, Any]:
    library = faults.build(source.parent)
    if library is None:
        pytest.skip("needs a C compiler (cc) to build tests/faults/faults.c")
    command = [
        sys.executable,
        "-m",
        "tests.faults.driver",
        arguments[0],
        str(source),
        str(work),
        *arguments[1:],
    ]
    done = subprocess.run(
        command,
        env=faults.environment(library),
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "Exception ignored" not in done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("count", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_killed_at_any_write_flush_or_rename_the_next_run_gives_the_same_bytes(
    source: Path, tmp_path: Path, count: int
) -> None:
    result = drive(source, tmp_path, "crash", "--count", str(count))
    assert result["killed"] == count
    assert result["different"] == []


def test_a_full_disk_is_named_and_never_gives_wrong_bytes(source: Path, tmp_path: Path) -> None:
    result = drive(source, tmp_path, "full", "--step", "81920")
    assert result["failed"] >= 3
    assert result["corrupt"] == []
    assert result["unnamed"] == []


def test_a_failing_disk_is_named_and_never_gives_wrong_bytes(source: Path, tmp_path: Path) -> None:
    result = drive(source, tmp_path, "eio", "--count", "5")
    assert result["failed"] > 0
    assert result["corrupt"] == []
    assert result["unnamed"] == []


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
