"""Copies to a GPU by a stream that is as late as possible: memory is reused only after its copies."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import torch

import sa1b
from tests.stream.recorded import make_root
from tests.stream.test_stream import SMALL, assert_equal, take


class LateEvent:
    def __init__(self, side: "LateStream", number: int) -> None:
        self.side, self.number = side, number

    def synchronize(self) -> None:
        self.side.run(self.number)

    def query(self) -> bool:
        return self.number <= self.side.finished


class LateStream:
    """What a loader needs of a SideStream, on the CPU: copies are done when an event after them is waited for.

    A GPU may be as late as that. Until then the copy's memory holds 0xEE.
    """

    made: ClassVar[list[Any]] = []

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda"
        self.device = torch.device("cpu")
        self.lock = threading.Lock()
        self.copies: list[Callable[[], object]] = []
        self.finished = 0
        self.waited: list[int] = []
        self.locked: list[int] = []  # bytes
        LateStream.made.append(self)

    def begin_thread(self) -> None:
        """The threads of a decoder call it."""

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def page_lock(self, memory: npt.NDArray[np.uint8]) -> None:
        self.locked.append(memory.nbytes)

    def copy(self, batch: sa1b.Batch) -> sa1b.Batch:
        assert batch.buffer is not None
        small, images = torch.full_like(batch.buffer, 0xEE), torch.full_like(batch.images, 0xEE)

        def work() -> None:
            assert batch.buffer is not None
            small.copy_(batch.buffer)
            images.copy_(batch.images)

        with self.lock:
            self.copies.append(work)
        return replace(batch._repacked(small), images=images)

    def event(self) -> LateEvent:
        with self.lock:
            return LateEvent(self, len(self.copies))

    def run(self, number: int) -> None:
        with self.lock:
            while self.finished < number:
                self.copies[self.finished]()
                self.copies[self.finished] = lambda: None
                self.finished += 1

    def hand_over(self, batch: sa1b.Batch, ready: Any) -> None:
        self.waited.append(ready.number)  # the caller's stream will wait; nothing has to happen yet


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("side"), 17)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[LateStream]:
    LateStream.made.clear()
    monkeypatch.setattr("sa1b.stream.device.SideStream", LateStream)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return LateStream.made


def stream(root: Path, **options: Any) -> sa1b.Stream:
    step: dict[str, Any] = {"global_batch": 6, "micro_batch": 3, "epochs": None}
    return sa1b.Stream(root, damage_log=root / "log.jsonl", **(step | options), **SMALL)


# Rank 0 of two gets 2 of 5 images in every step, as micro-batches of 2 and of none.
EMPTY: dict[str, Any] = {"global_batch": 5, "micro_batch": 2, "rank": 0, "world_size": 2}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("step", [{}, EMPTY], ids=["", "empty"])
@pytest.mark.parametrize(("prefetch", "hold"), [(1, 1), (2, 1), (2, 4), (3, 4)])
def test_memory_is_written_again_only_after_its_copies(
    root: Path, prefetch: int, hold: int, step: dict[str, Any], processes: int, late: list[LateStream]
) -> None:
    options: dict[str, Any] = {"threads": 3, "processes": processes, "prefetch": prefetch}
    loader = sa1b.Loader(stream(root, **step), **options, device="cuda", quiet=True)
    batches = iter(loader)
    held: list[sa1b.Batch] = []
    expected = take(stream(root, **step), 14)
    assert {len(batch) for batch in expected} == ({2, 0} if step else {3})
    for number in range(14):
        held.append(next(batches))
        if number >= hold:  # the caller's GPU comes to a batch some batches later
            (side,) = late
            side.run(side.waited[number - hold])
            one, other = replace(held[number - hold], buffer=None), expected[number - hold]
            assert len(one) == len(other)
            if len(one):  # without elements, strides differ
                assert_equal(one, other)
    batches.close()
    assert len(side.locked) == 1


@pytest.mark.parametrize("stage", ["page_lock", "copy", "event"])
@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt])
def test_an_error_of_the_device_is_delivered(
    root: Path,
    late: list[LateStream],
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    error: type[BaseException],
) -> None:
    def fail(*_: object) -> None:
        raise error("this one")

    monkeypatch.setattr(LateStream, stage, fail)
    loader = sa1b.Loader(stream(root, micro_batch=1), threads=2, prefetch=1, device="cuda", quiet=True)
    with pytest.raises(error, match="this one"):
        next(iter(loader))


def test_all_iterations_of_a_loader_share_one_stream(root: Path, late: list[LateStream]) -> None:
    # Torch's memory of a stream is not reused by another one.
    loader = sa1b.Loader(stream(root, epochs=1), threads=2, device="cuda", quiet=True)
    assert [len(list(loader)) for _ in range(2)] == [len(loader)] * 2
    assert len(late) == 1


def test_the_memory_line_names_pinned_memory_and_the_device(
    root: Path, late: list[LateStream], said: pytest.LogCaptureFixture
) -> None:
    sa1b.Loader(stream(root), threads=2, prefetch=2, device="cuda")
    line = said.messages[-1]
    assert "4 batches of up to 3 images" in line
    assert "on the device" in line
    assert "of pinned memory" in line


@pytest.mark.gpu
@pytest.mark.parametrize("dense", [pytest.param(None, marks=pytest.mark.cuda_host), 32])
def test_a_gpu_gets_the_same_batches(root: Path, dense: int | None) -> None:
    loader = sa1b.Loader(stream(root), threads=3, prefetch=2, device="cuda", dense=dense, quiet=True)
    for expected, batch in zip(take(stream(root), 14), loader, strict=False):
        assert batch.images.device.type == batch.masks.sizes.device.type == "cuda"
        if dense is not None:
            assert batch.dense is not None
            assert torch.equal(batch.dense.cpu(), expected.masks.dense(dense))
        assert_equal(replace(batch, dense=None).to("cpu"), expected)
