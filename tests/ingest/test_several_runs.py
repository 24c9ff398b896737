"""Several runs on one directory: they share its sources, and both end well, whatever happens to one of them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sa1b
from tests import processes
from tests.shards import tiny

REPOSITORY = Path(__file__).parents[2]
TARS = 6


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    for number in range(TARS):
        tiny.make_tar(folder / f"sa_00000{number}.tar", range(100 * number, 100 * number + 40))
    return folder


def start(tars: Path, root: Path, *flags: str) -> processes.Process:
    line = [sys.executable, "tools/reshard.py", *map(str, (tars, "--out", root)), "--json", *flags]
    return processes.Process(
        line,
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def ended(process: processes.Process, code: int = 0) -> dict[str, object]:
    out, errors = process.communicate(timeout=300)
    assert process.returncode == code, errors + out
    found: dict[str, object] = json.loads(out)
    return found


def files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()
    }


@pytest.fixture(scope="module")
def alone(tars: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one undisturbed run makes."""
    root = tmp_path_factory.mktemp("alone") / "root"
    ended(start(tars, root))
    return files(root)


def test_two_commands_at_the_same_time_share_the_work_and_both_end_well(
    tars: Path, tmp_path: Path, alone: dict[str, bytes]
) -> None:
    both = [ended(process) for process in [start(tars, tmp_path / "root") for _ in range(2)]]
    done = [list(one["done"]) for one in both]
    assert sorted(done[0] + done[1]) == [f"sa_00000{number}" for number in range(TARS)]
    for one in both:
        assert sorted([*one["done"], *one["skipped"]]) == sorted(done[0] + done[1])
        assert one["complete"]
    assert files(tmp_path / "root") == alone


def test_a_run_that_is_killed_leaves_its_sources_to_the_other_one(
    tars: Path, tmp_path: Path, alone: dict[str, bytes]
) -> None:
    root = tmp_path / "root"
    one, other = start(tars, root), start(tars, root)
    deadline = time.monotonic() + 120
    while not list(root.glob("tasks/*.claim")):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(one.pid, signal.SIGKILL)
    one.communicate()
    assert ended(other)["complete"]
    assert files(root) == alone


def test_tasks_of_an_array_job_and_a_finish_give_the_same_bytes(
    tars: Path, tmp_path: Path, alone: dict[str, bytes]
) -> None:
    root = tmp_path / "root"
    parts = [start(tars, root, "--task", f"{number}/3") for number in range(3)]
    done = [ended(part) for part in parts]
    assert [one["done"] for one in done] == [[f"sa_00000{i}", f"sa_00000{i + 3}"] for i in range(3)]
    assert not (root / "dataset.json").exists()
    line = [sys.executable, "tools/reshard.py", "--out", str(root), "--finish"]
    finished = processes.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (finished.returncode, "Complete" in finished.stdout) == (0, True)
    assert files(root) == alone


def test_a_task_has_the_same_sources_whatever_the_order_of_the_command_line(
    tars: Path, tmp_path: Path
) -> None:
    named = sorted(tars.iterdir())
    for number, order in enumerate((named, named[::-1])):
        line = [sys.executable, "tools/reshard.py", *map(str, order), "--out", str(tmp_path / str(number))]
        line += ["--json", "--task", "1/4"]
        run = processes.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        assert json.loads(run.stdout)["done"] == ["sa_000001", "sa_000005"]


def test_finishing_too_early_says_what_is_pending(tars: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    ended(start(tars, root, "--task", "0/2"))
    line = [sys.executable, "tools/reshard.py", str(tars), "--out", str(root), "--finish", "--json"]
    early = processes.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert early.returncode == 1
    assert json.loads(early.stdout)["pending"] == ["sa_000001", "sa_000003", "sa_000005"]
    assert len(sa1b.open(root)) == 3 * 40
    ended(start(tars, root))
    assert len(sa1b.open(root)) == TARS * 40


def test_an_old_claim_of_another_machine_is_taken_over_and_a_live_one_is_waited_for(
    tars: Path, tmp_path: Path, alone: dict[str, bytes]
) -> None:
    root = tmp_path / "root"
    (root / "tasks").mkdir(parents=True)
    claims = [root / "tasks" / f"sa_00000{number}.claim" for number in range(2)]
    for claim in claims:
        claim.write_text(
            json.dumps({"host": "node7", "pid": 4711, "process": "0123456789ab-4711", "token": claim.name})
        )
    os.utime(claims[0], (1, 1))
    folder = root / ".partial" / f"staging-0123456789ab-4711-{'0' * 16}"
    staged = folder / "sa_000000"
    staged.mkdir(parents=True)
    (folder / "owner").write_text(f"This folder was made by sa1b: {folder.name}\n")
    (staged / "sa1b-000000-0000.tar").write_bytes(b"half of a shard")
    line = [sys.executable, "tools/reshard.py", str(tars), "--out", str(root)]
    process = processes.Process(
        line, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 120
    while (
        not (root / "tasks" / "sa_000005.json").exists() or not (root / "tasks" / "sa_000000.json").exists()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.poll() is None  # the live claim holds it back
    assert not (root / "tasks" / "sa_000001.json").exists()
    os.utime(claims[1], (1, 1))
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "waiting for sa_000001, which node7:4711 works on" in errors
    assert f"{claims[1]}: taken over 120 s after its last heartbeat, in at most" in errors
    assert "remove this file if no process uses it" in errors
    assert "Complete" in out
    assert files(root) == alone


def test_a_source_whose_claim_was_taken_over_meanwhile_is_not_published(tmp_path: Path) -> None:
    root, tar = tmp_path / "root", tmp_path / "sa_000000.tar"
    tiny.make_tar(tar, range(600))
    line = [sys.executable, "tools/reshard.py", str(tar), "--out", str(root), "--workers", "1"]
    process = processes.Process(
        line,
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    claim, task = (root / "tasks" / f"sa_000000.{ending}" for ending in ("claim", "json"))
    deadline = time.monotonic() + 120
    while not claim.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGSTOP)  # as a machine that sleeps
    assert not task.exists()
    other = {"host": "node7", "pid": 4711, "process": "0123456789ab-4711", "token": "of node7"}
    (tmp_path / "claim").write_text(json.dumps(other))
    (tmp_path / "claim").replace(claim)
    os.killpg(process.pid, signal.SIGCONT)
    assert process.stderr is not None
    said = ""
    while "waiting for sa_000000, which node7:4711 works on" not in said:
        line_of_it = process.stderr.readline()
        assert line_of_it, said
        said += line_of_it
    assert not task.exists()
    assert json.loads(claim.read_text()) == other
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--task", "3/3"], "must have the form I/N with I from 0 to N - 1"),
        (["--task", "1"], "must have the form I/N"),
        (["--task", "a/b"], "must have the form I/N"),
        (["--drop", "sa_000001"], "cannot be combined"),
        (["--rename", "nonsense"], "must have the form PATH=NAME"),
        (["--claim-timeout", "0"], "--claim-timeout 0: must be more than 0"),
        (["--claim-timeout", "nan"], "--claim-timeout nan: must be more than 0"),
        (["--stall-timeout", "nan"], "--stall-timeout nan: must be more than 0"),
        (["--stall-timeout", "inf"], "--stall-timeout inf: must be more than 0"),
    ],
)
def test_flags_that_mean_nothing_are_refused(tars: Path, tmp_path: Path, flags: list[str], said: str) -> None:
    line = [sys.executable, "tools/reshard.py", str(tars), "--out", str(tmp_path / "root"), *flags]
    run = processes.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert said in run.stderr
    assert not (tmp_path / "root").exists()


def test_a_file_in_place_of_the_folder_is_refused(tars: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = [sys.executable, "tools/reshard.py", str(tars), "--out", str(tmp_path / "file")]
    run = processes.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert f"--out {tmp_path / 'file'}: is a file; pass a folder" in run.stderr


def test_a_source_can_be_taken_under_another_name(tars: Path, tmp_path: Path) -> None:
    other = tmp_path / "b" / "sa_000001.tar"
    tiny.make_tar(other, range(900, 910))
    root = tmp_path / "root"
    ended(start(tars / "sa_000001.tar", root))
    ended(start(other, root), 1)
    assert len(sa1b.open(root)) == 40
    assert ended(start(other, root, "--rename", f"{other}=second"))["done"] == ["second"]
    assert sorted(sa1b.open(root).manifest["sources"]) == ["sa_000001", "second"]
    assert len(sa1b.open(root)) == 50
