"""Efficiency and its parts, medians over rounds and ranks, table and document."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sa1b.programs.scaling.measurement import round_of
from sa1b.programs.scaling.rank import StepTimes
from sa1b.programs.scaling.result import CaseResult, Scaling, compare
from tests.scaling.measured import case, result, scaling

seconds = st.floats(1e-4, 10)


@settings(deadline=None)
@given(
    images=st.integers(1, 64),
    ranks=st.integers(2, 64),
    base=st.tuples(seconds, seconds, seconds),
    found=st.tuples(seconds, seconds, seconds),
)
def test_the_parts_of_the_lost_efficiency_add_up(
    images: int, ranks: int, base: tuple[float, ...], found: tuple[float, ...]
) -> None:
    first, one = case(1, images * ranks), case(ranks, images)
    point = compare(one, result(sum(found), *found[:2]), first, result(sum(base), *base[:2]))
    assert point.communication is not None
    lost = point.communication + point.data + point.compute
    assert lost == pytest.approx(1 - point.efficiency, abs=1e-9, rel=1e-9)
    assert point.speed_up == pytest.approx(point.efficiency * ranks)


def test_efficiency_of_weak_and_strong_scaling() -> None:
    weak = compare(case(4, 2), result(0.125), case(1, 2), result(0.1))
    assert (weak.efficiency, weak.speed_up) == pytest.approx((0.8, 3.2))
    strong = compare(case(4, 2), result(0.125), case(1, 8), result(0.4))
    assert (strong.efficiency, strong.speed_up) == pytest.approx((0.8, 3.2))


def test_a_round_has_the_differences_of_the_parts_of_the_slowest_rank() -> None:
    found = round_of(
        [
            StepTimes((0.5, 0.5, 0.9), (0.3, 0.4, 0.4), (0.2, 0.2, 0.7), 0.01),
            StepTimes((0.5, 0.5, 0.9), (0.4, 0.4, 0.4), (0.3, 0.3, 0.3), 0.2),
        ]
    )
    assert (found.step, found.data, found.communication) == pytest.approx((0.5, 0.1, 0.1))
    assert (found.imbalance, found.queued) == pytest.approx((0.3 / 0.25, 0.2))


def test_without_data_or_without_a_step_alone_those_parts_are_missing() -> None:
    found = round_of([StepTimes((), (0.4,), (0.3,), 0.0), StepTimes((), (0.4,), (), 0.0)])
    assert (found.step, found.data, found.communication) == (0.4, 0.0, None)
    point = compare(case(2), result(0.5, None), case(1), result(0.3, 0.1))
    assert point.communication is None
    assert point.compute == pytest.approx((0.5 - 0.2) / 0.5)


def test_noise_below_zero_is_no_time() -> None:
    found = result(0.5, -0.1, -0.02)
    assert (found.communication, found.data, found.compute) == (0.0, 0.0, 0.5)


def test_the_table_has_all_figures_and_the_document_all_rounds() -> None:
    failed = case(2, precision="bf16")
    found = scaling(
        {
            case(1): result(0.1, 0.01, 0.02, spread=0.1),
            case(2): result(0.125, 0.025, 0.025),
            case(1, precision="bf16"): result(0.2),
            failed: CaseResult((), "rank 1: out of memory"),
        },
        root="shards",
    )
    table = found.table()
    rows = [line.split() for line in table.splitlines() if line.startswith("  ddp")]
    assert rows[0][:5] == ["ddp", "fp32", "1", "2", "100"]
    assert rows[0][5:] == ["95-105", "20.0", "1.00", "100%", "70%", "10%", "20%"]
    assert rows[1][6:] == ["32.0", "1.60", "80%", "60%", "20%", "20%"]
    assert rows[3][4:] == ["failed"]
    assert "FAILED  ddp bf16, 2 ranks x 2 images: rank 1: out of memory" in table
    document = json.loads(json.dumps(found.document()))
    assert document["exit_code"] == found.exit_code() == 1
    assert [len(one["rounds"]) for one in document["cases"]] == [3, 3, 3, 0]
    assert document["series"][0]["points"][1]["efficiency"] == pytest.approx(0.8)
    assert [len(one["points"]) for one in document["series"]] == [2, 1]
    again = Scaling.of_document(document)
    assert again == found
    assert scaling({case(1): result(0.1)}).exit_code() == 0
    assert scaling({failed: found.results[failed]}).exit_code() == 2
    assert again.table() == table
