"""A stand-in on a CPU for decoding JPEG files on a GPU: a lane of host memory, where libjpeg-turbo decodes.

As the allocator of a GPU does, it hands out the same memory again for each micro-batch.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from torch import Tensor

from sa1b.stream.decoders import POISON, CudaLane

_UNUSED = 3  # references to an unused block: the list, the loop variable, and the call that counts references


class HostLane(CudaLane):
    """A lane on the CPU. Its blocks of memory are handed out again once unreferenced, the first one first.

    Args:
        device: the CPU.
        fast: repeat pixels of chroma instead of interpolating them, which changes colours as a GPU may do.
    """

    def __init__(self, device: torch.device, *, fast: bool = False) -> None:
        self.device, self.fast = device, fast
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
        """Memory for decoded images."""
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

    def decode(self, files: Sequence[Tensor]) -> list[Tensor]:
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
        return self.allocate((3, height, width)).copy_(pixels.permute(2, 0, 1))
