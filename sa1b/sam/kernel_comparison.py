"""One comparison of Triton kernels with torch's operators, in a process that `kernel_proof` starts.

python -m sa1b.sam.kernel_comparison '{"kernels": "norm", "kind": ["bf16", [256, 0, 64], 0], "limit": 60}'
"""

import json
import math
import signal
import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module

import torch
from torch import Tensor

from sa1b.masks import raster_torch
from sa1b.masks.proved import MASKS
from sa1b.sam.clicks import BACKGROUND, FOREGROUND
from sa1b.sam.image_tokens import IN_USE
from sa1b.sam.kernel_proof import Kind, Result
from sa1b.sam.mask_decoder import AMBIGUOUS, SINGLE
from sa1b.sam.model import PATCH_SIZE, ModelConfig, Sam
from sa1b.sam.targets import compared

# Clicks of a mask, and masks of each image. A first iteration, a last one, whose tiles differ, and one of
# images with unequal numbers of masks, which some kernels do not support.
PASSES = ((2, (4, 4)), (10, (4, 4)), (3, (3, 2)))
SIDES = (1024, 256, 100, 64, 24)  # pixels of masks, with all kinds of tiles
# Of the losses, so that gradients do not underflow in float16: the first with which they do not overflow.
SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)
# An error may be LARGER times that of the operators in the same number format, plus SMALL of the norm: by
# rounding, an input of ReLU changes its sign, and so the gradient of its weights.
LARGER, SMALL = 4.0, 0.1


def compared_here(kernels: str, kind: Kind) -> Result:
    """Kernels, joined by "+", compared in this process."""
    device = torch.device("cuda", kind.device)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    try:
        if kind.number_format == MASKS:
            errors = {"numbers that differ": (raster_differences(kernels, device), 0.5)}
        else:
            channels, features, side = kind.sizes
            small = ModelConfig(PATCH_SIZE * side, width=64, depth=1, heads=1, global_blocks=())
            model = Sam(replace(small, channels=channels, pixel_features=features)).to(device)
            errors = decoder_errors(model, kind.number_format, kernels.split("+"))
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return {"right": None, "why": "too little free memory on the GPU"}
    except Exception as error:  # such as an invalid address, which ends all work of this process on the GPU
        return {"right": False, "why": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    worse = {name: x for name, (x, most) in errors.items() if not x <= most}  # also NaN
    result: Result = {"right": not worse, "why": "", "registers": _registers(kernels, kind)}
    for part in ("forward", "backward"):
        each = [x for name, (x, _) in errors.items() if name.startswith("gradient") == (part == "backward")]
        result[part] = max(each, default=0.0, key=lambda x: math.inf if math.isnan(x) else x)
    if worse:
        name = max(worse, key=lambda name: worse[name] / errors[name][1])
        result["why"] = "{}: an error of {:.3g}, where {:.3g} is allowed".format(name, *errors[name])
    return result


def _registers(kernels: str, kind: Kind) -> int | None:
    """The most registers of a thread of the kernels that were launched; None: none was."""
    names = [f"sam.{name}" for name in kernels.split("+")] if kind.sizes else ["masks.raster"]
    functions = [x for name in names for x in vars(import_module(f"sa1b.{name}_triton")).items()]
    caches = [
        cache
        for name, function in functions
        if kind.sizes or name == kernels
        for cache in getattr(function, "device_caches", {}).values()
    ]
    return max((kernel.n_regs or 0 for cache in caches for kernel in cache[0].values()), default=None)


def decoder_errors(model: Sam, name: str, kernels: Iterable[str]) -> dict[str, tuple[float, float]]:
    """The error of each result with these kernels in a number format, and the error that it may have."""
    precision = torch.get_float32_matmul_precision()
    device, half = model.pixel_mean.device.type, {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)

    def results(scale: float, exact: bool, used: Iterable[str] = ()) -> dict[str, Tensor]:
        IN_USE.clear()
        IN_USE.update(used)
        torch.set_float32_matmul_precision("high" if name == "tf32" and not exact else "highest")
        # With its cache, autocast would use converted weights, and their graph, again.
        with torch.autocast(device, half, half is not None and not exact, cache_enabled=False):
            return results_of(model, scale)

    try:
        for scale in SCALES if name == "fp16" else SCALES[:1]:
            exact = results(scale, True)
            plain = _errors(results(scale, False), exact)
            if all(map(math.isfinite, plain.values())):
                break
        errors = _errors(results(scale, False, kernels), exact)
    finally:
        IN_USE.clear()
        torch.set_float32_matmul_precision(precision)
    # Where the operators overflow, there is nothing to compare.
    return {x: (errors[x], LARGER * plain[x] + SMALL) for x in errors if math.isfinite(plain[x])}


def _errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The norm of each difference, as a part of the norm of the exact result."""
    errors = [(x - exact[name]).norm() / exact[name].norm().clamp(min=1e-30) for name, x in found.items()]
    return dict(zip(found, torch.stack(errors).tolist(), strict=True))


def results_of(model: Sam, scale: float = 1.0) -> dict[str, Tensor]:
    """Logits, IoU and losses of random masks and prompts, and the gradient of each module, for each pass."""
    config, device = model.config, model.pixel_mean.device
    side, channels = config.side, config.channels + 16 * config.pixel_features
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(device)

    results: dict[str, Tensor] = {}
    used = {name: x for name, x in model.named_parameters() if not name.startswith("image_encoder.")}
    embeddings = normal(2, channels, side, side).requires_grad_()
    for clicks, counts in PASSES:
        count, later = sum(counts), clicks > 2
        points = torch.rand(count, clicks, 2, generator=random) * config.image_size
        labels = torch.randint(BACKGROUND, FOREGROUND + 1, (count, clicks), generator=random)
        logits, predicted = model.decode(
            embeddings,
            torch.arange(2).repeat_interleave(torch.tensor(counts)).to(device),
            points.to(device),
            labels.to(device),
            4 * normal(count, 1, 4 * side, 4 * side) if later else None,
            counts=counts,
            candidates=SINGLE if later else AMBIGUOUS,
        )
        masks = normal(count, 4 * side, 4 * side) > 0.5
        losses = torch.stack(compared(logits, masks, torch.ones_like(masks), 0.25, 2.0)[:2])
        results[f"logits of {clicks} prompts"] = logits.detach().float()
        results[f"predicted IoU of {clicks} prompts"] = predicted.detach().float()
        results[f"losses of {clicks} prompts"] = losses.detach()
        total = scale * losses.sum() + predicted.float().sum()
        gradients = torch.autograd.grad(total, [embeddings, *used.values()], allow_unused=True)
        by_module: dict[str, list[Tensor]] = {}
        for name, gradient in zip(("embeddings", *used), gradients, strict=True):
            if gradient is not None:
                by_module.setdefault(name.rpartition(".")[0] or name, []).append(gradient.flatten().float())
        for name, parts in by_module.items():
            results[f"gradient of {name} of {clicks} prompts"] = torch.cat(parts)
    return results


def raster_differences(kernel: str, device: torch.device) -> float:
    """Pixels or ends of runs in which a kernel of the raster differs from torch."""
    from sa1b.masks import raster_triton

    random, different = torch.Generator().manual_seed(0), 0
    images = torch.tensor([[1500, 2250], [768, 1024], [33, 57], [1, 1]])
    ends = [(torch.rand(64, generator=random) * n).long().sort()[0] for n in images.prod(1).tolist()]
    ends = [torch.cat((x, n[None])) for x, n in zip(ends, images.prod(1), strict=True)]
    runs = torch.cat([x.diff(prepend=x.new_zeros(1)) for x in ends]).int().to(device)
    heights, widths = images.T.contiguous().to(device)
    offsets, sources = torch.arange(5, device=device) * 65, (heights, widths)
    flips = torch.tensor([True, False, True, False], device=device)
    for size in SIDES:
        taken = raster_torch.framed_sizes(images, size)
        if kernel == "measure_masks":
            rows = [x % h for x, h in zip(ends, images[:, 0], strict=True)]
            tops = [
                raster_torch.first_target(row, h * size, 2 * size * t)
                for row, h, t in zip(rows, images[:, 0], taken[:, 0], strict=True)
            ]
            expected = [x // h * size + y for x, h, y in zip(ends, images[:, 0], tops, strict=True)]
            for given in (None, taken.to(device)):
                found, _ = raster_triton.measured(runs, offsets, sources, given, 0, (size, size, size))
                different += int((found.cpu() != torch.cat(expected)).sum())
            continue
        for dtype in raster_torch.DTYPES:
            for more in ({"flip": flips}, {"taken": taken.to(device)}):
                masks = (runs, offsets, *sources, size, size)
                found, expected = (
                    each.rasterize_frame(*masks, **more, dtype=dtype)
                    for each in (raster_triton, raster_torch)
                )
                different += int((found != expected).sum())
        masks = (runs[:65], offsets[:2], 1500, 2250, size, size // 2)
        different += int((raster_triton.rasterize(*masks) != raster_torch.rasterize(*masks)).sum())
    return float(different)


def main(text: str) -> None:
    """Print the result of a case as a line of JSON. The process ends after its limit, whatever hangs."""
    case = json.loads(text)
    signal.alarm(math.ceil(case["limit"]) + 1)
    number_format, sizes, device = case["kind"]
    print(json.dumps(compared_here(case["kernels"], Kind(number_format, tuple(sizes), device))))


if __name__ == "__main__":
    main(sys.argv[1])
