"""The report: merged over ranks, with ranks, hosts and remedies, and what ranks should have in common."""

from typing import Any

from sa1b.programs.doctor import Finding, Report, differences


def of(rank: int, check: str, **values: Any) -> Finding:
    return Finding("ok", f"{check} of a rank", "", values, check, (rank,), f"gpu-{rank // 2}")


def test_equal_findings_become_one_line_and_their_numbers_a_range() -> None:
    rates = ("1,790", "812", "800.5", "812")
    findings = [
        Finding("ok", f"{rate} MB/s of sa_000020-0001.tar", "", {}, "rate", (rank,), "h")
        for rank, rate in enumerate(rates)
    ]
    findings += [Finding("ok", f"torch 2.{rank % 2}.0", "", {}, "c", (rank,), "h") for rank in range(4)]
    lines = Report(findings, "4 ranks", ["h"] * 4).table().splitlines()
    assert lines[1] == "  ok       rate  800.5 to 1,790 MB/s of sa_000020-0001.tar"
    assert lines[2:4] == [
        "  ok       c     torch 2.0.0  [ranks 0, 2 on h]",
        "  ok       c     torch 2.1.0  [ranks 1, 3 on h]",
    ]


def test_a_fault_names_its_ranks_and_hosts_once_and_fills_a_few_lines() -> None:
    bad = [
        Finding("failed", f"disk-{rank}", "Buy", {}, "disk", (rank,), f"h{rank % 2}") for rank in range(99)
    ]
    report = Report([*bad, Finding("warning", "slow", "Hurry", check="a")], "99 ranks", ["h"] * 99)
    lines = report.table().splitlines()
    assert sum("  disk-" in line for line in lines) == 8
    assert any("and 91 more; --json lists all" in line for line in lines)
    assert lines[-6:] == [
        "Warnings:", "  a: Hurry", "", "Failed:", "  disk (ranks 0-98 on h0, h1): Buy", "", "99 failed, 1 warning"
    ][1:]  # fmt: skip
    assert (report.exit_code(), report.document()["counts"]["failed"]) == (1, 99)
    assert Report(bad[:0], "nothing").exit_code() == 0


def test_versions_that_differ_name_ranks_and_hosts() -> None:
    good = [of(rank, "versions", torch="2.13.0", python="3.12.1", driver="580.1") for rank in range(4)]
    assert not list(differences(good))
    other = [of(rank, "versions", torch="2.11.0", python="3.12.2", driver="580.1") for rank in (4, 5)]
    found = [(one.state, one.figure, one.where()) for one in differences([*good, *other])]
    assert found == [
        ("failed", "torch 2.11.0, and 2.13.0 on ranks 0-3", "ranks 4-5 on gpu-2"),
        ("warning", "python 3.12.2, and 3.12.1 on ranks 0-3", "ranks 4-5 on gpu-2"),
    ]


def test_variables_that_differ_are_named_but_for_interfaces() -> None:
    same = [of(rank, "environment", NCCL_DEBUG="WARN", NCCL_SOCKET_IFNAME=f"eth{rank}") for rank in range(3)]
    assert not list(differences(same))
    (one,) = differences([*same, of(3, "environment")])
    assert (one.figure, one.where()) == ("NCCL_DEBUG not set, and WARN on ranks 0-2", "rank 3 on gpu-1")
    assert "Set NCCL_DEBUG in the job script" in one.remedy


def test_two_ranks_with_one_gpu_are_named() -> None:
    gpus = [of(rank, "device", uuid=f"GPU-{rank}") for rank in range(3)]
    assert not list(differences(gpus))
    (one,) = differences([*gpus, of(3, "device", uuid="GPU-2")])
    assert (one.state, one.check, one.where()) == ("failed", "device", "ranks 2-3 on gpu-1")
    assert "GPU-2" in one.figure
