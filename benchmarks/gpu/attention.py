"""Attention over a complete image with relative positions, in two forms with the same result.

`folded` is the form of the model (`sa1b.sam.image_encoder`): heads are three times as long, for one fused
kernel, with values of their own length by cuDNN. `tiles` are kernels of this folder, which add the positions
to the logits: heads keep their length. They need a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu import timing
from benchmarks.gpu.part import Record, Setting
from sa1b.engine.precision import Precision, autocast
from sa1b.sam.image_encoder import RelativeAttention
from sa1b.sam.image_tokens import IN_USE, OwnImage, SharedImage
from sa1b.sam.kernel_proof import KERNELS
from sa1b.sam.transformer import TwoWayLayer

ERROR = 0.1  # of the folded form in bf16, relative to float32: of the result and of each gradient
HALF = torch.bfloat16, torch.float16
KERNELS_OF_TILES = "benchmarks.gpu.attention_triton"
Form = Callable[[RelativeAttention, Tensor], Tensor]
# Constants of the kernels of `tiles`, and values that may be faster.
TILES: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = (
    ("FORWARD", ((128, 8, 3, 128), (128, 8, 2), (64, 4, 3), (128, 4, 3))),
    ("QUERIES", ((64, 4, 3), (64, 4, 2), (64, 4, 3, 168))),
    ("KEYS", ((64, 4, 3), (64, 4, 2), (64, 8, 2, 0, 2), (32, 8, 3, 128, 2))),
)
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


def tiles() -> Form:
    """The attention by kernels, which need triton."""
    apply = import_module(KERNELS_OF_TILES).TiledAttention.apply

    def forward(attention: RelativeAttention, x: Tensor) -> Tensor:
        qkv = attention.qkv(x).view(*x.shape[:3], 3, attention.heads, -1)
        rows, columns = attention.positions(qkv[:, :, :, 0].permute(0, 3, 1, 2, 4))
        out: Tensor = attention.proj(apply(qkv.flatten(1, 2), rows, columns).view(x.shape))
        return out

    return forward


@contextmanager
def with_tiles() -> Iterator[None]:
    """Context in which attention over a complete image is in `tiles`, in half precision on a GPU."""
    folded, tiled, fits = RelativeAttention.forward, tiles(), import_module(KERNELS_OF_TILES).fits

    def forward(attention: RelativeAttention, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        chosen = x.is_cuda and dtype in HALF and fits(attention.side, x.shape[-1] // attention.heads)
        return (tiled if chosen else folded)(attention, x)

    with patch.object(RelativeAttention, "forward", forward):
        yield


def work(setting: Setting, record: Record) -> None:
    """Errors of results and gradients in bf16, and times, of both forms and of other constants of `tiles`."""
    # At the small size, heads have the length for which the kernels are made.
    (width, heads, side), batch = setting.pick((768, 12, 64), (128, 2, 16)), setting.pick(8, 2)
    torch.manual_seed(0)
    attention = RelativeAttention(width, heads, side)
    for table in (attention.rel_pos_h, attention.rel_pos_w):
        torch.nn.init.normal_(table, std=0.3)
    attention = attention.to(setting.device)
    x = torch.randn(batch, side, side, width, device=setting.device)
    weight = torch.randn(width, device=setting.device)
    inputs = (x.requires_grad_(), *attention.parameters())

    def forward(form: Form, precision: Precision = "bf16") -> Tensor:
        with autocast(precision, torch.device(setting.device)):
            return form(attention, x).float()

    def backward(form: Form, precision: Precision = "bf16") -> list[Tensor]:
        result = forward(form, precision)
        return [result.detach(), *torch.autograd.grad((result * weight).sum(), inputs)]

    folded = RelativeAttention.forward
    expected, most = backward(folded, "fp32"), [ERROR] * (1 + len(inputs))
    changes = [(name, one) for name, values in TILES for one in values]
    tiled = tiles() if setting.on_gpu else folded
    for form, change in ((folded, None), *((tiled, one) for one in (None, *changes) if setting.on_gpu)):
        label = ("folded" if form is folded else "tiles") + (" {} {}".format(*change) if change else "")
        with record.attempt(label), ExitStack() as stack:
            if change:
                kernels = import_module(KERNELS_OF_TILES)
                stack.enter_context(patch.object(kernels, change[0], kernels.Places(*change[1])))
            errors = [_difference(*pair) for pair in zip(backward(form), expected, strict=True)]
            exact = all(error <= limit for error, limit in zip(errors, most, strict=True))
            record.check(f"{label}: same as in float32", exact, ", ".join(f"{one:.2g}" for one in errors))
            if form is folded:
                most = [2 * error + 0.005 for error in errors]
            for part, call in (("forward", forward), ("forward and backward", backward)):
                took = timing.each(lambda _, c=call, f=form: c(f), [x], setting.pick(5, 1))
                record.figure(f"{label}: {part}", took / batch, "ms an image")


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
                IN_USE.update(KERNELS if form == "kernels" else ())
                stack.callback(IN_USE.clear)
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


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().norm() / other.detach().norm().clamp(min=1e-3))
