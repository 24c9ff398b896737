"""Invalid options of the comparison are refused before the images are made."""

import sys
from pathlib import Path

import pytest

from tests import processes
from tests.shards import tiny

REPOSITORY = Path(__file__).parents[2]


def refused(*arguments: str) -> str:
    """The usage error that pytest prints."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "benchmarks/test_peers.py"]
    done = processes.run([*command, *arguments], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "Traceback" not in done.stderr
    return done.stderr


def test_too_few_images_or_rounds() -> None:
    assert "--images 6: an even number, at least 8" in refused("--images", "6")
    assert "--images 9: an even number, at least 8" in refused("--images", "9")
    assert "--rounds 0: at least 1" in refused("--rounds", "0")


def test_data_that_is_no_root(tmp_path: Path) -> None:
    assert f"--data: {tmp_path}: no dataset there" in refused("--data", str(tmp_path))


def test_data_of_too_few_images(tmp_path: Path) -> None:
    tiny.make_tar(tmp_path / "sa_000001.tar", ids=range(3))
    root = tmp_path / "root"
    tiny.ingest_tar(tmp_path / "sa_000001.tar", root)
    assert f"--data {root}: 3 images; at least 8" in refused("--data", str(root))


def test_the_folder_alone_is_the_comparison_in_one_round_and_full_is_everything() -> None:
    def collected(*arguments: str) -> list[str]:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "--collect-only",
            "-q",
            *arguments,
        ]
        done = processes.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True)
        assert ("One round of two questions" in done.stdout) == (arguments == ("benchmarks",))
        return [line for line in done.stdout.splitlines() if "::" in line]

    quick, part, full = (
        collected("benchmarks"),
        collected("benchmarks/test_peers.py"),
        collected("benchmarks", "--full"),
    )
    assert [name for name in quick if "::test_comparison" in name] == [
        f"benchmarks/test_peers.py::test_comparison[{key}]" for key in ("a-1024", "b-1024")
    ]
    assert {name.split("::")[0] for name in quick} == {"benchmarks/test_peers.py"}
    assert set(quick) < set(part) < set(full)
