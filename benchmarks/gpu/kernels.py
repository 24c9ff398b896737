"""Kernels at the shapes of the model: attention, layer norms, upscaling, features of masks, losses.

Attention: which back end torch chooses, and for each one its time and the error of its output and gradients
against float64, on fewer heads. All others: time of torch and of the kernels of this package, and errors.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu import timing
from benchmarks.gpu.part import Record, Setting
from sa1b.sam import mask_decoder
from sa1b.sam import targets as targets_module
from sa1b.sam.mask_decoder import MaskDecoder, PromptEncoder
from sa1b.sam.targets import compared
from sa1b.sam.transformer import layer_norm

# Batch, heads, tokens, length of queries and keys, length of values.
SHAPES = {
    "window": (200, 12, 196, 96, 96),
    "window, values of 64": (200, 12, 196, 96, 64),
    "global": (8, 12, 4096, 192, 192),
    "global, values of 128": (8, 12, 4096, 192, 128),
    "global, values of 64": (8, 12, 4096, 192, 64),
    "tokens": (512, 8, 16, 32, 32),
}
BACK_ENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
CHOICES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
# Rows and channels of an iteration of 464 masks; numbers and warps, and programs, for the gradients.
TILED = ((464 << 12, 256), (464 << 14, 64))
TILES, PROGRAMS = ((1024, 4), (2048, 4), (2048, 8), (4096, 8)), (528, 1056, 2112)
NORMS = ((8 << 20, 4), (8 << 20, 64), (2 << 20, 256), (512 * 16, 256))
MASKS = (464, 64)  # of the upscaling; 464 masks are 8 images of SA-1B with at most 64 masks


def attention(setting: Setting, record: Record) -> None:
    """Choice, errors and times of each back end."""
    for name, shape in SHAPES.items():
        with record.attempt(name):
            _attention(setting, record, name, setting.pick(shape, (2, 2, 16, 32, 32)))


def _attention(setting: Setting, record: Record, name: str, shape: tuple[int, int, int, int, int]) -> None:
    dtype = torch.bfloat16 if setting.on_gpu else torch.float32
    q, k, v = _tensors(shape, dtype, setting.device)
    chosen = torch._fused_sdp_choice(q, k, v, None, 0.0, False, scale=0.1)
    record.text(f"{name}: chosen", CHOICES.get(chosen, str(chosen)))
    small = _tensors((1, 1, *shape[2:]), dtype, setting.device)
    exact = _results(*(one.detach().double().requires_grad_() for one in small))
    for label, back_end in BACK_ENDS.items():
        if label == "math" and shape[2] > 1024:
            continue  # tokens x tokens in memory
        try:
            with sdpa_kernel(back_end):
                found = _results(*small)
                errors = [_difference(*pair) for pair in zip(found, exact, strict=True)]
                for part, error in zip(("output", "dq", "dk", "dv"), errors, strict=True):
                    record.figure(f"{name}, {label}: error of {part}", error)
                forward = timing.each(lambda _: _forward(q, k, v), [q], setting.pick(5, 1))
                both = timing.each(lambda _: _results(q, k, v), [q], setting.pick(5, 1))
            record.figure(f"{name}, {label}: forward", forward, "ms")
            record.figure(f"{name}, {label}: forward and backward", both, "ms")
        except RuntimeError as error:
            record.text(f"{name}, {label}: refused", str(error).splitlines()[0])


def _tensors(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str) -> list[Tensor]:
    batch, heads, tokens, keys, values = shape
    torch.manual_seed(0)
    return [
        torch.randn(batch, heads, tokens, length, device=device).to(dtype).requires_grad_()
        for length in (keys, keys, values)
    ]


def _forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=0.1)


def _results(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The output, and the gradients of a sum with fixed weights."""
    out = _forward(q, k, v)
    weight = torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), weight.expand_as(out))]


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other).norm() / other.norm().clamp(min=1e-9))


def norms(setting: Setting, record: Record) -> None:
    """Layer norms of few channels, the upscaling and the features of masks, forward and backward."""
    for masks in setting.pick(MASKS, (2,)):
        _upscaling(setting, record, masks)
        _downscaling(setting, record, masks)
    dtype = torch.bfloat16 if setting.on_gpu else torch.float32
    for full, channels in NORMS:
        rows = setting.pick(full, 64)
        x = torch.randn(rows, channels, device=setting.device, dtype=dtype, requires_grad=True)
        weight, bias = (torch.randn(channels, device=setting.device, requires_grad=True) for _ in range(2))
        with record.attempt(f"[{rows}, {channels}]"):
            with torch.autocast(setting.device, dtype=torch.bfloat16, enabled=setting.on_gpu):
                out = F.layer_norm(x, (channels,), weight, bias)
            record.text(f"layer norm [{rows}, {channels}]: output", str(out.dtype))
            calls: dict[str, Callable[[Tensor], Any]] = {
                "forward": lambda x, w=weight, b=bias: F.layer_norm(x, w.shape, w.to(x.dtype), b.to(x.dtype)),
                "backward": lambda g, o=out, x=x, w=weight, b=bias: torch.autograd.grad(
                    o, (x, w, b), g, retain_graph=True
                ),
            }
            with torch.autocast(setting.device, dtype=torch.bfloat16, enabled=setting.on_gpu):
                own = layer_norm(x, weight, bias, 1e-6, gelu=True)
            calls |= {
                "with GELU, of the package, forward": lambda x, w=weight, b=bias: layer_norm(
                    x, w, b, 1e-6, gelu=True
                ),
                "with GELU, of the package, backward": lambda g, o=own, x=x, w=weight, b=bias: (
                    torch.autograd.grad(o, (x, w, b), g, retain_graph=True)
                ),
            }
            inputs = {"forward": x.detach(), "backward": out.detach(), "own": own.detach()}
            for label, call in calls.items():
                kind = label.split()[-1] if label in inputs else "own" if "backward" in label else "forward"
                took = timing.each(call, [inputs[kind]], 3)
                record.figure(f"layer norm [{rows}, {channels}], {label}", took, "ms")
    if setting.on_gpu:
        for full, channels in TILED:
            with record.attempt(f"tiles of {channels} channels"):
                _tiles(record, setting.pick(full, 64), channels)


def _tiles(record: Record, rows: int, channels: int) -> None:
    """The gradients of a norm with other numbers of a tile, warps and programs; the best ones."""
    from sa1b.sam.norm_triton import BACKWARD, Tiles, gradients  # needs triton

    x, gradient = torch.randn(2, rows, channels, device="cuda", dtype=torch.bfloat16)
    weight, bias = torch.randn(2, channels, device="cuda")
    took = {}
    others = (Tiles(*one, programs) for one, programs in product(TILES, PROGRAMS))
    for tiles in dict.fromkeys((BACKWARD, *others)):

        def run(tiles: Tiles = tiles) -> None:
            gradients(x, weight, bias, gradient, 1e-6, tiles, gelu=channels < 256)

        run()  # compiles
        took[tiles] = min(timing.between(run, "cuda") for _ in range(3))
    for tiles, ms in took.items():
        record.figure(f"gradients of a norm [{rows}, {channels}], {tiles}", ms, "ms")
    best = min(took, key=lambda tiles: took[tiles])
    record.text(
        f"best tiles of [{rows}, {channels}]", f"{best}, {took[best] / took[BACKWARD]:.3f} of the used ones"
    )


def losses(setting: Setting, record: Record) -> None:
    """The losses of an iteration of 464 masks in one pass and by operators of torch, forward and backward."""
    masks, size = setting.pick((464, 256), (3, 16))
    dtype = torch.bfloat16 if setting.on_gpu else torch.float32
    logits = (4 * torch.randn(masks, 1, size, size, device=setting.device)).to(dtype).requires_grad_()
    targets, inside = (torch.rand(masks, size, size, device=setting.device) < part for part in (0.3, 0.9))
    scene = (targets & inside, inside, 0.25, 2.0)
    weights = (
        torch.full((masks, 1), 20.0, device=setting.device),
        torch.ones(masks, 1, device=setting.device),
    )
    forms = {"in one pass": targets_module.kernels_of, "by operators": lambda *_: None}
    results = {}
    for name, kernels_of in forms.items():
        with record.attempt(name), patch.object(targets_module, "kernels_of", kernels_of):
            found = compared(logits, *scene)

            def backward(_: Tensor, found: tuple[Tensor, ...] = found) -> Tensor:
                return torch.autograd.grad(found[:2], logits, weights, retain_graph=True)[0]

            results[name] = [*found, backward(logits)]
            took = timing.each(lambda x: compared(x, *scene), [logits], 3)
            record.figure(f"losses {name}: forward", took, "ms")
            record.figure(f"losses {name}: backward", timing.each(backward, [logits], 3), "ms")
    with record.attempt("errors"):
        limits = {"focal": 1e-5, "dice": 1e-5, "IoU": 0, "masks": 0, "gradient": 0.01}
        for (part, limit), one, other in zip(limits.items(), *results.values(), strict=True):
            scale = other.detach().double().abs().max().clamp(min=1e-12)
            error = float((one.detach().double() - other.detach().double()).abs().max() / scale)
            record.figure(f"losses in one pass: largest error of {part}", error, at_most=limit)


def _upscaling(setting: Setting, record: Record, masks: int) -> None:
    dtype = torch.bfloat16 if setting.on_gpu else torch.float32
    channels, tokens = setting.pick((256, 4096), (64, 16))
    decoder = MaskDecoder(channels).to(setting.device)
    side = 4 * math.isqrt(tokens)
    shapes = ((masks, tokens, channels), (masks, 1, channels // 8), (masks, 1, side, side))
    x, weights, gradient = (torch.randn(shape, device=setting.device).to(dtype) for shape in shapes)

    def graph(x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        inputs = (x.requires_grad_(), *decoder.output_upscaling.parameters())
        return decoder.upscale(x, weights[: len(x)].to(x.dtype)), inputs

    _fused(record, f"upscaling of {masks} masks", graph, x, gradient)


def _downscaling(setting: Setting, record: Record, masks: int) -> None:
    dtype = torch.bfloat16 if setting.on_gpu else torch.float32
    side = setting.pick(64, 4)
    encoder = PromptEncoder(256, 16 * side, side).to(setting.device)
    low_res = torch.randn(masks, 1, 4 * side, 4 * side, device=setting.device).to(dtype)
    gradient = torch.randn(masks, 16, side * side, device=setting.device).to(dtype)

    def graph(low_res: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return encoder.mask_features(low_res), tuple(encoder.mask_downscaling[:5].parameters())

    _fused(record, f"features of {masks} masks", graph, low_res, gradient)


Graph = Callable[[Tensor], tuple[Tensor, tuple[Tensor, ...]]]


def _fused(record: Record, subject: str, graph: Graph, x: Tensor, gradient: Tensor) -> None:
    """Errors and times of kernels and of separate operators; `graph`: result, and inputs with a gradient."""

    def results(dtype: torch.dtype) -> list[Tensor]:
        found, inputs = graph(x.detach()[:2].to(dtype))
        return [found.detach(), *torch.autograd.grad(found, inputs, gradient[:2].to(found))]

    exact = results(torch.float32)
    for label in ("fused", "separate operators"):
        separate = patch.object(mask_decoder, "kernels_of", lambda *_: None)
        name = f"{subject}, {label}"
        with record.attempt(name), nullcontext() if label == "fused" else separate:
            pairs = zip(results(x.dtype), exact, strict=True)
            errors = [float((one - other).abs().max() / other.abs().max()) for one, other in pairs]
            record.figure(f"{name}: error", errors[0])
            record.figure(f"{name}: largest error of a gradient", max(errors[1:]))
            record.figure(f"{name}: forward", timing.each(graph, [x], 3), "ms")
            found, inputs = graph(x)
            took = timing.each(
                lambda g, found=found, inputs=inputs: torch.autograd.grad(
                    found, inputs, g.to(found), retain_graph=True
                ),
                [gradient],
                3,
            )
            record.figure(f"{name}: backward", took, "ms")
