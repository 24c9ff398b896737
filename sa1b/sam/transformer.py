"""The two-way transformer of the mask decoder: tokens attend to the image, and the image to the tokens.

"Segment Anything", Kirillov et al., 2023, figure 14. Parameters have the published names and shapes. The
results are the published ones; the order of the matrix products is not. A mask has T tokens, at most 20, and
N image tokens, 4,096 at 1024 pixels. The published code projects all N image tokens of every mask to keys,
values and queries, and the result back. Here the projections are applied to the tokens:

    logits = q (x W_k)' = (q W_k) x'        the products with x cost heads * T numbers per image token, not
    seen = a (x W_v) = (a x) W_v            C / 2, and no projection of x is stored
    added = a' (v W_out)

In the first layer x is the embedding of the image plus a term of the mask. All masks of an image share the
products with the embedding, and the mask's term has rank 16 (see `SharedImage`): nothing of N x C numbers is
stored for a mask before the first layer's result.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def feed_forward(width: int, hidden: int, activation: nn.Module) -> nn.Sequential:
    """Two linear layers, `lin1` and `lin2`, and what is between them."""
    return nn.Sequential(
        OrderedDict(lin1=nn.Linear(width, hidden), act=activation, lin2=nn.Linear(hidden, width))
    )


@dataclass(frozen=True, slots=True, eq=False)
class OwnImage:
    """Image tokens that differ for every mask.

    Attributes:
        tokens: float [M, N, C].
        placed: float [M, N, C], the tokens plus their positions: what queries and keys see.
    """

    tokens: Tensor
    placed: Tensor

    def logits(self, rows: Tensor) -> Tensor:
        """The products of rows [M, R, C] and placed tokens: [M, R, N]."""
        return rows @ self.placed.transpose(1, 2)

    def weighted(self, weights: Tensor) -> Tensor:
        """The tokens summed with weights [M, R, N]: [M, R, C]."""
        return weights @ self.tokens

    def plus(self, weights: Tensor, values: Tensor) -> Tensor:
        """The tokens plus values [M, R, C], summed with weights [M, R, N]: [M, N, C]."""
        return torch.baddbmm(self.tokens, weights.transpose(1, 2), values)


@dataclass(frozen=True, slots=True, eq=False)
class SharedImage:
    """Image tokens of which the masks of an image share the most.

    The tokens of mask m, of image b, are tokens[b] + features[m]' @ basis. They are never stored.

    Attributes:
        tokens: float [B, N, C].
        placed: float [B, N, C], the tokens plus their positions.
        counts: masks of each image, B numbers with the sum M; the masks of an image are neighbours.
        features: float [M, r, N], None for no term of the masks.
        basis: float [r, C].
    """

    tokens: Tensor
    placed: Tensor
    counts: Sequence[int]
    features: Tensor | None
    basis: Tensor

    def logits(self, rows: Tensor) -> Tensor:
        """As `OwnImage.logits`."""
        found = self.product(rows, self.placed.transpose(1, 2))
        if self.features is None:
            return found
        return torch.baddbmm(found, rows @ self.basis.T, self.features)

    def weighted(self, weights: Tensor) -> Tensor:
        """As `OwnImage.weighted`."""
        found = self.product(weights, self.tokens)
        if self.features is None:
            return found
        return found + (weights @ self.features.transpose(1, 2)) @ self.basis

    def plus(self, weights: Tensor, values: Tensor) -> Tensor:
        """As `OwnImage.plus`."""
        if self.features is not None:
            weights = torch.cat((weights, self.features), dim=1)
            values = torch.cat((values, self.basis.expand(len(values), -1, -1)), dim=1)
        weights = weights.transpose(1, 2)
        if min(self.counts) == max(self.counts):
            added = (weights @ values).view(len(self.counts), -1, *self.tokens.shape[1:])
            return added.add_(self.tokens[:, None]).flatten(0, 1)
        groups = zip(self.tokens, self.by_image(weights), self.by_image(values), strict=True)
        return torch.cat([torch.baddbmm(token, weight, value) for token, weight, value in groups])

    def product(self, rows: Tensor, image: Tensor) -> Tensor:
        """Rows [M, R, K] times the matrix of their image, [B, K, L]: [M, R, L]."""
        if min(self.counts) == max(self.counts):
            grouped = rows.reshape(len(self.counts), -1, rows.shape[-1])
            return (grouped @ image).view(*rows.shape[:-1], -1)
        return torch.cat([group @ matrix for group, matrix in zip(self.by_image(rows), image, strict=True)])

    def by_image(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(x, list(self.counts))


class TwoWayTransformer(nn.Module):
    """Layers of attention in both directions, and a last attention of the tokens to the image.

    Args:
        depth: layers.
        width: numbers a token, of the image and of the prompts alike.
        heads: of every attention.
        hidden: inside the feed-forward network of the tokens.
    """

    def __init__(self, depth: int, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TwoWayLayer(width, heads, hidden) for _ in range(depth))
        self.final_attn_token_to_image = TokenToImage(width, heads, reduction=2)
        self.norm_final_attn = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, ProjectedAttention) and module.reduction > 1:
                start_alike(module)

    def forward(self, image: SharedImage, image_position: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """
        Args:
            image: the image tokens of each mask.
            image_position: float [N, C], the same for all; added to queries and keys, never to values.
            tokens: float [M, T, C]. They are their own position: added again before every attention but the
                first, so that a prompt is not forgotten on the way.

        Returns:
            Tokens [M, T, C] and image [M, N, C].
        """
        queries, seen = tokens, image
        for index, layer in enumerate(self.layers):
            queries, seen = layer(queries, seen, tokens, image_position, first=index == 0)
        looked = self.final_attn_token_to_image(queries + tokens, seen)
        return self.norm_final_attn(queries + looked), seen.tokens


class TwoWayLayer(nn.Module):
    """Tokens among themselves, tokens to image, feed-forward on tokens, image to tokens."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.self_attn = TokenAttention(width, heads)
        self.norm1 = nn.LayerNorm(width)
        self.cross_attn_token_to_image = TokenToImage(width, heads, reduction=2)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = feed_forward(width, hidden, nn.ReLU())
        self.norm3 = nn.LayerNorm(width)
        self.norm4 = nn.LayerNorm(width)
        self.cross_attn_image_to_token = ImageToToken(width, heads, reduction=2)

    def forward(
        self,
        queries: Tensor,
        image: SharedImage | OwnImage,
        tokens: Tensor,
        image_position: Tensor,
        *,
        first: bool,
    ) -> tuple[Tensor, OwnImage]:
        """As `TwoWayTransformer.forward`; the first layer's queries are the tokens, and have no residual."""
        if first:
            queries = self.self_attn(queries, queries, queries)
        else:
            placed = queries + tokens
            queries = queries + self.self_attn(placed, placed, queries)
        queries = self.norm1(queries)

        queries = self.norm2(queries + self.cross_attn_token_to_image(queries + tokens, image))
        queries = self.norm3(queries + self.mlp(queries))

        changed = self.cross_attn_image_to_token(image, queries + tokens, queries)
        changed = layer_norm(changed, self.norm4)
        return queries, OwnImage(changed, changed + image_position)


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """The norm in the number format of x; autocast would give a float32 copy."""
    with torch.autocast(x.device.type, enabled=False):
        return F.layer_norm(
            x, norm.normalized_shape, norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps
        )


def softmax(x: Tensor, dim: int) -> Tensor:
    """The softmax in the number format of x; autocast would give a float32 copy."""
    with torch.autocast(x.device.type, enabled=False):
        return x.softmax(dim)


class ProjectedAttention(nn.Module):
    """The projections of an attention in the mask decoder, optionally at a smaller width inside.

    Args:
        width: numbers a token, outside.
        heads: how many; must divide the inner width.
        reduction: the inner width is width // reduction.
    """

    def __init__(self, width: int, heads: int, reduction: int = 1) -> None:
        super().__init__()
        inner = width // reduction
        self.heads = heads
        self.reduction = reduction
        self.q_proj = nn.Linear(width, inner)
        self.k_proj = nn.Linear(width, inner)
        self.v_proj = nn.Linear(width, inner)
        self.out_proj = nn.Linear(inner, width)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)  # (M, heads, T, d)

    def by_head(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.heads, -1, x.shape[-1])  # (M, heads * T, ...) -> (M, heads, T, ...)

    def projection(self, weight: Tensor) -> Tensor:
        """The rows of a projection by heads: [inner, C] -> [heads, d, C]."""
        return weight.reshape(self.heads, -1, *weight.shape[1:])


class TokenAttention(ProjectedAttention):
    """Attention of the tokens to each other."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries, keys and values [M, T, C] -> [M, T, C]."""
        heads = (self.split(self.q_proj(q)), self.split(self.k_proj(k)), self.split(self.v_proj(v)))
        out: Tensor = self.out_proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return out


class TokenToImage(ProjectedAttention):
    """Attention of T tokens to N image tokens, with the image's projections applied to the tokens."""

    def forward(self, queries: Tensor, image: SharedImage | OwnImage) -> Tensor:
        """Queries [M, T, C] -> [M, T, C]."""
        q = self.split(self.q_proj(queries))
        # The bias of the keys adds the same to all logits of a query: the softmax does not change, and the
        # gradient is zero. It still takes part, because DDP waits for every gradient.
        q = q * q.shape[-1] ** -0.5 + 0 * self.k_proj.bias.sum()
        rows = q @ self.projection(self.k_proj.weight).to(q.dtype)  # (M, heads, T, C)
        weights = softmax(image.logits(rows.flatten(1, 2)), dim=-1)
        seen = self.by_head(image.weighted(weights))
        v = seen @ self.projection(self.v_proj.weight).transpose(1, 2).to(seen.dtype)  # (M, heads, T, d)
        v = v.transpose(1, 2).flatten(2) + self.v_proj.bias
        out: Tensor = self.out_proj(v)
        return out


class ImageToToken(ProjectedAttention):
    """Attention of N image tokens to T tokens, with the image's projections applied to the tokens."""

    def forward(self, image: SharedImage | OwnImage, keys: Tensor, values: Tensor) -> Tensor:
        """Keys and values [M, T, C] -> image tokens plus what they attended to, [M, N, C]."""
        k, v = self.split(self.k_proj(keys)), self.split(self.v_proj(values))
        k = k * k.shape[-1] ** -0.5
        rows = k @ self.projection(self.q_proj.weight).to(k.dtype)  # (M, heads, T, C)
        bias = k @ self.projection(self.q_proj.bias)[..., None].to(k.dtype)  # (M, heads, T, 1)
        logits = self.by_head(image.logits(rows.flatten(1, 2)))
        weights = softmax(logits.add_(bias), dim=2)
        # A head's weights sum to 1, so each head adds its share of the bias.
        added = v @ self.projection(self.out_proj.weight.T).to(v.dtype)
        added = added + (self.out_proj.bias / self.heads).to(v.dtype)
        return image.plus(weights.flatten(1, 2), added.flatten(1, 2))


def start_alike(attention: ProjectedAttention) -> None:
    """Begin with queries that look at the keys they resemble: both are projected by the same weights.

    Tokens and image carry their positions, so a point looks at its own position from the first step. Two
    projections with independent weights have to find this first, which takes longer than all the rest.
    """
    nn.init.normal_(attention.q_proj.weight, std=attention.q_proj.in_features**-0.5)
    with torch.no_grad():
        attention.k_proj.weight.copy_(attention.q_proj.weight)
