"""The power fails while ingest, or the writer of a layer, is at work: what opens is right, and the next run gives the same files."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import faults
from tests.shards import tiny

SCENARIOS = {"first", "second", "replaced", "layer"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sa_000000.tar, another source, and a larger one of the same name."""
    folder = tmp_path_factory.mktemp("power")
    for path, images, first_id in (
        (folder / "sa_000000.tar", 20, 1),
        (folder / "other" / "sa_000001.tar", 8, 100),
        (folder / "larger" / "sa_000000.tar", 27, 1),
    ):
        path.parent.mkdir(exist_ok=True)
        tiny.synthesize(path, images=images, first_id=first_id, long_side=96)
    return folder / "sa_000000.tar"


def replayed(source: Path, work: Path, count: int, *options: str) -> dict[str, Any]:
    """What came of so many cut points in each scenario."""
    library = faults.build(source.parent)
    if library is None:
        pytest.skip("needs a C compiler (cc) to build tests/faults/faults.c")
    command = [sys.executable, "-m", "tests.faults.driver", "power", source, work, "--count", str(count)]
    done = subprocess.run(
        [*command, *options],
        env=faults.environment(library),
        cwd=Path(__file__).parents[2],
        check=True,
        stdout=subprocess.PIPE,
    )
    result: dict[str, Any] = json.loads(done.stdout)["power"]
    assert result.keys() == SCENARIOS
    assert all(found["points"] == count for found in result.values())
    return result


def wrong(result: dict[str, Any]) -> list[Any]:
    return [(name, *one) for name, found in result.items() for one in found["wrong"]]


def test_what_a_loss_of_power_leaves_is_right_or_refused_and_is_repaired(
    source: Path, tmp_path: Path
) -> None:
    assert wrong(replayed(source, tmp_path, 2)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_hundreds_of_cut_points(source: Path, tmp_path: Path, seed: int) -> None:
    assert wrong(replayed(source, tmp_path, 70, "--seed", str(seed))) == []


@pytest.mark.slow  # the quick one: the replay of what was flushed
def test_the_replay_finds_a_flush_that_is_missing(source: Path, tmp_path: Path) -> None:
    result = replayed(source, tmp_path, 5, "--forget-flushes")
    assert wrong(result)
