"""Cases of attention in tiles: `TRITON_INTERPRET=1 python -m tests.benchmarks.attention_cases`."""

from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu import attention_triton
from benchmarks.gpu.attention import tiles
from benchmarks.gpu.attention_triton import Places, TiledAttention
from sa1b.sam.image_encoder import RelativeAttention

# Of the norm of the difference, relative to that of the result and of each gradient.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def plain(qkv: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The definition, with all logits."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    positions = rows[..., :, None] + columns[..., None, :]
    logits = q @ k.mT * q.shape[-1] ** -0.5 + positions.flatten(4, 5).flatten(2, 3)
    return (logits.softmax(-1) @ v).transpose(1, 2)


def compare(found: list[Tensor], expected: list[Tensor], *case: object) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert (one.shape, one.dtype) == (other.shape, found[0].dtype), (case, number)
        error = float((one - other).detach().norm() / other.detach().norm())
        assert error <= TOLERANCE[one.dtype], (case, number, error)


def check(side: int, length: int, dtype: torch.dtype, images: int, heads: int) -> None:
    """Result and gradients of the kernels equal those of the definition in float64."""
    generator = torch.Generator().manual_seed(side + length)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    # With the strides of products by rows and by columns of the queries, as the model computes them.
    rows = made(side, images, heads, side, side).permute(1, 2, 0, 3, 4)
    columns = made(side, images, heads, side, side).permute(1, 2, 3, 0, 4)
    given = [made(images, side * side, 3, heads, length), rows, columns]
    gradient, results = made(images, side * side, heads, length), []
    for function, number in ((TiledAttention.apply, dtype), (plain, torch.float64)):
        inputs = [x.to(number).requires_grad_() for x in given]
        out = function(*inputs)
        results.append([out, *torch.autograd.grad(out, inputs, gradient.to(number))])
    compare(*results, side, length, dtype)


def check_module(side: int, length: int) -> None:
    """The attention of a block of the encoder in tiles equals the folded form."""
    torch.manual_seed(0)
    attention, results = RelativeAttention(2 * length, 2, side), []
    for table in (attention.rel_pos_h, attention.rel_pos_w):
        torch.nn.init.normal_(table, std=0.3)
    x, gradient = torch.randn(2, 2, side, side, 2 * length)
    for function in (tiles(), RelativeAttention.forward):
        out = function(attention, x.requires_grad_())
        results.append([out, *torch.autograd.grad(out, (x, *attention.parameters()), gradient)])
    compare(*results, side, length)


if __name__ == "__main__":
    # The interpreter multiplies the bits of bfloat16 as integers.
    check(16, 64, torch.float16, 2, 2)
    check(32, 32, torch.float32, 1, 1)
    check_module(16, 16)
    few = Places(32, 4, 1)
    with mock.patch.multiple(attention_triton, FORWARD=few, QUERIES=few, KEYS=few):
        check(16, 16, torch.float32, 2, 1)
    print("4 cases")
