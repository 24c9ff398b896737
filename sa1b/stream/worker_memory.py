"""Batches in memory of another process: those of a DataLoader's workers and of a loader's processes.

A worker decodes into anonymous files, which it reuses when no tensor of either process refers to them: new
shared memory takes 3 ms for an image of 1024 x 1024 pixels. Images and dense masks of a caller's function are
copied into such a file. The rest of a batch is sent as bytes: a tensor in shared memory takes the receiver
0.5 ms. torch pickles in a thread, which drops what fails, and the training process waits forever; here the
error replaces the batch. A thread ends the worker after the training process: others hold the pipe's end too.
"""

import io
import mmap
import os
import pickle
import shutil
import signal
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import current_process, parent_process
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sa1b.errors import Sa1bError
from sa1b.limit import ForkLock
from sa1b.stream.batch import Batch
from sa1b.stream.ragged import fresh

_SMALL = 4096  # bytes of images that are sent as bytes too
_BUFFERS = 16  # of a worker; further batches have new memory, and are sent as bytes
_HEAD = 64  # bytes before the pixels: for each batch that was sent from the buffer, 1 when it is released
_NONE = torch.empty(0, dtype=torch.uint8)
_ALIGNMENT = 64  # bytes; of a tensor in the memory of a batch
_workers: dict[int, list["_Buffer"]] = {}  # by process id, because a fork inherits it
_taking = ForkLock()  # the thread that decodes and the one that sends take memory


class TransportError(Sa1bError):
    """A worker process cannot send its batches; the message says why and what to change."""


def mapped(file: int, size: int) -> npt.NDArray[np.uint8]:
    """The memory of an anonymous file, which stays while an array refers to it."""
    os.ftruncate(file, size)
    return np.frombuffer(mmap.mmap(file, size), np.uint8)


class _Buffer:
    def __init__(self, size: int) -> None:
        os.scandir(f"/proc/{os.getppid()}/fd").close()  # OSError: processes may not open each other's files
        self.file = os.memfd_create("sa1b-images", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.file).atexit = False
        self.array = mapped(self.file, _HEAD + size)
        self.sent = 0  # batches since `take`
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
    size = int(np.prod(shape))
    if os.getpid() not in _workers or device.type != "cpu" or size <= _SMALL:
        return fresh(shape, device)
    with _taking:
        buffers = _workers[os.getpid()]
        free = next((one for one in buffers if len(one.array) == _HEAD + size and one.is_free()), None)
        if free is None:
            # A new list: the thread that sends batches may iterate over the other one.
            _workers[os.getpid()] = buffers = [one for one in buffers if not one.is_free()]
            with suppress(OSError, AttributeError):  # as on macOS, or `ulimit -n` is low
                if len(buffers) < _BUFFERS:
                    buffers.append(free := _Buffer(size))
        return fresh(shape, device) if free is None else free.take().view(shape)


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
    # The folder of torch's sockets, for tensors outside of a `Batch`; an inherited one is of another process.
    if (folder := _temporary_folder()) is not None and folder != inherited:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _temporary_folder() -> str | None:
    process: Any = current_process()
    folder: str | None = process._config.get("tempdir")  # of multiprocessing.util.get_temp_dir
    return folder


def _reduce(batch: Batch) -> tuple[Any, ...]:
    try:
        if (buffer := _holding(batch)) is None:
            buffer = _holding(batch := _copied(batch))
        if buffer is not None:
            data, buffer.sent = dumps(batch, torch.from_numpy(buffer.array)), buffer.sent + 1
            return _received, (os.getpid(), buffer.file, len(buffer.array), buffer.sent - 1, data)
        return loads, (dumps(batch, _NONE), _NONE.numpy())
    except Exception as error:
        message = f"worker process {os.getpid()} cannot send a batch: {type(error).__name__}: {error}; "
        return _fail, (message + "leave out of `batch.extra` what Python cannot pickle",)


def _large(batch: Batch) -> dict[str, Any]:
    given = {"images": batch.images, "dense": batch.dense}
    return {name: one for name, one in given.items() if isinstance(one, Tensor) and one.is_cpu}


def _holding(batch: Batch) -> _Buffer | None:
    """The buffer of this process that has the images and dense masks of a batch."""
    large = _large(batch).values()
    for buffer in _workers.get(os.getpid(), ()):
        memory = torch.from_numpy(buffer.array)
        if large and buffer.sent < _HEAD and all(_place(one, memory) is not None for one in large):
            return buffer
    return None


def _copied(batch: Batch) -> Batch:
    """The batch with its images and dense masks in other memory, which is shared if it can be."""
    large = _large(batch)
    sizes = [-(-one.nbytes // _ALIGNMENT) * _ALIGNMENT for one in large.values()]
    parts = torch.split(image_memory((sum(sizes),), _NONE.device), sizes)
    for (name, one), part in zip(large.items(), parts, strict=True):
        stride = torch.empty_like(one, device="meta").stride()
        large[name] = part[: one.nbytes].view(one.dtype).as_strided(one.shape, stride).copy_(one.detach())
    return replace(batch, **large)


def _fail(message: str) -> NoReturn:
    raise TransportError(message)


class _Lent(mmap.mmap):
    lent = 0, 0  # the process that releases it, which is no fork of that one; the number of the batch

    def __del__(self) -> None:
        if os.getpid() == self.lent[0]:
            self[self.lent[1]] = 1


def _received(process: int, file: int, size: int, number: int, data: bytes) -> Batch:
    # A signal may raise torch's error of a dead worker at any line, and leaves nothing open or in a table.
    with io.FileIO(f"/proc/{process}/fd/{file}", "r+") as theirs:
        memory = _Lent(theirs.fileno(), size)
    memory.lent = os.getpid(), number
    return loads(data, np.frombuffer(memory, np.uint8))


def dumps(batch: Batch, memory: Tensor) -> bytes:
    """A pickle of a batch, in which a tensor in `memory`, uint8, is its place there."""
    file = io.BytesIO()
    # A buffer elsewhere would be sent beside the tensors that are its views.
    is_inside = batch.buffer is not None and _place(batch.buffer, memory) is not None
    _Pickler(file, memory).dump(batch if is_inside else replace(batch, buffer=None))
    return file.getvalue()


def loads(data: bytes, memory: npt.NDArray[np.uint8]) -> Batch:
    """The batch of a pickle; its tensors are views of `memory`, which is in use until they are dropped."""
    unpickler: Any = pickle.Unpickler(io.BytesIO(data))
    unpickler.persistent_load = partial(_tensor, torch.from_numpy(memory))
    batch: Batch = unpickler.load()
    return batch


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, memory: Tensor) -> None:
        super().__init__(file, 5)
        self._memory = memory

    def persistent_id(self, value: object) -> Any:
        if type(value) is not Tensor or not value.is_cpu or value.is_sparse:
            return None  # torch pickles a tensor of another class or place, as such
        if (start := _place(value, self._memory)) is not None:
            return start, value.dtype, tuple(value.shape), value.stride(), None
        dense = value.clone()
        data = dense.as_strided((value.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
        return 0, value.dtype, tuple(value.shape), dense.stride(), data


def _place(tensor: Tensor, memory: Tensor) -> int | None:
    start = tensor.data_ptr() - memory.data_ptr()
    return start if 0 <= start < memory.nbytes else None


def _tensor(memory: Tensor, place: Any) -> Tensor:
    start, dtype, shape, stride, data = place
    if data is not None:
        memory = torch.frombuffer(bytearray(data or 8), dtype=torch.uint8)
    stop = len(memory) - (len(memory) - start) % dtype.itemsize
    return memory[start:stop].view(dtype).as_strided(shape, stride)
