"""Image tokens in the mask decoder, and their products with the tokens of the prompts.

The initial image tokens of a mask are the tokens of its image plus a term of rank 16 that depends on the
earlier mask. `SharedImage` does not compute this sum: it stores no N x C tensor for a mask before the result
of the first layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class OwnImage:
    """Image tokens that differ for every mask, float [M, N, C]; `placed` are tokens plus positions."""

    tokens: Tensor
    placed: Tensor

    def logits(self, rows: Tensor) -> Tensor:
        """The products of rows [M, R, C] and placed tokens: [M, R, N]."""
        return product_with_transposed(rows, self.placed)

    def weighted(self, weights: Tensor) -> Tensor:
        """The tokens summed with weights [M, R, N]: [M, R, C]."""
        return weights @ self.tokens

    def plus(self, weights: Tensor, values: Tensor) -> Tensor:
        """The tokens plus the sum over R of weights [M, R, N] times values [M, R, C]: [M, N, C]."""
        return added(product_of_transposed(weights, values), self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class SharedImage:
    """Image tokens as the sum of a part for each image and a low-rank part for each mask.

    The tokens of mask m of image b are tokens[b] + features[m]' @ basis, never stored: float [B, N, C], [M,
    r, N] (None: 0) and [r, C]. `placed` are the tokens plus their positions. `counts` are the masks of each
    image, which are neighbours.
    """

    tokens: Tensor
    placed: Tensor
    counts: Sequence[int]
    features: Tensor | None
    basis: Tensor

    def logits(self, rows: Tensor) -> Tensor:
        """See `OwnImage.logits`."""
        logits = self.by_image(product_with_transposed, rows, self.placed)
        if self.features is None:
            return logits
        return logits + (rows @ self.basis.T) @ self.features

    def weighted(self, weights: Tensor) -> Tensor:
        """See `OwnImage.weighted`."""
        sums = self.by_image(torch.matmul, weights, self.tokens)
        if self.features is None:
            return sums
        return sums + product_with_transposed(weights, self.features) @ self.basis

    def plus(self, weights: Tensor, values: Tensor) -> Tensor:
        """See `OwnImage.plus`."""
        if self.features is not None:
            weights = torch.cat((weights, self.features), dim=1)
            values = torch.cat((values, self.basis.expand(len(values), -1, -1)), dim=1)
        if min(self.counts) == max(self.counts):
            grouped = (x.view(len(self.counts), -1, *x.shape[1:]) for x in (weights, values))
            return added(product_of_transposed(*grouped), self.tokens[:, None]).flatten(0, 1)
        parts = torch.split(product_of_transposed(weights, values), list(self.counts))
        return torch.cat([part + tokens for part, tokens in zip(parts, self.tokens, strict=True)])

    def by_image(self, product: Product, rows: Tensor, image: Tensor) -> Tensor:
        """Rows [M, R, K] times the matrix of their image: [M, R, L]."""
        if min(self.counts) == max(self.counts):
            grouped = rows.reshape(len(self.counts), -1, rows.shape[-1])
            return product(grouped, image).view(*rows.shape[:-1], -1)
        parts = torch.split(rows, list(self.counts))
        matrices = [matrix.expand(len(part), -1, -1) for part, matrix in zip(parts, image, strict=True)]
        return torch.cat([product(part, matrix) for part, matrix in zip(parts, matrices, strict=True)])


def added(product: Tensor, tokens: Tensor) -> Tensor:
    """The sum, computed in place in the memory of the product unless the product is a view, as in a graph.

    Autograd would copy the gradient of a view that is changed in place.
    """
    return product + tokens if torch.compiler.is_compiling() else product.add_(tokens)


class _OfTwo(torch.autograd.Function):
    """A function of two tensors; its backward pass needs both."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)


class _WithTransposed(_OfTwo):
    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a @ b.transpose(-2, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return gradient @ b, gradient.transpose(-2, -1) @ a


class _OfTransposed(_OfTwo):
    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a.transpose(-2, -1) @ b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return b @ gradient.transpose(-2, -1), a @ gradient


_with_transposed: Product = _WithTransposed.apply
_of_transposed: Product = _OfTransposed.apply


def product_with_transposed(a: Tensor, b: Tensor) -> Tensor:
    """a @ b' for a [..., R, K] and b [..., L, K] with equal leading dimensions.

    The gradients have the memory layouts of a and b. The gradients of a plain product are transposed, and
    adding them to other gradients takes as long as the product.
    """
    return _with_transposed(a, b)


def product_of_transposed(a: Tensor, b: Tensor) -> Tensor:
    """a' @ b for a [..., R, K] and b [..., R, L]; the gradients as for `product_with_transposed`."""
    return _of_transposed(a, b)
