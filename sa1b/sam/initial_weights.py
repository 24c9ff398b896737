"""Initial weights for training, resized to the sizes of the model.

Two kinds of files are accepted: a SAM, also of another image size, and a plain ViT for the image encoder,
such as the published MAE ViT-B, ViT-L and ViT-H (He et al., "Masked Autoencoders Are Scalable Vision
Learners", 2022), the initial weights of the published SAM. Position embeddings are resized as in ViTDet's
code (Li et al. 2022): absolute ones with bicubic, relative ones with linear interpolation; kernels of another
patch size (ViT-H has 14 pixels) with bicubic interpolation.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from sa1b.errors import UsageError
from sa1b.sam.low_rank import merged
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.published import WeightsError, check_weights, config_of, misfit, read_tensors

_ENCODER = "image_encoder."
_POSITIONS, _KERNEL = "pos_embed", "patch_embed.proj.weight"
_OF_VIT = re.compile(
    r"pos_embed|patch_embed\.proj\.|blocks\.\d+\.(norm1|norm2|attn\.qkv|attn\.proj|mlp\.fc[12])\."
)


@dataclass(frozen=True, slots=True)
class FittedWeights:
    """Weights that fit the sizes of a model; as a string, a line that describes them."""

    tensors: dict[str, Tensor]
    kind: str  # of the file's model, in words
    resized: str | None  # the resized tensors, in words; None: no tensor was resized
    left_out: tuple[str, ...]  # names in the file that the model does not use
    kept: tuple[str, ...]  # names of the model that keep their initial values

    def __str__(self) -> str:
        parts = [f"{len(self.tensors)} tensors of {self.kind}"]
        if self.resized is not None:
            parts.append(f"resized: {self.resized}")
        if self.left_out:
            parts.append(f"left out: {', '.join(self.left_out)}")
        if self.kept:
            parts.append(f"initial values: {', '.join(_groups(self.kept))}")
        return "; ".join(parts)


def read_initial_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, float32, on the CPU; runs no code of it. WeightsError: damaged, or no ViT."""
    tensors = read_tensors(path)
    if not _is_vit(tensors):
        check_weights(path, tensors)
    elif strange := sorted(name for name, tensor in tensors.items() if not tensor.is_floating_point()):
        raise WeightsError(f"{path}: {strange[0]} must be floating point, not {tensors[strange[0]].dtype}")
    return {name: tensor.to(torch.float32) for name, tensor in tensors.items()}


def fit_weights(weights: Mapping[str, Tensor], model: ModelConfig) -> FittedWeights:
    """Weights resized to the image size of a model, with low-rank changes added to the weights; UsageError
    names the flag of a size that differs.
    """
    weights, model = merged(weights), replace(model, lora_rank=0)
    return _fit_encoder(weights, model) if _is_vit(weights) else _fit_sam(weights, model)


def _is_vit(weights: Mapping[str, Tensor]) -> bool:
    return "pos_embed" in weights and "blocks.0.attn.qkv.weight" in weights


def _fit_sam(weights: Mapping[str, Tensor], model: ModelConfig) -> FittedWeights:
    try:
        size = config_of(weights).image_size
    except (KeyError, ValueError, IndexError, ZeroDivisionError):
        size = model.image_size
    if (sentence := misfit(weights, replace(model, image_size=size))) is not None:
        raise UsageError(sentence)
    tensors = dict(weights)
    for name, shape in _shapes(model).items():
        if tensors[name].shape != shape:
            resize = resize_positions if name.endswith(_POSITIONS) else resize_table
            tensors[name] = resize(tensors[name], shape[1] if name.endswith(_POSITIONS) else shape[0])
    resized = f"positions, from {size} to {model.image_size} pixels" if size != model.image_size else None
    return FittedWeights(tensors, "a SAM", resized, (), ())


def _fit_encoder(weights: Mapping[str, Tensor], model: ModelConfig) -> FittedWeights:
    depth = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    width = weights["blocks.0.attn.qkv.weight"].shape[-1]
    if (width, depth) != (model.width, model.depth):
        raise UsageError(
            f"weights of a ViT of width {width} and depth {depth}: the image encoder has width {model.width} "
            f"and depth {model.depth}; pass the --preset or --model.width and --model.depth of these sizes"
        )
    positions = _grid(weights[_POSITIONS], width)
    fitted = {**weights, _POSITIONS: resize_positions(positions, model.side)}
    resized = []
    if (side := positions.shape[1]) != model.side:
        resized.append(f"pos_embed, from {side} x {side} to {model.side} x {model.side} tokens")
    kernel = fitted.get(_KERNEL)
    if kernel is not None and kernel.ndim == 4 and kernel.shape[-1] != model.patch_size:
        resized.append(f"{_KERNEL}, from {kernel.shape[-1]} to {model.patch_size} pixels")
        square = (model.patch_size, model.patch_size)
        fitted[_KERNEL] = F.interpolate(kernel, square, mode="bicubic", align_corners=False)
    shapes = _shapes(model)
    tensors = {
        _ENCODER + name.replace(".mlp.fc", ".mlp.lin"): tensor
        for name, tensor in fitted.items()
        if _OF_VIT.match(name)
    }
    for name in shapes:
        theirs = name.removeprefix(_ENCODER).replace(".mlp.lin", ".mlp.fc")
        if name.startswith(_ENCODER) and _OF_VIT.match(theirs):
            has = list(tensors[name].shape) if name in tensors else "missing"
            if has != list(shapes[name]):
                raise UsageError(
                    f"weights with {theirs} {has}: the image encoder has {list(shapes[name])}; pass "
                    "weights of the same shape"
                )
    return FittedWeights(
        tensors,
        "a ViT for the image encoder",
        "; ".join(resized) or None,
        tuple(sorted(name for name in weights if not _OF_VIT.match(name))),
        tuple(name for name in shapes if name not in tensors),
    )


def _grid(positions: Tensor, width: int) -> Tensor:
    """The positions of a ViT, [1, 1 + n * n, width], without the class token: [1, n, n, width]."""
    side = round(max(positions.numel() // width - 1, 0) ** 0.5)
    if positions.shape != (1, 1 + side**2, width):
        raise UsageError(
            f"weights with pos_embed {list(positions.shape)}: must be [1, 1 + n * n, {width}] for "
            "a class token and a square of patches"
        )
    return positions[:, 1:].reshape(1, side, side, width)


def resize_positions(positions: Tensor, side: int) -> Tensor:
    """Absolute positions float [1, h, w, C], resized to side x side tokens with bicubic interpolation."""
    if positions.shape[1:3] == (side, side):
        return positions
    planes = positions.permute(0, 3, 1, 2)
    resized = F.interpolate(planes, (side, side), mode="bicubic", align_corners=False)
    return resized.permute(0, 2, 3, 1).contiguous()


def resize_table(table: Tensor, length: int) -> Tensor:
    """Relative positions float [2n - 1, d], resized to another length with linear interpolation."""
    resized = F.interpolate(table.T[None], length, mode="linear", align_corners=False)
    return resized[0].T.contiguous()


def _shapes(model: ModelConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in Sam(model).state_dict().items()}


def _groups(names: tuple[str, ...]) -> list[str]:
    """The parts of the model that the names belong to, in order and without duplicates."""
    parts = (
        "relative positions"
        if ".rel_pos_" in name
        else ".".join(name.split(".")[: 2 if _ENCODER in name else 1])
        for name in names
    )
    return list(dict.fromkeys(parts))
