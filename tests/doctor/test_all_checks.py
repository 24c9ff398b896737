"""All checks together, in real processes: one, several, with ranks that are missing, alone or different."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sa1b.programs.doctor.all_checks import LOCAL, TOGETHER, names, out_of_step, run_checks
from sa1b.programs.doctor.check import CheckTogether, RankExchange, RankProcess, crashed
from sa1b.programs.doctor.report import Finding
from sa1b.programs.doctor.synchronisation import GROUP, process_group, rank_sum
from tests import processes
from tests.cli.verb import called, runner
from tests.engine.launch import launch
from tests.processes import REPOSITORY, Process, rank_environments
from tests.shards import tiny_source

doctor = runner("doctor")
HOST = socket.gethostname()
PATIENCE = 120  # seconds
FEW_FILES = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
runpy.run_module("sa1b", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    sources = [tiny_source.write_source(folder / "sa_000001.tar", tiny_source.pairs(range(100, 112)))]
    return tiny_source.make_root(folder / "root", sources, tiny_source.ROOTS["plain"])


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "sa1b", "doctor", *map(str, words)]


def states(document: dict[str, Any]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for one in document["findings"]:
        found.setdefault(one["check"], set()).add(one["state"])
    return found


def test_one_process_runs_every_check(root: Path, tmp_path: Path) -> None:
    done = doctor(root, "--out", tmp_path / "run", "--seconds", 0.1, "--rate", 0.001, "--json")
    document = json.loads(done.stdout)
    assert done.returncode == document["exit_code"]
    found = states(document)
    assert list(found) == [*(check.name for check in LOCAL), "rendezvous"]
    assert found["rendezvous"] == {"skipped"}
    assert found["dataset"] == found["placement"] == found["read rate"] == {"ok"}
    assert done.stderr == ""
    assert not (tmp_path / "run").exists()


def test_checks_are_chosen_by_name_and_the_others_do_not_run() -> None:
    done = doctor("--only", "shared-memory", "--only", "open files", "--only", "clock", "--skip", "clock")
    assert done.returncode == 0, done.stdout
    rows = done.stdout.splitlines()
    assert rows[0] == f"1 process on {HOST}"
    assert [row[11:24].strip() for row in rows[1:3]] == ["shared memory", "open files"]
    assert rows[-1] == "2 ok"


def test_a_fault_is_an_exit_code_and_its_remedy_is_the_last_part() -> None:
    done = doctor("nowhere", "--only", "dataset", "--only", "read-rate")
    assert done.returncode == 1
    assert "  FAILED   dataset    nowhere: no dataset there\n" in done.stdout
    assert "  skipped  read rate  the check 'dataset' failed\n" in done.stdout
    assert "\nFailed:\n  dataset: Pass the --out folder of `" in done.stdout
    assert done.stdout.endswith("\n1 failed, 1 skipped\n")


def test_a_file_system_that_does_not_answer_is_named_and_stops_no_other_check(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "dataset.json")  # no process writes to it, so opening it never returns
    words = ("--timeout", 2, "--seconds", 0.1, *("--only", "dataset"), *("--only", "read rate"))
    done = doctor(tmp_path, *words, "--only", "clock")
    assert done.returncode == 1
    assert "  FAILED   dataset    did not end within 1.4 s\n" in done.stdout
    assert "  skipped  read rate  the check 'dataset' failed\n" in done.stdout
    assert "  ok       clock " in done.stdout
    assert "A file system, a store or a driver does not answer" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seconds", "0"), "--seconds 0: must be from 0.1 to 600"),
        (("--timeout", "nan"), "--timeout nan: must be from 1 to 3600"),
        (("--rate", "-1"), "--rate -1: must be more than 0"),
        (("--only", "disk"), "--only disk: no such check; they are: versions, "),
        (("--skip", ""), "--skip : no such check"),
        (("--only", "ring", "--skip", "ring"), "--only ring: no check is left; omit one of them from --skip"),
        (("",), "argument 1: is empty; give it a value"),
        (("a", "b"), "b: one argument too many"),
        (("--rnig",), "--rnig: no such flag"),
    ],
)
def test_a_wrong_command_line(arguments: tuple[str, ...], message: str) -> None:
    done = called("doctor")(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert message in line


def test_variables_of_a_launcher_that_contradict_each_other() -> None:
    environment = {**os.environ, "RANK": "3", "WORLD_SIZE": "2"}
    done = processes.run(command(), env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "RANK=3: must be from 0 to below WORLD_SIZE=2" in done.stderr
    environment = {**os.environ, "WORLD_SIZE": "two"}
    done = processes.run(command(), env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: WORLD_SIZE=two: must be a whole number; torchrun sets it\n"
    environment = {**os.environ, "LOCAL_RANK": "%q", "WORLD_SIZE": "2"}
    done = processes.run(command(), env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: LOCAL_RANK=%q: must be a whole number; torchrun sets it\n"


def test_ctrl_c_prints_what_was_found(root: Path) -> None:
    with Process(
        command(root, "--seconds", 100), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stderr:
            if "read rate" in line:
                break
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "interrupted" in output.splitlines()[0]
    assert "  ok       dataset" in output
    assert "interrupted" in errors
    assert "Traceback" not in errors


def test_ranks_that_differ_are_named_and_equal_ones_merged() -> None:
    """Rank 1 has few open files and another NCCL variable, rank 2 never starts."""
    checks = ("open files", "environment", "locked memory", "rendezvous")
    words = command(
        "--timeout", 2, "--seconds", 0.1, *(word for check in checks for word in ("--only", check))
    )
    with rank_environments(3) as (first, second, _):
        # Rank 1 has sent its findings to the store when rank 0 starts, which therefore waits for rank 2 only.
        few = [sys.executable, "-c", FEW_FILES, *words[3:]]
        environment = {**second, "NCCL_DEBUG": "TRACE"}
        done = processes.run(few, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        done = processes.run(words, env=first, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1, done.stderr
    rows = done.stdout.splitlines()
    assert rows[0] == "3 ranks on 1 host"
    (row,) = [row for row in rows if row.startswith("  FAILED   open files")]
    assert row.endswith(f"limit 300, 524 needed  [rank 1 on {HOST}]")
    assert f"  open files (rank 1 on {HOST}): Run `ulimit -n" in done.stdout
    slow = "NCCL_DEBUG=TRACE: slow: writes lines for every call, for debugging only"
    assert f"{slow}  [rank 1 on {HOST}]" in done.stdout
    (row,) = [row for row in rows if row.startswith("  FAILED   rendezvous")]
    assert "1 of 3 ranks did not answer at 127.0.0.1:" in row
    assert row.endswith("within 2 s  [rank 2]")
    assert len([row for row in rows if "  locked memory  " in row]) == 1


def test_a_rank_that_cannot_reach_the_others_reports_its_own_findings() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        port = str(closed.getsockname()[1])
        of_rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
        environment = {**os.environ, **of_rank, "MASTER_PORT": port}
        done = processes.run(
            command("--only", "rendezvous", "--only", "clock", "--timeout", 1, "--seconds", 0.1),
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout.startswith(f"rank 1 on {HOST}, alone\n")
    assert "  ok       clock       " in done.stdout
    assert f"  FAILED   rendezvous  127.0.0.1:{port}: connection refused, tried for " in done.stdout
    assert "frame #" not in done.stderr  # of torch
    assert f"nc -zv 127.0.0.1 {port}" in done.stdout


def test_ranks_without_torchrun_name_one_that_was_not_started() -> None:
    """Rank 0 has the store, which does not wait for the missing rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    words = command("--only", "rendezvous", "--only", "process-group", "--timeout", 10, "--seconds", 0.1)
    ranks = [
        Process(words, env={**os.environ, **at, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]  # fmt: skip
    (first, _), (second, errors) = (rank.communicate(timeout=PATIENCE) for rank in ranks)
    (row,) = [row for row in first.splitlines() if row.startswith("  FAILED   rendezvous")]
    assert row.endswith("within 10 s  [rank 2]")
    assert "  skipped  process group  rank 2 did not answer\n" in first
    assert (second, [rank.returncode for rank in ranks]) == ("", [1, 0]), errors


@pytest.mark.slow  # quick: ranks with its variables, below
def test_torchrun(root: Path) -> None:
    words = [*(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")]
    done = processes.run(
        [*words, "-m", "sa1b", "doctor", root, "--seconds", "0.1", "--json"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert (done.returncode != 0) == (document["exit_code"] != 0)
    found = states(document)
    assert set(found) == set(names()) - {"ring"}  # which only --ring runs
    assert found["rendezvous"] == found["dataset"] == {"ok"}
    assert document["hosts"] == [HOST, HOST]
    assert {tuple(one["ranks"]) for one in document["findings"] if one["check"] == "dataset"} == {(0,), (1,)}


def together_on_rank() -> dict[str, Any] | None:
    """Checks by both ranks: one raises on rank 1, and another one does not end there."""
    RankExchange(ready := RankProcess.of_this_process(timeout=PATIENCE)).send("ready", True)
    assert len(RankExchange(ready).receive("ready")) == 2  # from here on, 5 s are long

    def good(name: str) -> CheckTogether:
        def work(process: RankProcess, exchange: RankExchange) -> Iterator[Finding]:
            yield Finding(name, "ok", f"of rank {process.rank}")

        needs = ("raises",) if name == "needs it" else ()
        return CheckTogether(name, work, needs)

    def raises(process: RankProcess, exchange: RankExchange) -> Iterator[Finding]:
        if process.rank == 1:
            raise ValueError("broken")
        yield Finding("raises", "ok", "fine")

    def stops(process: RankProcess, exchange: RankExchange) -> Iterator[Finding]:
        if process.rank == 1:
            exchange.send("pid", os.getpid())
            os.kill(os.getpid(), signal.SIGSTOP)
        yield from process_group(process, exchange)

    def hangs(process: RankProcess, exchange: RankExchange) -> Iterator[Finding]:
        if process.rank == 1:
            time.sleep(PATIENCE)
        yield Finding("hangs", "ok", "fine")

    checks = (
        good("first"),
        CheckTogether("raises", raises),
        good("needs it"),
        good("another"),
        CheckTogether("hangs", hangs),
        good("after it"),
        CheckTogether(GROUP, stops),
        CheckTogether("last", rank_sum, needs=(GROUP,)),
    )
    process = RankProcess.of_this_process(timeout=5, seconds=0.1)
    mine = [check.name for check in checks]
    report = run_checks(process, lambda name: name in mine, quiet=True, together=checks)
    if process.rank == 0:
        (pid,) = RankExchange(process).receive("pid", [1]).values()
        os.kill(pid, signal.SIGCONT)
    return report.document() if report else None


def test_after_an_error_the_group_is_not_used_again() -> None:
    """Ranks that left a check at different collectives would end by an abort of gloo in the next one."""
    error = crashed("rank sum", RuntimeError("Connection reset"))
    last, free = TOGETHER[-1], TOGETHER[0]
    found = out_of_step(last, TOGETHER, [error])
    assert found is not None
    assert (found.state, found.figure) == ("skipped", "the check 'rank sum' did not end on all ranks")
    assert out_of_step(last, TOGETHER, [Finding("rank sum", "failed", "9, expected 3", "drain")]) is None
    assert out_of_step(free, TOGETHER, [error]) is None


def test_a_check_of_all_ranks_that_fails_or_hangs_on_one_rank_is_named() -> None:
    report, other = launch(together_on_rank, 2)
    assert other is None

    def found(check: str) -> list[tuple[str, list[int], str]]:
        findings = [one for one in report["findings"] if one["check"] == check]
        return [(one["state"], list(one["ranks"]), one["figure"]) for one in findings]

    assert found("first") == found("another") == [("ok", [0], "of rank 0"), ("ok", [1], "of rank 1")]
    raised = ("failed", [1], "the check ended by ValueError: broken")
    assert found("raises") == [("ok", [0], "fine"), raised]
    assert found("needs it") == [("skipped", [], "the check 'raises' failed")]
    assert found("hangs") == [("ok", [0], "fine"), ("failed", [1], "did not end within 2.9 s")]
    assert found("after it") == [("ok", [0], "of rank 0"), ("ok", [1], "of rank 1")]
    assert found("process group") == [
        ("failed", [1], "no answer within 2.5 s, though they had reached the store"),
        ("failed", [1], "1 of 2 ranks did not end this check within 5 s"),
    ]
    assert {one["host"] for one in report["findings"] if one["check"] == "process group"} >= {HOST}
    assert found("last") == [("skipped", [], "rank 1 did not answer")]
    assert report["exit_code"] == 1
