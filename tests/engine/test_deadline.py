"""--deadline: times, the start of the run that they count from, and the time left for a step and a checkpoint."""

import os
import sys
import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from sa1b.engine.settings import ParallelConfig
from sa1b.engine.watch.control import Control
from sa1b.engine.watch.signals import Stop, deadline_of, started, timestamp
from sa1b.errors import UsageError
from tests.engine.launch import group, launch
from tests.engine.stream_root import place_of
from tests.processes import run


@pytest.fixture(params=["UTC", "Europe/Berlin"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
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
def test_times_of_the_machine(text: str, expected: str, zone: str) -> None:
    since = datetime.fromisoformat("2026-01-31T21:00").timestamp()
    assert timestamp(text, since) == datetime.fromisoformat(expected).timestamp()


def test_a_time_with_a_zone_is_the_same_on_all_machines(zone: str) -> None:
    assert timestamp("2026-03-01T06:30+02:00", 0) == 1772339400
    assert timestamp("2026-03-01T04:30Z", 0) == 1772339400


@pytest.mark.skipif(not os.path.exists("/usr/share/zoneinfo/Europe/Berlin"), reason="needs time zones")  # noqa: PTH110
def test_a_night_in_which_clocks_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        evening = datetime.fromisoformat("2026-03-28T22:00").timestamp()  # 2:00 is followed by 3:00
        assert timestamp("06:00", evening) == evening + 7 * 3600
        assert timestamp("+08:00", evening) == evening + 8 * 3600
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("text", ["", "6", "24:00", "12:60", "-01:00", "06:30pm", "2026-03-01", "tomorrow"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must be a time such as 06:30, a duration such as"):
        timestamp(text, 0)


def test_a_time_before_the_start_is_refused() -> None:
    with pytest.raises(UsageError, match="--deadline 2026-01-31T06:30: is past; pass a later time"):
        timestamp("2026-01-31T06:30", time.time() + 1e9)


def test_a_run_that_torchrun_starts_again_keeps_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    own = started()
    assert 0 <= time.time() - own < 24 * 3600
    time.sleep(0.05)
    assert started() == pytest.approx(own, abs=0.02)
    program = "from sa1b.engine.watch import signals; print(signals.started())"
    alone = float(run([sys.executable, "-c", program], capture_output=True, text=True).stdout)
    assert alone > own
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert started() <= own + 0.02  # of the parent
    deadline, clock = deadline_of("+01:00")
    assert deadline is not None
    assert deadline - clock() == pytest.approx(started() + 3600 - time.time(), abs=0.05)


def test_a_duration_does_not_follow_a_clock_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    end, clock = deadline_of("+90:00")
    assert end is not None
    left, real = end - clock(), time.time
    of_day, calendar = deadline_of("2126-01-31T06:30")
    assert of_day is not None
    for jump in (-3600, 3600):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        assert 0 <= left - (end - clock()) < 600
        restarted, clock_after = deadline_of("+90:00")  # as the ranks do that torchrun starts again
        assert restarted is not None
        assert abs(left - (restarted - clock_after())) < 600
    assert calendar is not time.monotonic


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_run_stops_while_a_step_and_a_checkpoint_still_fit() -> None:
    clock = Clock()
    control = Control(place_of(), 1100.0, clock)
    assert not control.poll()
    control.took(step=7.0, checkpoint=0.0)
    control.took(step=5.0, checkpoint=20.0)
    clock.now = 1072.9
    assert not control.poll()
    clock.now = 1073.0  # 7 s for the longest step, 20 s for the checkpoint
    assert control.poll()
    assert control.stop is Stop.DEADLINE


def test_a_long_step_counts_for_16_steps() -> None:
    clock = Clock()
    control = Control(place_of(), 1100.0, clock)
    control.took(step=99.0, checkpoint=0.0)
    for _ in range(16):
        control.took(step=1.0, checkpoint=0.0)
    clock.now = 1098.9
    assert not control.poll()


def test_without_a_deadline_nothing_stops() -> None:
    control = Control(place_of(), None, lambda: 1e12)
    assert not control.poll()


def stops(world_size: int) -> list[Stop]:
    with group(ParallelConfig(mode="ddp")) as rank_info:
        clock = Clock()
        clock.now += 100 * rank_info.rank  # clocks differ
        control = Control(rank_info, 1150.0, clock)
        seen = []
        for _ in range(3):
            control.poll()
            seen.append(control.stop)
            clock.now += 30
        return seen


def test_the_first_clock_that_reaches_the_deadline_stops_all_ranks() -> None:
    assert launch(stops, 2, 2) == [[Stop.NONE, Stop.NONE, Stop.DEADLINE]] * 2
