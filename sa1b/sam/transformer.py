"""The two-way transformer of the mask decoder: tokens attend to the image, and the image to the tokens.

"Segment Anything", Kirillov et al., 2023, figure 14. Parameters have the published names and shapes. The
results equal the published ones, but the order of the matrix products differs. A mask has T tokens, 7 to 16
in training, and N image tokens x, 4,096 at 1024 pixels. The published code projects the image tokens of every
mask to keys, values and queries of C / 2 numbers, and projects the result of the attention back to C. Here
the projections are applied to the tokens:

    logits = q (x W_k)' = (q W_k) x'
    seen   = a (x W_v)  = (a x) W_v
    added  = (a' v) W_o = a' (v W_o)

This takes heads * T instead of C / 2 numbers for each image token, and no projection of x is stored. In the
first layer the masks of an image share its tokens: see `SharedImage`. The image encoder takes its layer norms
and feed-forward layers from here too.
"""

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sa1b.sam.image_tokens import HALF, OwnImage, SharedImage, kernels_of, softmax
from sa1b.sam.low_rank import weight_of

Image = SharedImage | OwnImage
# Without cuDNN's, which on an H100 plans 1.2 s a step for each new number of masks, and takes 0.27 ms for
# forward and backward of 512 masks with 16 tokens; this one takes 0.17 ms, flash attention 0.37.
TOKEN_BACK_ENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def feed_forward(width: int, hidden: int, activation: nn.Module) -> nn.Sequential:
    """Two linear layers, `lin1` and `lin2`, with an activation between them."""
    return nn.Sequential(
        OrderedDict(lin1=nn.Linear(width, hidden), act=activation, lin2=nn.Linear(hidden, width))
    )


class TwoWayTransformer(nn.Module):
    """Layers of attention in both directions, and a last attention of the tokens to the image."""

    def __init__(self, depth: int, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TwoWayLayer(width, heads, hidden) for _ in range(depth))
        self.final_attn_token_to_image = TokenToImage(width, heads, reduction=2)
        self.norm_final_attn = nn.LayerNorm(width)
        # Queries and keys begin with the same projection, so that queries attend to similar keys. Tokens and
        # image tokens contain their positions, so a point attends to its own position from the first step.
        # Independent projections have to learn this first, which takes most of the training time.
        for attention in self.modules():
            if isinstance(attention, TokenToImage | ImageToToken):
                nn.init.normal_(attention.q_proj.weight, std=width**-0.5)
                with torch.no_grad():
                    attention.k_proj.weight.copy_(attention.q_proj.weight)

    def forward(
        self, image: SharedImage, image_position: Tensor, tokens: Tensor, outputs: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Tokens [M, len(outputs), C] and image [M, N, C].

        Positions are added to queries and keys, not to values: `image_position` [N, C] to those of the image,
        and the initial `tokens` [M, T, C] to those of the tokens in every attention except the first. The
        last attention is computed for the tokens of `outputs` only.
        """
        queries, attended_image = tokens, image
        for index, layer in enumerate(self.layers):
            queries, attended_image = layer(queries, attended_image, tokens, image_position, first=index == 0)
        queries, tokens = (torch.stack([x[:, i] for i in outputs], dim=1) for x in (queries, tokens))
        attended, attended_image = self.final_attn_token_to_image(queries + tokens, attended_image)
        return self.norm_final_attn(queries + attended), attended_image.tokens


class TwoWayLayer(nn.Module):
    """One layer: token self-attention, attention from tokens to image, token MLP, image to tokens."""

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
        self, queries: Tensor, image: Image, tokens: Tensor, image_position: Tensor, *, first: bool
    ) -> tuple[Tensor, OwnImage]:
        """See `TwoWayTransformer.forward`. The self-attention of the first layer has no residual."""
        if first:
            queries = self.self_attn(queries, queries, queries)
        else:
            placed = queries + tokens
            queries = queries + self.self_attn(placed, placed, queries)
        queries = self.norm1(queries)

        attended, image = self.cross_attn_token_to_image(queries + tokens, image)
        queries = self.norm2(queries + attended)
        queries = self.norm3(queries + self.mlp(queries))

        attention = self.cross_attn_image_to_token
        return queries, attention(image, queries + tokens, queries, self.norm4, image_position)


class ProjectedAttention(nn.Module):
    """The projections of an attention in the mask decoder, at the inner width `width // reduction`."""

    def __init__(self, width: int, heads: int, reduction: int = 1) -> None:
        super().__init__()
        inner = width // reduction
        self.heads = heads
        self.q_proj = nn.Linear(width, inner)
        self.k_proj = nn.Linear(width, inner)
        self.v_proj = nn.Linear(width, inner)
        self.out_proj = nn.Linear(inner, width)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)  # (M, heads, T, d)

    def by_head(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.heads, -1, x.shape[-1])  # (M, heads * T, ...) -> (M, heads, T, ...)

    def projection(self, weight: Tensor) -> Tensor:
        """The rows of a projection, split by heads: [inner, C] -> [heads, d, C]."""
        return weight.reshape(self.heads, -1, *weight.shape[1:])


class TokenAttention(ProjectedAttention):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries, keys and values [M, T, C] -> [M, T, C]."""
        heads = (self.split(self.q_proj(q)), self.split(self.k_proj(k)), self.split(self.v_proj(v)))
        with sdpa_kernel(TOKEN_BACK_ENDS) if q.is_cuda else nullcontext():
            out = F.scaled_dot_product_attention(*heads)
        projected: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return projected


class TokenToImage(ProjectedAttention):
    """Attention of T tokens to N image tokens, with the image's projections applied to the tokens."""

    def forward(self, queries: Tensor, image: Image) -> tuple[Tensor, Image]:
        """Queries [M, T, C] -> [M, T, C], and the image for later uses."""
        q = self.split(self.q_proj(queries))
        # The bias of the keys adds a constant to all logits of a query, so the softmax does not change and
        # the gradient of the bias is zero. The bias is still used, because DDP waits for every gradient.
        q = q * q.shape[-1] ** -0.5 + 0 * self.k_proj.bias.sum()
        rows = q @ self.projection(weight_of(self.k_proj)).to(q.dtype)  # (M, heads, T, C)
        flat, image = image.read(rows.flatten(1, 2))
        read = self.by_head(flat)
        v = read @ self.projection(weight_of(self.v_proj)).transpose(1, 2).to(read.dtype)  # (M, heads, T, d)
        v = v.transpose(1, 2).flatten(2) + self.v_proj.bias
        return self.out_proj(v), image


class ImageToToken(ProjectedAttention):
    """Attention of N image tokens to T tokens, with the image's projections applied to the tokens."""

    def forward(
        self, image: Image, keys: Tensor, values: Tensor, norm: nn.LayerNorm, position: Tensor
    ) -> OwnImage:
        """The norm of the image tokens plus the result of their attention to keys and values [M, T, C]."""
        k, v = self.split(self.k_proj(keys)), self.split(self.v_proj(values))
        k = k * k.shape[-1] ** -0.5
        # Keys, biases and values for the image, (M, heads, T, C or 1).
        rows = k @ self.projection(weight_of(self.q_proj)).to(k.dtype)
        bias = k @ self.projection(self.q_proj.bias)[..., None].to(k.dtype)
        # A head's weights sum to 1, so each head adds its share of the bias.
        added = v @ self.projection(weight_of(self.out_proj).T).to(v.dtype)
        added = added + (self.out_proj.bias / self.heads).to(v.dtype)
        x, kernels = image.tokens, kernels_of("image_to_tokens", image.tokens)
        if (
            kernels is not None
            and x.dtype in HALF
            and kernels.fits(x.shape[-2], *rows.shape[1:])
            and (given := image.for_kernels(kernels)) is not None
        ):
            others = position, rows, bias[..., 0], added, norm.weight, norm.bias, norm.eps
            return OwnImage(kernels.ImageToTokens.apply(*given, *others), None, position)
        logits = self.by_head(image.logits(rows.flatten(1, 2)))
        weights = softmax(logits + bias, dim=2)
        changed = image.plus(weights.flatten(1, 2), added.flatten(1, 2))
        changed = layer_norm(changed, norm.weight, norm.bias, norm.eps)
        return OwnImage(changed, changed + position, position)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, gelu: bool = False) -> Tensor:
    """x [..., C] -> the same shape and number format, also under autocast, which would give float32."""
    # In a compiled graph torch generates such a kernel.
    if (kernels := kernels_of("norm", x)) is not None:
        channels = x.shape[-1]
        if channels <= kernels.MOST_CHANNELS and channels & (channels - 1) == 0:
            out: Tensor = kernels.FewChannelNorm.apply(x.contiguous(), weight, bias, eps, gelu)
            return out
    with torch.autocast(x.device.type, enabled=False):
        x = F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), eps)
        return F.gelu(x) if gelu else x
