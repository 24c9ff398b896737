"""The verdict: it names the parts that cost the efficiency, their reasons, and what to change."""

from dataclasses import replace

import pytest

from sa1b.programs.scaling.page import judge
from sa1b.programs.scaling.result import CaseResult
from tests.scaling.measured import case, result, scaling

BASE = result(0.1)


@pytest.mark.parametrize(
    ("slow", "line", "advice"),
    [
        (
            result(0.2, 0.1),
            "efficiency 50%: communication exposed 50%",
            ["communication: compute more for each exchange", "doctor"],
        ),
        (result(0.15, data=0.05), "efficiency 67%: data wait 33%", ["bench shards` names the stage"]),
        (result(0.2), "efficiency 50%: slower computation 50%", ["ranks share caches and memory bandwidth"]),
        (
            result(0.25, 0.05, 0.08),
            "efficiency 40%: data wait 32%, communication exposed 20%, slower computation 8%",
            ["communication: ", "data: ", "computation: "],
        ),
        (
            result(0.2, imbalance=1.5),
            "slower computation 50%",
            ["the slowest rank takes up to 1.50 times as long"],
        ),
        (
            result(0.2, 0.1, spread=0.8),
            "communication exposed 50% (the rounds differ by 80%: measure again)",
            [],
        ),
        (result(0.2, None), "slower computation and communication 50% (not separated: out of memory)", []),
    ],
)
def test_a_low_efficiency_is_explained(slow: CaseResult, line: str, advice: list[str]) -> None:
    found = judge(scaling({case(1): BASE, case(2): slow}, root="shards"))
    assert found.lines == (f"Weak scaling, ddp fp32, 2 ranks: {found.lines[0].partition('ranks: ')[2]}",)
    assert line in found.lines[0]
    for part in advice:
        assert any(part in one for one in found.advice)


def test_the_waiting_of_a_pipeline_is_not_called_a_lack_of_memory() -> None:
    cases = {replace(case(1), mode="pipeline"): BASE, replace(case(2), mode="pipeline"): result(0.2, None)}
    found = judge(scaling(cases))
    assert "communication 50% (not separated: stages wait for each other)" in found.lines[0]
    assert any(one.startswith("pipeline: stages wait for each other; a larger") for one in found.advice)


def test_parts_that_cost_little_get_no_advice() -> None:
    found = judge(scaling({case(1): BASE, case(2): result(0.2, 0.098, 0.002)}))
    assert "data" not in str(found).replace("--data.", "")
    assert "computation" not in str(found)


def test_shared_cores_are_named_and_advice_for_gpus_differs() -> None:
    results = {case(1): BASE, case(2): result(0.2)}
    assert "ranks share cores; pass fewer" in str(judge(scaling(results, shared_cores=True)))
    assert "do not fill a GPU" in str(judge(scaling(results, device="NVIDIA H100")))


@pytest.mark.parametrize("step", [0.11, 0.2])
def test_a_busy_machine_is_named_first(step: float) -> None:
    found = judge(scaling({case(1): result(0.1, queued=0.1), case(2): result(step, queued=0.4)}))
    assert found.lines[0].startswith("The machine was busy: ranks waited for a CPU up to 40% of the time")
    assert len(found.lines) == 2
    idle = judge(scaling({case(1): BASE, case(2): result(step, queued=0.01)}))
    assert idle.lines == found.lines[1:]


def test_fsdp_has_advice_of_its_own() -> None:
    results = {case(1, mode="fsdp-full"): BASE, case(2, mode="fsdp-full"): result(0.2, 0.1)}
    text = str(judge(scaling(results)))
    assert "--parallel.shard grad_op" in text
    assert "--parallel.precision bf16" in text


def test_advice_for_fsdp_is_not_given_for_other_modes() -> None:
    results = {case(1, mode="zero1"): BASE, case(2, mode="zero1"): result(0.2, 0.1)}
    assert "FSDP" not in str(judge(scaling(results)))


def test_a_good_efficiency_needs_no_explanation() -> None:
    found = judge(scaling({case(1): BASE, case(2): result(0.124, 0.02)}))
    assert found.advice == ()
    assert found.lines == (
        "1 of 1 series: efficiency at least 80% with the most ranks; the lowest of them is weak scaling, ddp "
        "fp32 with 81%",
    )


def test_low_and_good_series_are_both_named() -> None:
    results = {case(1): BASE, case(2): BASE}
    low = {case(1, precision="bf16"): BASE, case(2, precision="bf16"): result(0.2, 0.1)}
    found = judge(scaling(results | low))
    assert [line.split(":")[0] for line in found.lines] == [
        "Weak scaling, ddp bf16, 2 ranks",
        "1 of 2 series",
    ]


def test_without_two_measured_cases_there_is_no_verdict() -> None:
    found = judge(scaling({case(1): BASE, case(2): CaseResult((), "lost")}))
    assert found.lines == ("No verdict: no series has two cases that were measured.",)
