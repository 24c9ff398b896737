"""`make gpu`: the driver with parts that end badly, and every part at tiny size on a CPU."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import sa1b
from benchmarks.gpu import child, commands, decoders, driver, parts, table, training
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.driver import Outcome
from benchmarks.gpu.part import Part, Record, Setting
from benchmarks.gpu.stand_in import HostLane
from sa1b.engine import config as settings
from sa1b.recipes.presets import PRESETS
from sa1b.stream.decoders import DECODERS, POISON
from tests import processes
from tests.benchmarks import pretended_gpu
from tests.benchmarks.pretended_gpu import SideStream, pretended

FAULTY = "tests.benchmarks.faulty_parts"


def part(name: str, seconds: float = 60, *needs: str, measures: bool = True) -> Part:
    return Part(name, f"{FAULTY}:{name}", seconds, "", needs, measures)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Outcome], list[str]]:
    """One run of all faulty parts, and the names in the order in which they ended."""
    folder, ended = tmp_path_factory.mktemp("faulty"), []
    faulty = [
        *(part(name, measures=False) for name in ("fails", "raises", "goes_on", "crashes")),
        part("hangs", 3, measures=False),
        *map(part, ("records_nothing", "leaves", "skips")),
        Part("missing", f"{FAULTY}:no_such_function", 60, ""),
        Part("needing", f"{FAULTY}:good", 60, "", ("raises", "good")),
        part("good"),
    ]
    found = driver.run(
        faulty, Setting("cpu", True, folder), seconds=600, ended=lambda one, outcome: ended.append(one.name)
    )
    return folder, found, ended


def test_every_part_runs_whatever_happens_to_the_others(
    outcomes: tuple[Path, dict[str, Outcome], list[str]],
) -> None:
    _, found, ended = outcomes
    assert sorted(found) == sorted(ended)
    assert ended[-1] == "good"
    assert {name: (one.state, one.why) for name, one in found.items()} == {
        "fails": ("failed", "1 of 2 checks failed"),
        "raises": ("failed", "ended with exit code 1"),
        "goes_on": ("failed", "1 of 1 checks failed"),
        "crashes": ("failed", "killed by SIGSEGV"),
        "hangs": ("timed out", "killed after 3 s"),
        "records_nothing": ("failed", "recorded no check and no figure"),
        "leaves": ("failed", "ended without a record of its end"),
        "skips": ("skipped", "no decoder is installed"),
        "missing": ("failed", "ended with exit code 1"),
        "needing": ("not run", "it needs raises and good, which did not end well"),
        "good": ("ok", ""),
    }


def test_what_was_recorded_before_the_fault_is_kept_with_the_end_of_the_log(
    outcomes: tuple[Path, dict[str, Outcome], list[str]],
) -> None:
    _, found, _ = outcomes
    assert [check["name"] for check in found["crashes"].checks] == ["before the crash"]
    assert found["raises"].figures["before the error"]["value"] == 1
    assert "illegal memory access" in found["raises"].log
    assert "Fatal Python error: Segmentation fault" in found["crashes"].log
    assert [check["detail"] for check in found["goes_on"].checks] == ["RuntimeError: one thing fails"]
    assert found["goes_on"].figures["the second half"]["value"] == 2


def test_a_part_that_hangs_is_killed_with_its_children_and_its_log_says_where(
    outcomes: tuple[Path, dict[str, Outcome], list[str]],
) -> None:
    _, found, _ = outcomes
    assert "faulty_parts.py" in found["hangs"].log
    assert "in hangs" in found["hangs"].log
    assert "--- child.output" in found["hangs"].log
    process = int(found["hangs"].log.split()[-1])
    end = time.monotonic() + 60
    while Path(f"/proc/{process}").exists() and time.monotonic() < end:
        if Path(f"/proc/{process}/stat").read_text().split()[2] == "Z":  # nobody here reaps orphans
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{process}").exists()


def test_the_table_names_what_failed_and_targets_that_were_missed(
    outcomes: tuple[Path, dict[str, Outcome], list[str]],
) -> None:
    _, found, _ = outcomes
    assert "    FAILED second: 3 of 4 masks differ" in list(table.lines("fails", found["fails"]))
    assert "illegal memory access" in "\n".join(table.lines("raises", found["raises"]))
    figure = next(line for line in table.lines("good", found["good"]) if "a figure" in line)
    assert re.fullmatch(r" +a figure +1.5 ms   at most 1: MISSED", figure)
    assert table.summary(found, 61.4).startswith(
        "7 failed, 1 timed out, 1 skipped, 1 not run, 1 ok; 5 of 7 checks"
    )
    assert "1 targets missed; 61 s" in table.summary(found, 61.4)


def test_the_results_file_keeps_the_parts_of_earlier_runs(
    outcomes: tuple[Path, dict[str, Outcome], list[str]], tmp_path: Path
) -> None:
    _, found, _ = outcomes
    path = tmp_path / "results" / "nvidia-h200.json"
    table.write(path, "NVIDIA H200", {"good": found["good"], "fails": found["good"]})
    table.write(path, "NVIDIA H200", {"fails": found["fails"]})
    document = json.loads(path.read_bytes())
    assert document["machine"] == {"python": "3"}
    assert {name: one["state"] for name, one in document["parts"].items()} == {
        "good": "ok",
        "fails": "failed",
    }
    assert document["parts"]["good"]["figures"]["a figure"] == {
        "value": 1.5, "unit": "ms", "target": "at most 1", "met": False,
    }  # fmt: skip
    assert [path.name for path in path.parent.iterdir()] == ["nvidia-h200.json"]
    assert table.path_of("NVIDIA H100 80GB HBM3").name == "nvidia-h100-80gb-hbm3.json"


def test_the_exit_code_says_whether_all_checks_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = (part("good"), part("fails"), part("skips"), Part("needing", f"{FAULTY}:good", 60, "", ("good",)))
    out = tmp_path / "out.json"
    flags = ["--device", "cpu", "--tiny", "--out", str(out)]
    assert main(["needing", "skips", *flags], some) == 0
    assert set(json.loads(out.read_bytes())["parts"]) == {"good", "skips", "needing"}  # with what it needs
    assert main(["fails", *flags], some) == 1
    assert main(["good", *flags, "--seconds", "0"], some) == 1
    printed = capsys.readouterr().out
    assert "not run" in printed
    assert "the 0 s of the run have passed" in printed
    with pytest.raises(SystemExit, match="2"):
        main(["god"], some)
    assert "god: is no part; choose from good, fails, skips, needing" in capsys.readouterr().err


def test_ctrl_c_kills_the_parts_in_progress(tmp_path: Path) -> None:
    both = ", ".join(f"Part('{name}', '{FAULTY}:hangs', 600, '', measures=False)" for name in "ab")
    code = (
        "import sys; from benchmarks.gpu.__main__ import main; from benchmarks.gpu.part import Part;"
        f"sys.exit(main(sys.argv[1:], ({both})))"
    )
    command = [sys.executable, "-c", code, "--device", "cpu", "--tiny", "--folder", str(tmp_path)]
    outputs = [tmp_path / "outputs" / name / "child.output" for name in "ab"]
    with processes.Process(
        command, cwd=processes.REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while not all(output.exists() and output.read_text().endswith("\n") for output in outputs):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    for output in outputs:
        stat = Path(f"/proc/{int(output.read_text())}/stat")
        end = time.monotonic() + 60
        while stat.exists() and stat.read_text().split()[2] != "Z" and time.monotonic() < end:
            time.sleep(0.05)
        assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_each_part_is_named_once_needs_earlier_ones_and_has_a_limit() -> None:
    names = [one.name for one in parts.PARTS]
    assert len(set(names)) == len(names)
    for number, one in enumerate(parts.PARTS):
        assert set(one.needs) <= {other.name for other in parts.PARTS[:number] if other.measures}
        assert 0 < one.seconds <= 120
    assert parts.SECONDS < 540


# Every part at tiny size, in this process: so that no defect of the code waits for a GPU.

SLOW = {"modes", "recipe", "checkpoint", "presets"}  # like "precision", with more steps and processes


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """With the material of the other parts."""
    found = Setting("cpu", True, tmp_path_factory.mktemp("gpu"), processes.run)
    assert run(found, "material").state == "ok"
    return found


def run(setting: Setting, name: str) -> Outcome:
    """The outcome of a part that runs in this process."""
    (found,) = [one for one in parts.PARTS if one.name == name]
    path = setting.folder / f"{name}.jsonl"
    path.unlink(missing_ok=True)  # of an earlier test
    with _unchanged_environment():
        child.run(found.work, setting, Record(path))
    return driver._outcome(path, 0, found.seconds)


@contextmanager
def _unchanged_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_the_training_commands_of_full_size_are_valid(tmp_path: Path) -> None:
    started: list[list[str]] = []

    def start(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        started.append(command)
        return subprocess.CompletedProcess(command, 1, "", "not run")

    full = Setting("cuda", False, tmp_path, start)
    for part_of_training in (training.recipe, training.modes, training.precision, training.checkpoint,
                             training.failure, commands.presets):  # fmt: skip
        with suppress(training.CommandFailed):
            part_of_training(full, Record(tmp_path / "records"))
    assert len(started) == 1 + 4 + 4 + 3 + 2 + 2 * (4 + bool(find_spec("timm")))
    for command in started:
        first = command.index("--data.root")
        config = settings.parse(command[first:], None, PRESETS, "train")
        assert config.parallel.device == "cuda"
        assert config.micro_batches(1)[1] == 1


def test_waits_of_the_main_thread_and_busy_time_come_from_a_trace() -> None:
    main, other = {"pid": 1, "tid": 1}, {"pid": 1, "tid": 2}

    def wait(name: str, ts: float, thread: dict[str, int], took: float = 1) -> dict[str, Any]:
        return {"cat": "cuda_runtime", "name": name, "ts": ts, "dur": took, **thread}

    steps = [
        {"cat": "user_annotation", "name": f"ProfilerStep#{n}", "ts": 100 * n, "dur": 100, **main}
        for n in (1, 2)
    ]
    kernels = [
        {"cat": "kernel", "name": "k", "ts": ts, "dur": 30, "pid": 0, "tid": 7} for ts in (110, 120, 250)
    ]
    waits = [wait("cudaStreamSynchronize", 150, main), wait("cudaEventSynchronize", 260, main, 101),
             wait("cudaStreamSynchronize", 155, other), wait("cudaDeviceSynchronize", 350, main),
             wait("cudaLaunchKernel", 151, main)]  # fmt: skip
    found = training.of_trace([*steps, *kernels, *waits, {"ph": "M", "name": "process_name"}])
    assert found == {
        "waits of the host per step": 1.0, training.LONG_WAITS: 0.5, "kernels per step": 1.5,
        "share of the time in which a kernel runs": (40 + 30) / 200,
        "cudaStreamSynchronize per step": 0.5, "cudaEventSynchronize per step": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one.name, marks=pytest.mark.slow) if one.name in SLOW else one.name
        for one in parts.PARTS
        if one.name != "material"
    ],
)
def test_a_part_runs_at_tiny_size_on_a_cpu(setting: Setting, name: str) -> None:
    outcome = run(setting, name)
    assert [check for check in outcome.checks if not check["passed"]] == []
    assert outcome.state in ("ok", "skipped"), outcome.why
    assert all(found["value"] is not None for found in outcome.figures.values())


PRETENDED = ("machine", "raster", "equal", "race", "loader", "encoder",
             "decoders", "decoder-race", "decoder-rates")  # fmt: skip


@pytest.mark.parametrize("name", PRETENDED)
def test_the_code_for_a_gpu_runs_where_the_cpu_pretends_to_be_one(
    setting: Setting, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretended(monkeypatch):
        outcome = run(replace(setting, device="cuda"), name)
    assert [check for check in outcome.checks if not check["passed"]] == []
    assert outcome.state == "ok", outcome.why


def test_training_runs_where_the_cpu_pretends_to_be_a_gpu(setting: Setting) -> None:
    out = setting.folder / "pretended"
    flags = training.common(replace(setting, device="cuda"), out)
    command = [sys.executable, "-m", "tests.benchmarks.pretended_gpu", *flags, "--optim.steps", "4"]
    more = ["--data.decode", "gpu", "--parallel.precision", "fp16"]
    done = processes.run([*command, *more], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = training.lines(out)
    assert len(found) == 4
    assert found[-1]["peak_memory_gb"] == (1 << 20) / 1e9  # of the device
    assert found[-1]["mfu"] > 0


class Changing(HostLane):
    """Pixels change from call to call."""

    calls = 0

    def decode(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.calls += 1
        return [image.add_(self.calls % 2) for image in super().decode(files)]


class Skipping(HostLane):
    """Reports success for the last image of a batch without writing it."""

    def decode(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = super().decode(files)
        if len(found) > 1:
            found[-1].fill_(POISON)
        return found


@pytest.mark.parametrize(
    ("memory", "failed"),
    [
        (Changing, "torchcodec: the same pixels alone and in a batch"),
        (Skipping, "torchcodec: all images on the GPU"),
    ],
)
def test_decoders_with_faults_are_found(
    setting: Setting, memory: type[HostLane], failed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretended(monkeypatch), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monkeypatch.setitem(DECODERS, "torchcodec", partial(pretended_gpu.decoder, memory))
        outcome = run(replace(setting, device="cuda"), "decoders")
    assert failed in [check["name"] for check in outcome.checks if not check["passed"]]


def test_pixels_that_are_wrong_during_the_race_are_counted(setting: Setting) -> None:
    expected = torch.ones((2, 8, 8, 3), dtype=torch.uint8)
    calls = itertools.count()
    found = decoders._overwritten(setting, lambda out: out.fill_(1 + (next(calls) == 3)), expected, 9, 60, 8)
    assert found == (9, 0, 1)


def test_batches_that_are_wrong_on_the_device_are_found(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = SideStream.copy

    def damaged(self: SideStream, batch: sa1b.Batch) -> sa1b.Batch:
        copied = copy(self, batch)
        copied.images[0, 0, 0, 0] += batch.positions[0] == len(batch)  # in the second batch
        return copied

    monkeypatch.setattr(SideStream, "copy", damaged)
    found = {}
    with pretended(monkeypatch):
        for name in ("race", "equal"):
            outcome = run(replace(setting, device="cuda"), name)
            found |= {check["name"]: check["detail"] for check in outcome.checks if not check["passed"]}
    assert found == {
        "prefetch 1: images are those of the CPU": "1 of 6 batches",
        "prefetch 3: images are those of the CPU": "1 of 6 batches",
        "original: 2 batches equal those of the CPU": "['images']",
        "1024: 2 batches equal those of the CPU": "['images']",
    }
