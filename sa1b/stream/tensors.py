"""Dataclasses of tensors that are moved together."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Tensors:
    """A dataclass of tensors that are moved together, also those in nested dataclasses of this kind."""

    def map_tensors(self, function: Callable[[str, Tensor], Tensor]) -> Self:
        """A copy in which function(name, tensor) replaces each tensor, also in nested dataclasses."""
        changed: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Tensor):
                changed[one.name] = function(one.name, value)
            elif isinstance(value, Tensors):
                changed[one.name] = value.map_tensors(function)
        return replace(self, **changed)

    def pin_memory(self) -> Self:
        """A copy in pinned memory, from which copies to a GPU need not wait."""
        return self.map_tensors(lambda name, tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell CUDA's allocator that `stream` uses these tensors too."""

        def record(name: str, tensor: Tensor) -> Tensor:
            tensor.record_stream(stream)
            return tensor

        self.map_tensors(record)

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Self:
        """A copy on another device; tensors that are already there are not copied.

        Args:
            non_blocking: do not wait for copies to a GPU. Copies to the CPU are complete on return: nothing
                else would keep the caller from reading them too early.
        """
        non_blocking &= torch.device(device).type != "cpu"
        return self.map_tensors(lambda name, tensor: tensor.to(device, non_blocking=non_blocking))
