"""Attention over a complete image with relative positions, in several forms with the same result.

`folded` is the form of the model (`sa1b.sam.image_encoder`): heads are three times as long, for one fused
kernel of any kind. `short values` has the same queries and keys, and values that are not padded, which not
every kernel supports. `flex` is FlexAttention, which adds the positions to the logits inside of the kernel:
heads keep their length, and the gradients of the positions are scattered sums. On a CPU it has no backward
pass.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.gpu import timing
from benchmarks.gpu.part import Record, Setting
from sa1b.engine.step.precision import autocast
from sa1b.sam.image_encoder import RelativeAttention

TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 1e-5}  # relative, of the results and of all gradients
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


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp(min=1e-3))
