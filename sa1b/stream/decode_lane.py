"""A CUDA stream for decoding JPEG files on a GPU, whose memory no other stream uses.

The JPEG engine in a GPU does not wait for the stream that it is given: it may write its output before
earlier work of that stream has run (github.com/pytorch/vision/pull/9606). PyTorch's allocator reuses memory
as soon as it is freed on the host, because later work of the same stream runs later. So the JPEG engine would
overwrite memory that queued kernels still read, without an error. A lane prevents this:

    its memory was allocated on its stream, and the allocator reuses memory on the same stream only
    the host waits for all work of the lane before the engine writes

A pool (torch.cuda.MemPool) would not add to this. While a thread allocates from one, the allocator treats all
threads as if a CUDA graph were captured: it forgets what `Tensor.record_stream` says, and would hand out the
memory of batches that the caller's stream still reads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

POISON = 0xA5  # a byte; output memory is filled with it before decoding, to find images that were not written
_CUDA: Any = torch.cuda  # some of its functions are untyped
_GROWTH = 1.5


class Lane(Protocol):
    """Interface of a lane. One thread at a time uses it, inside `current`."""

    @property
    def device(self) -> torch.device: ...

    @property
    def handle(self) -> int:
        """The CUDA stream, as a number for other libraries."""
        ...

    def current(self) -> Any:
        """A context in which the calling thread submits to this lane and allocates its memory.

        On exit, the stream that was current before waits for the lane.
        """
        ...

    def follow(self) -> None:
        """Let work that is submitted from now on wait for the stream that was current before `current`."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until all work of this lane has ended."""
        ...

    def filled(self, shape: tuple[int, ...]) -> Tensor:
        """New memory, uint8, filled with POISON by a kernel of this lane."""
        ...

    def host(self, size: int) -> Tensor:
        """Host memory of at least `size` bytes, uint8, always the same: use it after `synchronize`."""
        ...


class CudaLane:
    """A lane on a CUDA device; see `Lane`.

    PyTorch has 32 streams of high priority, and gives them to callers in turn. So only a few lanes may be
    made in a process; see `sa1b.stream.decode.decoder`.

    Args:
        device: a CUDA device with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = _CUDA.Stream(device, priority=-1)
        self._caller: Any = None
        self._host = torch.empty(0, dtype=torch.uint8)

    @property
    def handle(self) -> int:
        return int(self._stream.cuda_stream)

    @contextmanager
    def current(self) -> Iterator[None]:
        self._caller = caller = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                caller.wait_stream(self._stream)

    def follow(self) -> None:
        self._stream.wait_stream(self._caller)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def filled(self, shape: tuple[int, ...]) -> Tensor:
        return torch.full(shape, POISON, dtype=torch.uint8, device=self.device)

    def host(self, size: int) -> Tensor:
        if size > len(self._host):
            self._host = torch.empty(int(size * _GROWTH), dtype=torch.uint8, pin_memory=True)
        return self._host
