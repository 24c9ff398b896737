"""The report: merged over ranks, with ranks, hosts and remedies."""

import json

from sa1b.programs.doctor.report import Finding, Report, merged
from sa1b.report import ranges


def test_equal_findings_become_one_line_and_their_numbers_a_range() -> None:
    same = [Finding("a", "ok", "torch 2.13.0, 8 CPUs", ranks=(rank,), host="h") for rank in range(4)]
    rates = [
        Finding("b", "ok", f"{rate} MB/s of sa_000020-0001.tar", ranks=(rank,), host="h")
        for rank, rate in enumerate(("1,790", "812", "800.5", "812"))
    ]
    first, second = merged([one for pair in zip(same, rates, strict=True) for one in pair], 4)
    assert (first.figure, first.where()) == ("torch 2.13.0, 8 CPUs", "")
    assert (second.figure, second.where()) == ("800.5 to 1,790 MB/s of sa_000020-0001.tar", "")
    slow = [Finding("disk", "failed", f"{9 + rank} MB/s", "Buy", (rank,), "h") for rank in range(2)]
    assert [(one.figure, one.where()) for one in merged(slow, 2)] == [("9 to 10 MB/s", "ranks 0-1 on h")]
    versions = [Finding("c", "ok", f"torch 2.{rank}.0", ranks=(rank,), host="h") for rank in (1, 3)]
    assert len(merged(versions, 2)) == 2


def test_a_fault_names_its_ranks_and_hosts_once() -> None:
    bad = [Finding("shm", "failed", "64 MiB", "grow it", (rank,), f"h{rank // 2}") for rank in (1, 2, 3)]
    good = Finding("shm", "ok", "9 GB", "", (0,), "h0")
    report = Report([good, *bad], "4 ranks on 2 hosts", ["h0", "h0", "h1", "h1"])
    text = report.table()
    assert "  FAILED   shm  64 MiB  [ranks 1-3 on h0, h1]" in text
    assert "  ok       shm  9 GB  [rank 0 on h0]" in text
    assert text.index("FAILED") < text.index("  ok  ")
    assert text.endswith("Failed:\n  shm (ranks 1-3 on h0, h1): grow it\n\n1 failed, 1 ok")
    assert report.exit_code() == 1
    document = json.loads(json.dumps(report.document()))
    assert [one["ranks"] for one in document["findings"]] == [[0], [1], [2], [3]]
    assert document["counts"] == {"failed": 1, "warning": 0, "skipped": 0, "ok": 1}
    assert document["exit_code"] == 1


def test_a_warning_and_a_skipped_check_are_no_failure() -> None:
    report = Report([Finding("a", "warning", "slow", "hurry"), Finding("b", "skipped", "no ROOT", "pass it")])
    assert report.exit_code() == 0
    assert report.table().splitlines() == [
        "1 process", "  warning  a  slow", "  skipped  b  no ROOT", "", "Warnings:", "  a: hurry", "",
        "1 warning, 1 skipped",
    ]  # fmt: skip


def test_two_warnings_are_in_the_plural() -> None:
    table = Report([Finding(name, "warning", "slow", "hurry") for name in "ab"]).table()
    assert table.endswith("\n2 warnings")


def test_ranks_that_differ_fill_a_few_lines_only() -> None:
    findings = [Finding("disk", "failed", f"disk-{rank}", "Buy", (rank,), "h") for rank in range(100)]
    lines = Report(findings, hosts=["h"] * 100).table().splitlines()
    assert sum("  disk-" in line for line in lines) == 8
    assert [line for line in lines if "Buy" in line] == ["  disk (ranks 0-99 on h): Buy"]
    assert any("and 92 more; --json lists all" in line for line in lines)


def test_ranges() -> None:
    assert ranges([0, 1, 2, 3, 7, 9, 10]) == "0-3, 7, 9-10"
