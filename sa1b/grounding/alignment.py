"""The losses of grounding: features of regions, and their contrastive alignment with texts.

The loss of pair i is the mean of two cross entropies: its text among all texts for its region, and its
region among all regions for its text (symmetric InfoNCE: van den Oord et al., "Representation Learning with
Contrastive Predictive Coding", 2018; Radford et al., "Learning Transferable Visual Models From Natural
Language Supervision", 2021). A pair with the same text as pair i is neither its positive nor its negative.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from sa1b.arguments import BadValue, Range, check_fields
from sa1b.errors import UsageError
from sa1b.hashing import Purpose
from sa1b.sam.clicks import random_words
from sa1b.sam.transformer import feed_forward
from sa1b.stream.batch import Batch


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.count = len(rows)
        all_rows = rows.new_empty(len(rows) * dist.get_world_size(), *rows.shape[1:])
        dist.all_gather_into_tensor(all_rows, rows.contiguous())
        return all_rows

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> Tensor:
        total = incoming.contiguous().clone()
        dist.all_reduce(total)
        first = dist.get_rank() * int(ctx.count)
        return total[first : first + ctx.count]


def gather(rows: Tensor) -> Tensor:
    """The rows [N, ...] of all ranks, with gradient: [world size * N, ...]. Collective, both passes."""
    # The engine needs sums over the global batch whose gradients add up over the ranks. Let L = sum over i of
    # L_i, where L_i depends on the features of all ranks. Rank r computes the sum of L_i of its own pairs.
    # Its backward pass yields the derivative of that part with respect to the features of every rank; the
    # backward pass of `gather` adds these over the ranks and returns to each rank those of its own features.
    # So the sum over the ranks, which DDP and FSDP form, is the gradient of L in one process, for any
    # division of the images among the ranks. With several micro-batches, pairs are compared only with those
    # of the same micro-batch of all ranks.
    apply: Callable[[Tensor], Tensor] = _Gather.apply
    return apply(rows) if _is_group() else rows


def _is_group() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def contrastive_loss(
    regions: Tensor, texts: Tensor, keys: Tensor, counted: Tensor, scale: Tensor, *, capacity: int
) -> tuple[Tensor, Tensor]:
    """The loss of each pair of this rank against those of all, 0 without a pair, and whether the region most
    similar to a text is its own, both float32 [M]; of features [M, D] of length 1, keys that are equal for
    equal texts, and the inverse temperature. From each rank `capacity` rows are gathered, at least M.
    """
    count = len(regions)
    if count > capacity:
        raise ValueError(f"capacity={capacity} must be at least the {count} pairs of a micro-batch")
    rows = capacity if _is_group() else count
    with torch.autocast(regions.device.type, enabled=False):
        regions, texts = regions.float(), texts.float()
        padding = (0, 0, 0, rows - count)
        all_regions = gather(functional.pad(regions, padding))
        all_texts = gather(functional.pad(texts, padding))
        # A text that is not counted has the key -1; keys of texts are not negative.
        all_keys = gather(functional.pad(torch.where(counted, keys, -1), (0, rows - count), value=-1))
        first = dist.get_rank() * capacity if _is_group() else 0
        targets = torch.arange(first, first + count, device=keys.device)
        columns = torch.arange(len(all_keys), device=keys.device)
        itself = columns == targets[:, None]
        compared = ((all_keys >= 0) & (all_keys != keys[:, None])) | itself
        by_region = (scale * regions @ all_texts.T).masked_fill(~compared, -torch.inf)
        by_text = (scale * texts @ all_regions.T).masked_fill(~compared, -torch.inf)
        losses = (functional.cross_entropy(by_region, targets, reduction="none")
                  + functional.cross_entropy(by_text, targets, reduction="none")) / 2  # fmt: skip
        hit = by_text.detach().argmax(dim=1) == targets if count else itself.any(dim=1)
        weights = counted.float()
        return losses * weights, hit * weights


def region_features(
    embeddings: Tensor, masks: Tensor, points: Tensor, counts: Sequence[int], image_size: int
) -> Tensor:
    """The mean of the embedding [B, C, side, side] over the pixels of each mask [M, side, side], in the order
    of the images; without a pixel, the vector at its point: float [M, C].
    """
    side = embeddings.shape[-1]
    cell = (points * (side / image_size)).long().clamp(0, side - 1)
    at_point = torch.zeros_like(masks.flatten(1))
    at_point = at_point.scatter(1, (cell[:, 1] * side + cell[:, 0])[:, None], 1)
    flat = masks.flatten(1)
    shares = torch.where(flat.any(dim=1, keepdim=True).bool(), flat, at_point).to(embeddings.dtype)
    shares = shares / shares.sum(dim=1, keepdim=True)
    parts = zip(torch.split(shares, list(counts)), embeddings.flatten(2), strict=True)
    means = [share @ vectors.T for share, vectors in parts]
    return torch.cat([*means, embeddings.new_zeros(0, embeddings.shape[1])])


@dataclass(frozen=True, slots=True)
class GroundingRecipe:
    """Losses of a mask and its phrase.

    Attributes:
        mask_weight: Weight of the binary cross entropy of the mask that is predicted for the phrase.
        contrastive_weight: Weight of the contrastive loss of regions and phrases.
        temperature: Temperature of the contrastive loss at the start; it is learned.
        least_temperature: The temperature does not fall below this.
        features: Length of the vectors in which regions and phrases are compared.
        negatives: Phrases and regions that a pair is compared with. step: those of the whole step, over all
            ranks, which needs one micro-batch. micro-batch: those of the micro-batches that all ranks compute
            at the same time; with a smaller micro-batch, the loss is different.
    """

    mask_weight: Annotated[float, Range(0)] = 1.0
    contrastive_weight: Annotated[float, Range(0)] = 0.1
    temperature: float = 0.07
    least_temperature: Annotated[float, Range(above=0)] = 0.01
    features: Annotated[int, Range(1)] = 256
    negatives: Literal["step", "micro-batch"] = "step"

    def __post_init__(self) -> None:
        check_fields(self, "recipe")
        Range(self.least_temperature).check("--recipe.temperature", self.temperature)


@dataclass(frozen=True, slots=True, eq=False)
class Phrased:
    """The M masks of a micro-batch of B images, with a phrase for each; see `sa1b.sam.targets.Targets`."""

    dense: Tensor  # uint8 [M, R, R], 1 is foreground, the targets
    coarse: Tensor  # uint8 [M, side, side], the same masks at the resolution of the embedding
    points: Tensor  # float32 [M, 2], x and y of a foreground pixel in the padded square
    image: Tensor
    counts: tuple[int, ...]
    sizes: Tensor
    tokens: Tensor  # int64 [M, L]; L is 0 with embeddings
    belongs: Tensor  # bool [M, L], False for padding
    vectors: Tensor  # float32 [M, D], precomputed embeddings; D is 0 with tokens
    keys: Tensor  # int64 [M], equal for equal phrases; -1 without a phrase
    counted: Tensor  # bool [M]: the mask has a phrase and a pixel, and its image is valid


def phrased(batch: Batch, seed: int, side: int, width: int) -> tuple[Tensor, Phrased, Tensor]:
    """Images, masks with phrases, and a hash for each image and visit; UsageError without texts of masks.
    `side`: of the embedding. `width`: numbers of a precomputed embedding; 0: phrases are tokens.
    """
    texts = batch.texts
    if texts is None or texts.key != "mask_id":
        raise UsageError("--data.text: must name a table with a phrase for each mask, by a column mask_id")
    if (found := texts.vectors.shape[1]) != width:
        kind = f"embeddings of {found} numbers" if found else "strings"
        raise UsageError(f"--data.text-width {width}: the column of texts has {kind}; pass {found}")
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
            word has many; an odd number.
        vocabulary: Number of different tokens; by default that of --data.tokenizer.
    """

    width: Annotated[int, Range(1)] = 256
    depth: Annotated[int, Range(1)] = 4
    heads: Annotated[int, Range(1)] = 4
    kernel: Annotated[int, Range(1)] = 5
    vocabulary: Annotated[int | None, Range(1)] = None

    def __post_init__(self) -> None:
        check_fields(self, "text")
        if self.width % self.heads:
            raise BadValue(f"--text.width {self.width}: must be a multiple of --text.heads {self.heads}")
        if self.kernel % 2 == 0:
            raise BadValue(f"--text.kernel {self.kernel}: must be odd")


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
        """Tokens int64 [N, L] and which belong to the text, bool [N, L] -> float [N, width]. N may be 0."""
        # A text without tokens gets the vector of a text with the token 0.
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
