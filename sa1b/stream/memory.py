"""Memory for pixels that is used again as soon as nobody looks at it any more.

Fresh memory costs more than filling it: the system clears every page when it is first touched, 9 ms for the
64 MB of an image's masks at 1024 x 1024, which take 2.5 when they are written again. So buffers are kept, and
handed out anew when their last tensor, and every view of it, has gone: until then they are the caller's.
"""

import sys

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_OURS = 3  # references to a buffer that nobody uses: the list's, the loop's, that of asking


class Memory:
    """Buffers of one size.

    Args:
        capacity: bytes of each.
        keep: buffers at most; those that are handed out beyond are freed by their users.
    """

    def __init__(self, capacity: int, keep: int) -> None:
        self.capacity = capacity
        self.keep = keep
        self._buffers: list[npt.NDArray[np.uint8]] = []

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """A tensor uint8 of this shape, of at most `capacity` bytes, filled with anything. Not for several
        threads at a time.
        """
        size = int(np.prod(shape, dtype=np.int64))
        if size > self.capacity:
            raise ValueError(f"{size} bytes of a buffer of {self.capacity}")
        return torch.from_numpy(self._free()[:size]).view(shape)

    def _free(self) -> npt.NDArray[np.uint8]:
        for buffer in self._buffers:
            if sys.getrefcount(buffer) == _OURS:
                return buffer
        buffer = _allocate(self.capacity)
        if len(self._buffers) < self.keep:
            self._buffers.append(buffer)
        return buffer


def fresh(shape: tuple[int, ...]) -> Tensor:
    """Memory for pixels, uint8, that nobody has used: filled with anything."""
    # Shaped by torch: numpy gives an array without elements other strides.
    return torch.from_numpy(_allocate(int(np.prod(shape, dtype=np.int64)))).view(shape)


def _allocate(size: int) -> npt.NDArray[np.uint8]:
    """By numpy, which asks the system for huge pages: touching them for the first time takes a third of the
    time (0.11 against 0.32 ms for an image of 1024 x 1024), as much as touching them again.
    """
    return np.empty(size, np.uint8)
