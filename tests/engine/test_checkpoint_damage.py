"""A damaged checkpoint is detected and runs no code, and the older checkpoint is used."""

import hashlib
import logging
import pickle
import shutil
import signal
import sys
import time
from pathlib import Path
from random import Random

import pytest

from sa1b.engine.checkpoint.checkpoints import Checkpoints
from sa1b.engine.checkpoint.folder import read, steps
from sa1b.engine.settings import CheckpointConfig
from sa1b.engine.weights import newest
from sa1b.errors import CheckpointError
from tests.engine import small_run
from tests.engine.small_run import FUNCTIONS, Hostile, SmallRun, place, resume, write_run
from tests.processes import REPOSITORY, Process

KILLS = 20


def digest(folder: Path) -> str:
    parts = [(path.name, path.is_symlink(), path.read_bytes()) for path in sorted(folder.iterdir())]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("pristine")
    write_run(run, (1, 2))
    return run


@pytest.mark.parametrize("mutations", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_no_mutated_checkpoint_is_accepted_and_none_runs_code(
    mutations: int, pristine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    canary = tmp_path / "canary"
    good = digest(place(pristine, 2))
    done = set()
    for seed in range(mutations):
        run = tmp_path / "run"
        shutil.copytree(pristine, run)
        what = small_run.spoil(place(run, 2), place(run, 1), canary, Random(seed))
        assert digest(place(run, 2)) != good, what
        caplog.clear()
        state, small = resume(run)
        assert state == {"steps": 1}, f"{seed}: {what}"
        assert small.steps() == {1.0}, f"{seed}: {what}"
        (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert str(place(run, 2)) in warning.getMessage()
        assert not canary.exists(), f"{seed}: {what}"
        done.add(what.split(":")[0].split(" ")[0])
        shutil.rmtree(run)
    assert len(done) >= 9


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_hostile_pickles_of_these_tests_do_run_code_when_trusted(function: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    pickle.loads(pickle.dumps(Hostile(canary, function)))
    assert canary.exists()


def test_an_unspoilt_checkpoint_is_accepted(pristine: Path, tmp_path: Path) -> None:
    shutil.copytree(pristine, tmp_path / "run")
    state, small = resume(tmp_path / "run")
    assert (state, small.steps()) == ({"steps": 2}, {2.0})


def test_a_warning_names_the_file_and_what_is_wrong_with_it(
    pristine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    shutil.copytree(pristine, run)
    file = place(run, 2) / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    found = newest(run / "checkpoints")
    assert found is not None
    assert found.step == 1
    size = file.stat().st_size
    assert f"{file}: {size} bytes, {size + 1} expected" in caplog.text


def test_where_none_is_good_there_is_no_fresh_start_but_an_error_that_lists_them_all(
    pristine: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(pristine, run)
    (place(run, 1) / "manifest.json").unlink()
    (place(run, 2) / ".metadata").write_bytes(b"")
    for find in (resume, lambda run: newest(run / "checkpoints")):
        with pytest.raises(CheckpointError) as error:
            find(run)
        for part in ("step-00000001/manifest.json: missing", "step-00000002/.metadata: 0 bytes", "move"):
            assert part in str(error.value)


def test_where_there_is_none_the_start_is_fresh(tmp_path: Path) -> None:
    state, small = resume(tmp_path)
    assert state is None
    assert small.steps() == {-1.0}
    assert newest(tmp_path / "checkpoints") is None


def test_a_damaged_checkpoint_does_not_push_out_the_good_one_before_it(
    pristine: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(pristine, run)
    for step in (2, 3):
        shutil.copytree(
            place(run, 1), place(run, step), dirs_exist_ok=True
        )  # contents of step 1 under another name: damaged
    small = SmallRun()
    checkpoints = Checkpoints(run, CheckpointConfig(keep_last=1))
    assert checkpoints.resume(small.model, small.optimizer) == {"steps": 1}
    small.become(2)
    checkpoints.save(2, small.model, small.optimizer, {"steps": 2})  # replaces the damaged checkpoint
    checkpoints.close()
    assert steps(run / "checkpoints") == [2, 3]
    assert read(place(run, 2)).state == {"steps": 2}


def test_after_a_kill_at_any_time_the_newest_checkpoint_is_right_and_nothing_half_done_stays(
    tmp_path: Path,
) -> None:
    random = Random(0)
    step, left = 0, 0
    for number in range(KILLS):
        command = (
            f"from tests.engine.small_run import *; save_until_killed(Path({str(tmp_path)!r}), {step + 1})"
        )
        process = Process([sys.executable, "-c", command], cwd=REPOSITORY)
        before = time.monotonic()
        while steps(tmp_path / "checkpoints")[-1:] <= [step]:
            assert time.monotonic() - before < 600
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.05))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
        committed = steps(tmp_path / "checkpoints")
        left += len(names) - len(committed)
        state, small = resume(tmp_path)
        step = committed[-1]
        assert (state, small.steps()) == ({"steps": step}, {float(step)}), f"kill {number}"
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
            place(tmp_path, step).name for step in committed
        ]
    assert left > 0  # some kills happened during a write or a removal
