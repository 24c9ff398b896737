"""A worker process that cannot share memory sends bytes; what it cannot send is an error of the training process."""

import resource
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from sa1b.stream.worker_memory import TransportError
from tests.stream.leftovers import held, names
from tests.stream.reading import first_lines, start, stream_of
from tests.stream.recorded import make_root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("transport"), 12)


def no_shared_memory(worker: int) -> None:
    """Let this process write no file of more than one byte, as in a full /dev/shm."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_without_shared_memory_the_batches_arrive_and_leave_no_segment(root: Path) -> None:
    segments, own = names(), stream_of(root, order="sequential")
    expected = list(own)  # compiled kernels are inherited: the worker has none to cache in a file
    found = DataLoader(own, batch_size=None, num_workers=1, timeout=300, worker_init_fn=no_shared_memory)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.images, other.images)
        assert one.images.stride() == other.images.stride()
        assert torch.equal(one.masks.runs, other.masks.runs)
    assert not [name for name in names() - segments if name.startswith("torch_")]


def with_a_lock(batch: Any) -> Any:
    return replace(batch, extra={"lock": [threading.Lock()]})


def test_what_cannot_be_sent_is_an_error_of_the_training_process(root: Path) -> None:
    # Without the error the loader would wait until its own timeout, in seconds, and raise RuntimeError.
    loader = DataLoader(stream_of(root), batch_size=None, num_workers=1, timeout=300, collate_fn=with_a_lock)
    with pytest.raises(TransportError, match=r"worker process \d+ cannot send a batch: TypeError: .*lock"):
        next(iter(loader))


def test_a_temporary_folder_too_long_for_a_socket_is_no_matter(root: Path, short_path: Path) -> None:
    process = start("workers", root, "endless", short_path / ("x" * 100), forked=True)
    try:
        assert all(b"digest" in line for line in first_lines(process, 5))
    finally:
        process.send_signal(signal.SIGKILL, session=True)


def without_images(batch: Any) -> Any:
    return replace(batch, images=None, extra={"weight": torch.nn.Parameter(torch.ones(2))})


def test_a_batch_without_images_and_tensors_of_other_classes_arrive(root: Path) -> None:
    loader = DataLoader(
        stream_of(root), batch_size=None, num_workers=1, timeout=300, collate_fn=without_images
    )
    found = next(iter(loader))
    assert found.images is None
    assert isinstance(found.extra["weight"], torch.nn.Parameter)


def test_a_signal_just_after_a_descriptor_was_opened_leaves_none_open(root: Path) -> None:
    reading = iter(DataLoader(stream_of(root), batch_size=None, num_workers=1, timeout=300))
    next(reading)
    before = held()["descriptors"]

    def signalled(frame: object, event: str, function: object) -> None:
        if event == "c_return" and len(set(Path("/proc/self/fd").iterdir())) > len(before) + 1:  # the listing
            raise InterruptedError

    sys.setprofile(signalled)
    try:
        with pytest.raises(InterruptedError):
            next(reading)
    finally:
        sys.setprofile(None)
    assert held()["descriptors"] == before
