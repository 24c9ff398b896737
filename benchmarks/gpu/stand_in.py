"""Stand-ins on a CPU for decoding JPEG files on a GPU: a lane of host memory, and libjpeg-turbo for nvJPEG.

The interfaces are those of sa1b.stream.jpeg_libraries and of torchcodec. As the allocator of a GPU does, the
lane hands out the same memory again for each micro-batch.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from torch import Tensor

from sa1b.stream.jpeg_libraries import POISON

_UNUSED = 3  # references to an unused block: the list, the loop variable, and the call that counts references


class HostLane:
    """A lane on the CPU. Its blocks of memory are handed out again once unreferenced, the first one first."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.handle = device, 0
        self._blocks: list[npt.NDArray[np.uint8]] = []
        self._host = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def follow(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def filled(self, shape: tuple[int, ...]) -> Tensor:
        return self.allocate(shape).fill_(POISON)

    def allocate(self, shape: tuple[int, ...]) -> Tensor:
        """Memory for the output of a library."""
        size = torch.Size(shape).numel()
        for block in self._blocks:
            if sys.getrefcount(block) == _UNUSED and len(block) >= size:
                break
        else:
            block = np.zeros(size, np.uint8)
            self._blocks.append(block)
        return torch.from_numpy(block[:size]).view(shape)

    def host(self, size: int) -> Tensor:
        if size > len(self._host):
            self._host = torch.empty(size, dtype=torch.uint8)
        return self._host


class HostNvjpeg:
    """`torchcodec.decoders.decode_jpeg` with the memory of a lane.

    Args:
        lane: its memory.
        fast: repeat pixels of chroma instead of interpolating them, which changes colours as a GPU may do.
    """

    def __init__(self, lane: HostLane, *, fast: bool = False) -> None:
        self.lane, self.fast = lane, fast

    def __call__(self, files: Sequence[Tensor], *, mode: str, device: torch.device) -> list[Tensor]:
        assert mode == "RGB"
        return [self.image(file.numpy().tobytes()) for file in files]

    def image(self, file: bytes) -> Tensor:
        """Decode one file.

        Raises:
            RuntimeError: the file does not decode, as torchcodec reports it.
        """
        try:
            pixels = torch.from_numpy(simplejpeg.decode_jpeg(file, "RGB", fastupsample=self.fast))
        except ValueError as error:
            raise RuntimeError(f"Failed to decode batch: {error}") from None
        height, width, _ = pixels.shape
        return self.lane.allocate((3, height, width)).copy_(pixels.permute(2, 0, 1))
