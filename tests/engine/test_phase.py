"""Phases of a rank: seconds of each part without those of the parts within it, and where an error occurred."""

import time
from collections.abc import Iterator

import pytest

from sa1b.engine.watch.phase import OTHER, Phases


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_a_part_within_another_one_has_its_own_seconds(clock: list[float]) -> None:
    phases = Phases()
    phases.begin(7)
    clock[0] += 0.5
    with phases.part("compute", 2):
        clock[0] += 1.0
        with phases.part("sync"):
            clock[0] += 4.0
            assert phases.current[:3] == ("sync", 7, 0)
        assert phases.current[:3] == ("compute", 7, 2)
        clock[0] += 2.0
    assert phases.seconds == {OTHER: 0.5, "compute": 3.0, "sync": 4.0}
    assert phases.total() == 7.5
    phases.begin(8)
    assert phases.current[:3] == (OTHER, 8, 0)
    assert phases.total() == phases.seconds["compute"] == 0


def test_waiting_for_an_item_is_a_phase_with_its_number_and_working_on_it_is_not(clock: list[float]) -> None:
    phases = Phases()
    phases.begin(0)
    seen = []

    def items() -> Iterator[str]:
        for name in ("a", "b"):
            clock[0] += 1.0
            seen.append(phases.current[:3])
            yield name

    for number, name in phases.numbered("data", items()):
        seen.append((number, name, phases.current.name))
        clock[0] += 8.0
    assert seen == [("data", 0, 1), (1, "a", OTHER), ("data", 0, 2), (2, "b", OTHER)]
    assert (phases.seconds["data"], phases.seconds[OTHER]) == (2.0, 16.0)


def test_phases_are_counted_so_that_ranks_can_be_compared() -> None:
    one, other = Phases(), Phases()
    for phases in (one, other):
        phases.begin(0)
        list(phases.numbered("data", "ab"))
    assert one.current.number == other.current.number
    with one.part("sync"):
        assert one.current.number == other.current.number + 1


def test_after_an_error_the_phase_tells_where_it_occurred() -> None:
    phases = Phases()
    phases.begin(3)
    with pytest.raises(RuntimeError), phases.part("compute", 2), phases.part("sync"):
        raise RuntimeError
    assert phases.current[:3] == ("sync", 3, 0)
