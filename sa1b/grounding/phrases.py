"""Phrases of masks: the inputs of grounding from a batch of the loader, and the encoder of their texts."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from sa1b.errors import UsageError
from sa1b.hashing import Purpose
from sa1b.sam.random_values import random_words
from sa1b.sam.transformer import feed_forward
from sa1b.stream.batch import Batch


@dataclass(frozen=True, slots=True, eq=False)
class Phrased:
    """The M masks of a micro-batch of B images, with a phrase for each.

    Attributes:
        dense: uint8 [M, R, R], 1 is foreground, the targets.
        coarse: uint8 [M, side, side], the same masks at the resolution of the embedding.
        points: float32 [M, 2], x and y of a foreground pixel in the padded square.
        image, counts: as in `sa1b.sam.targets.Targets`; so is sizes.
        tokens, belongs: int64 [M, L] and bool, False for padding; L is 0 with embeddings.
        vectors: float32 [M, D], precomputed embeddings; D is 0 with tokens.
        keys: int64 [M], equal for equal phrases; -1 without a phrase.
        counted: bool [M]: the mask has a phrase and a pixel, and its image is valid.
    """

    dense: Tensor
    coarse: Tensor
    points: Tensor
    image: Tensor
    counts: tuple[int, ...]
    sizes: Tensor
    tokens: Tensor
    belongs: Tensor
    vectors: Tensor
    keys: Tensor
    counted: Tensor


def phrased(batch: Batch, seed: int, side: int, width: int) -> tuple[Tensor, Phrased, Tensor]:
    """Images, masks with phrases, and a hash for each image and visit; UsageError without texts of masks.

    Args:
        side: size of the embedding.
        width: numbers of a precomputed embedding; 0: phrases are tokens.
    """
    texts = batch.texts
    if texts is None or texts.key != "mask_id":
        raise UsageError(
            "--data.text: grounding needs a phrase for each mask; pass a table with a column mask_id and "
            "--data.text-key mask_id"
        )
    if texts.vectors.shape[1] != width:
        raise UsageError(
            f"--data.text-width {width}: the column of texts has "
            f"{f'embeddings of {texts.vectors.shape[1]} numbers' if texts.vectors.shape[1] else 'strings'}; "
            f"pass --data.text-width {texts.vectors.shape[1]}"
        )
    assert batch.dense is not None, "the batch has no dense masks"
    image = batch.masks.image
    tokens, belongs = texts.padded(0 if width else None)
    key = torch.full((), seed, dtype=torch.int64, device=batch.positions.device)
    masks = Phrased(
        dense=batch.dense,
        coarse=batch.masks.dense(side),
        points=batch.points,
        image=image,
        counts=batch.masks.counts,
        sizes=batch.framed_sizes,
        tokens=tokens,
        belongs=belongs,
        vectors=texts.vectors,
        keys=texts.keys,
        counted=texts.given & batch.valid[image] & batch.dense.flatten(1).any(dim=1).bool(),
    )
    return batch.images, masks, random_words(key, int(Purpose.VISIT), batch.positions)


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
