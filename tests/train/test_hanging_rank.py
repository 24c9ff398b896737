"""A rank that hangs is named with its phase, its stacks and what it reads, before the run ends."""

import contextlib
import json
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.train.command import start
from tests.train.mishap import Mishap

READ = r"image \d+ in .*/root/sa1b-\d+-\d+\.tar at offset [\d,]+"
HANGS: dict[
    str, tuple[dict[str, str], str, str]
] = {  # what and where; what the report says; a line of the stacks
    "stopped": ({"what": "freeze", "at": "forward"}, r"does not answer", ""),
    "in a loop": ({"what": "spin", "at": "forward"}, r"\bcompute\b.*outside.py:\d+ spin", r"in spin\b"),
    "in the optimizer": ({"what": "hang", "at": "update"}, r"\bupdate\b", r"in hang\b"),
    "in the decoder": ({"what": "hang", "at": "decode"}, rf"\bdata\b.*{READ}", r"in hang\b"),
    "in a read": ({"what": "hang", "at": "read"}, rf"\bdata\b.*{READ}", r"in hang\b"),
    "in its checkpoint": ({"what": "hang", "at": "save"}, r"\bcheckpoint\b|\bclosing\b", r"in hang\b"),
    "in C": ({"what": "lock", "at": "forward"}, r"does not answer", r"in keep_the_lock\b"),
}
QUICK = [("in a read", "ddp", 2), ("stopped", "ddp", 2), ("in C", "ddp", 2)]


def suspect(report: str) -> str:
    """The first line about a rank in the last report of a run, empty if there is none."""
    # A start that is slow, on a busy machine, is reported too, and before.
    found = re.search(r"\brank \d+\b.*", report.rpartition("no progress for")[2])
    return found[0] if found else ""


def reported(out: Path) -> str:
    path = out / "stall.txt"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize(
    ("where", "mode", "ranks"),
    [
        *QUICK,
        *(
            pytest.param(where, mode, 3, marks=pytest.mark.slow)
            for where in HANGS
            for mode in ("ddp", "fsdp")
        ),
    ],
)
def test_it_is_named_with_its_phase_and_again_when_it_is_killed(
    root: Path, tmp_path: Path, where: str, mode: str, ranks: int
) -> None:
    out, (what, said, line) = tmp_path / "run", HANGS[where]

    def has(rank: int, line: str) -> bool:
        stacks = out / f"stacks-{rank}.txt"
        return not line or (stacks.exists() and re.search(line, stacks.read_text()) is not None)

    def named(report: str) -> bool:
        return re.match(rf"rank 1\b.*{said}", suspect(report)) is not None

    def complete() -> bool:
        return has(0, "train.py") and has(1, line) and named(reported(out))

    given: dict[str, Any] = {"ranks": ranks, "mode": mode, "model": "reconstruction"}
    mishap = {**what, "rank": 1, "step": 1}
    ended = start(root, out, "--health.stall", "2", mishap=mishap, stuck=1, until=complete, **given)
    assert ended.codes == [1, -signal.SIGKILL, 1][:ranks], ended.outputs
    assert named(ended.outputs[0]), ended.outputs[0]
    assert all(re.search(r"in start\b", one) for one in ended.outputs[1:] if "no progress" in one)
    assert 'train.py", line' in (out / "stacks-0.txt").read_text()
    for rank in {0, ranks - 1} - {1}:
        (lost,) = (
            one for one in ended.outputs[rank].splitlines() if "ends because another rank ended" in one
        )
        assert f"rank {rank} ends because another rank ended or does not answer (" in lost
        assert "Traceback" not in ended.outputs[rank]


@pytest.mark.slow
def test_a_rank_that_hangs_ends_itself_after_the_timeout(root: Path, tmp_path: Path) -> None:
    timeouts = ("--data.deadline", "4", "--parallel.timeout", "5", "--parallel.timeout-first", "120")
    mishap = {"what": "spin", "at": "forward", "rank": 1, "step": 1}
    given: dict[str, Any] = {"ranks": 2, "mode": "ddp", "model": "reconstruction", "mishap": mishap}
    ended = start(root, tmp_path / "run", "--health.stall", "2", *timeouts, **given)
    assert ended.codes == [1, 1], ended.outputs
    assert re.search(r"rank 1 exits: no progress for 1\d s", ended.outputs[1])


def test_a_start_without_another_rank_names_the_interfaces(root: Path, tmp_path: Path) -> None:
    mishap = {"what": "freeze", "rank": 1, "step": 0}
    given: dict[str, Any] = {"ranks": 2, "mode": "ddp", "model": "reconstruction", "mishap": mishap}
    timeouts = ("--data.deadline", "4", "--parallel.timeout", "5", "--parallel.timeout-first", "5")
    ended = start(root, tmp_path / "run", *timeouts, stuck=1, **given)
    assert ended.codes == [1, -signal.SIGKILL]
    (line,) = (one for one in ended.outputs[0].splitlines() if "GLOO_SOCKET_IFNAME" in one)
    assert line.startswith("rank 0 ends because another rank ended or does not answer")
    assert "NCCL_SOCKET_IFNAME" in line
    assert all(name in line for _, name in socket.if_nameindex())


def test_a_run_says_what_each_rank_does_while_it_lasts(root: Path, tmp_path: Path) -> None:
    out, seen = tmp_path / "run", list[dict[str, Any]]()

    def noted() -> bool:
        for path in (out / "heartbeat").glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                seen.append(json.loads(path.read_text()))
        return {heartbeat["rank"] for heartbeat in seen} == {0, 1}

    flags = ("--optim.steps", "100000", "--health.stall", "20")
    given: dict[str, Any] = {"ranks": 2, "mode": "ddp", "model": "reconstruction"}
    start(root, out, *flags, stuck=1, until=noted, **given)
    assert {*seen[0]} >= {"rank", "host", "pid", "phase", "step", "collectives", "where"}
    assert (out / "heartbeat" / "1.json").exists()  # it was killed
    start(root, out, "--optim.steps", "1", *flags[2:], **given)  # it has more already
    assert not (out / "heartbeat").exists()
    assert not list(out.glob("stacks-*.txt"))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["stopped", "in a loop"])
def test_a_run_that_times_out_ends(root: Path, tmp_path: Path, where: str) -> None:
    timeouts = ("--data.deadline", "10", "--parallel.timeout", "11", "--parallel.timeout-first", "120")
    mishap = {**HANGS[where][0], "rank": 1, "step": 1}
    given: dict[str, Any] = {"ranks": 2, "mode": "ddp", "model": "reconstruction", "mishap": mishap}
    ended = start(root, tmp_path / "run", "--health.stall", "2", *timeouts, stuck=1, **given)
    assert ended.codes[0] == 1
    assert suspect(ended.outputs[0]).startswith("rank 1"), ended.outputs[0]
    assert "rank 0 ends because another rank ended or does not answer" in ended.outputs[0]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["stopped", "in a loop", "in the decoder"])
def test_it_is_named_within_half_a_minute(root: Path, tmp_path: Path, where: str) -> None:
    out, begun = tmp_path / "run", [0.0]

    def named() -> bool:
        if not begun[0] and (out / "metrics.jsonl").exists():
            begun[0] = time.monotonic()
        return bool(suspect(reported(out)))

    mishap = {**HANGS[where][0], "rank": 1, "step": 1}
    given: dict[str, Any] = {"ranks": 2, "mode": "ddp", "model": "reconstruction", "mishap": mishap}
    start(root, out, "--health.stall", "20", stuck=1, until=named, **given)
    assert time.monotonic() - begun[0] < 35  # of which some until the hang and after it
    assert suspect(reported(out)).startswith("rank 1")


@pytest.mark.parametrize(
    ("place", "stage", "reason"),
    [
        ("decode", " to be decoded", "is not decoded after .* a thread of the loader hangs"),
        ("read", "", "is not read after .* the disk or the server of its mount does not answer"),
    ],
)
@pytest.mark.slow  # tests/stream/test_loader.py has quick ones
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_rank_whose_loader_hangs_ends_after_the_deadline_and_names_sample_and_stage(
    root: Path, tmp_path: Path, place: str, stage: str, reason: str, everywhere: bool
) -> None:
    out = tmp_path / "run"
    mishap = {"what": "hang", "at": place, "rank": 1, "step": 1, "all": everywhere}
    flags = ("--data.deadline", "8", "--health.stall", "2", "--parallel.timeout", "300")
    ended = start(root, out, *flags, mishap=mishap, ranks=2, mode="ddp")
    assert ended.codes == [1, 1]
    failing = "[01]" if everywhere else "1"  # the other one may have its batch and wait for it
    assert re.search(rf"error on rank {failing}: {READ}: {reason}", "".join(ended.outputs))
    assert re.search(rf"rank {failing}\b.*\bdata\b.*{READ}{stage}", reported(out))


def test_a_single_process_reports_its_blocked_read(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"

    def named() -> bool:
        return re.search(rf"rank 0\b.*\bdata\b.*{READ}", reported(out)) is not None

    mishap = {"what": "hang", "at": "read", "step": 1}
    ended = start(root, out, "--health.stall", "1", mishap=mishap, stuck=0, until=named)
    assert ended.codes == [-signal.SIGKILL]
    assert re.search(rf"no progress for [^\0]*rank 0\b.*\bdata\b.*{READ}", ended.outputs[0])


@pytest.mark.slow  # tests/engine/test_control.py has a quick one
def test_a_metrics_file_that_does_not_answer_ends_the_run_and_is_named(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    mishap = {"what": "command", "command": ["sh", "-c", f"rm {path} && mkfifo {path}"], "step": 1}
    given: dict[str, Any] = {"ranks": 2, "mode": "ddp", "model": "reconstruction", "mishap": mishap}
    ended = start(root, tmp_path / "run", "--data.deadline", "3", **given)
    assert ended.codes == [1, 1], ended.outputs
    assert (
        f"error on rank 0: {path}: no answer within 3 s (--data.deadline); check the disk" in ended.outputs[0]
    )
    assert "rank 1 ends because another rank ended" in ended.outputs[1]


@pytest.mark.slow  # tests/engine/test_checkpoint.py has a quick one
@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_that_one_rank_does_not_write_ends_all_ranks(
    root: Path, tmp_path: Path, rank: int
) -> None:
    mishap = Mishap({"what": "raise", "at": "write", "error": "never", "rank": rank})
    given: dict[str, Any] = {"ranks": 2, "mode": "ddp", "model": "reconstruction", "mishap": mishap}
    flags = ("--parallel.timeout-first", "30", "--parallel.timeout", "30", "--data.deadline", "20")
    ended = start(root, tmp_path / "run", *flags, **given)
    assert ended.codes == [1, 1], ended.outputs
    assert "(--parallel.timeout-first); check the disk" in ended.outputs[rank]
    assert f"rank {1 - rank} ends because another rank ended or does not answer" in ended.outputs[1 - rank]
    assert "Traceback" not in "".join(ended.outputs)
