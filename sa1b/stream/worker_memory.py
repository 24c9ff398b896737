"""A DataLoader's worker process: how its batches reach the training process, and when it ends.

torch pickles a batch in a thread, which drops a batch that fails (TMPDIR is too long for the path of a
socket, `ulimit -n` is low, /dev/shm is full), and the training process waits for it forever. In a prepared
worker the error replaces the batch.

New shared memory takes 3 ms for an image of 1024 x 1024 pixels. A worker therefore decodes into memory that
it reuses when no tensor of the worker, or sent from it, refers to it any more. A thread ends the worker when
the training process has ended: other workers hold the end of its pipe too.
"""

import os
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from multiprocessing import current_process, parent_process
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy

from sa1b.errors import Sa1bError
from sa1b.stream.batch import Batch
from sa1b.stream.ragged import fresh

_SMALL = 4096  # bytes of a tensor that a worker process sends without shared memory
_BUFFERS = 8  # of a worker; further batches have new memory
_HEAD = 64  # bytes before the pixels: for each tensor that was sent from the buffer, 1 when it is released
_workers: dict[int, list["_Buffer"]] = {}  # by process id, because a fork inherits it


class _Buffer:
    def __init__(self, size: int) -> None:
        # A tensor that is moved to shared memory leaves its first memory to the worker, unused.
        storage: Any = torch.UntypedStorage
        self.memory = torch.empty(0, dtype=torch.uint8).set_(storage._new_shared(_HEAD + size))
        self.array: npt.NDArray[np.uint8] = self.memory.numpy()
        self.sent = 0  # number of tensors since `take`
        self.is_lent = False  # a tensor of this process refers to it

    def is_free(self) -> bool:
        return not self.is_lent and bool(self.array[: self.sent].all())

    def take(self) -> Tensor:
        self.sent, self.array[:_HEAD], self.is_lent = 0, 0, True
        part = self.array[_HEAD:]
        weakref.finalize(part, setattr, self, "is_lent", False).atexit = False
        return torch.from_numpy(part)


def image_memory(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Memory for the pixels of a batch, uint8, not initialised; in a worker process shared if it can be."""
    buffers, size = _workers.get(os.getpid()), int(np.prod(shape))
    if buffers is None or device.type != "cpu" or size <= _SMALL:
        return fresh(shape, device)
    free = next((one for one in buffers if len(one.array) == _HEAD + size and one.is_free()), None)
    if free is None:
        # A new list: the thread that sends batches may iterate over the other one.
        _workers[os.getpid()] = buffers = [one for one in buffers if not one.is_free()]
        if len(buffers) < _BUFFERS:
            try:
                free = _Buffer(size)
                buffers.append(free)
            except (RuntimeError, OSError):  # sending the batch then says why
                _remove_segments()
    return fresh(shape, device) if free is None else free.take().view(shape)


def _received(
    memory: Tensor, number: int, start: int, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]
) -> Tensor:
    array: npt.NDArray[np.uint8] = memory.numpy()
    part = array[start:]
    # In this process only: one that it has forked has a copy of the tensor.
    Finalize(part, array.__setitem__, (number, 1))
    return torch.from_numpy(part).view(dtype).as_strided(shape, stride)


class TransportError(Sa1bError):
    """A worker process cannot send its batches; the message says why and what to change."""


def prepare_worker() -> None:
    """Prepare this worker process, once: the memory of batches, errors in their place, and its end."""
    if os.getpid() in _workers:
        return
    _workers[os.getpid()] = []
    ForkingPickler.register(Batch, _reduce)
    # Schedulers send it to all processes of a job, for the training process to save a checkpoint.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if (training := parent_process()) is not None:
        arguments = (training.pid, _temporary_folder())
        threading.Thread(target=_end_with, args=arguments, name="sa1b-end", daemon=True).start()


def _end_with(training: int, inherited: str | None) -> None:
    """End this process when the training process has ended, whatever its other threads wait for."""
    with suppress(ProcessLookupError):
        try:
            wait([os.pidfd_open(training)])
        except (AttributeError, OSError):  # macOS and some containers have none
            while True:
                os.kill(training, 0)
                time.sleep(1)
    # The folder for the sockets of tensors; an inherited one is of another process.
    if (folder := _temporary_folder()) is not None and folder != inherited:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _temporary_folder() -> str | None:
    process: Any = current_process()
    folder: str | None = process._config.get("tempdir")  # of multiprocessing.util.get_temp_dir
    return folder


def _remove_segments() -> None:
    """Remove, at once, what torch leaves where it cannot set the size of a segment."""
    # Another thread has none without a size, because torch holds the interpreter's lock meanwhile.
    strategy: Callable[[], str] = get_sharing_strategy
    if strategy() == "file_descriptor":  # a segment that could be made has no name any more
        for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*"):
            path.unlink(missing_ok=True)


def _reduce(batch: Batch) -> tuple[Any, ...]:
    try:
        # A pickle within the pickle: the tensors are shared here, where an error can still be replaced.
        columns = {member.name: getattr(batch, member.name) for member in fields(batch)}
        pickler = _Pickler if batch.buffer is None else ForkingPickler  # tensors of a packed batch are one
        return _batch, (bytes(pickler.dumps(columns)),)
    except Exception as error:
        _remove_segments()
        message = (
            f"worker process {os.getpid()} cannot send a batch: {type(error).__name__}: {error}. Tensors go "
            f"through /dev/shm and a socket below {tempfile.gettempdir()}: set TMPDIR to a shorter path, "
            "raise `ulimit -n`, or enlarge /dev/shm (docker run --shm-size)"
        )
        return _fail, (message,)


class _Pickler(ForkingPickler):
    """Sends small tensors as bytes: one in shared memory takes the receiver 0.5 ms, for its own socket."""

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, Tensor) or not value.is_cpu:
            return NotImplemented
        if value.nbytes <= _SMALL and value.is_contiguous():
            row = value.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)
            return _tensor, (row.numpy().tobytes(), value.dtype, value.shape, value.stride())
        for buffer in _workers.get(os.getpid(), ()):
            start = value.data_ptr() - buffer.memory.data_ptr()
            if _HEAD <= start < len(buffer.array) and buffer.sent < _HEAD:
                buffer.sent += 1
                place = start, value.dtype, value.shape, value.stride()
                return _received, (buffer.memory, buffer.sent - 1, *place)
        return NotImplemented


def _tensor(data: bytes, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.as_strided(shape, stride)


def _batch(columns: bytes) -> Batch:
    return Batch(**ForkingPickler.loads(columns))


def _fail(message: str) -> NoReturn:
    raise TransportError(message)
