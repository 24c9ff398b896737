"""The supervisor: a dead worker is retried, then reported; no task hangs or is lost."""

import errno
import multiprocessing
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import popen_fork
from pathlib import Path

import pytest

from sa1b import workers
from sa1b.workers import Failure, supervise
from tests.worker_tasks import (
    STALL,
    act,
    chatter,
    die,
    double,
    double_and_stay,
    fail,
    full_disk,
    leave,
    mixed,
    no_memory,
    sleep_or_double,
    stall,
)


@pytest.fixture
def forked() -> None:
    """Workers start at once, so that a start on a busy machine does not look like a stall."""


@pytest.fixture(autouse=True)
def _new_interpreters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start as they do for a user."""
    if "forked" not in request.fixturenames:
        monkeypatch.setattr(workers, "_CONTEXT", multiprocessing.get_context("spawn"))


def test_workers_are_new_interpreters() -> None:
    """Workers inherit no threads, locks or handles of the parent."""
    program = "from sa1b import workers; print(workers._CONTEXT.get_start_method())"
    line = [sys.executable, "-c", program]
    run = subprocess.run(line, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "spawn"


def test_every_task_gives_its_result_and_progress() -> None:
    events = list(supervise(double, [(i,) for i in range(5)], workers=2))
    assert {event.task: event.value for event in events if event.kind == "done"} == {
        i: 2 * i for i in range(5)
    }
    assert {event.value for event in events if event.kind == "progress"} == set(range(5))


def test_an_exception_is_an_answer_and_is_not_retried() -> None:
    (event,) = supervise(fail, [(7,)], workers=1)
    assert event.kind == "failed"
    assert isinstance(event.value, Failure)
    assert (event.value.kind, event.value.message) == ("ValueError", "cannot do 7")
    assert "raise ValueError" in event.value.trace


def test_a_killed_worker_is_retried(tmp_path: Path) -> None:
    events = list(supervise(die, [(str(tmp_path / "marker"), 2)], workers=1, retries=2))
    assert [event.kind for event in events] == ["died", "died", "done"]
    assert "SIGKILL" in events[0].value


def test_a_worker_that_always_dies_is_named_and_the_others_finish(tmp_path: Path) -> None:
    tasks = [("a", ""), ("dies", str(tmp_path / "marker")), ("c", "")]
    ends = {e.task: e.kind for e in supervise(mixed, tasks, workers=2, retries=1) if e.kind != "died"}
    assert ends == {0: "done", 1: "lost", 2: "done"}


def test_the_reason_is_known_if_another_thread_takes_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another library's `multiprocessing.active_children` does: for a moment nobody can ask for the code."""
    poll, left = popen_fork.Popen.poll, [3]
    others = {process.pid for process in multiprocessing.active_children()}  # of other tests

    def taken(self: popen_fork.Popen, flag: int = os.WNOHANG) -> int | None:
        if left[0] and self.pid not in others:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # it has ended
            left[0] -= 1
            return None
        return poll(self, flag)

    monkeypatch.setattr(popen_fork.Popen, "poll", taken)
    events = list(supervise(die, [(str(tmp_path / "x"), 1)], workers=1, retries=0))
    assert [(event.kind, event.value) for event in events] == [
        ("lost", "killed by SIGKILL, perhaps out of memory")
    ]
    assert left == [0]


def test_leaving_without_an_answer_is_a_death_even_with_code_0() -> None:
    events = list(supervise(leave, [()], workers=1, retries=0))
    assert [event.kind for event in events] == ["lost"]
    assert "code 0" in events[0].value


def test_a_worker_without_progress_is_killed_and_tried_again_once_and_the_others_finish(
    tmp_path: Path, forked: None
) -> None:
    kinds = ("stall once", "stall", "stop", "stop within a message", "double")
    ends: dict[str, list[object]] = {kind: [] for kind in kinds}
    tasks = [(kind, str(tmp_path / kind)) for kind in kinds]
    for event in supervise(act, tasks, workers=len(tasks), retries=5, stall_timeout=STALL):
        kind = kinds[event.task]
        if event.kind != "progress":
            ends[kind].append((event.kind, event.value))
        elif kind == "stop within a message":
            status = Path(f"/proc/{event.value}/stat")
            # Nothing is read meanwhile, so its buffer is full.
            while status.read_text().split(") ")[1][0] != "T":
                time.sleep(0.01)
    died, lost = ((end, f"no progress for {STALL} s") for end in ("died", "lost"))
    assert ends == {
        "stall once": [died, ("done", "done")],  # the second time its reports count as life
        "stall": [died, lost],
        "stop": [died, lost],
        "stop within a message": [died, ("done", "done")],
        "double": [("done", 2)],
    }
    assert len((tmp_path / "stall").read_text()) == 2


def test_reports_that_wait_for_a_busy_caller_are_signs_of_life(tmp_path: Path, forked: None) -> None:
    events = supervise(stall, [(str(tmp_path / "marker"), 0)], workers=1, stall_timeout=STALL)
    assert next(events).kind == "progress"
    time.sleep(STALL + 1)  # the worker has long ended
    assert {event.kind for event in events} == {"progress", "done"}


def test_a_failure_says_which_error_of_the_operating_system_it_is() -> None:
    (event,) = supervise(full_disk, [()], workers=1)
    assert (event.value.errno, event.value.expected) == (errno.ENOSPC, True)
    assert "/disk/file" in event.value.message
    assert event.value.filename == "/disk/file"
    (event,) = supervise(fail, [(7,)], workers=1)
    assert event.value.errno is None


def test_out_of_memory_is_a_message_with_the_way_out() -> None:
    (event,) = supervise(no_memory, [()], workers=1)
    assert event.value.expected
    assert event.value.message.startswith("out of memory (4 GB); use fewer workers")


def test_a_process_is_registered_once_and_not_at_every_event() -> None:
    """An event's cost must not grow with the number of tasks or workers."""
    registered: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selectors.DefaultSelector, "register", counted_register(registered))
        events = list(supervise(chatter, [(50,)] * 3, workers=2))
    assert len(events) == 51 * 3
    assert len(registered) == 3


def counted_register(made: list[object]) -> Callable[..., object]:
    register = selectors.DefaultSelector.register

    def counted(self: selectors.DefaultSelector, file: object, events: int, data: object = None) -> object:
        made.append(file)
        return register(self, file, events, data)

    return counted


def test_closing_early_ends_the_workers(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    events = supervise(sleep_or_double, [("sleep", str(marker)), ("double", str(marker))], workers=2)
    assert next(events).kind == "done"
    pid = int(marker.read_text())
    events.close()
    assert not alive(pid)


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    code = (
        "import sys; from sa1b.workers import supervise; from tests.worker_tasks import sleep\n"
        "list(supervise(sleep, [(sys.argv[1],)], workers=1))"
    )
    root = Path(__file__).parents[1]
    parent = subprocess.Popen([sys.executable, "-c", code,
                               str(marker)], cwd=root)  # fmt: skip
    deadline = time.monotonic() + 600
    while not marker.exists() or not marker.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pid = int(marker.read_text())
    parent.kill()
    parent.wait()
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_first_worker_starts_with_ctrl_c_blocked_too() -> None:
    """The first start of a process in an interpreter also starts multiprocessing's resource tracker."""
    program = (
        "from sa1b.workers import supervise; from tests.worker_tasks import interrupts_blocked\n"
        "print([event.value for event in supervise(interrupts_blocked, [()], workers=1)])"
    )
    line = [sys.executable, "-c", program]
    run = subprocess.run(line, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[True]"


@pytest.mark.parametrize("stall_timeout", [None, 600.0])
def test_a_worker_that_has_answered_and_does_not_exit_is_ended(
    monkeypatch: pytest.MonkeyPatch, stall_timeout: float | None
) -> None:
    monkeypatch.setattr(workers, "_EXIT_SECONDS", 0.2)
    others = set(multiprocessing.active_children())  # of other tests
    events = supervise(double_and_stay, [(1,), (2,)], workers=1, stall_timeout=stall_timeout)
    assert [(event.kind, event.value) for event in events] == [("done", 2), ("done", 4)]
    assert set(multiprocessing.active_children()) <= others
