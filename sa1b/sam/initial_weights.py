"""Initial weights for training, resized to the sizes of the model.

Two kinds of files are accepted: a SAM, also of another image size, and a plain ViT for the image encoder,
such as the published MAE ViT-B, ViT-L and ViT-H (He et al., "Masked Autoencoders Are Scalable Vision
Learners", 2022), the initial weights of the published SAM. Position embeddings are resized as in ViTDet's
code (Li et al. 2022): absolute ones with bicubic, relative ones with linear interpolation; kernels of another
patch size (ViT-H has 14 pixels) with bicubic interpolation.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from sa1b.errors import UsageError
from sa1b.sam.low_rank import merged
from sa1b.sam.model import ModelConfig
from sa1b.sam.published import WeightsError, check_weights, config_of, misfit, read_tensors, shapes_of

_ENCODER = "image_encoder."
_POSITIONS, _KERNEL = f"{_ENCODER}pos_embed", f"{_ENCODER}patch_embed.proj.weight"
_OF_VIT = re.compile(
    r"pos_embed|patch_embed\.proj\.|blocks\.\d+\.(norm1|norm2|attn\.qkv|attn\.proj|mlp\.fc[12])\."
)


def read_initial_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, float32, on the CPU; runs no code of it. WeightsError: damaged, or no ViT."""
    tensors = read_tensors(path)
    if not _is_vit(tensors):
        check_weights(path, tensors)
    elif strange := sorted(name for name, tensor in tensors.items() if not tensor.is_floating_point()):
        raise WeightsError(f"{path}: {strange[0]} must be floating point, not {tensors[strange[0]].dtype}")
    return {name: tensor.to(torch.float32) for name, tensor in tensors.items()}


def fit_weights(weights: Mapping[str, Tensor], model: ModelConfig) -> tuple[dict[str, Tensor], str]:
    """Weights in the sizes of a model, with low-rank changes added to the weights, and a line that describes
    them. UsageError names the flag of a size that differs.
    """
    weights, needed, resized = merged(weights), shapes_of(model), list[str]()
    if is_vit := _is_vit(weights):
        kind, fitted = "a ViT for the image encoder", _of_vit(weights, model)
    else:
        kind, fitted = "a SAM", dict(weights)
        if (sentence := misfit(weights, _at_their_size(model, weights))) is not None:
            raise UsageError(sentence)
    for name, shape in needed.items():
        theirs = name.removeprefix(_ENCODER).replace(".mlp.lin", ".mlp.fc")
        has = list(fitted[name].shape) if name in fitted else None
        if has == list(shape) or (has is None and not (is_vit and _OF_VIT.match(theirs))):
            continue
        if name == _POSITIONS and has is not None:
            planes = fitted[name].permute(0, 3, 1, 2)
            planes = F.interpolate(planes, shape[1:3], mode="bicubic", align_corners=False)
            fitted[name] = planes.permute(0, 2, 3, 1).contiguous()
            resized.append(f"pos_embed, from {has[1]} x {has[2]} to {shape[1]} x {shape[2]} tokens")
        elif name == _KERNEL and has is not None and len(has) == 4:
            fitted[name] = F.interpolate(fitted[name], shape[2:], mode="bicubic", align_corners=False)
            resized.append(f"{theirs}, from {has[-1]} to {shape[-1]} pixels")
        elif ".rel_pos_" in name:
            table = F.interpolate(fitted[name].T[None], shape[0], mode="linear", align_corners=False)
            fitted[name] = table[0].T.contiguous()
        else:
            raise UsageError(
                f"weights with {theirs} {has or 'missing'}: the image encoder has {list(shape)}; pass "
                "weights of the same shape"
            )
    parts = {
        "resized": resized,
        "left out": sorted(name for name in weights if is_vit and not _OF_VIT.match(name)),
        "initial values": dict.fromkeys(_group(name) for name in needed if name not in fitted),
    }
    notes = (
        f"; {part}: {('; ' if part == 'resized' else ', ').join(of)}" for part, of in parts.items() if of
    )
    return fitted, f"{len(fitted)} tensors of {kind}{''.join(notes)}"


def _is_vit(weights: Mapping[str, Tensor]) -> bool:
    return "pos_embed" in weights and "blocks.0.attn.qkv.weight" in weights


def _of_vit(weights: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a ViT by their names in a SAM; the positions are a square, without the class token."""
    depth = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    width, positions = weights["blocks.0.attn.qkv.weight"].shape[-1], weights["pos_embed"]
    if (width, depth) != (model.width, model.depth):
        raise UsageError(
            f"weights of a ViT of width {width} and depth {depth}: the image encoder has width {model.width} "
            f"and depth {model.depth}; pass the --preset or --model.width and --model.depth of these sizes"
        )
    side = round(max(positions.numel() // width - 1, 0) ** 0.5)
    if positions.shape != (1, 1 + side**2, width):
        raise UsageError(
            f"weights with pos_embed {list(positions.shape)}: must be [1, 1 + n * n, {width}] for "
            "a class token and a square of patches"
        )
    used = {name: tensor for name, tensor in weights.items() if _OF_VIT.match(name)}
    used["pos_embed"] = positions[:, 1:].reshape(1, side, side, width)
    return {_ENCODER + name.replace(".mlp.fc", ".mlp.lin"): tensor for name, tensor in used.items()}


def _at_their_size(model: ModelConfig, weights: Mapping[str, Tensor]) -> ModelConfig:
    try:
        return replace(model, image_size=config_of(weights).image_size)
    except ValueError:
        return model


def _group(name: str) -> str:
    """The part of the model that a name belongs to."""
    return (
        "relative positions" if ".rel_pos_" in name else ".".join(name.split(".")[: 1 + (_ENCODER in name)])
    )
