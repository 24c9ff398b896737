"""The tokens of the image in the mask decoder: written out for each mask, or shared by the masks of an image.

Both have the products that attention needs (see sa1b.sam.transformer), and read the image with one kernel
where there is one for the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]
HALF = torch.bfloat16, torch.float16
RANK = 16  # of the features with which kernels read a shared image
IN_USE: set[str] = set()  # kernels that the model uses now, see sa1b.sam.kernel_proof


@dataclass(frozen=True, slots=True, eq=False)
class OwnImage:
    """Image tokens that differ for every mask, float [M, N, C]."""

    tokens: Tensor
    placed: Tensor | None  # the tokens plus their positions; None: computed where they are needed
    position: Tensor  # [N, C]

    def logits(self, rows: Tensor) -> Tensor:
        """The products of rows [M, R, C] and placed tokens: [M, R, N]."""
        x = self.tokens
        placed = x + self.position.to(x.dtype) if self.placed is None else self.placed
        return product_with_transposed(rows, placed)

    def weighted(self, weights: Tensor) -> Tensor:
        """The tokens summed with weights [M, R, N]: [M, R, C]."""
        return weights @ self.tokens

    def plus(self, weights: Tensor, values: Tensor) -> Tensor:
        """The tokens plus the sum over R of weights [M, R, N] times values [M, R, C]: [M, N, C]."""
        return added(product_of_transposed(weights, values), self.tokens)

    def for_kernels(self, kernels: Any) -> tuple[Tensor | None, ...]:
        """The first arguments of the kernel `ImageToTokens`."""
        return self.tokens[:, None], None, None, None

    def read(self, rows: Tensor) -> tuple[Tensor, "OwnImage"]:
        """The tokens, summed with the softmax of the logits of rows [M, R, C]; the image for later uses."""
        x = self.tokens
        if self.placed is not None or (kernels := reading(x, rows, shared=False)) is None:
            return self.weighted(softmax(self.logits(rows), dim=-1)), self
        read, tokens = kernels.ReadImage.apply(rows, x, self.position, None, None)
        return read, OwnImage(tokens, None, self.position)


@dataclass(frozen=True, slots=True, eq=False)
class SharedImage:
    """Image tokens as the sum of a part for each image and a low-rank part for each mask.

    The tokens of mask m of image b are tokens[b] + features[m]' @ basis, never stored.
    """

    tokens: Tensor  # [B, N, C]
    placed: Tensor  # the tokens plus their positions
    counts: Sequence[int]  # masks of each image, which are neighbours
    features: Tensor | None  # [M, r, N]; None: 0
    basis: Tensor  # [r, C]
    of_masks: Tensor | None = None  # [B, M / B, N, C]: `tokens`, with the gradient of the tokens of each mask

    def logits(self, rows: Tensor) -> Tensor:
        logits = self.by_image(product_with_transposed, rows, self.placed)
        return logits if self.features is None else logits + (rows @ self.basis.T) @ self.features

    def weighted(self, weights: Tensor) -> Tensor:
        sums = self.by_image(torch.matmul, weights, self.tokens)
        if self.features is None:
            return sums
        return sums + product_with_transposed(weights, self.features) @ self.basis

    def plus(self, weights: Tensor, values: Tensor) -> Tensor:
        if self.features is not None:
            weights = torch.cat((weights, self.features), dim=1)
            values = torch.cat((values, self.basis.expand(len(values), -1, -1)), dim=1)
        if self.has_equal_counts():
            grouped = (x.view(len(self.counts), -1, *x.shape[1:]) for x in (weights, values))
            return added(product_of_transposed(*grouped), self.tokens[:, None]).flatten(0, 1)
        parts = torch.split(product_of_transposed(weights, values), list(self.counts))
        return torch.cat([part + tokens for part, tokens in zip(parts, self.tokens, strict=True)])

    def for_kernels(self, kernels: Any) -> tuple[Tensor | None, ...] | None:
        if not self.fits_kernels():
            return None
        low, of_masks = self.low_rank(), self.of_masks
        if of_masks is None:
            of_masks = kernels.TokensOfMasks.apply(self.tokens, *low, self.counts[0])
        return of_masks, self.placed, *low

    def read(self, rows: Tensor) -> tuple[Tensor, "SharedImage"]:
        kernels = reading(self.tokens, rows, shared=True)
        if kernels is None or not self.fits_kernels():
            return self.weighted(softmax(self.logits(rows), dim=-1)), self
        read, of_masks = kernels.ReadImage.apply(rows, self.tokens, self.placed, *self.low_rank())
        return read, replace(self, of_masks=of_masks)

    def has_equal_counts(self) -> bool:
        """Whether all images have as many masks."""
        return min(self.counts) == max(self.counts)

    def fits_kernels(self) -> bool:
        """Whether all images have as many masks, and features the rank of the kernels."""
        return self.has_equal_counts() and len(self.basis) in (0, RANK)

    def low_rank(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Features and basis; None for both without features."""
        return (None, None) if self.features is None else (self.features, self.basis)

    def by_image(self, product: Product, rows: Tensor, image: Tensor) -> Tensor:
        """Rows [M, R, K] times the matrix of their image: [M, R, L]."""
        if self.has_equal_counts():
            grouped = rows.reshape(len(self.counts), -1, rows.shape[-1])
            return product(grouped, image).view(*rows.shape[:-1], -1)
        parts = torch.split(rows, list(self.counts))
        matrices = [matrix.expand(len(part), -1, -1) for part, matrix in zip(parts, image, strict=True)]
        return torch.cat([product(part, matrix) for part, matrix in zip(parts, matrices, strict=True)])


def reading(x: Tensor, rows: Tensor, *, shared: bool) -> ModuleType | None:
    """The kernels with which rows [M, R, C] read image tokens [..., N, C]; None where they cannot be used."""
    kernels = kernels_of("tokens_to_image", x)
    if kernels is None or not kernels.fits(x, rows.shape[1], shared=shared):
        return None
    return kernels if x.dtype == rows.dtype in HALF else None


def added(product: Tensor, tokens: Tensor) -> Tensor:
    """The sum, computed in place in the memory of the product unless the product is a view, as in a graph."""
    # Autograd would copy the gradient of a view that is changed in place.
    return product + tokens if torch.compiler.is_compiling() else product.add_(tokens)


class _Product(torch.autograd.Function):
    """a' @ b or, without `first`, a @ b'. The gradients have the memory layouts of a and b: those of a plain
    product are transposed, and adding them to other gradients takes as long as the product.
    """

    @staticmethod
    def forward(a: Tensor, b: Tensor, first: bool) -> Tensor:
        return a.transpose(-2, -1) @ b if first else a @ b.transpose(-2, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        *both, ctx.first = inputs
        ctx.save_for_backward(*both)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        if ctx.first:
            return b @ gradient.transpose(-2, -1), a @ gradient, None
        return gradient @ b, gradient.transpose(-2, -1) @ a, None


_product: Callable[[Tensor, Tensor, bool], Tensor] = _Product.apply


def product_with_transposed(a: Tensor, b: Tensor) -> Tensor:
    """a @ b' for a [..., R, K] and b [..., L, K] with equal leading dimensions."""
    return _product(a, b, False)


def product_of_transposed(a: Tensor, b: Tensor) -> Tensor:
    """a' @ b for a [..., R, K] and b [..., R, L]."""
    return _product(a, b, True)


def softmax(x: Tensor, dim: int) -> Tensor:
    """The softmax in the number format of x; autocast would give a float32 copy."""
    with torch.autocast(x.device.type, enabled=False):
        return x.softmax(dim)


def kernels_of(name: str, x: Tensor) -> ModuleType | None:
    """A module of kernels for x, if it is in use; None on other devices than CUDA and in a compiled graph."""
    if not x.is_cuda or torch.compiler.is_compiling() or name not in IN_USE:
        return None
    return _imported(f"sa1b.sam.{name}_triton")


@cache
def _imported(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ImportError:
        return None
