"""A second model: a plain ViT that reconstructs an image from two thirds of its patches, without masks.

It shares no code with SAM and has no evaluation; the engine uses only the model contract.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from sa1b import Batch
from sa1b.engine.config import Config
from sa1b.engine.settings import DataConfig, OptimConfig
from sa1b.errors import UsageError


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # (B, N, width)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Reconstruction(nn.Module):
    figures = ("loss", "error")
    shown: Mapping[str, str] = {"error": "error"}

    def __init__(
        self,
        image_size: int,
        patch: int,
        width: int,
        depth: int,
        *,
        dropout: float = 0.0,
        branch: bool = False,
        norm: bool = False,
    ) -> None:
        super().__init__()
        self.patch = patch
        self.side = image_size // patch
        self.embed = nn.Linear(3 * patch**2, width)
        self.position = nn.Parameter(0.02 * torch.randn(self.side**2, width))
        self.hidden = nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(Block(width, 2, dropout) for _ in range(depth))
        self.head = nn.Linear(width, 3 * patch**2)
        self.branch = nn.Linear(width, width) if branch else None
        self.norm = nn.BatchNorm1d(width) if norm else None

    def forward(self, images: Tensor, hide: Tensor, counts: Tensor, rare: Tensor) -> dict[str, Tensor]:
        patches = functional.unfold(images.float() / 255, self.patch, stride=self.patch).transpose(1, 2)
        tokens = torch.where(hide[..., None], self.hidden, self.embed(patches)) + self.position
        for block in self.blocks:
            tokens = block(tokens)
        if self.branch is not None and bool(rare.any()):
            tokens = tokens + rare[:, None, None] * self.branch(tokens)
        if self.norm is not None:
            tokens = self.norm(tokens.transpose(1, 2)).transpose(1, 2)
        errors = (self.head(tokens) - patches).square().mean(dim=(1, 2)) * counts
        loss = errors.sum()
        return {"loss": loss, "error": loss.detach().sqrt(), "count": counts.sum()}

    def inputs(self, batch: Batch, seed: int) -> tuple[Any, ...]:
        patches = torch.arange(self.side**2, device=batch.positions.device)
        hide = (patches + batch.positions[:, None] + seed) % 3 == 0
        return batch.images, hide, batch.valid.float(), (batch.positions % 10 == 7).float()

    def weights(self) -> nn.Module:
        return self

    def read_weights(self, path: Path) -> dict[str, Tensor]:
        found: dict[str, Tensor] = torch.load(path, weights_only=True)
        return found

    def load_weights(self, weights: Mapping[str, Tensor]) -> str:
        try:
            self.load_state_dict(weights)
        except RuntimeError as error:
            raise UsageError(f"another model: {error}") from None
        return "all weights"

    def fsdp_units(self) -> list[list[nn.Module]]:
        return [[block] for block in self.blocks]

    def layer_of(self, name: str) -> int | None:
        parts = name.split(".")
        if parts[0] == "blocks":
            return int(parts[1]) + 1
        return 0 if parts[0] in ("embed", "position", "hidden") else None

    def decays(self, name: str, parameter: Tensor) -> bool:
        return parameter.ndim > 1 and name != "position"

    def flops(self, images: float, masks: float) -> float:
        used = sum(parameter.numel() for parameter in self.parameters() if parameter.ndim > 1)
        return 6 * images * self.side**2 * used


@dataclass(frozen=True, slots=True)
class ReconstructionConfig(Config):
    """A run that trains the second model.

    Attributes:
        preset: The only preset.
        size: Pixels of an image.
        patch: Pixels of a patch.
        width: Numbers per token.
        depth: Blocks.
        branch: Add a layer that only some images use, one of ten.
        norm: Add a BatchNorm layer.
        dropout: Part of the numbers of each block that is set to 0.
    """

    preset: Literal["small"] = "small"
    data: DataConfig = field(default_factory=lambda: DataConfig(global_batch=5, micro_batch=2, masks=0))
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(
            lr=3e-3, batch_scaling="none", warmup=2, steps=6, schedule="cosine"
        )
    )
    size: int = 64
    patch: int = 16
    width: int = 32
    depth: int = 2
    branch: bool = False
    norm: bool = False
    dropout: float = 0.0

    @property
    def image_size(self) -> int:
        return self.size

    def build(self) -> nn.Module:
        return Reconstruction(
            self.size,
            self.patch,
            self.width,
            self.depth,
            dropout=self.dropout,
            branch=self.branch,
            norm=self.norm,
        )


PRESETS = {"small": ReconstructionConfig()}
