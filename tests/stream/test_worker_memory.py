"""Images that a worker process shares: memory is reused only when nothing refers to it in either process."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import sa1b
from sa1b import Batch
from sa1b.stream import worker_memory
from sa1b.stream.worker_memory import image_memory, sent, share_images
from tests.stream.recorded import RECIPE, make_root

CPU = torch.device("cpu")
SHAPE = (2, 40, 40, 3)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("worker-memory"), 40)


@pytest.fixture
def worker() -> Iterator[None]:
    """This process shares its images, as a worker does."""
    share_images()
    yield
    del worker_memory._workers[os.getpid()]


def received(tensor: Tensor) -> Tensor:
    """The tensor as the process that receives it has it; here its memory is the same."""
    function, arguments = sent(tensor)
    found: Tensor = function(*arguments)
    return found


def taken() -> Tensor:
    return image_memory(SHAPE, CPU)


def same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr()


def test_memory_is_reused_when_neither_process_refers_to_it(worker: None) -> None:
    first = taken()
    address = first.data_ptr()
    assert taken().data_ptr() != address  # it is not sent yet
    copy = received(first[1].permute(2, 0, 1))
    assert torch.equal(copy, first[1].permute(2, 0, 1))
    del first
    assert taken().data_ptr() != address  # the receiver has it
    row = copy[0]
    del copy
    assert taken().data_ptr() != address  # a view of it
    del row
    assert taken().data_ptr() == address


def test_a_worker_that_keeps_what_it_has_sent_keeps_its_memory(worker: None) -> None:
    first = taken()
    copy = received(first)
    del copy
    assert not same_memory(taken(), first)


def test_two_tensors_of_a_batch_are_released_one_by_one(worker: None) -> None:
    first = taken()
    address, halves = first.data_ptr(), [received(first[:1]), received(first[1:])]
    del first
    halves.pop(0)
    assert taken().data_ptr() != address
    halves.pop()
    assert taken().data_ptr() == address


def test_a_process_that_the_receiver_forks_releases_nothing(worker: None) -> None:
    first = taken()
    copy = received(first)
    del first
    child = os.fork()
    if not child:
        del copy
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not same_memory(taken(), copy)


def test_buffers_are_limited_and_those_of_another_size_are_dropped(worker: None) -> None:
    held = [taken() for _ in range(worker_memory._BUFFERS)]
    assert sent(taken()) is None  # ordinary memory
    assert len({one.data_ptr() for one in held}) == len(held)
    held.clear()
    other = image_memory((1, 70, 70, 3), CPU)
    assert sent(other) is not None
    assert len(worker_memory._workers[os.getpid()]._buffers) == 1


def test_without_shared_memory_batches_have_ordinary_memory(
    worker: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("unable to allocate shared memory")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", full)
    assert sent(taken()) is None


def test_little_memory_is_not_shared(worker: None) -> None:
    assert sent(image_memory((1, 30, 30, 3), CPU)) is None


def test_outside_of_a_worker_nothing_is_shared() -> None:
    assert sent(image_memory(SHAPE, CPU)) is None


def stream_of(root: Path) -> sa1b.Stream:
    return sa1b.Stream(root, global_batch=2, damage_log=root / "damage.jsonl", **RECIPE)


def plain(root: Path) -> list[Batch]:
    return list(stream_of(root))


def loaded(root: Path, **options: Any) -> Iterator[Any]:
    return iter(DataLoader(stream_of(root), batch_size=None, num_workers=1, **options))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_batches_that_are_kept_keep_their_pixels(root: Path, context: str) -> None:
    expected = plain(root)
    assert len(expected) > 2 * worker_memory._BUFFERS
    kept = [batch.images for batch in loaded(root, multiprocessing_context=context)]  # without the batch
    assert all(torch.equal(one, other.images) for one, other in zip(kept, expected, strict=True))
    assert all(one.stride() == other.images.stride() for one, other in zip(kept, expected, strict=True))


def with_the_one_before(batch: Batch, before: list[Tensor] = []) -> tuple[Batch, Tensor, Tensor]:  # noqa: B006
    """Mixes batches in a worker, which keeps the last one."""
    before.append(batch.images)
    return batch, batch.images, before[-2] if len(before) > 1 else batch.images


def test_a_worker_may_keep_batches_and_send_their_images_twice(root: Path) -> None:
    expected = [batch.images for batch in plain(root)]
    found = loaded(root, collate_fn=with_the_one_before)
    for number, (batch, images, before) in enumerate(found):
        assert torch.equal(batch.images, expected[number])
        del batch
        assert torch.equal(images, expected[number])
        assert torch.equal(before, expected[max(number - 1, 0)])
