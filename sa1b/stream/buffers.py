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

_BOX = np.dtype((np.int64, 4))  # top, bottom, left, right
_OURS = 3  # references to a buffer that nobody uses: the list's, the loop's, that of asking


class BufferPool:
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
        buffer = self._new()
        if len(self._buffers) < self.keep:
            self._buffers.append(buffer)
        return buffer

    def _new(self) -> npt.NDArray[np.uint8]:
        return _allocate(self.capacity)


class MaskBufferPool(BufferPool):
    """Buffers for masks as pixels that know where they are not 0, so that only this is cleared.

    The boxes that masks were drawn in lie in front of their pixels: memory fresh from the system says that
    nothing was drawn, which is so.

    Args:
        masks: of a buffer at most; size: pixels of their sides.
        keep: as for `BufferPool`.
    """

    def __init__(self, masks: int, size: int, keep: int) -> None:
        self._masks, self._size = masks, size
        super().__init__(masks * (_BOX.itemsize + size * size), keep)

    def take_drawn(self, masks: int) -> tuple[Tensor, npt.NDArray[np.int64]]:
        """Pixels uint8 [masks, size, size], and int64 [masks, 4] for `sa1b.masks.raster.rasterize_frame`.

        Right only if nobody writes into the pixels but that raster, with these boxes.
        """
        buffer = self._free()
        head = self._masks * _BOX.itemsize
        pixels = buffer[head : head + masks * self._size**2]
        boxes = buffer[:head].view(np.int64).reshape(-1, 4)[:masks]
        return torch.from_numpy(pixels).view(masks, self._size, self._size), boxes

    def _new(self) -> npt.NDArray[np.uint8]:
        return np.zeros(self.capacity, np.uint8)


def fresh(shape: tuple[int, ...]) -> Tensor:
    """Memory for pixels, uint8, that nobody has used: filled with anything."""
    # Shaped by torch: numpy gives an array without elements other strides.
    return torch.from_numpy(_allocate(int(np.prod(shape, dtype=np.int64)))).view(shape)


def _allocate(size: int) -> npt.NDArray[np.uint8]:
    """By numpy, which asks the system for huge pages: touching them for the first time takes a third of the
    time (0.11 against 0.32 ms for an image of 1024 x 1024), as much as touching them again.
    """
    return np.empty(size, np.uint8)
