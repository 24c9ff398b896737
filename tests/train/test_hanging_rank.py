"""A rank that hangs is named with its phase, its stacks and what it reads, before the run ends."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.train.command import start
from tests.train.mishap import Mishap

HANGS = {  # what -> sentence about rank 1
    "freeze": r"does not answer: it is stopped or dead, or its host is lost; last seen .* in step \d, \w+",
    "spin": r"is in step 2, compute, micro-batch 1, for \d+ s, at train/mishap.py:\d+ spinning, and the others",
    "block": r"is in step \d, data, micro-batch \d, for \d+ s, at .*; it waits for image \d+ in .*/root/sa1b-\d+-"
    r"\d+.tar at offset [\d,]+, and the others wait for it",
}


def hang(root: Path, folder: Path, what: str, *flags: str, **more: Any) -> tuple[list[int], list[str], Path]:
    out = folder / "run"
    os.mkfifo(folder / "fifo")
    mishap = Mishap({"what": what, "rank": 1, "step": 1, "fifo": str(folder / "fifo")})
    ended = start(root, out, "--health.stall", "1.5", *flags, mishap=mishap, stuck=1, **more)
    return ended.codes, ended.outputs, out


def assert_named(what: str, outputs: list[str], out: Path) -> None:
    sentence = rf"rank 1 \(host .*\) {HANGS[what]}"
    assert re.search(rf"sa1b: no progress for \d+ s\n  {sentence}", outputs[0])
    assert re.search(sentence, (out / "stall.txt").read_text())
    assert "no progress" not in "".join(outputs[1:])
    assert 'train.py", line' in (out / "stacks-0.txt").read_text()
    if what == "spin":
        assert re.search(r'mishap.py", line \d+ in spinning', (out / "stacks-1.txt").read_text())
    if what == "block":
        assert re.search(r'mishap.py", line \d+ in blocked', (out / "stacks-1.txt").read_text())


@pytest.mark.parametrize(
    ("what", "mode", "ranks"),
    [
        ("block", "ddp", 2),
        pytest.param("freeze", "ddp", 2, marks=pytest.mark.slow),  # engine/test_watchdog.py
        *(
            pytest.param(what, mode, 3, marks=pytest.mark.slow)
            for what in ("freeze", "spin", "block")
            for mode in ("ddp", "fsdp")
        ),
    ],
)
def test_it_is_named_and_again_when_it_is_killed(
    root: Path, tmp_path: Path, what: str, mode: str, ranks: int
) -> None:
    report, stacks = tmp_path / "run" / "stall.txt", tmp_path / "run" / "stacks-1.txt"

    def reported() -> bool:
        named = report.exists() and re.search(HANGS[what], report.read_text()) is not None
        return named and (what == "freeze" or (stacks.exists() and "mishap.py" in stacks.read_text()))

    codes, outputs, out = hang(root, tmp_path, what, ranks=ranks, mode=mode, until=reported)
    assert codes == [1, -signal.SIGKILL, 1][:ranks]
    assert_named(what, outputs, out)
    for rank in {0, ranks - 1} - {1}:
        first, last = outputs[rank].splitlines()[-2:]
        assert first.startswith(f"rank {rank} ends because another rank ended or does not answer (")
        assert last.startswith(f"rank {rank}: rank 1 (host ")
        assert "does not answer: it is stopped or dead" in last


@pytest.mark.slow
@pytest.mark.parametrize("what", ["freeze", "spin", "block"])
def test_the_last_lines_of_a_run_that_times_out_name_it(root: Path, tmp_path: Path, what: str) -> None:
    timeouts = ("--data.deadline", "10", "--parallel.timeout", "11", "--parallel.timeout-first", "120")
    codes, outputs, out = hang(root, tmp_path, what, *timeouts, ranks=2, mode="ddp")
    assert_named(what, outputs, out)
    if what == "block":  # its own deadline is shorter
        assert codes == [1, 1]
        assert re.search(r"error on rank 1: image .*: is not read after", outputs[1])
        return
    assert codes == [1, -signal.SIGKILL]
    first, last = outputs[0].splitlines()[-2:]
    assert "Timed out" in first
    assert re.match(rf"rank 0: rank 1 \(host .*\) {HANGS[what]}", last)


@pytest.mark.parametrize(
    ("what", "stage", "reason"),
    [
        ("loop", " to be decoded", "is not decoded after .* a thread of the loader hangs"),
        ("block", "", "is not read after .* the disk or the server of its mount does not answer"),
    ],
)
@pytest.mark.slow  # tests/stream/test_loader.py and tests/engine/test_stall.py have quick ones
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_rank_whose_loader_hangs_ends_after_the_deadline_and_names_sample_and_stage(
    root: Path, tmp_path: Path, what: str, stage: str, reason: str, everywhere: bool
) -> None:
    out = tmp_path / "run"
    os.mkfifo(tmp_path / "fifo")
    hang = {"what": what, "rank": 1, "step": 1, "fifo": str(tmp_path / "fifo"), "all": everywhere}
    mishap = Mishap(hang)
    flags = ("--data.deadline", "8", "--health.stall", "1", "--parallel.timeout", "300")
    ended = start(root, out, *flags, mishap=mishap, ranks=2, mode="ddp")
    assert ended.codes == [1, 1]
    where = r"image \d+ in .*/root/sa1b-\d+-\d+.tar at offset [\d,]+"
    assert re.search(rf"error on rank 1: {where}: {reason}", ended.outputs[1])
    report = (out / "stall.txt").read_text()
    assert re.search(
        rf"rank 1 \(host .*\) is in step \d, data, .*; it waits for {where}{stage}(, and|\n)", report
    )
    assert ("all 2 ranks wait for data, and none for another rank" in report) == everywhere
    assert "network" not in report


def test_a_single_process_reports_its_blocked_read(root: Path, tmp_path: Path) -> None:
    out, fifo = tmp_path / "run", tmp_path / "fifo"
    os.mkfifo(fifo)
    mishap = Mishap({"what": "block", "step": 1, "fifo": str(fifo)})
    report = out / "stall.txt"
    # A step that is only slow, on a busy machine, is reported too, and before it.
    blocked = re.compile(r"rank 0 \(host .*\) is in step \d, data.*; it waits for image \d+ in")

    def reported() -> bool:
        return report.exists() and bool(blocked.search(report.read_text()))

    ended = start(root, out, "--health.stall", "1", mishap=mishap, stuck=0, until=reported)
    assert ended.codes == [-signal.SIGKILL]
    assert blocked.search(ended.outputs[0])
    assert "the others" not in ended.outputs[0]


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
