"""The text encoder: a small transformer over tokens, or a projection of precomputed embeddings."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from sa1b.sam.transformer import feed_forward


@dataclass(frozen=True, slots=True)
class TextConfig:
    """Sizes of the text encoder.

    Attributes:
        width: Width of the encoder: size of a token's vector.
        depth: Blocks of the encoder.
        heads: Attention heads of a block; head dimension is width / heads.
        kernel: Neighbouring tokens that are joined before the first block; most useful for bytes, of which a
            word has many.
        vocabulary: Number of different tokens; by default that of --data.tokenizer.
    """

    width: int = 256
    depth: int = 4
    heads: int = 4
    kernel: int = 5
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        for name in ("width", "depth", "heads", "kernel", "vocabulary"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--text.{name} {value}: must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"--text.width {self.width}: must be a multiple of --text.heads {self.heads}")
        if self.kernel % 2 == 0:
            raise ValueError(f"--text.kernel {self.kernel}: must be odd")


class TextEncoder(nn.Module):
    """A transformer whose output is the mean over the tokens of a text, at most `length` of `vocabulary`."""

    def __init__(self, config: TextConfig, vocabulary: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, config.width)
        self.position = nn.Parameter(0.02 * torch.randn(length, config.width))
        self.join = nn.Conv1d(config.width, config.width, config.kernel, padding=config.kernel // 2)
        self.blocks = nn.ModuleList(TextBlock(config.width, config.heads) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        nn.init.normal_(self.embed.weight, std=config.width**-0.5)

    def forward(self, tokens: Tensor, belongs: Tensor) -> Tensor:
        """Tokens int64 [N, L] and which of them belong to the text, bool [N, L] -> float [N, width].

        A text without tokens gets the vector of a text with the token 0. N may be 0.
        """
        first = torch.arange(tokens.shape[1], device=tokens.device) == 0
        belongs = belongs | first
        weights = belongs[..., None]
        embedded = self.embed(tokens) * weights
        x = embedded + self.position[: tokens.shape[1]]
        x = x + functional.gelu(self.join(embedded.transpose(1, 2)).transpose(1, 2))
        for block in self.blocks:
            x = block(x, belongs)
        x = self.norm(x) * weights
        mean: Tensor = x.sum(dim=1) / weights.sum(dim=1)
        return mean


class TextBlock(nn.Module):
    """Attention over the tokens of a text and a feed-forward network, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = feed_forward(width, 4 * width, nn.GELU())

    def forward(self, x: Tensor, belongs: Tensor) -> Tensor:
        """Tokens [N, L, width] -> the same shape; belongs: bool [N, L], the tokens that are attended to."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=belongs[:, None, None])
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        fed: Tensor = self.mlp(self.norm2(x))
        return x + fed
