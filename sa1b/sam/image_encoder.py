"""The image encoder: a plain ViT with windowed and global attention, and a neck of two convolutions.

Li et al., "Exploring Plain Vision Transformer Backbones for Object Detection", 2022, as used in "Segment
Anything", Kirillov et al., 2023. Parameters have the published names and shapes. A model of the package timm
can compute the tokens in place of the patch embedding; it needs no blocks after it.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from sa1b.arguments import BadValue
from sa1b.errors import UsageError
from sa1b.sam.clicks import kept_branches
from sa1b.sam.transformer import feed_forward, layer_norm

EPSILON = 1e-6  # epsilon of the layer norms of encoder, neck and mask prompt


class ImageEncoder(nn.Module):
    """Computes an embedding from normalised pixels, with one vector for each patch; config: `ModelConfig`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        side, width, channels = config.side, config.width, config.channels
        self.drop_rates = config.drop_rates
        self.patch_embed: nn.Module = (
            Backbone(config.backbone, config.patch_size, width)
            if config.backbone
            else PatchEmbedding(config.patch_size, width)
        )
        self.pos_embed = nn.Parameter(torch.zeros(1, side, side, width))
        windows = [0 if index in config.global_blocks else config.window for index in range(config.depth)]
        self.blocks = nn.ModuleList(
            Block(config, window, index in config.recomputed_blocks) for index, window in enumerate(windows)
        )
        self.neck = nn.Sequential(
            nn.Conv2d(width, channels, kernel_size=1, bias=False),
            ChannelNorm(channels),
            nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False),
            ChannelNorm(channels),
        )
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, pixels: Tensor, keep: Tensor | None = None) -> Tensor:
        """Normalised pixels float [B, 3, S, S] -> embedding float [B, channels, S / patch, S / patch].

        `keep`: as for `Sam.embed`; outputs are scaled by 1 / (1 - rate), which keeps the expected value. In
        evaluation mode all images pass through all blocks, unscaled.
        """
        x = self.tokens(pixels)
        for index, block in enumerate(self.blocks):
            gain = None
            if keep is not None and block.training:
                gain = keep[:, index].to(x.dtype) / (1 - self.drop_rates[index])
            x = block(x, gain)
        embedding: Tensor = self.neck(x.permute(0, 3, 1, 2))
        return embedding

    def tokens(self, pixels: Tensor) -> Tensor:
        """The input of the first block: [B, S / patch, S / patch, width]."""
        tokens: Tensor = self.patch_embed(pixels) + self.pos_embed
        return tokens


class WithImageEncoder(nn.Module):
    """A model in training with one image encoder: its part of the model contract of `sa1b.engine.model`."""

    def fsdp_units(self) -> list[list[nn.Module]]:
        """Attention and MLP of each encoder block, without its norms, which stay in float32.

        In the group of a block, norms would lose 16 of their 24 bits without benefit, and torch's CPU norm
        does not accept a weight whose dtype differs from its float32 input.
        """
        blocks = next(module for module in self.modules() if isinstance(module, ImageEncoder)).blocks
        return [[block.get_submodule("attn"), block.get_submodule("mlp")] for block in blocks]

    def layer_of(self, name: str) -> int | None:
        """0 for the image encoder's embeddings, i + 1 for its block i, None after them."""
        if name.startswith("image_encoder.blocks."):
            return int(name.split(".")[2]) + 1
        return 0 if name.startswith(("image_encoder.patch_embed.", "image_encoder.pos_embed")) else None

    def decays(self, name: str, parameter: Tensor) -> bool:
        """False for biases and norms, which have one dimension, and for positions; else True."""
        positions = ("pos_embed", "rel_pos_h", "rel_pos_w", "position")
        return parameter.ndim > 1 and name.rpartition(".")[2] not in positions

    def kept(self, image_keys: Tensor, config: Any) -> Tensor | None:
        """The branches that each image passes through, by its key: bool [B, depth, 2]; None: all."""
        if not self.training or config.drop_path == 0:
            return None
        return kept_branches(image_keys, config.depth, config.drop_path)


class PatchEmbedding(nn.Module):
    """One token for each patch of pixels."""

    def __init__(self, patch_size: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, S, S] -> tokens [B, S / patch, S / patch, width]."""
        tokens: Tensor = self.proj(pixels.to(self.proj.weight.dtype))
        return tokens.permute(0, 2, 3, 1)


class Backbone(nn.Module):
    """The tokens of a model of timm: the sum of its features at the patch size and at twice the patch size,
    each after a convolution to the width, as in a feature pyramid (Lin et al., 2017).

    Its weights have the prefix `name`, from which the model of a file is recognised.
    """

    def __init__(self, name: str, patch_size: int, width: int) -> None:
        super().__init__()
        self.name, create = name, None
        try:
            create = import_module("timm").create_model
            every = create(name, pretrained=False, features_only=True).feature_info.reduction()
            places = [every.index(patch_size), every.index(2 * patch_size)]
            features = create(name, pretrained=False, features_only=True, out_indices=places)
        except (ImportError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            if create is None:  # RuntimeError: torchvision is of another build than torch
                raise UsageError(
                    f"--model.backbone: needs the package timm, which cannot be imported ({first}); "
                    "pip install 'sa1b[timm]', with torch and torchvision of the same build"
                ) from None
            raise BadValue(
                f"--model.backbone {name}: timm gives no features of it at {patch_size} and {2 * patch_size} "
                f"pixels ({first}); pass another model, such as tiny_vit_5m_224 or repvit_m1_0"
            ) from None
        self.add_module(name, features)
        self.lateral = nn.ModuleList(
            nn.Conv2d(channels, width, kernel_size=1) for channels in features.feature_info.channels()
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, S, S] -> tokens [B, S / patch, S / patch, width]."""
        features = self.get_submodule(self.name)(pixels)
        fine, coarse = (layer(feature) for layer, feature in zip(self.lateral, features, strict=True))
        tokens: Tensor = fine + F.interpolate(coarse, scale_factor=2.0, mode="nearest")
        return tokens.permute(0, 2, 3, 1)


class Block(nn.Module):
    """Attention, with `window` 0 over the whole image, and a feed-forward network, after layer norms."""

    def __init__(self, config: Any, window: int, recompute: bool) -> None:
        super().__init__()
        self.window, self.recompute = window, recompute
        self.norm1 = nn.LayerNorm(config.width, eps=EPSILON)
        self.attn = RelativeAttention(config.width, config.heads, window or config.side)
        self.norm2 = nn.LayerNorm(config.width, eps=EPSILON)
        self.mlp = feed_forward(config.width, 4 * config.width, nn.GELU())
        self.compiled: Callable[[Tensor, Tensor | None], Tensor] | None = None
        if config.compile_blocks:
            # Separately for each batch size: sizes must not become dynamic. FSDP's hooks and the activation
            # checkpoint stay outside of the graph: a graph breaks at hooks, and nothing in a checkpoint is
            # compiled if a graph breaks inside.
            #
            # All blocks share one code object and its limit of graphs. There is a graph for windowed and for
            # global blocks, for training and evaluation, and for a few batch sizes.
            dynamo: Any = import_module("torch._dynamo.config")
            dynamo.recompile_limit = max(dynamo.recompile_limit, 64)
            self.compiled = torch.compile(self.compute, dynamic=False, fullgraph=True)

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        """Tokens [B, H, W, width] -> the same shape; gain: float [B, 2], factors of attention and MLP."""
        compute = self.compiled or self.compute
        if self.recompute and torch.is_grad_enabled():
            # A block uses no random values, so the state of the generator is not saved.
            compute = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
        return self.attn.gathered(compute, x, gain)

    def compute(self, x: Tensor, gain: Tensor | None) -> Tensor:
        # Call the methods of attention and MLP, not the modules: FSDP's hooks on them run in `gathered`.
        attended = self.attend(self.norm1(x))
        x = x + (attended if gain is None else attended * gain[:, 0, None, None, None])
        fed: Tensor = self.norm2(x)
        for layer in self.mlp:
            fed = layer(fed)
        return x + (fed if gain is None else fed * gain[:, 1, None, None, None])

    def attend(self, x: Tensor) -> Tensor:
        if self.window == 0:
            return self.attn.forward(x)
        return join_windows(self.attn.forward(split_windows(x, self.window)), x.shape[1], x.shape[2])


class ChannelNorm(nn.Module):
    """Layer norm over the channels of each pixel of [B, channels, H, W]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, *, gelu: bool = False) -> Tensor:
        """Input of any memory format -> output in channels-last format; `gelu`: GELU follows."""
        x = layer_norm(x.permute(0, 2, 3, 1), self.weight, self.bias, EPSILON, gelu=gelu)
        return x.permute(0, 3, 1, 2)


HEAD_MULTIPLE = 8  # flash attention needs a head length that is a multiple of 8


class RelativeAttention(nn.Module):
    """Self-attention on a grid of side x side tokens with decomposed relative positions (`attn`)."""

    # Its attention is fused: no tokens x tokens matrix is stored. The encoder adds a decomposed relative
    # position to the logits of its attention (Li et al., "MViTv2", 2022). With q at row r and column c, and k
    # at row s and column t,
    #
    #     logit = q.k / sqrt(d) + q.Rh[r - s] + q.Rw[c - t]
    #
    # A bias of tokens x tokens would prevent the use of fused kernels and take 4096 * 4096 numbers per head
    # at 1024 pixels. So the bias is folded into longer queries and keys, without loss of accuracy:
    #
    #     q' = [q / sqrt(d), q.Rh[r - 0], q.Rh[r - 1], ..., q.Rw[c - 0], q.Rw[c - 1], ...]
    #     k' = [k,           1 where s = 0, 1, ...,         1 where t = 0, 1, ...        ]
    #
    # and q'.k' is the logit above. The length of a head grows from d to d + rows + columns: 92 in a window of
    # 14 with d = 64, padded to 96, and 192 in a global block at 1024 pixels. See `attended` for the values.

    def __init__(self, width: int, heads: int, side: int) -> None:
        super().__init__()
        self.heads, self.side = heads, side
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.rel_pos_h = nn.Parameter(torch.zeros(2 * side - 1, width // heads))
        self.rel_pos_w = nn.Parameter(torch.zeros(2 * side - 1, width // heads))

    def gathered(self, function: Callable[..., Tensor], *arguments: Tensor | None) -> Tensor:
        """Call a function that uses the weights; FSDP gathers them around this call, not around `forward`."""
        return function(*arguments)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens float [B, side, side, width] -> the same shape; B images or windows."""
        q, k, v = self.projected(x)
        out = attended(*self.folded(q, k), v.flatten(2, 3))
        projected: Tensor = self.proj(out.transpose(1, 2).reshape(x.shape))
        return projected

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of tokens: [B, heads, rows, columns, d] each."""
        grid = self.qkv(x).view(*x.shape[:3], 3, self.heads, -1).permute(3, 0, 4, 1, 2, 5)
        q, k, v = grid.unbind(0)
        return q, k, v

    def positions(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Products of queries [B, heads, rows, columns, d] and the positions of each axis: [..., side]."""
        rows = torch.einsum("bnrcd,rds->bnrcs", q, distances(self.rel_pos_h))
        return rows, torch.einsum("bnrcd,cdt->bnrct", q, distances(self.rel_pos_w))

    def folded(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The longer queries and keys: [B, heads, rows, columns, d] -> [B, heads, tokens, longer d]."""
        rows_of_q, columns_of_q = self.positions(q)
        one_hot = torch.eye(self.side, dtype=k.dtype, device=k.device)
        rows_of_k = one_hot[:, None, :].expand(*k.shape[:-1], -1)
        columns_of_k = one_hot[None, :, :].expand(*k.shape[:-1], -1)

        # Under autocast, the products of q may have another dtype than q.
        zeros = q.new_zeros(1).expand(*q.shape[:-1], -(q.shape[-1] + 2 * self.side) % HEAD_MULTIPLE)
        parts = (q * q.shape[-1] ** -0.5, rows_of_q.to(q.dtype), columns_of_q.to(q.dtype), zeros)
        q, k = torch.cat(parts, dim=-1), torch.cat([k, rows_of_k, columns_of_k, zeros], dim=-1)
        return q.flatten(2, 3), k.flatten(2, 3)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The attention of queries and keys [B, heads, N, e] to shorter values [B, heads, N, d], not scaled."""
    # Other kernels than cuDNN's need equal lengths. On an H100, cuDNN takes 13.3 ms with values of 64 numbers
    # and 19.5 with padded ones, flash attention 16.0: forward and backward, 8 images of 12 heads, 4,096
    # tokens, queries of 192 numbers. Torch too prefers cuDNN's on an H100, a B200 and their relatives.
    eager = q.is_cuda and not torch.compiler.is_compiling()
    if eager and torch.cuda.get_device_capability(q.device)[0] in (9, 10):
        given = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, False)
        if torch.backends.cuda.can_use_cudnn_attention(given):
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, scale=1.0)
    length = v.shape[-1]
    out = F.scaled_dot_product_attention(q, k, F.pad(v, (0, q.shape[-1] - length)), scale=1.0)
    return out[..., :length]


def distances(table: Tensor) -> Tensor:
    """The embeddings of all distances r - s along one axis: float [n, d, n], at [r, :, s]."""
    # Row i of the table [2n - 1, d] is the embedding of the distance i - (n - 1). The result is made of
    # windows of the table, not by indexing: the gradient of indexing is a scattered sum, which is slower and
    # has no fixed order on some devices.
    return table.unfold(0, (table.shape[0] + 1) // 2, 1).flip(-1)


def split_windows(x: Tensor, window: int) -> Tensor:
    """Tokens [B, H, W, C] -> [B * windows, window, window, C], in row-major order of windows."""
    # Padded with zeros at the bottom and on the right; as in the published model, attention includes them.
    batch, height, width, channels = x.shape
    x = F.pad(x, (0, 0, 0, -width % window, 0, -height % window))
    down, across = x.shape[1] // window, x.shape[2] // window
    x = x.view(batch, down, window, across, window, channels).transpose(2, 3)
    return x.reshape(batch * down * across, window, window, channels)


def join_windows(windows: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `split_windows`: [B * windows, window, window, C] -> [B, height, width, C]."""
    window, channels = windows.shape[1], windows.shape[3]
    down, across = -(-height // window), -(-width // window)
    x = windows.view(-1, down, across, window, window, channels).transpose(2, 3)
    return x.reshape(-1, down * window, across * window, channels)[:, :height, :width]
