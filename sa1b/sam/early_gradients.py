"""Gradients of a sum of losses, computed as soon as each loss is known.

No gradient flows between the iterations of interactive training. So only the activations of one iteration are
in memory, as with activation checkpointing, but nothing is computed twice.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class EarlyGradients:
    """The gradients of losses with respect to image embeddings and parameters.

    The losses are added without a loss scale, so this is not for number formats that underflow (float16).
    `embeddings` is the input for the losses, detached from the encoder.
    """

    def __init__(self, embeddings: Tensor, parameters: Iterable[Tensor]) -> None:
        self.embeddings = embeddings.detach().requires_grad_(embeddings.requires_grad)
        pairs = [(embeddings, self.embeddings), *((parameter, parameter) for parameter in parameters)]
        self._sources = [pair for pair in pairs if pair[0].requires_grad]
        self._sums: list[Tensor] = []
        self._loss: Tensor | None = None

    def add(self, loss: Tensor) -> None:
        """Compute and add the gradients of a scalar, and free its graph."""
        with torch.autocast(loss.device.type, enabled=False):
            results = torch.autograd.grad(loss, [inner for _, inner in self._sources], allow_unused=True)
        if self._loss is None:
            pairs = zip(self._sources, results, strict=True)
            self._sources = [source for source, gradient in pairs if gradient is not None]
        gradients = [gradient for gradient in results if gradient is not None]
        if self._loss is None:
            self._loss, self._sums = loss.detach(), gradients
        else:
            self._loss = self._loss + loss.detach()
            self._sums = list(torch._foreach_add(self._sums, gradients))

    def total(self) -> Tensor:
        """The sum of the losses; its backward pass returns the stored gradients times the incoming one."""
        if self._loss is None:
            raise ValueError("total(): no loss was added; call add() first")
        total: Tensor = _total(self._loss, self._sums, *(outer for outer, _ in self._sources))
        return total


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *sources: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *torch._foreach_mul(ctx.gradients, incoming)


_total: Any = _Total.apply
