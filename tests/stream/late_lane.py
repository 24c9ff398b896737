"""A lane on the CPU whose work runs as late as on a GPU: when the host waits for it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.stand_in import HostLane
from sa1b.stream.decoders import POISON


class LateLane(HostLane):
    """Operations run at once, so that their results have shapes, and again when the host waits. The engine
    that decodes writes its output at once, whatever was submitted before.

    An operation thus sees what was written into its inputs after it was submitted, as on a GPU. Each
    micro-batch gets the memory of the one before, which is free on the host, though queued work may read it.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._memory = torch.zeros(1 << 20, dtype=torch.uint8)
        self._taken = 0  # bytes
        self.submitted: list[tuple[Any, Any, Any, Any]] = []

    @contextmanager
    def current(self) -> Iterator[None]:
        self._taken = 0
        with _Recording(self.submitted):
            yield

    def allocate(self, shape: tuple[int, ...]) -> torch.Tensor:
        size = torch.Size(shape).numel()
        self._taken += size
        return self._memory[self._taken - size : self._taken].view(shape)

    def filled(self, shape: tuple[int, ...]) -> torch.Tensor:
        block = self.allocate(shape)  # filled later only: work that was submitted before may still read it
        self.submitted.append((torch.Tensor.fill_, (block, POISON), {}, block))
        return block

    def synchronize(self) -> None:
        self._taken = 0  # the blocks that were filled are free
        self.run()

    def run(self) -> None:
        """Run what was submitted."""
        submitted, self.submitted[:] = list(self.submitted), []
        with _disable_current_modes():
            for function, arguments, named, results in submitted:
                again = function(*arguments, **named)
                for result, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    if isinstance(result, torch.Tensor) and result.data_ptr() != new.data_ptr():
                        result.copy_(new)

    def decode(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with _disable_current_modes():
            return super().decode(files)


class _Recording(TorchDispatchMode):
    def __init__(self, submitted: list[tuple[Any, Any, Any, Any]]) -> None:
        super().__init__()
        self.submitted = submitted

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.submitted.append((function, args, kwargs or {}, result))
        return result
