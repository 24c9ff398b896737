"""Checkpoints of a single process: their schedule, contents and removal."""

import json
import logging
import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from sa1b.engine.checkpoint.checkpoints import Checkpoints
from sa1b.engine.checkpoint.folder import read_state, steps
from sa1b.engine.checkpoint.tensors import MismatchError
from sa1b.engine.settings import CheckpointConfig
from sa1b.errors import CheckpointError, UsageError
from tests.engine.small_run import SmallRun, place, resume, write_run


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let writes fail as on a full disk, without a separate file system."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def kept(run: Path) -> list[int]:
    return steps(run / "checkpoints")


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_saved_is_what_was_there_at_the_call(asynchronous: bool, tmp_path: Path) -> None:
    small = SmallRun()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(asynchronous=asynchronous))
    for step in range(1, 10):
        small.become(step)
        checkpoints.save(step, small.model, small.optimizer, {"steps": step})
        small.become(-step)
    checkpoints.close()
    state, found = resume(tmp_path)
    assert (state, found.steps()) == ({"steps": 9}, {9.0})


def test_a_copy_to_host_memory_that_fails_is_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small = SmallRun()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(tolerate=1))
    with monkeypatch.context() as patch:
        patch.setattr(StateDictStager, "stage", Mock(side_effect=RuntimeError("no pinned memory")))
        checkpoints.save(1, small.model, small.optimizer, {})
    checkpoints.save(2, small.model, small.optimizer, {})
    checkpoints.close()
    assert "step-00000001: RuntimeError: no pinned memory" in caplog.text
    assert kept(tmp_path) == [2]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_write_that_does_not_end_is_an_error_that_names_the_folder(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ends = threading.Event(), threading.Event()

    def hang(path: Path) -> None:
        begun.set()
        ends.wait(60)

    monkeypatch.setattr("sa1b.engine.checkpoint.folder.flush", hang)
    small = SmallRun()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(asynchronous=asynchronous), 0.05)
    message = (
        r"/checkpoints: the write of a checkpoint has not ended within 0.05 s \(--parallel.timeout-first\)"
    )
    if asynchronous:
        checkpoints.save(1, small.model, small.optimizer, {})
        assert begun.wait(60)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.save(2, small.model, small.optimizer, {})
    checkpoints.close()
    assert not ends.is_set()
    assert kept(tmp_path) == []  # it still writes
    ends.set()


def test_the_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {"position": 2**62, "rate": 0.1 + 0.2, "scaler": {}, "digests": ["ä"], "none": None}
    small = SmallRun()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(7, small.model, small.optimizer, state)
    checkpoints.close()
    assert read_state(place(tmp_path, 7)) == state


@pytest.mark.parametrize("state", [{"rate": float("nan")}, {"tensor": torch.ones(1)}])
def test_a_state_that_is_not_json_is_refused_at_once(state: dict[str, object], tmp_path: Path) -> None:
    small = SmallRun()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    with pytest.raises((TypeError, ValueError)):
        checkpoints.save(1, small.model, small.optimizer, state)
    checkpoints.close()
    assert kept(tmp_path) == []


def test_the_last_n_and_every_mth_are_kept(tmp_path: Path) -> None:
    write_run(tmp_path, tuple(range(1, 12)), keep_last=3, keep_every=4)
    assert kept(tmp_path) == [4, 8, 9, 10, 11]


def test_the_best_one_is_kept_until_another_one_is_better(tmp_path: Path) -> None:
    small = SmallRun()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=2))
    found = []
    for step, best in ((1, 1), (2, 1), (3, 1), (4, 4), (5, 4), (6, 4), (7, 4)):
        checkpoints.save(step, small.model, small.optimizer, {})
        checkpoints.steps()  # waits for the write
        checkpoints.best = best
        found.append(kept(tmp_path))
    assert found[2:] == [[1, 2, 3], [1, 3, 4], [4, 5], [4, 5, 6], [4, 6, 7]]
    checkpoints.close()


def test_a_second_run_in_the_same_folder_waits_with_a_message_and_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sa1b.engine.checkpoint.folder._PATIENCE", 0.1)
    monkeypatch.setattr("sa1b.engine.checkpoint.folder._QUIET", 0.0)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    with pytest.raises(
        CheckpointError, match=f"in use by another run, process {socket.gethostname()}:{os.getpid()}; pass"
    ):
        Checkpoints(tmp_path, CheckpointConfig())
    (message,) = [one.getMessage() for one in caplog.records if one.name.startswith("sa1b")]
    assert message.startswith("waiting for the end of another run with this --out, process ")
    checkpoints.close()
    Checkpoints(tmp_path, CheckpointConfig()).close()


def test_what_killed_runs_have_left_is_removed_at_the_start_and_nothing_else(tmp_path: Path) -> None:
    write_run(tmp_path, (1,))
    folder = tmp_path / "checkpoints"
    own = {path.name for path in (folder / "step-00000001").iterdir()}
    own |= {".metadata.tmp", "__10_0.distcp"}
    for name in ("step-00000002.partial-01234567", "step-00000002.damaged-01234567", "notes.partial", "mine"):
        (folder / name).mkdir(parents=True)
        for inside in own:
            (folder / name / inside).touch()
    Checkpoints(tmp_path, CheckpointConfig()).close()
    left = ["mine", "notes.partial", "step-00000001", "step-00000002.damaged-01234567"]
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == left


def test_files_that_no_run_wrote_stay_when_a_checkpoint_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoints"
    for round_ in range(3):
        write_run(tmp_path, (1,))
        (folder / "step-00000001" / "notes.txt").write_text(f"notes {round_}")
        (folder / "step-00000001" / "plots").mkdir()
        write_run(tmp_path, (1, 2), keep_last=1)  # replaces 1, then removes it
    notes = sorted(path.read_text() for path in folder.glob("step-00000001.partial-*/notes.txt"))
    assert notes == ["notes 0", "notes 1", "notes 2"]
    assert kept(tmp_path) == [2]
    assert "stays: no run wrote notes.txt, plots" in caplog.text


@pytest.mark.parametrize("asynchronous", [True, False])
def test_failed_writes_are_reported_and_survived_as_often_as_tolerated(
    asynchronous: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = write_run(tmp_path, (1,))
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(asynchronous=asynchronous, tolerate=1))
    with files_of_at_most(2048):
        checkpoints.save(2, small.model, small.optimizer, {})
        while "checkpoint failed" not in caplog.text:
            time.sleep(0.01)
    final = tmp_path / "checkpoints" / "step-00000002"
    assert f"{final}: File too large" in caplog.text
    assert not list(final.parent.glob("*.partial*"))
    assert kept(tmp_path) == [1]
    checkpoints.save(3, small.model, small.optimizer, {})  # the disk has space again
    checkpoints.save(4, small.model, small.optimizer, {})
    checkpoints.close()
    assert kept(tmp_path) == [3, 4]


def test_too_many_failed_writes_end_the_run_with_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    small = write_run(tmp_path, (1,))
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(tolerate=1))
    with files_of_at_most(2048):
        checkpoints.save(2, small.model, small.optimizer, {})
        checkpoints.save(3, small.model, small.optimizer, {})
        with pytest.raises(CheckpointError, match="step-00000003: .*2 failed in a row"):
            checkpoints.save(4, small.model, small.optimizer, {})
    with pytest.raises(CheckpointError, match="2 failed in a row"):
        checkpoints.close()
    state, found = resume(tmp_path)
    assert (state, found.steps()) == ({"steps": 1}, {1.0})


def test_a_checkpoint_of_another_model_is_named_as_such_and_no_older_one_is_tried(tmp_path: Path) -> None:
    write_run(tmp_path, (1, 2))
    other = nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(other.parameters())
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    with pytest.raises(MismatchError) as error:
        checkpoints.resume(other, optimizer)
    checkpoints.close()
    assert "step-00000002: of another model" in str(error.value)
    assert "differs in model.bias, model.weight" in str(error.value)


def test_the_optimizer_keeps_its_own_rates_and_groups(tmp_path: Path) -> None:
    write_run(tmp_path, (1,))
    small = SmallRun()
    optimizer = torch.optim.AdamW(
        [{"params": [small.model.bias], "lr": 0.5, "scale": 2}, {"params": [small.model.weight]}], lr=0.25
    )
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.resume(small.model, optimizer)
    checkpoints.close()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert optimizer.param_groups[0]["scale"] == 2
    assert torch.equal(optimizer.state[small.model.bias]["exp_avg"], torch.ones(2))
    assert torch.equal(optimizer.state[small.model.weight]["exp_avg"], torch.ones(2, 3))


def test_the_folder_tells_a_person_what_it_is(tmp_path: Path) -> None:
    write_run(tmp_path, (3,))
    folder = place(tmp_path, 3)
    assert {path.name for path in folder.iterdir()} == {
        "__0_0.distcp",
        ".metadata",
        "state.json",
        "manifest.sha256",
    }
    state = json.loads((folder / "state.json").read_text())
    assert (state["step"], state["world_size"], state["torch"]) == (3, 1, torch.__version__)
    done = subprocess.run(["sha256sum", "-c", "manifest.sha256"], cwd=folder, check=True, capture_output=True)
    assert done.stdout.splitlines() == [b".metadata: OK", b"__0_0.distcp: OK", b"state.json: OK"]


@pytest.mark.parametrize("field", ["every", "keep_last", "keep_every", "tolerate"])
def test_a_configuration_that_makes_no_sense_names_the_flag(field: str) -> None:
    with pytest.raises(UsageError, match=f"--checkpoint.{field.replace('_', '-')} -1: must be at least"):
        CheckpointConfig(**{field: -1})
