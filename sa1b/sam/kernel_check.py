"""Comparison of the mask decoder's kernels with torch's operators, on the GPU that runs them.

Triton compiles the kernels for each kind of GPU. In a process, a kernel with wrong results or gradients there
is replaced by torch's operators, and a warning names it.
"""

import logging
import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from sa1b.errors import Sa1bError
from sa1b.sam.clicks import BACKGROUND, FOREGROUND
from sa1b.sam.image_tokens import LEFT_OUT
from sa1b.sam.mask_decoder import AMBIGUOUS, SINGLE
from sa1b.sam.model import Sam
from sa1b.sam.targets import compared

# Modules sa1b.sam.<name>_triton.
KERNELS = ("norm", "downscale", "image_to_tokens", "tokens_to_image", "upscale", "losses")
# Clicks of a mask, and masks of each image. A first iteration, a last one, whose tiles differ, and one of
# images with unequal numbers of masks, which some kernels do not support.
PASSES = ((2, (4, 4)), (10, (4, 4)), (3, (3, 2)))
SCALE = 2.0**16  # of the losses, so that their gradients do not underflow in float16
# An error may be LARGER times that of the operators in the same number format, plus SMALL of the norm: by
# rounding, an input of ReLU changes its sign, and so the gradient of its weights.
LARGER, SMALL = 4.0, 0.1

_log = logging.getLogger(__name__)
_checked: set[tuple[object, ...]] = set()


def check_kernels(model: Sam) -> None:
    """Leave out kernels that differ from torch's operators on the device of this model.

    It is done once for each decoder size, number format and device; without gradients where the caller needs
    none. The weights must be in float32.

    Raises:
        Sa1bError: a kernel has ended the process's use of the device.
    """
    first = next(model.parameters())
    if not first.is_cuda or isinstance(first, FakeTensor) or torch.compiler.is_compiling():
        return
    config, weight = model.config, model.mask_decoder.mask_tokens.weight
    if not config.kernels:
        LEFT_OUT.update(KERNELS)
    autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    sizes = config.channels, config.pixel_features, config.side
    kind = (*sizes, weight.device, weight.dtype, autocast, torch.is_grad_enabled())
    if kind in _checked or weight.dtype != torch.float32 or LEFT_OUT.issuperset(KERNELS):
        return
    different = leave_out_different(model)
    _checked.add(kind)
    for name, why in different.items():
        _log.warning(
            "kernel sa1b.sam.%s_triton is not used on %s: %s; torch's operators take its place",
            *(name, torch.cuda.get_device_name(weight.device), why),
        )


def leave_out_different(model: Sam) -> dict[str, str]:
    """Add kernels to LEFT_OUT whose results or gradients differ from those of operators: name -> reason."""
    before, reasons = set(LEFT_OUT), dict[str, str]()
    try:
        LEFT_OUT.update(KERNELS)
        with torch.autocast(model.pixel_mean.device.type, enabled=False):
            exact = _results(model)
        plain = _errors(_results(model), exact)
        allowed = {name: LARGER * x + SMALL if math.isfinite(x) else math.inf for name, x in plain.items()}
        LEFT_OUT.intersection_update(before)
        if _difference(model, exact, allowed) is None:
            return {}
        LEFT_OUT.update(KERNELS)
        for name in (name for name in KERNELS if name not in before):
            LEFT_OUT.discard(name)  # tried together with those that have passed
            if (why := _difference(model, exact, allowed)) is not None:
                LEFT_OUT.add(name)
                reasons[name] = why
        return reasons
    finally:
        LEFT_OUT.clear()
        LEFT_OUT.update(before | reasons.keys())


def _difference(model: Sam, exact: dict[str, Tensor], allowed: dict[str, float]) -> str | None:
    """Why the results with the kernels that are not left out are wrong; None: they are right."""
    try:
        errors = _errors(_results(model), exact)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        why = (str(error).splitlines() or ["no reason"])[0]
        try:  # an invalid address ends all work of the process on the device
            next(iter(exact.values())).norm().item()
        except RuntimeError as dead:
            used = ", ".join(name for name in KERNELS if name not in LEFT_OUT)
            raise Sa1bError(
                f"kernels of the mask decoder ({used}): {why}; pass --model.no-kernels, which is slower"
            ) from dead
        return f"{type(error).__name__}: {why}"
    worse = {name: error for name, error in errors.items() if not error <= allowed[name]}  # NaN is worse
    if not worse:
        return None
    name = max(worse, key=lambda name: worse[name] - allowed[name])
    return f"{name}: an error of {worse[name]:.3g} of its norm, where {allowed[name]:.3g} is allowed"


def _errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The norm of each difference, as a part of the norm of the exact result."""
    errors = [(x - exact[name]).norm() / exact[name].norm().clamp(min=1e-30) for name, x in found.items()]
    return dict(zip(found, torch.stack(errors).tolist(), strict=True))


def _results(model: Sam) -> dict[str, Tensor]:
    """Logits, predicted IoU and losses of random masks and prompts, and the gradient of each module, flat;
    no gradients where they are disabled.
    """
    config, device = model.config, model.pixel_mean.device
    side, channels = config.side, config.channels + 16 * config.pixel_features
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(device)

    results: dict[str, Tensor] = {}
    with_gradients = torch.is_grad_enabled()
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(with_gradients),
        # The caller's autocast would use the converted weights, and their graph, again.
        torch.autocast(device.type, dtype, enabled, cache_enabled=False),
    ):
        embeddings = normal(2, channels, side, side).requires_grad_()
        total = torch.zeros((), device=device)
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
            losses = compared(logits, masks, torch.ones_like(masks), 0.25, 2.0)[:2]
            results[f"logits of {clicks} prompts"] = logits.detach().float()
            results[f"predicted IoU of {clicks} prompts"] = predicted.detach().float()
            results[f"losses of {clicks} prompts"] = torch.stack(losses).detach()
            total = total + SCALE * torch.stack(losses).sum() + predicted.float().sum()
        if not with_gradients:
            return results
        used = {name: x for name, x in model.named_parameters() if x.requires_grad}
        used = {name: x for name, x in used.items() if not name.startswith("image_encoder.")}
        gradients = torch.autograd.grad(total, [embeddings, *used.values()], allow_unused=True)
    by_module: dict[str, list[Tensor]] = {}
    for name, gradient in zip(("embeddings", *used), gradients, strict=True):
        if gradient is not None:
            by_module.setdefault(name.rpartition(".")[0] or name, []).append(gradient.flatten().float())
    return results | {f"gradient of {name}": torch.cat(parts) for name, parts in by_module.items()}
