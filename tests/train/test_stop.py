"""SIGTERM, SIGUSR1, Ctrl-C and --deadline: all ranks stop after the same step with a checkpoint, and the same command resumes."""

import json
import os
import signal
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Process
from tests.train.command import PATIENCE, checkpoint_steps, losses, output_of, processes_of, start, torchrun
from tests.train.mishap import AGENT, Mishap

LONG = ("--optim.steps", "100000")


@pytest.mark.parametrize("place", ["", "save", pytest.param("update", marks=pytest.mark.slow)])
def test_one_rank_asked_at_any_moment_of_a_step_stops_all_with_a_checkpoint(
    root: Path, tmp_path: Path, place: str
) -> None:
    mishap = {"what": "stop", "rank": 1, "step": 1} | ({"at": place, "single": True} if place else {})
    ended = start(root, tmp_path / "run", *LONG, ranks=2, mode="ddp", mishap=mishap, model="reconstruction")
    assert ended.codes == [0, 0], ended.outputs
    done = len(losses(tmp_path / "run"))
    assert done == {"": 2, "update": 3, "save": done}[place]  # the ranks agree once a step
    assert done >= 2
    assert checkpoint_steps(tmp_path / "run")[-1] == done
    assert f"stopped after step {done:,} and saved a checkpoint; run the same command" in ended.outputs[0]


def test_the_deadline_of_one_rank_stops_all_with_a_checkpoint_and_exit_code_0(
    root: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    at = (datetime.now() + timedelta(days=1)).isoformat(timespec="seconds")
    mishap = Mishap({"what": "clock", "rank": 1, "step": 2})
    given: dict[str, Any] = {"ranks": 2, "mode": "ddp", "mishap": mishap, "model": "reconstruction"}
    ended = start(root, out, *LONG, "--deadline", at, **given)
    assert ended.codes == [0, 0], ended.outputs
    assert len(losses(out)) == 3
    assert (
        f"stopped after step 3, before --deadline {at}, and saved a checkpoint; run the same command with a later "
        "--deadline to resume"
    ) in ended.outputs[0]
    assert checkpoint_steps(out)[-1] == 3
    assert json.loads((out / "config.json").read_text())["deadline"] == at
    assert processes_of(out) == []


def test_a_run_that_resumes_after_its_deadline_does_no_step(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = start(root, out, *LONG, "--deadline", "+00:00", model="reconstruction")
    assert ended.codes == [0], ended.outputs
    assert (
        "stopped before the first step, before --deadline +00:00; run the same command to start"
        in ended.outputs[0]
    )
    assert losses(out) == []
    assert checkpoint_steps(out) == []


def test_the_second_signal_ends_a_process_that_nobody_supervises_at_once(root: Path, tmp_path: Path) -> None:
    # The first one is not agreed upon before the next step: the second one comes in between.
    mishap = {"what": "stop", "at": "update", "step": 1, "times": 2}
    ended = start(root, tmp_path / "run", *LONG, mishap=mishap, model="reconstruction")
    assert ended.codes == [-signal.SIGTERM]


def wait_for_step(process: Process, out: Path, step: int) -> None:
    end, path = time.monotonic() + PATIENCE, out / "metrics.jsonl"
    while not (path.exists() and path.read_text().count("\n") > step):  # the first line is of the start
        assert process.poll() is None, output_of(process, out)
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_torchrun_that_is_told_to_end_leaves_a_checkpoint(
    root: Path, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "run"
    process = torchrun(root, out, *LONG, ranks=2, mode="ddp", mishap={"what": "record"}, agent=AGENT)
    wait_for_step(process, out, 1)
    ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    if number == signal.SIGINT:
        for rank in ranks:  # as Ctrl-C does where ranks and torchrun are one group of processes
            os.kill(rank, number)
    os.kill(process.pid, number)
    output = output_of(process, out)
    done = len(losses(out))
    assert f"stopped after step {done:,} and saved a checkpoint" in output
    assert checkpoint_steps(out)[-1] == done
    assert processes_of(out) == []


@pytest.mark.parametrize("steps", [3, 100000])
def test_only_a_run_that_has_finished_creates_the_file_for_job_scripts(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    marker = tmp_path / "logs" / "finished"
    monkeypatch.setenv("SA1B_FINISHED", str(marker))
    mishap = {"what": "stop", "step": 2}  # its last step, or not
    flags = ("--optim.steps", str(steps))
    ended = start(root, tmp_path / "run", *flags, mishap=mishap, model="reconstruction")
    assert ended.codes == [0], ended.outputs
    assert len(losses(tmp_path / "run")) == 3
    assert marker.exists() == (steps == 3)
    assert ("run the same command to resume" in ended.outputs[0]) == (steps > 3)
