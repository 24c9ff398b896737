"""Optional techniques hang on the training loop, which trains without their modules."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sa1b import train
from sa1b.engine.checkpoint import checkpoints
from sa1b.engine.step import run
from sa1b.engine.technique import Place
from tests.processes import REPOSITORY, rank_environments
from tests.processes import run as run_forked
from tests.train.command import FLAGS, losses, start
from tests.train.without import TECHNIQUES


def test_every_technique_has_its_place() -> None:
    places = {one for one in vars(run).values() if isinstance(one, Place)}
    assert {one.module for one in places} == {f"sa1b.engine.{name}" for name in TECHNIQUES}
    for place in (*places, checkpoints.BUCKET):
        assert place.load() is not None, place
    assert train.PLANNER is run.PLANNER


@pytest.mark.parametrize(
    ("mode", "ranks"),
    [("ddp", 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in (("none", 1), ("fsdp", 2)))],
)
def test_the_loop_trains_the_same_without_the_modules_of_the_techniques(
    root: Path, whole: Callable[..., Path], tmp_path: Path, mode: str, ranks: int
) -> None:
    given: dict[str, Any] = {"ranks": ranks, "mode": mode, "model": "reconstruction"}
    ended = start(root, tmp_path / "run", program="tests.train.without", **given)
    assert ended.codes == [0] * ranks, ended.outputs
    assert ended.outputs[0].splitlines()[-1] == "imported: []"
    assert losses(tmp_path / "run") == losses(whole(mode, ranks, "reconstruction"))


def test_a_run_that_asks_for_a_missing_technique_is_refused_in_one_sentence(
    root: Path, tmp_path: Path
) -> None:
    asked = {
        "planner": ("--dry-run",),
        "watch.watchdog": ("--health.stall", "60"),
        "watch.stragglers": ("--logging.window", "7"),
    }
    assert sorted(asked) == sorted(TECHNIQUES)
    common = ["--data.root", str(root), "--out", str(tmp_path / "run"), *FLAGS]
    runs = [[*common, *flags] for flags in asked.values()]
    command = [sys.executable, "-m", "tests.train.without", "refused", json.dumps(runs)]
    with rank_environments(1) as (environment,):
        done = run_forked(
            command, capture_output=True, text=True, cwd=REPOSITORY, env=environment, check=True
        )
    assert json.loads(done.stdout.splitlines()[-1]) == [2] * len(asked)
    assert [line for line in done.stderr.splitlines() if line.startswith("error")] == [
        f"error: {flags[0]}: needs the module sa1b.engine.{technique}, which is not "
        "installed; drop the flag, or install sa1b again"
        for technique, flags in asked.items()
    ]
