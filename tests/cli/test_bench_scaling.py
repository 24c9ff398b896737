"""`sa1b bench scaling`: real ranks on separate CPUs, a case that fails, wrong arguments, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import processes
from tests.shards.tiny_source import ROOTS, make_root, pairs, write_source

TINY = ("--micro-batch", "1", "--masks", "1", "--steps", "1", "--rounds", "1", "--threads", "1")
two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "sa1b", "bench", "scaling", *map(str, arguments)]
    return processes.run(command, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scaling")
    source = write_source(folder / "sa_000001.tar", pairs(range(8)))
    return make_root(folder / "root", [source], ROOTS["plain"])


@two_cpus
def test_ranks_take_real_steps_on_shards_and_a_case_that_fails_stops_no_other(
    root: Path, tmp_path: Path
) -> None:
    report = tmp_path / "scaling.html"
    flags = ("--ranks", "1,2", "--modes", "ddp", "--precisions", "tf32,fp32", "--device", "cpu")
    done = run(root, *flags, *TINY, "--report", report, "--json")
    assert done.returncode == 1
    document, page = json.loads(done.stdout), report.read_text()
    assert document["exit_code"] == 1
    assert done.stderr == ""  # no progress with --json
    assert document["threads"] == 1
    assert "rank 0 on" in document["placement"]
    good = [one for one in document["series"] if one["precision"] != "tf32"]
    assert [(one["kind"], one["precision"]) for one in good] == [
        ("weak", "fp32"), ("strong", "fp32"),
    ]  # fmt: skip
    for one in good:
        assert [point["ranks"] for point in one["points"]] == [1, 2]
        assert one["points"][0]["efficiency"] == 1
        for point in one["points"]:
            assert point["step_seconds"] > 0
            parts = sum(point[f"{part}_seconds"] for part in ("compute", "communication", "data"))
            assert parts == pytest.approx(point["step_seconds"])
    assert document["verdict"]
    assert page.count("<svg") == 2  # none for tf32
    errors = {(one["precision"], one["ranks"]): one["error"] for one in document["cases"]}
    for ranks in (1, 2):
        assert errors["tf32", ranks].startswith("rank ")
        assert errors["tf32", ranks].endswith("--parallel.precision tf32: needs a GPU; pass fp32 or bf16")
        assert errors["fp32", ranks] is None
    assert "FAILED" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "100000", "--device", "cpu"], "--ranks 100000: this job may use "),
        (["--ranks", "1,x"], "--ranks 'x': must be whole numbers of at least 1, separated by commas"),
        (["--ranks", "0"], "--ranks '0': must be whole numbers"),
        (["--modes", "ddp,fsdp"], "--modes fsdp: must be one of ddp, fsdp-full, fsdp-grad_op, fsdp-hybrid"),
        (["--precisions", "fp8"], "--precisions fp8: must be one of fp32, tf32, bf16, fp16"),
        (["--preset", "huge"], "--preset huge: must be one of vit_b, "),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--timeout", "1"], "--timeout 1: must be from 10 to 36000"),
        (
            ["--ranks", "1", "--micro-batch", "2", "--global-batch", "3"],
            "--global-batch 3: must be a multiple",
        ),
        (["--report", "missing/page.html"], "--report missing/page.html: there is no folder missing"),
        (["--report", "."], "--report .: is a folder; name a file, such as report.html"),
        (["missing", "--ranks", "1"], "missing: no dataset there"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_line(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_unknown_flag_names_the_help_of_this_command() -> None:
    done = run("--nonsense")
    assert done.returncode == 2
    assert done.stderr.endswith("bench scaling --help`\n")


def test_ctrl_c_ends_all_ranks() -> None:
    command = [sys.executable, "-m", "sa1b", "bench", "scaling", "--ranks", "1", "--device", "cpu", *TINY]
    with processes.Process(
        [*command, "--rounds", "1000", "--modes", "ddp"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        limit = time.monotonic() + 60
        # The first one is the resource tracker of multiprocessing.
        while len(found := children.read_text().split()) < 2 and time.monotonic() < limit:
            time.sleep(0.02)
        assert len(found) == 2
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.rstrip().endswith("interrupted")
    assert "Traceback" not in errors
    while any(Path(f"/proc/{number}").exists() for number in found):
        assert time.monotonic() < limit + 60
        time.sleep(0.02)
