"""The checks that the ranks run together, each with its fault, in real processes."""

import socket
from functools import cache

import pytest
import torch

from sa1b.programs.doctor import reachability
from sa1b.programs.doctor.check import connect_reason
from sa1b.programs.doctor.reachability import connection_findings
from sa1b.programs.doctor.report import Finding, Report
from sa1b.programs.doctor.ring import steps_of, timeline
from tests.doctor import ranks
from tests.engine.launch import launch

RANKS = 3


@cache
def results() -> list[dict[str, list[Finding]]]:
    """The findings of each rank, by case; all cases share one start of the processes."""
    return launch(ranks.found, RANKS)


def of(case: str) -> list[Finding]:
    found = [one for rank in results() for one in rank[case]]
    assert all(bool(one.remedy) == (one.state != "ok") for one in found)
    return found


def failed(case: str) -> list[Finding]:
    return [one for one in of(case) if one.state != "ok"]


@pytest.mark.parametrize(
    "case", ["group", "sum", "gradients", "bandwidth", "ring", "clock", "reachability"]
)  # fmt: skip
def test_without_a_fault_nothing_is_found(case: str) -> None:
    if case == "ring":  # a link may be slow on a busy machine
        assert [one.state for one in of(case) if one.state == "failed"] == []
    else:
        assert failed(case) == []
    assert of(case)


def test_a_wrong_sum_names_the_rank_and_its_value() -> None:
    for one in failed("wrong sum"):
        assert one.figure.startswith("9 in int32, 9 in int64, 9 in float32")
        assert one.figure.endswith("expected 3; rank 1 sent 7")
    assert [one.ranks for one in failed("wrong sum")] == [(0,), (1,), (2,)]
    assert of("sum")[0].figure == "3 in 6 number formats"


def test_a_hook_that_skips_on_one_rank() -> None:
    (one,) = failed("skips")
    assert one.ranks == (1,)
    assert one.figure.startswith("ddp: ")
    assert one.figure.endswith("not synchronised, it is the gradient of the data of this rank alone")
    assert "hook" in one.remedy


def test_a_hook_that_does_not_divide_is_wrong_on_all_ranks_though_they_agree() -> None:
    found = failed("sums")
    assert [one.ranks for one in found] == [(0,), (1,), (2,)]
    assert all(one.figure.endswith("the mean over the ranks times 3, the sum") for one in found)
    assert all("divides by another number" in one.remedy for one in found)


def test_no_sync_left_on() -> None:
    found = failed("left on")
    assert [(one.ranks, one.values["mode"]) for one in found] == [
        ((rank,), mode) for rank in range(RANKS) for mode in ("ddp", "fsdp")
    ]
    assert found[0].figure.endswith("not synchronised, it is the gradient of the data of this rank alone")
    assert found[1].figure.endswith("has no gradient")
    assert all("no_sync" in one.remedy for one in found)


def test_gradients_that_differ_in_their_last_bits() -> None:
    (one,) = failed("rounds")
    assert one.ranks == (1,)
    assert "has other bytes than on ranks 0, 2" in one.figure


def test_the_sweep_measures_each_collective_and_prints_a_table() -> None:
    (one,) = of("bandwidth")
    measured = one.values["measurements"]
    assert {each["collective"] for each in measured} == {"all-reduce", "all-gather", "reduce-scatter"}
    assert max(each["size_bytes"] for each in measured) <= 1 << 17
    for each in measured:
        factor = (2 if each["collective"] == "all-reduce" else 1) * (RANKS - 1) / RANKS
        assert each["algorithm_bytes_per_second"] == pytest.approx(each["size_bytes"] / each["seconds"])
        assert each["bus_bytes_per_second"] == pytest.approx(each["algorithm_bytes_per_second"] * factor)
    assert "informative" in one.figure
    assert "\nBandwidth:\n" in Report([one], hosts=["h"] * RANKS).table()


def test_a_ring_sends_the_least_bytes() -> None:
    (one,) = of("ring")
    sent, size = one.values["sent_bytes"], 4 * ((1 << 20) + 1)
    assert sum(sent) == one.values["expected_bytes_of_all"] == 2 * (RANKS - 1) * size
    # Chunks differ by one element, and a rank omits one chunk in each phase.
    assert all(abs(each - 2 * (RANKS - 1) / RANKS * size) <= 8 for each in sent)
    assert len([line for line in one.values["lines"] if line.startswith("step ")]) == 2 * (RANKS - 1)


def test_a_wrong_chunk_names_step_link_and_element() -> None:
    (one,) = failed("wrong chunk")
    assert (one.state, one.ranks) == ("failed", (1, 2))
    # Of the sizes 2, 3, 4 and 3,001, the last is the first with chunks of two elements on this link.
    assert "step 2, link 1 -> 2, chunk 0: element 1 is " in one.figure
    assert "cables" in one.remedy


def test_the_slowest_link_is_named() -> None:
    (one,) = failed("slow link")
    assert (one.state, one.ranks, one.host) == ("warning", (1, 2), "gpu-1, gpu-2")
    assert one.figure.startswith("link 1 -> 2 (gpu-1 -> gpu-2) takes ")
    assert one.values["link_seconds"][1] >= 0.5


def test_clocks_that_differ() -> None:
    ahead, after = failed("skewed")
    assert (ahead.state, ahead.ranks) == ("warning", (1,))
    assert ahead.figure.startswith("the clock of gpu-1 is ")
    assert ahead.values["offset_seconds"] == pytest.approx(5, abs=ahead.values["error_seconds"] + 0.01)
    assert (after.state, after.ranks) == ("failed", (2,))
    assert "the clock of gpu-2 is 16.7 minutes behind that of gpu-0" in after.figure
    assert "15 minutes" in after.figure
    assert all("chronyc" in one.remedy for one in (ahead, after))


def test_a_small_difference_is_no_fault() -> None:
    assert reachability.skew_finding(1.2, 0.5, "b", "a").state == "ok"
    assert reachability.skew_finding(-1.2, 0.001, "b", "a").figure.startswith(
        "the clock of b is 1.2 s behind that of a"
    )


def test_a_port_that_is_blocked_names_the_pairs_of_hosts() -> None:
    found = failed("blocked")
    assert [(one.state, one.ranks, one.host) for one in found] == [
        ("failed", (0,), "gpu-0"),
        ("failed", (1,), "gpu-1"),
    ]
    for one in found:
        assert one.figure.startswith(f"{one.host} -> gpu-2 (127.0.0.1:")
        assert one.figure.endswith("): connection refused")
        assert "GLOO_SOCKET_IFNAME" in one.remedy
    assert [one.state for one in of("blocked")] == ["failed", "failed", "ok"]  # gpu-2 reaches the others


def test_why_a_connection_fails() -> None:
    with (
        socket.socket() as closed,
        socket.socket() as full,
        socket.socket() as first,
        socket.socket() as second,
    ):
        closed.bind(("127.0.0.1", 0))
        assert connect_reason("127.0.0.1", closed.getsockname()[1]) == "connection refused"
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # one connection waits to be accepted, and the answer to others is dropped
        for one in (first, second):
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        assert connect_reason("127.0.0.1", full.getsockname()[1], 0.2) == "timed out"
    assert connect_reason("no-such-host.invalid", 80) == "name not known"


def test_hosts_that_cannot_be_reached_are_grouped_by_reason() -> None:
    hosts = {rank: f"gpu-{rank}" for rank in range(0, 80, 8)} | {0: "gpu-0"}
    targets = {rank: ("10.0.0.1", 40000 + rank) for rank in hosts if rank} | {-1: ("gpu-0", 29500)}
    reasons = {rank: "timed out" if rank > 8 else "" for rank in targets} | {-1: "no route"}
    late, rendezvous = connection_findings("gpu-0", hosts, targets, reasons)
    assert late.figure.startswith("gpu-0 -> gpu-16 (10.0.0.1:40016), gpu-24 (10.0.0.1:40024)")
    assert late.figure.endswith("and 4 more: timed out")
    assert "firewall" in late.remedy
    assert rendezvous.figure == "gpu-0 -> rendezvous (gpu-0:29500): no route"


def test_a_rank_that_does_not_reach_the_barrier_is_named() -> None:
    missing, waiting = failed("barrier")
    assert (missing.state, missing.ranks) == ("failed", (1,))
    assert missing.figure == "no answer within 4 s, though they had reached the store"
    assert "py-spy" in missing.remedy
    assert (waiting.state, waiting.ranks) == ("skipped", (2,))


def test_a_host_whose_name_is_its_loopback_address() -> None:
    found = failed("loopback")
    assert [one.host for one in found] == ["gpu-0", "gpu-1", "gpu-2"]
    assert all("leads to 127.0.0.1, which no other host reaches" in one.figure for one in found)
    assert all("GLOO_SOCKET_IFNAME" in one.remedy for one in found)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
@pytest.mark.parametrize("length", [0, 1, 2, 5, 12, 13])
def test_the_steps_of_a_ring_sum_every_chunk(world_size: int, length: int) -> None:
    values = [torch.arange(length) * (rank + 1) for rank in range(world_size)]
    expected = sum(values)
    chunks = [[part.clone() for part in one.tensor_split(world_size)] for one in values]
    programs = [steps_of(rank, world_size) for rank in range(world_size)]
    assert all(len(steps) == 2 * (world_size - 1) for steps in programs)
    sent = 0
    for number in range(2 * (world_size - 1)):
        messages = [chunks[rank][programs[rank][number].sends].clone() for rank in range(world_size)]
        sent += sum(len(one) for one in messages)
        for rank in range(world_size):
            step = programs[rank][number]
            assert programs[rank - 1][number].sends == step.receives
            kept = chunks[rank][step.receives] if step.adds else 0
            chunks[rank][step.receives] = messages[rank - 1] + kept
    assert all(torch.equal(torch.cat(one), expected) for one in chunks)
    assert sent == 2 * (world_size - 1) * length


def test_the_timeline_of_two_ranks() -> None:
    assert timeline(2) == [
        "step 1  reduce-scatter  0 -[0]-> 1   1 -[1]-> 0",
        "step 2  all-gather      0 -[1]-> 1   1 -[0]-> 0",
    ]
