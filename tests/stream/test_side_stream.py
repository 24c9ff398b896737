"""Copies to a GPU by a stream that is as late as possible: memory is reused only after its copies."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import sa1b
from sa1b.stream.ragged import PinnedBuffer
from tests.stream.recorded import make_root
from tests.stream.test_stream import SMALL, assert_equal, take


class LateEvent:
    def __init__(self, side: "LateStream", number: int) -> None:
        self.side, self.number = side, number

    def synchronize(self) -> None:
        self.side.run(self.number)


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
        self.threads: set[str] = set()
        self.waited: list[int] = []
        self.allocated: list[torch.Tensor] = []
        LateStream.made.append(self)

    def begin_thread(self) -> None:
        self.threads.add(threading.current_thread().name)

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def pinned(self, shape: tuple[int, ...]) -> torch.Tensor:
        self.allocated.append(torch.empty(shape, dtype=torch.uint8))
        return self.allocated[-1]

    def copy(self, batch: sa1b.Batch) -> sa1b.Batch:
        assert batch.buffer is not None
        assert threading.current_thread().name in self.threads
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
    monkeypatch.setattr("sa1b.stream.loader.SideStream", LateStream)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return LateStream.made


def stream(root: Path, **options: Any) -> sa1b.Stream:
    step: dict[str, Any] = {"global_batch": 6, "micro_batch": 3, "epochs": None}
    return sa1b.Stream(root, damage_log=root / "log.jsonl", **(step | options), **SMALL)


# Rank 0 of two gets 2 of 5 images in every step, as micro-batches of 2 and of none.
EMPTY: dict[str, Any] = {"global_batch": 5, "micro_batch": 2, "rank": 0, "world_size": 2}


@pytest.mark.parametrize("step", [{}, EMPTY], ids=["", "empty"])
@pytest.mark.parametrize(("prefetch", "hold"), [(1, 1), (2, 1), (2, 4), (3, 4)])
def test_memory_is_written_again_only_after_its_copies(
    root: Path, prefetch: int, hold: int, step: dict[str, Any], late: list[LateStream]
) -> None:
    loader = sa1b.Loader(stream(root, **step), threads=3, prefetch=prefetch, device="cuda", quiet=True)
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
    assert len([one for one in side.allocated if one.ndim == 4]) == prefetch + 1


@pytest.mark.parametrize("stage", ["begin_thread", "copy", "event"])
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


def test_small_tensors_share_one_buffer_that_grows(root: Path, late: list[LateStream]) -> None:
    batches = iter(sa1b.Loader(stream(root), threads=2, prefetch=1, device="cuda", quiet=True))
    for _ in range(10):
        batch = next(batches)
        assert batch.buffer is not None
        assert batch.areas.untyped_storage().data_ptr() == batch.masks.runs.untyped_storage().data_ptr()
    batches.close()
    (side,) = late
    small = [len(one) for one in side.allocated if one.ndim == 1]
    assert len(small) < 10  # not one for each batch


def test_all_iterations_of_a_loader_share_one_stream(root: Path, late: list[LateStream]) -> None:
    # Torch's memory of a stream is not reused by another one.
    loader = sa1b.Loader(stream(root, epochs=1), threads=2, device="cuda", quiet=True)
    assert [len(list(loader)) for _ in range(2)] == [len(loader)] * 2
    assert len(late) == 1


def test_a_pinned_buffer_waits_for_its_own_copies_only() -> None:
    side = LateStream(torch.device("cuda"))
    buffer = PinnedBuffer(side, (1, 2, 2, 3))
    buffer.wait()  # nothing was copied from it
    assert len(buffer.small(10)) == 10
    grown = buffer.small(100)
    assert buffer.small(150).data_ptr() == grown.data_ptr()
    side.copies.append(lambda: None)
    buffer.copied()
    side.copies.append(lambda: None)
    buffer.wait()
    assert side.finished == 1


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
