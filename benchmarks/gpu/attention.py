"""Attention over a complete image with relative positions, in several forms with the same result.

`folded` is the form of the model (`sa1b.sam.image_encoder`): heads are three times as long, for one fused
kernel, with values of their own length by cuDNN. `padded values` is this form by flash attention. `flex` is
FlexAttention, which adds the positions to the logits inside of the kernel: heads keep their length, and the
gradients of the positions are scattered sums. On a CPU it has no backward pass.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.gpu import timing
from benchmarks.gpu.part import Record, Setting
from sa1b.engine.precision import autocast
from sa1b.sam.image_encoder import RelativeAttention
from sa1b.sam.image_tokens import OwnImage, SharedImage
from sa1b.sam.transformer import TwoWayLayer

TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 1e-5}  # relative, of the results and of all gradients
# Modules and constants of the kernels of `image_to_tokens`, and values that may be faster.
PLACES: tuple[tuple[str, str, tuple[tuple[int, ...], ...]], ...] = (
    ("image_to_tokens", "FORWARD_PLACES", ((64, 1, 8, 3), (64, 16, 8, 1))),
    ("image_to_tokens", "BACKWARD_PLACES", ((64, 1, 8, 1), (64, 16, 8, 1))),
    ("image_to_tokens", "ROWS_PLACES", ((32, 128, 8, 1), (64, 64, 8, 1))),
    ("tokens_to_image", "FORWARD_PLACES", ((32, 8, 2), (64, 8, 1))),
    ("tokens_to_image", "ROWS_PLACES", ((32, 8, 1), (64, 8, 1))),
    ("tokens_to_image", "OWN_PLACES", ((64, 8, 1),)),
    ("tokens_to_image", "SHARED_PLACES", ((32, 8, 1), (32, 8, 2))),
)
Form = Callable[[RelativeAttention, Tensor], Tensor]


def padded_values(attention: RelativeAttention, x: Tensor) -> Tensor:
    """The folded form without cuDNN."""
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        out: Tensor = attention(x)
        return out


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
        "padded values": padded_values,
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
    """A decoder layer's attention in both directions: by torch, and by the kernels with several tiles."""
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
    own = made(count, places, width).requires_grad_()
    queries = made(count, heads * tokens, width).mul(0.05).requires_grad_()
    rows = [made(count, tokens, width).requires_grad_() for _ in ("keys", "values")]
    gradients = [made(count, heads * tokens, width), made(count, places, width)]

    def forward(kind: str, form: str) -> tuple[Tensor, Tensor]:
        image: SharedImage | OwnImage = OwnImage(own, None if form == "kernels" else own + position, position)
        if kind == "shared":
            image = SharedImage(x, x + position, (count // images,) * images, features, basis)
        read, image = image.read(queries)
        with torch.autocast(setting.device, dtype, enabled=setting.on_gpu):
            return read, attention(image, *rows, norm, position).tokens

    def backward(kind: str, form: str) -> list[Tensor]:
        found = forward(kind, form)
        given = [*([x, features, basis] if kind == "shared" else [own]), queries, *rows, *norm.parameters()]
        return [*found, *torch.autograd.grad(found, given, gradients)]

    changes = [(module, name, one) for module, name, values in PLACES for one in values]
    for kind in ("shared", "own"):
        expected: list[Tensor] = []
        for form, change in (("torch", None), ("kernels", None), *(("kernels", one) for one in changes)):
            if form == "kernels" and not setting.on_gpu:
                continue
            label = f"{kind} image, {form}" + (" {}.{} {}".format(*change) if change else "")
            with record.attempt(label), ExitStack() as stack:
                if form == "torch":
                    for module in ("transformer", "image_tokens"):
                        stack.enter_context(patch(f"sa1b.sam.{module}.kernels_of", return_value=None))
                if change:
                    kernels = import_module(f"sa1b.sam.{change[0]}_triton")  # needs triton
                    value = kernels.Places(*change[2])
                    if isinstance(constant := getattr(kernels, change[1]), dict):
                        value = constant | {128: value}
                    stack.enter_context(patch.object(kernels, change[1], value))
                found = backward(kind, form)
                expected = expected or found
                worst = max(_difference(a.float(), b.float()) for a, b in zip(found, expected, strict=True))
                record.figure(f"{label}: largest relative difference", worst)
                del found
                for part, call in (("forward", forward), ("forward and backward", backward)):
                    took = timing.each(lambda _, c=call, k=kind, f=form: c(k, f), [own], setting.pick(3, 1))
                    record.figure(f"{label}: {part}", took, "ms")

    for count_of_rows in (16, 32):
        queries = made(count, count_of_rows, width).mul(0.05).requires_grad_()
        _reading(setting, record, queries, own, position, (made(count, count_of_rows, width), gradients[1]))


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
