"""Memory for the images of a DataLoader's worker process, shared with the process that receives its batches.

New shared memory takes longer than the copy into it, because the system clears every page at its first use: 3
ms for an image of 1024 x 1024 pixels. A worker therefore decodes into memory that it reuses. A slot is free
again once no tensor of the worker refers to it, nor any that was sent from it.
"""

import os
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sa1b.stream.ragged import fresh

SMALL = 4096  # bytes of a tensor that a worker process sends without shared memory
_SLOTS = 8  # of a worker; then batches have new memory
_HEAD = 64  # bytes before the pixels: for each tensor that was sent from the slot, 1 once it is released
_workers: dict[int, "_WorkerMemory"] = {}  # by process id, because a fork inherits it


class _Slot:
    def __init__(self, size: int) -> None:
        memory: Any = torch.zeros(_HEAD + size, dtype=torch.uint8)
        self.memory: Tensor = memory.share_memory_()
        self.array: npt.NDArray[np.uint8] = self.memory.numpy()
        self.sent = 0  # tensors, since it was taken
        self.is_lent = False  # a tensor of this process refers to it

    def is_free(self) -> bool:
        return not self.is_lent and bool(self.array[: self.sent].all())

    def take(self) -> Tensor:
        self.sent, self.array[:_HEAD], self.is_lent = 0, 0, True
        part = self.array[_HEAD:]
        weakref.finalize(part, setattr, self, "is_lent", False).atexit = False
        return torch.from_numpy(part)


class _WorkerMemory:
    """The slots of this worker process."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []

    def take(self, size: int) -> Tensor | None:
        """Shared memory of `size` bytes; None: all slots are in use, or there is no more shared memory."""
        for slot in self._slots:
            if len(slot.array) == _HEAD + size and slot.is_free():
                return slot.take()
        self._slots = [slot for slot in self._slots if len(slot.array) == _HEAD + size or not slot.is_free()]
        if len(self._slots) < _SLOTS:
            with suppress(RuntimeError, OSError):  # sending the batch then says why
                self._slots.append(_Slot(size))
                return self._slots[-1].take()
        return None

    def slot_of(self, tensor: Tensor) -> _Slot | None:
        """The slot in whose pixels a tensor begins."""
        address = tensor.data_ptr()
        for slot in self._slots:
            if _HEAD <= address - slot.memory.data_ptr() < len(slot.array):
                return slot
        return None


def share_images() -> None:
    """In a worker process: decode into memory that is shared from now on."""
    _workers.setdefault(os.getpid(), _WorkerMemory())


def image_memory(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Memory for the pixels of a batch, uint8, not initialised; in a worker process shared if it can be."""
    memory, size = _workers.get(os.getpid()), int(np.prod(shape))
    found = memory.take(size) if memory is not None and device.type == "cpu" and size > SMALL else None
    return fresh(shape, device) if found is None else found.view(shape)


def sent(tensor: Tensor) -> Any:
    """How a tensor of a slot is pickled for the process that receives it; None: it is in no slot."""
    memory = _workers.get(os.getpid())
    slot = memory.slot_of(tensor) if memory is not None and tensor.is_cpu else None
    if slot is None or slot.sent == _HEAD:
        return None
    slot.sent += 1
    place = tensor.data_ptr() - slot.memory.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    return _received, (slot.memory, slot.sent - 1, *place)


def _received(
    memory: Tensor, number: int, start: int, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]
) -> Tensor:
    array: npt.NDArray[np.uint8] = memory.numpy()
    part = array[start:]
    weakref.finalize(part, _release, array, number, os.getpid()).atexit = False
    return torch.from_numpy(part).view(dtype).as_strided(shape, stride)


def _release(array: npt.NDArray[np.uint8], number: int, receiver: int) -> None:
    if os.getpid() == receiver:  # a process that it has forked has a copy of the tensor
        array[number] = 1
