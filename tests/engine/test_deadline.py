"""--deadline: times, the start of the run that they count from, and the time left for a step and a checkpoint."""

import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from sa1b.engine.settings import ParallelConfig
from sa1b.engine.watch import signals
from sa1b.engine.watch.control import Control
from sa1b.engine.watch.signals import Stop, deadline_of, started
from sa1b.errors import UsageError
from tests.engine.launch import group, launch
from tests.engine.stream_root import place_of


@pytest.fixture(params=["UTC", "Europe/Berlin"])
def since(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run that began at 21:00 on the clock of the machine."""
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    begun = datetime.fromisoformat("2026-01-31T21:00").timestamp()
    monkeypatch.setattr(signals, "started", lambda: begun)
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("22:30", "2026-01-31T22:30"),
        ("21:00", "2026-02-01T21:00"),  # the run starts at 21:00:00
        ("06:05", "2026-02-01T06:05"),
        ("6:05", "2026-02-01T06:05"),
        ("00:00", "2026-02-01T00:00"),
        ("+00:45", "2026-01-31T21:45"),
        ("+30:00", "2026-02-02T03:00"),
        ("2026-03-01T06:30", "2026-03-01T06:30"),
        ("2026-03-01 06:30:15", "2026-03-01T06:30:15"),
    ],
)
@pytest.mark.usefixtures("since")
def test_times_of_the_machine(text: str, expected: str) -> None:
    assert deadline_of(text) == datetime.fromisoformat(expected).timestamp()


@pytest.mark.usefixtures("since")
def test_a_time_with_a_zone_is_the_same_on_all_machines() -> None:
    assert deadline_of("2026-03-01T06:30+02:00") == deadline_of("2026-03-01T04:30Z") == 1772339400


@pytest.mark.parametrize("text", ["", "6", "24:00", "12:60", "-01:00", "06:30pm", "2026-03-01", "tomorrow"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must be a time such as 06:30, a duration such as"):
        deadline_of(text)


def test_a_time_before_the_start_is_refused() -> None:
    with pytest.raises(UsageError, match="--deadline 2026-01-31T06:30: is past; pass a later time"):
        deadline_of("2026-01-31T06:30")


def test_a_run_that_torchrun_starts_again_keeps_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    own = started()
    time.sleep(0.05)
    assert started() == pytest.approx(own, abs=0.02)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert started() <= own + 0.02  # of the parent
    assert deadline_of("+01:00") == pytest.approx(started() + 3600, abs=0.05)


def test_a_run_stops_while_a_step_and_a_checkpoint_still_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    control = Control(place_of(), 1100.0)
    assert not control.poll()
    control.took(step=7.0, checkpoint=0.0)
    control.took(step=5.0, checkpoint=20.0)
    now[0] = 1072.9
    assert not control.poll()
    now[0] = 1073.0  # 7 s for the longest step, 20 s for the checkpoint
    assert control.poll()
    assert control.stop is Stop.DEADLINE


def stops(world_size: int) -> list[Stop]:
    with group(ParallelConfig(mode="ddp")) as rank_info:
        control = Control(rank_info, time.time() + 1000 - 900 * rank_info.rank)  # clocks differ
        seen = []
        for step in (0.0, 500.0):
            control.took(step, 0.0)
            control.poll()
            seen.append(control.stop)
        return seen


def test_the_first_clock_that_reaches_the_deadline_stops_all_ranks() -> None:
    assert launch(stops, 2, 2) == [[Stop.NONE, Stop.DEADLINE]] * 2
