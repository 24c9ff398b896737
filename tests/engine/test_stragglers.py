"""Which ranks are slow: medians of the others, windows, incidents, and the table."""

import math

import pytest

from sa1b.engine.watch.stragglers import PARTS, Stragglers

FAST = {"data": 0.01, "compute": 0.5, "sync": 0.1, "update": 0.04}


def times(ranks: int, **slow: tuple[int, float]) -> dict[str, list[float]]:
    """Seconds of all ranks in a step; `slow`: part -> rank and its seconds."""
    found = {name: [FAST[name]] * ranks for name in PARTS}
    for name, (rank, seconds) in slow.items():
        found[name][rank] = seconds
    return found


def filled(ranks: int, steps: int = 4, **slow: tuple[int, float]) -> Stragglers:
    stragglers = Stragglers([f"node{rank}" for rank in range(ranks)], steps)
    assert [stragglers.add(times(ranks, **slow)) for _ in range(steps)] == [*[False] * (steps - 1), True]
    return stragglers


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("part", ["data", "compute", "update"])
def test_a_rank_whose_own_work_exceeds_the_limit_is_found_with_its_part(ranks: int, part: str) -> None:
    for over, found in ((0.29, []), (0.31, [1])):
        extra = over * sum(FAST[name] for name in ("data", "compute", "update"))
        slow = filled(ranks, **{part: (1, FAST[part] + extra)}).slow()
        assert [one.rank for one in slow] == found
        for one in slow:
            assert (one.part, one.host) == (part, "node1")
            assert one.factor == pytest.approx(1.31)
            assert (one.seconds, one.others) == pytest.approx((FAST[part] + extra, FAST[part]))


def test_waiting_makes_no_rank_slow_and_one_rank_has_no_others() -> None:
    assert filled(3, sync=(1, 50.0)).slow() == []
    assert filled(1).slow() == []


def test_two_slow_ranks_of_eight_are_both_found() -> None:
    stragglers = Stragglers(["node"] * 8, 1)
    stragglers.add(times(8, compute=(2, 1.0), update=(5, 1.0)))
    assert [(one.rank, one.part) for one in stragglers.slow()] == [(2, "compute"), (5, "update")]


def test_an_incident_is_two_windows_long_and_is_reported_once() -> None:
    stragglers = Stragglers(["node"] * 2, 2)
    reported = []
    for window in "fsffsssffss":  # fast or slow
        for _ in range(2):
            complete = stragglers.add(times(2, compute=(1, 2.0 if window == "s" else 0.5)))
        assert complete
        reported.append([one.rank for one in stragglers.judge()])
    assert reported == [[], [], [], [], [], [1], [], [], [], [], [1]]


def test_a_report_names_rank_host_part_and_times() -> None:
    (slow,) = filled(3, compute=(2, 1.0)).slow()
    assert slow.message() == (
        "rank 2 on node2 is 1.91 times slower than the other ranks, which wait for it: compute takes 1.000 s a "
        "step, 0.500 s on the others"
    )


def test_the_table_has_medians_and_maxima_of_the_last_window_only() -> None:
    stragglers = Stragglers(["a", "longer"], 3)
    assert stragglers.table() == "times of the ranks: no complete step yet"
    assert not stragglers.add({name: [math.nan, 0.0] for name in PARTS})  # the first step of a rank
    for seconds in (9.0, 1.0, 0.5, 3.0):
        stragglers.add(times(2, compute=(1, seconds)))
    document = stragglers.document()
    assert (document["steps"], document["hosts"]) == (3, ["a", "longer"])
    assert document["seconds"]["compute"] == {"median": [0.5, 1.0], "max": [0.5, 3.0]}
    assert document["seconds"]["sync"] == {"median": [0.1, 0.1], "max": [0.1, 0.1]}
    assert document["slow"] == [{"rank": 1, "host": "longer", "factor": 2.818, "part": "compute"}]
    assert stragglers.table().splitlines() == [
        "times of the ranks in the last 3 steps, in seconds: median and maximum",
        " rank  host               data          compute             sync           update",
        "    1  longer    0.010   0.010    1.000   3.000    0.100   0.100    0.040   0.040"
        "  2.82 times the others: compute",
        "    0  a         0.010   0.010    0.500   0.500    0.100   0.100    0.040   0.040",
        "compute: own work; sync: waiting for other ranks and communication",
    ]


def test_the_table_of_many_ranks_has_the_slowest_ones() -> None:
    lines = filled(100, compute=(70, 2.0)).table().splitlines()
    assert lines[2].startswith("   70  node70")
    assert len(lines) == 2 + 32 + 2
    assert lines[-2] == "68 faster ranks are left out; metrics.jsonl has all"


def test_the_table_says_when_waiting_is_not_separated() -> None:
    stragglers = Stragglers(["a"], 1, separable=False)
    stragglers.add(times(1))
    assert "compute includes waiting for other ranks" in stragglers.table()
