"""Ranks that are slow are named, with their part of the step and host; the table of the ranks on request."""

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.train.command import lines, output_of, start, torchrun
from tests.train.mishap import Mishap

SECONDS = 1000.0
PARTS = {"compute": [1, 7], "data": [7, 13], "update": [13, 19]}  # the first step is in no window
FLAGS = ("--optim.steps", "20", "--logging.window", "2", "--checkpoint.every", "100")


@pytest.mark.parametrize(
    ("mode", "ranks"),
    [
        ("ddp", 2),
        *(pytest.param(mode, 3, marks=pytest.mark.slow) for mode in ("ddp", "fsdp")),
        pytest.param("fsdp", 2, marks=pytest.mark.slow),
    ],
)
def test_a_slow_rank_is_named_with_its_part_whatever_the_mode(
    root: Path, tmp_path: Path, mode: str, ranks: int
) -> None:
    out = tmp_path / "run"
    mishap = Mishap({"what": "slow", "rank": 1, "seconds": SECONDS, "parts": PARTS})
    ended = start(root, out, *FLAGS, ranks=ranks, mode=mode, mishap=mishap, model="reconstruction")
    assert ended.codes == [0] * ranks, ended.outputs
    windows = [line["ranks"] for line in lines(out) if "ranks" in line]
    assert [window["steps"] for window in windows] == [2] * 9
    named: list[Any] = [
        next((slow["part"] for slow in window["slow"] if slow["rank"] == 1), None) for window in windows
    ]
    for number, part in enumerate(PARTS):
        assert part in named[3 * number : 3 * number + 3], named
    assert all(window["hosts"] == [socket.gethostname()] * ranks for window in windows)
    assert all(slow["factor"] > 1.3 for window in windows for slow in window["slow"])
    report = f"rank 1 on {socket.gethostname()} is "
    assert any(line.startswith(report) for line in ended.outputs[0].splitlines())
    assert not any("times slower" in output for output in ended.outputs[1:])


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _tables(out: Path) -> int:
    path = out / "metrics.jsonl"
    return sum('"ranks"' in line for line in path.read_text().splitlines()) if path.exists() else 0


def test_a_table_is_printed_after_the_step_in_which_a_rank_was_asked(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    mishap = {"what": "table", "rank": 1, "step": 3}
    ended = start(root, out, ranks=2, mode="ddp", mishap=mishap, model="reconstruction")
    assert ended.codes == [0, 0], ended.outputs
    assert "times of the ranks in the last 2 steps, in seconds: median and maximum" in ended.outputs[0]
    assert "times of the ranks" not in ended.outputs[1]
    (table,) = (line for line in lines(out) if "ranks" in line)
    assert table["step"] == 4
    assert len(table["ranks"]["seconds"]["sync"]["max"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("everyone", [False, True])
def test_sigusr2_to_any_rank_of_torchrun_prints_the_table_and_the_run_goes_on(
    root: Path, tmp_path: Path, everyone: bool
) -> None:
    out = tmp_path / "run"
    process = torchrun(root, out, "--optim.steps", "5000", "--checkpoint.every", "5000", ranks=2, mode="ddp")
    try:
        end = time.monotonic() + 300
        while not (out / "metrics.jsonl").exists() or len(lines(out)) < 4:
            assert process.poll() is None, output_of(process, out)
            assert time.monotonic() < end
            time.sleep(0.05)
        ranks = _children(process.pid)
        environments = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in ranks}
        of_rank = {
            int(word.removeprefix(b"RANK=")): pid
            for pid, words in environments.items()
            for word in words
            if word.startswith(b"RANK=")
        }
        for rank in (0, 1) if everyone else (1,):
            os.kill(of_rank[rank], signal.SIGUSR2)
        while not _tables(out):
            assert process.poll() is None, output_of(process, out)
            assert time.monotonic() < end
            time.sleep(0.05)
        asked = lines(out)[-1]["step"]
        while lines(out)[-1]["step"] < asked + 3:
            assert process.poll() is None, output_of(process, out)
            assert time.monotonic() < end
            time.sleep(0.05)
        os.kill(of_rank[0], signal.SIGTERM)
        text = output_of(process, out)
    finally:
        process.terminate()
        process.wait(60)
    assert text.count("times of the ranks in the last ") in ((1, 2) if everyone else (1,))
    assert text.count("compute: own work; sync: waiting for other ranks") in ((1, 2) if everyone else (1,))
    document = json.loads(
        next(line for line in (out / "metrics.jsonl").read_text().splitlines() if '"ranks"' in line)
    )
    assert len(document["ranks"]["seconds"]["compute"]["median"]) == 2
