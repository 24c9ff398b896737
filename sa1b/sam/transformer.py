"""The two-way transformer of the mask decoder: tokens look at the image, and the image at the tokens.

"Segment Anything", Kirillov et al., 2023, figure 14. Parameters have the published names and shapes.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from sa1b.sam.attention import ProjectedAttention


def feed_forward(width: int, hidden: int, activation: nn.Module) -> nn.Sequential:
    """Two linear layers, `lin1` and `lin2`, and what is between them."""
    return nn.Sequential(
        OrderedDict(lin1=nn.Linear(width, hidden), act=activation, lin2=nn.Linear(hidden, width))
    )


class TwoWayTransformer(nn.Module):
    """Layers of attention in both directions, and a last look of the tokens at the image.

    Args:
        depth: layers.
        width: numbers a token, of the image and of the prompts alike.
        heads: of every attention.
        hidden: inside the feed-forward network of the tokens.
    """

    def __init__(self, depth: int, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TwoWayLayer(width, heads, hidden) for _ in range(depth))
        self.final_attn_token_to_image = ProjectedAttention(width, heads, reduction=2)
        self.norm_final_attn = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, ProjectedAttention) and module.reduction > 1:
                start_alike(module)

    def forward(self, image: Tensor, image_position: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """
        Args:
            image: float [M, N, C], the image tokens of each mask.
            image_position: float [1, N, C], the same for all; added to queries and keys, never to values.
            tokens: float [M, T, C]. They are their own position: added again before every attention but the
                first, so that a prompt is not forgotten on the way.

        Returns:
            Tokens [M, T, C] and image [M, N, C].
        """
        queries = tokens
        for index, layer in enumerate(self.layers):
            queries, image = layer(queries, image, tokens, image_position, first=index == 0)
        looked = self.final_attn_token_to_image(queries + tokens, image + image_position, image)
        return self.norm_final_attn(queries + looked), image


def start_alike(attention: ProjectedAttention) -> None:
    """Begin with queries that look at the keys they resemble: both are projected by the same weights.

    Tokens and image carry their positions, so a point looks at its own place from the first step. Two
    projections that are drawn apart have to find this first, which takes longer than all the rest.
    """
    nn.init.normal_(attention.q_proj.weight, std=attention.q_proj.in_features**-0.5)
    with torch.no_grad():
        attention.k_proj.weight.copy_(attention.q_proj.weight)


class TwoWayLayer(nn.Module):
    """Tokens among themselves, tokens to image, feed-forward on tokens, image to tokens."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.self_attn = ProjectedAttention(width, heads)
        self.norm1 = nn.LayerNorm(width)
        self.cross_attn_token_to_image = ProjectedAttention(width, heads, reduction=2)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = feed_forward(width, hidden, nn.ReLU())
        self.norm3 = nn.LayerNorm(width)
        self.norm4 = nn.LayerNorm(width)
        self.cross_attn_image_to_token = ProjectedAttention(width, heads, reduction=2)

    def forward(
        self, queries: Tensor, image: Tensor, tokens: Tensor, image_position: Tensor, *, first: bool
    ) -> tuple[Tensor, Tensor]:
        """As `TwoWayTransformer.forward`; the first layer's queries are the tokens, and have no residual."""
        if first:
            queries = self.self_attn(queries, queries, queries)
        else:
            placed = queries + tokens
            queries = queries + self.self_attn(placed, placed, queries)
        queries = self.norm1(queries)

        placed_image = image + image_position
        queries = queries + self.cross_attn_token_to_image(queries + tokens, placed_image, image)
        queries = self.norm2(queries)

        queries = self.norm3(queries + self.mlp(queries))

        image = image + self.cross_attn_image_to_token(placed_image, queries + tokens, queries)
        return queries, self.norm4(image)
