"""The supervisor: a dead worker is retried, then named; nothing hangs, nothing is lost."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from sa1b.workers import Failure, supervise

Report = Callable[[object], None]


def double(value: int, report: Report) -> int:
    report(value)
    return 2 * value


def fail(value: int, report: Report) -> int:
    raise ValueError(f"cannot do {value}")


def die(marker: str, times: int, report: Report) -> str:
    """Killed `times` times, then done."""
    path = Path(marker)
    seen = len(path.read_text()) if path.exists() else 0
    if seen < times:
        path.write_text("x" * (seen + 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def leave(report: Report) -> None:
    os._exit(0)


def sleep(marker: str, report: Report) -> None:
    Path(marker).write_text(str(os.getpid()))
    time.sleep(60)


def mixed(kind: str, marker: str, report: Report) -> str:
    return die(marker, 99, report) if kind == "dies" else kind


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


def test_leaving_without_an_answer_is_a_death_even_with_code_0() -> None:
    events = list(supervise(leave, [()], workers=1, retries=0))
    assert [event.kind for event in events] == ["lost"]
    assert "code 0" in events[0].value


def test_closing_early_ends_the_workers(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    events = supervise(sleep_or_double, [("sleep", str(marker)), ("double", str(marker))], workers=2)
    assert next(events).kind == "done"
    pid = int(marker.read_text())
    events.close()
    assert not alive(pid)


def sleep_or_double(kind: str, marker: str, report: Report) -> None:
    if kind == "sleep":
        sleep(marker, report)
    while not Path(marker).exists() or not Path(marker).read_text():
        time.sleep(0.01)


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    code = (
        "import sys; from sa1b.workers import supervise; from tests.test_workers import sleep\n"
        "list(supervise(sleep, [(sys.argv[1],)], workers=1))"
    )
    root = Path(__file__).parents[1]
    parent = subprocess.Popen([sys.executable, "-c", code,
                               str(marker)], cwd=root)  # fmt: skip
    deadline = time.monotonic() + 30
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
