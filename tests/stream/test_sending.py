"""A worker process that cannot send its batches: the error is raised in the training process, nothing hangs."""

import gc
import multiprocessing
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from sa1b.stream.worker_memory import TransportError, image_memory, prepare_worker
from tests.stream.leftovers import names, shared_memory
from tests.stream.reading import start, stream_of
from tests.stream.recorded import make_root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("transport"), 12)


def no_shared_memory(worker: int) -> None:
    """Let this process write no file of more than one byte, as in a full /dev/shm."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_shared_memory_that_cannot_be_had_is_an_error_of_the_training_process(root: Path) -> None:
    segments = names()
    next(iter(stream_of(root)))  # compiled kernels are inherited: the worker has none to cache in a file
    # Without the error the loader would wait until its own timeout, in seconds, and raise RuntimeError.
    loader = DataLoader(
        stream_of(root), batch_size=None, num_workers=1, timeout=300, worker_init_fn=no_shared_memory
    )
    with pytest.raises(TransportError, match=r"worker process \d+ cannot send a batch: .*/dev/shm") as caught:
        next(iter(loader))
    text = str(caught.value)
    assert "File too large" in text
    worker = int(text.split("worker process ")[1].split(maxsplit=1)[0])
    del caught, loader  # with its iterator, which the error's stack holds: then the worker process has ended
    gc.collect()
    assert shared_memory([worker], segments) == []  # torch leaves the file whose size it could not set


def fail_to_decode_and_be_killed() -> None:
    prepare_worker()
    no_shared_memory(0)
    image_memory((100, 100, 3), torch.device("cpu"))  # has memory that is not shared
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_segment_for_images_that_could_not_be_made_is_removed_before_its_worker_is_killed() -> None:
    segments = names()
    process = multiprocessing.get_context("fork").Process(target=fail_to_decode_and_be_killed)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert process.pid is not None
    left = shared_memory([process.pid], segments)
    for name in left:
        Path("/dev/shm", name).unlink()
    assert left == []


def test_a_temporary_folder_too_long_for_a_socket_is_an_error_of_the_training_process(
    root: Path, short_path: Path
) -> None:
    folder = short_path / ("x" * 100)
    process = start("workers", root, "endless", folder, forked=True)
    try:
        _, errors = process.communicate(timeout=300)
    finally:
        process.send_signal(signal.SIGKILL, session=True)
    assert process.returncode == 1
    message = errors.decode().splitlines()[-1]
    assert "TransportError" in message
    assert "AF_UNIX path too long" in message
    assert f"below {folder}: set TMPDIR to a shorter path" in message
