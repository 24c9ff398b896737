"""The exchange of ranks in each step: figures, timings, stop requests and failed writes."""

import errno
import math
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import ParallelConfig
from sa1b.engine.watch.control import Control, StepFigures
from sa1b.engine.watch.signals import SIGNALS, Stop, WriteError
from sa1b.storage.atomic import append_line
from tests.engine.launch import group, launch
from tests.engine.stream_root import place_of

NAMES = ("loss", "focal", "iou_last")
PARTS = [  # six parts of a step: the sums over their masks, the masks, the images
    ([2.0, 1.0, 0.5], 4, 2),
    ([0.0] * 3, 0, 0),
    ([9.0, 8.0, 7.0], 7, 3),
    ([1.0, 1.0, 1.0], 1, 1),
    ([0.5, 0.0, 0.25], 2, 1),
    ([4.0, 3.0, 2.0], 6, 2),
]


def no_space() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "here/metrics.jsonl")


def exchanged(control: Control, rank: int, world_size: int) -> StepFigures:
    mine = PARTS[rank * 6 // world_size : (rank + 1) * 6 // world_size]
    totals = {name: torch.tensor(sum(part[0][i] for part in mine)) for i, name in enumerate(NAMES)}
    totals["count"] = torch.tensor(float(sum(part[1] for part in mine)))
    numbers = {"data": 1.0 + rank, "compute": math.nan if rank else 2.0}
    return control.exchange(totals, torch.tensor(3.5), sum(part[2] for part in mine), numbers)


def on_rank(world_size: int) -> tuple[StepFigures, list[bool]]:
    with group(ParallelConfig(mode="ddp")) as rank_info:
        control = Control(rank_info)
        seen = []
        first = exchanged(control, rank_info.rank, world_size)
        seen += [bool(control.stop), control.poll()]
        control.asked = Stop.ASKED if rank_info.rank == world_size - 1 else Stop.NONE
        seen += [bool(control.stop), control.poll(), control.stop is Stop.FAILED]
        if rank_info.rank == 0:
            control.write(Path("here/metrics.jsonl"), no_space)
        seen += [control.stop is Stop.FAILED, control.poll(), control.stop is Stop.FAILED]
        with pytest.raises(WriteError, match="metrics.jsonl" if rank_info.rank == 0 else "another rank"):
            control.check()
        return first, seen


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_figures_of_ranks_are_those_of_a_single_process_and_requests_reach_all_at_once(
    world_size: int,
) -> None:
    single = exchanged(Control(place_of()), 0, 1)
    assert single.means == {"loss": 16.5 / 20, "focal": 13 / 20, "iou_last": 10.75 / 20}
    assert (single.count, single.images, single.norm, single.own_loss) == (20, 9, 3.5, 16.5)
    ranks = launch(on_rank, world_size, world_size)
    for figures, seen in ranks:
        assert figures.means == pytest.approx(single.means)
        assert (figures.count, figures.images, figures.norm) == (20, 9, 3.5)
        assert figures.ranks["data"] == [1.0 + rank for rank in range(world_size)]
        assert figures.ranks["compute"][0] == 2.0
        assert all(map(math.isnan, figures.ranks["compute"][1:]))
        assert seen == [False, False, False, True, False, False, True, True]
    assert sum(figures.own_loss for figures, _ in ranks) == single.own_loss


def test_one_collective_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def reduce(rows: torch.Tensor) -> None:
        calls.append(rows.shape)
        rows.copy_(rows[1].expand_as(rows))

    monkeypatch.setattr("torch.distributed.all_reduce", reduce)
    control = Control(place_of(1, 2))
    assert exchanged(control, 1, 2).count == 18  # twice the 9 of this rank
    control.poll()
    assert len(calls) == 2


def test_a_step_without_anything_that_counts_has_means_of_zero_and_others_keep_what_is_not_finite() -> None:
    totals = {name: torch.zeros(()) for name in (*NAMES, "count")}
    means = Control(place_of()).exchange(totals, torch.zeros(()), 1, {}).means
    assert means == dict.fromkeys(NAMES, 0.0)
    totals |= {"loss": torch.tensor(math.nan), "focal": torch.tensor(math.inf), "count": torch.tensor(2.0)}
    figures = Control(place_of()).exchange(totals, torch.tensor(math.inf), 1, {})
    assert math.isnan(figures.means["loss"])
    assert math.isnan(figures.own_loss)
    assert figures.means["focal"] == figures.norm == math.inf


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_asks_and_nothing_stops_before_the_ranks_have_met(number: signal.Signals) -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        control = Control(place_of())
        control.install()
        assert not control.poll()
        os.kill(os.getpid(), number)
        assert control.asked
        assert not control.stop
        assert control.poll()
        control.check()  # a stop request is not a failure
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@pytest.mark.parametrize("closed", [False, True])
def test_the_first_signal_is_answered_with_what_a_second_one_does(
    closed: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    stderr = os.dup(2)
    try:
        control = Control(place_of())
        control.install()
        if closed:  # as the terminal of a run that goes on without it
            os.close(2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert control.asked is Stop.TERMINATED
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        for one, handler in before.items():
            signal.signal(one, handler)
    assert capfd.readouterr().err == (
        ""
        if closed
        else "\nSIGTERM: stopping after this step, with a checkpoint; SIGTERM again ends the run at once, without one\n"
    )


AGENT = {"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "2"}


@pytest.mark.parametrize(
    ("asked", "other", "restarts"),
    [
        (Stop.TERMINATED, {}, True),
        (Stop.ASKED, {}, False),  # SIGUSR1 and Ctrl-C end the run on all machines
        (Stop.DEADLINE, {}, False),
        (Stop.TERMINATED, {"GROUP_WORLD_SIZE": "1"}, False),
        # None is left: torchrun ends at once, and does not wait for the one that left.
        (Stop.TERMINATED, {"TORCHELASTIC_RESTART_COUNT": "3"}, True),
    ],
)
def test_a_sigterm_ends_only_one_machine_of_several(
    asked: Stop, other: dict[str, str], restarts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = Control(place_of())
    assert not control.restarts
    control.asked = asked
    control.poll()
    assert not control.restarts  # without torchrun
    for name, value in (AGENT | other).items():
        monkeypatch.setenv(name, value)
    assert control.restarts is restarts
    control.wait_for_agent()  # returns at once, because this rank was asked


def test_the_first_failed_write_is_named_with_the_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    control = Control(place_of())
    control.check()
    for name in ("first", "second"):
        path = tmp_path / name / "file"
        control.write(path, partial(path.write_text, ""))
    control.write(tmp_path, lambda: None)
    assert not control.stop
    assert control.poll()
    with pytest.raises(WriteError) as raised:
        control.check()
    assert str(raised.value) == (
        f"{tmp_path}/first/file: cannot be written (No such file or directory); free space or repair the disk, "
        "then start the same command again: it resumes from the newest checkpoint"
    )
    assert [record.getMessage() for record in caplog.records] == [f"rank 0: {raised.value}"]


def test_other_errors_pass(tmp_path: Path) -> None:
    control = Control(place_of())
    with pytest.raises(KeyError):
        control.write(tmp_path, lambda: {}["a mistake"])
    control.check()


def test_a_file_that_is_not_written_within_the_limit_ends_this_rank_and_is_named(tmp_path: Path) -> None:
    control, path = Control(place_of(), limit=0.05), tmp_path / "metrics.jsonl"
    os.mkfifo(path)  # to open it waits for a reader, as a dead disk waits
    with pytest.raises(WriteError) as raised:
        control.write(path, lambda: append_line(path, "{}"))
    assert str(raised.value) == (
        f"{path}: no answer within 0.05 s (--data.deadline); check the disk, then start the same "
        "command again: it resumes from the newest checkpoint"
    )
    path.open("rb").close()  # the thread ends


def nccl_exchange() -> StepFigures:
    with group(ParallelConfig(mode="ddp", device="cuda")) as rank_info:
        return on_device(rank_info)


def on_device(rank_info: RankInfo) -> StepFigures:
    totals = {
        name: torch.tensor(i + 1.0, device=rank_info.device) for i, name in enumerate((*NAMES, "count"))
    }
    return Control(rank_info).exchange(totals, torch.tensor(3.5), 7, {})


@pytest.mark.gpu
def test_on_a_gpu_the_host_waits_once() -> None:
    device = torch.device("cuda", 0)
    rank_info = RankInfo(0, 1, 0, device)
    assert on_device(rank_info).images == 7
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        on_device(rank_info)
    copies = [event.name for event in profiled.events() if "Memcpy DtoH" in event.name]
    assert len(copies) == 1, copies
    (figures,) = launch(nccl_exchange, 1)
    assert figures.means == {"loss": 1 / 4, "focal": 2 / 4, "iou_last": 3 / 4}
