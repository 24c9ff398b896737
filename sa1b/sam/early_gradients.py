"""Gradients that are computed loss by loss, so that the graph of one loss at a time is in memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class EarlyGradients:
    """The gradients of losses with respect to `sources`, computed loss by loss.

    No gradient flows between the iterations of interactive training. So only the activations of one iteration
    are in memory, as with activation checkpointing, but nothing is computed twice.

    The losses are added without a loss scale, so this is not for number formats that underflow (float16).
    """

    def __init__(self, sources: Sequence[Tensor]) -> None:
        self._sources = sources
        self._places = [place for place, source in enumerate(sources) if source.requires_grad]
        self._found: list[Tensor] = []

    @property
    def sums(self) -> list[Tensor | None]:
        """The gradient of each source so far; None: it is not trained or not used."""
        gradients: dict[int, Tensor] = dict(zip(self._places, self._found, strict=True))
        return [gradients.get(place) for place in range(len(self._sources))]

    def add(self, loss: Tensor) -> Tensor:
        """Compute and add the gradients of a scalar, free its graph, and return it without gradient."""
        with torch.autocast(loss.device.type, enabled=False):
            results = torch.autograd.grad(
                loss, [self._sources[place] for place in self._places], allow_unused=True
            )
        gradients = [x for x in results if x is not None]
        if self._found:
            gradients = list(torch._foreach_add(self._found, gradients))
        else:
            self._places = [place for place, x in zip(self._places, results, strict=True) if x is not None]
        self._found = gradients
        return loss.detach()


def with_gradients(loss: Tensor, gradients: Sequence[Tensor | None], sources: Sequence[Tensor]) -> Tensor:
    """The loss; its backward pass gives the sources these gradients times the incoming one."""
    pairs = [(x, source) for x, source in zip(gradients, sources, strict=True) if x is not None]
    total: Tensor = _total(loss, [x for x, _ in pairs], *(source for _, source in pairs))
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
