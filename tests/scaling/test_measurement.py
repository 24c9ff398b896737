"""Reports of ranks become rounds of cases; the case and the rank that failed are named."""

import pytest

from sa1b.programs.scaling.measurement import collect
from sa1b.programs.scaling.rank import StepTimes
from sa1b.report import bar
from sa1b.workers import Event, Failure
from tests.scaling.measured import case

A, B, C = case(2, 1), case(2, 2), case(2, 3)
TIMES = StepTimes((), (0.2,), (0.1,), 0.0)
LOST = Failure("RuntimeError", "[gloo/transport] Connection closed by peer [127.0.0.1]:1", "")


def reports(*ranks: int) -> list[Event]:
    return [Event(rank, "progress", TIMES) for rank in ranks]


def collected(*events: Event) -> tuple[list[object], object]:
    with bar(3, "test", "case", quiet=True) as progress:
        found, failed = collect([A, B, C], events, progress)
    return list(found), failed


def test_a_case_is_complete_when_all_ranks_have_reported_it() -> None:
    assert collected(*reports(0, 0, 1, 0, 1, 1)) == ([A, B, C], None)


def test_a_case_that_fails_before_another_rank_reports_the_previous_one_is_named_itself() -> None:
    failure = Failure("UsageError", "a\nthe flag", "", expected=True)
    assert collected(*reports(0), Event(0, "failed", failure)) == ([], (B, "rank 0: the flag"))
    assert collected(*reports(0, 1), Event(0, "failed", failure)) == ([A], (B, "rank 0: the flag"))


def test_a_rank_that_only_lost_another_one_is_not_the_reason() -> None:
    events = [*reports(0, 1), Event(0, "failed", LOST)]
    killed = Event(1, "lost", "killed by SIGKILL, perhaps out of memory")
    assert collected(*events, killed) == ([A], (B, "rank 1: killed by SIGKILL, perhaps out of memory"))
    (_, failed) = collected(*events)  # there is no better reason
    assert failed == (B, f"rank 0: RuntimeError: {LOST.message}")


def test_an_unexpected_error_has_the_name_of_its_class() -> None:
    failure = Failure("ZeroDivisionError", "division by zero", "")
    assert collected(Event(1, "failed", failure)) == ([], (A, "rank 1: ZeroDivisionError: division by zero"))
    assert collected(Event(1, "failed", Failure("KeyError", "", ""))) == ([], (A, "rank 1: KeyError"))


@pytest.mark.parametrize("kind", ["died", "lost"])
def test_a_rank_that_hangs_is_named(kind) -> None:  # type: ignore[no-untyped-def]
    event = Event(1, kind, "no progress for 600 s")
    assert collected(*reports(0, 1, 0), event) == ([A], (B, "rank 1: no progress for 600 s"))


def test_an_error_after_the_last_case_costs_nothing() -> None:
    events = reports(0, 1, 0, 1, 0, 1)
    assert collected(*events, Event(0, "lost", "killed by SIGABRT")) == ([A, B, C], None)
