"""Attention over a complete image with relative positions, in several forms with the same result.

`folded` is the form of the model (`sa1b.sam.image_encoder`): heads are three times as long, for one fused
kernel of any kind. `short values` has the same queries and keys, and values that are not padded, which not
every kernel supports. `flex` is FlexAttention, which adds the positions to the logits inside of the kernel:
heads keep their length, and the gradients of the positions are scattered sums. On a CPU it has no backward
pass.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.gpu import timing
from benchmarks.gpu.part import Record, Setting, Skipped
from sa1b.engine.settings import autocast
from sa1b.sam.image_encoder import RelativeAttention
from sa1b.sam.transformer import OwnImage, SharedImage, TwoWayLayer, layer_norm

TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 1e-5}  # relative, of the results and of all gradients
# Image tokens of a tile, tiles of a program, warps and stages of the kernels of `image_to_tokens`.
PLACES = (
    *((64, 1, 8, 3), (32, 1, 8, 3), (32, 1, 4, 3), (64, 1, 16, 3), (64, 8, 8, 1), (64, 8, 16, 1)),
    *((32, 16, 8, 1), (32, 16, 8, 2), (32, 4, 8, 2), (32, 64, 8, 2), (16, 16, 8, 1), (16, 16, 8, 2)),
)
Form = Callable[[RelativeAttention, Tensor], Tensor]


def short_values(attention: RelativeAttention, x: Tensor) -> Tensor:
    """The folded form with values of their own length."""
    q, k, v = attention.projected(x)
    q, k = attention.folded(q, k)
    out = F.scaled_dot_product_attention(q, k, v.flatten(2, 3), scale=1.0)
    projected: Tensor = attention.proj(out.transpose(1, 2).reshape(x.shape))
    return projected


def flex(attention: RelativeAttention, x: Tensor, attend: Callable[..., Any] = flex_attention) -> Tensor:
    """The result of the attention by FlexAttention; `attend` is `flex_attention`, compiled on a GPU."""
    q, k, v = attention.projected(x)
    rows, columns = (one.flatten(2, 3).to(q.dtype) for one in attention.positions(q))
    side = attention.side

    def placed(logit: Tensor, image: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return logit + rows[image, head, query, key // side] + columns[image, head, query, key % side]

    out: Tensor = attend(q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3), score_mod=placed)
    projected: Tensor = attention.proj(out.transpose(1, 2).reshape(x.shape))
    return projected


def forms(device: str) -> dict[str, Form]:
    """All forms by name."""
    attend = torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention
    return {
        "folded": lambda attention, x: attention(x),
        "short values": short_values,
        "flex": partial(flex, attend=attend),
    }


def work(setting: Setting, record: Record) -> None:
    """Results, gradients and times of all forms."""
    width, heads, side = setting.pick((768, 12, 64), (32, 2, 4))
    batch = setting.pick(4, 2)
    dtype = torch.bfloat16 if setting.on_gpu else torch.float32
    torch.manual_seed(0)
    attention = RelativeAttention(width, heads, side)
    for table in (attention.rel_pos_h, attention.rel_pos_w):
        torch.nn.init.normal_(table, std=0.3)
    attention = attention.to(setting.device)
    x = torch.randn(batch, side, side, width, device=setting.device)
    weight = torch.randn(width, device=setting.device)
    inputs = (x.requires_grad_(), *attention.parameters())
    expected: list[Tensor] = []
    for name, form in forms(setting.device).items():
        forward_only = name == "flex" and not setting.on_gpu

        def forward(_: Tensor, form: Form = form) -> Tensor:
            with autocast("bf16" if setting.on_gpu else "fp32", torch.device(setting.device)):
                return form(attention, x).float()

        def backward(_: Tensor, forward: Callable[[Tensor], Tensor] = forward) -> list[Tensor]:
            result = forward(x)
            return [result.detach(), *torch.autograd.grad((result * weight).sum(), inputs)]

        with record.attempt(name), torch.set_grad_enabled(not forward_only):
            found = [forward(x)] if forward_only else backward(x)
            expected = expected or found
            worst = max(_difference(*pair) for pair in zip(found, expected, strict=False))
            record.check(f"{name}: same result and gradients", worst <= TOLERANCE[dtype], worst)
            calls = {"forward": forward, "forward and backward": backward}
            for label in list(calls)[: 1 if forward_only else 2]:
                took = timing.each(calls[label], [x], setting.pick(5, 1))
                record.figure(f"{name}: {label}", took / batch, "ms an image")


def image_to_tokens(setting: Setting, record: Record) -> None:
    """The last part of a layer of the mask decoder: by torch, and in one kernel with several tiles."""
    count, images, heads, tokens, width, side = setting.pick((464, 8, 8, 12, 256, 64), (4, 2, 2, 5, 32, 8))
    dtype, places = torch.bfloat16 if setting.on_gpu else torch.float32, side * side
    torch.manual_seed(0)
    layer = TwoWayLayer(width, heads, 64).to(setting.device)
    attention, norm = layer.cross_attn_image_to_token, layer.norm4
    position = torch.randn(places, width, device=setting.device, dtype=dtype)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, device=setting.device, dtype=dtype)

    x, features, basis = (
        made(*shape).requires_grad_() for shape in ((images, places, width), (count, 16, places), (16, width))
    )
    counts = (count // images,) * images
    own = made(count, places, width).requires_grad_()
    rows = [
        made(count, heads, tokens, size).mul(scale).requires_grad_()
        for size, scale in ((width, 0.05), (1, 1), (width, 1))
    ]
    gradients = [made(count, places, width) for _ in range(2)]

    def plain(image: SharedImage | OwnImage) -> tuple[Tensor, Tensor]:
        changed = attention.spread(image, *rows)
        changed = layer_norm(changed, norm.weight, norm.bias, norm.eps)
        return changed, changed + position

    def fused(image: SharedImage | OwnImage) -> tuple[Tensor, Tensor]:
        found = attention.fused(image, *rows, norm, position, last=False)
        if found is None or found.placed is None:
            raise Skipped("the kernel runs on a GPU only")
        return found.tokens, found.placed

    for kind in ("shared", "own"):
        expected: list[Tensor] = []
        for name, form, places in (
            ("torch", plain, None),
            *(("kernel", fused, places) for places in PLACES),
        ):
            if name == "kernel" and not setting.on_gpu:
                continue

            def forward(_: Tensor, form: Any = form, kind: str = kind) -> tuple[Tensor, Tensor]:
                image = SharedImage(x, x + position, counts, features, basis)
                return form(image if kind == "shared" else OwnImage(own, own + position, position))

            def backward(_: Tensor, forward: Any = forward, kind: str = kind) -> list[Tensor]:
                given = [x, features, basis] if kind == "shared" else [own]
                found = forward(_)
                return [
                    *found,
                    *torch.autograd.grad(found, [*given, *rows, norm.weight, norm.bias], gradients),
                ]

            label = f"{kind} image, {name}" + (
                " {}x{}, {} warps, {} stages".format(*places) if places else ""
            )
            with record.attempt(label), ExitStack() as stack:
                if places:
                    from sa1b.sam.image_to_tokens_triton import Places  # needs triton

                    for direction in ("FORWARD", "BACKWARD"):
                        constant = f"sa1b.sam.image_to_tokens_triton.{direction}_PLACES"
                        stack.enter_context(patch(constant, Places(*places)))
                found = backward(own)
                expected = expected or found
                worst = max(_difference(a.float(), b.float()) for a, b in zip(found, expected, strict=True))
                record.figure(f"{label}: largest relative difference", worst)
                del found
                for part, call in (("forward", forward), ("forward and backward", backward)):
                    record.figure(f"{label}: {part}", timing.each(call, [own], setting.pick(3, 1)), "ms")

    for rows in (16, 32):
        queries = made(count, rows, width).mul(0.05).requires_grad_()
        _reading(setting, record, queries, own, position, (made(count, rows, width), gradients[0]))


def _reading(
    setting: Setting,
    record: Record,
    queries: Tensor,
    x: Tensor,
    position: Tensor,
    gradients: Sequence[Tensor],
) -> None:
    """The attention of the last tokens to the image tokens of a mask: by torch, and in one kernel."""
    expected: list[Tensor] = []
    for name in ("torch", "kernel")[: 2 if setting.on_gpu else 1]:

        def forward(_: Tensor, name: str = name) -> tuple[Tensor, Tensor]:
            read, same = OwnImage(x, x + position if name == "torch" else None, position).read(queries)
            return read, same.tokens

        def backward(_: Tensor, forward: Any = forward) -> list[Tensor]:
            found = forward(_)
            return [found[0], *torch.autograd.grad(found, (x, queries), gradients)]

        label = f"reading of {queries.shape[1]} rows, {name}"
        with record.attempt(label):
            found = backward(x)
            expected = expected or found
            worst = max(_difference(a.float(), b.float()) for a, b in zip(found, expected, strict=True))
            record.figure(f"{label}: largest relative difference", worst)
            for part, call in (("forward", forward), ("forward and backward", backward)):
                record.figure(f"{label}: {part}", timing.each(call, [x], setting.pick(3, 1)), "ms")


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().norm() / other.detach().norm().clamp(min=1e-3))
