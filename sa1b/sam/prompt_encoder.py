"""The prompt encoder: embeds points, box corners and an earlier mask, always in float32.

"Segment Anything", Kirillov et al., 2023. Parameters have the published names and shapes. Half precision
would shift a coordinate by up to 2 pixels at 1024, and TF32 by half a pixel. So autocast is disabled in this
module, and coordinates are multiplied by the frequencies element by element, not in a matrix product.

Labels of points, which are prompts of any kind:

    -1  empty: its coordinates have no effect. The published code adds an empty point to prompts without a
        box; here the caller must do this.
     0  background     1  foreground     2  first corner of a box (x0, y0)     3  second corner (x1, y1)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sa1b.sam.image_encoder import EPSILON, ChannelNorm
from sa1b.sam.transformer import layer_norm

LABELS = 4  # background, foreground, two corners
MASK_CHANNELS = 16  # hidden channels of the mask embedding, for any width


@dataclass(frozen=True, slots=True, eq=False)
class DenseEmbedding:
    """The embedding of earlier masks in low-rank form, float32: constant + features' @ basis, of rank r."""

    constant: Tensor  # [channels]
    features: Tensor | None  # [M, r, side * side]; None: no earlier masks
    basis: Tensor  # [r, channels]


class PromptEncoder(nn.Module):
    """Prompts of M masks at once; coordinates are pixels of the square of `image_size` pixels."""

    def __init__(self, channels: int, image_size: int, side: int) -> None:
        super().__init__()
        self.image_size = image_size
        self.side = side
        self.pe_layer = PositionEncoding(channels)
        self.point_embeddings = nn.ModuleList(nn.Embedding(1, channels) for _ in range(LABELS))
        self.not_a_point_embed = nn.Embedding(1, channels)
        self.mask_downscaling = nn.Sequential(
            nn.Conv2d(1, MASK_CHANNELS // 4, kernel_size=2, stride=2),
            ChannelNorm(MASK_CHANNELS // 4),
            nn.GELU(),
            nn.Conv2d(MASK_CHANNELS // 4, MASK_CHANNELS, kernel_size=2, stride=2),
            ChannelNorm(MASK_CHANNELS),
            nn.GELU(),
            nn.Conv2d(MASK_CHANNELS, channels, kernel_size=1),
        )
        self.no_mask_embed = nn.Embedding(1, channels)

    def forward(
        self, points: Tensor, labels: Tensor, low_res: Tensor | None = None, has_low_res: Tensor | None = None
    ) -> tuple[Tensor, DenseEmbedding]:
        """Sparse float32 [M, P, channels], and the dense embedding; arguments as for `Sam.decode`."""
        # Both depend on every parameter in every call, possibly with weight zero, so every parameter always
        # gets a gradient.
        with torch.autocast(points.device.type, enabled=False):
            return self.embed_points(points, labels), self.embed_masks(low_res, has_low_res)

    def embed_points(self, points: Tensor, labels: Tensor) -> Tensor:
        position: Tensor = self.pe_layer((points.float() + 0.5) / self.image_size)
        position = position.masked_fill((labels < 0)[..., None], 0)
        of_label = [self.not_a_point_embed.weight, *(kind.weight for kind in self.kinds())]
        return position + F.embedding(labels + 1, torch.cat(of_label).float())

    def kinds(self) -> list[nn.Embedding]:
        return [kind for kind in self.point_embeddings if isinstance(kind, nn.Embedding)]

    def embed_masks(self, low_res: Tensor | None, has_low_res: Tensor | None) -> DenseEmbedding:
        nothing = self.no_mask_embed.weight[0].float()
        *layers, last = self.mask_downscaling
        if low_res is None:
            unused = torch.stack(
                [parameter.float().sum() for parameter in self.mask_downscaling.parameters()]
            )
            return DenseEmbedding(nothing + 0 * unused.sum(), None, nothing[None, :0])
        has = None if has_low_res is None else has_low_res[:, None, None]
        if has is not None:
            # Replace missing masks by zeros: a NaN would reach the gradient in spite of a weight of zero.
            low_res = torch.where(has[..., None], low_res, 0)
        weight, bias = last.get_parameter("weight"), last.get_parameter("bias").float()
        x = low_res.permute(0, 2, 3, 1)
        for convolution, norm in (layers[:2], layers[3:5]):
            gain, offset = norm.get_parameter("weight"), norm.get_parameter("bias")
            x = layer_norm(downscaled(x, convolution), gain, offset, EPSILON, gelu=True)
        features, basis = x.flatten(1, 2).transpose(1, 2).float(), weight.flatten(1).T.float()
        if has is None:
            return DenseEmbedding(bias + 0 * nothing, features, basis)
        present = has.to(features.dtype).expand(-1, -1, features.shape[2])
        features = torch.cat([features * present, present, 1 - present], dim=1)
        return DenseEmbedding(0 * nothing, features, torch.cat([basis, bias[None], nothing[None]]))

    def image_position(self) -> Tensor:
        """The position of each token of the image, encoded like points: float32 [1, channels, side, side]."""
        centres = (torch.arange(self.side, device=self.no_mask_embed.weight.device) + 0.5) / self.side
        rows, columns = torch.meshgrid(centres, centres, indexing="ij")
        with torch.autocast(centres.device.type, enabled=False):
            position: Tensor = self.pe_layer(torch.stack([columns, rows], dim=-1))
        return position.permute(2, 0, 1)[None]


def downscaled(x: Tensor, convolution: nn.Module) -> Tensor:
    """A convolution with a kernel of 2 x 2 and stride 2: [M, H, W, C] -> [M, H / 2, W / 2, D]."""
    if x.is_cuda:
        return product_of_patches(x, convolution)
    # A CPU takes longer to gather the patches than for the convolution.
    out: Tensor = convolution(x.permute(0, 3, 1, 2).to(convolution.get_parameter("weight").dtype))
    return out.permute(0, 2, 3, 1)


def product_of_patches(x: Tensor, convolution: nn.Module) -> Tensor:
    """See `downscaled`; a matrix product, since the patches of 2 x 2 pixels do not overlap."""
    masks, height, width, channels = x.shape
    weight = convolution.get_parameter("weight").permute(0, 2, 3, 1).flatten(1)  # (D, 4 C)
    squares = x.reshape(masks, height // 2, 2, width // 2, 2 * channels).transpose(2, 3)
    patches = squares.to(weight.dtype, memory_format=torch.contiguous_format)
    patches = patches.reshape(masks, height * width // 4, 4 * channels)
    out = _of_patches(patches, weight, convolution.get_parameter("bias"))
    return out.view(masks, height // 2, width // 2, len(weight))


class _OfPatches(torch.autograd.Function):
    """F.linear of [M, N, I] whose gradient of the weight is computed for each mask, then added."""

    # As one product it has 16 x 16 results or fewer, each a sum over millions of rows: few processors work.

    @staticmethod
    def forward(patches: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(patches, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        patches, weight = ctx.saved_tensors
        of_patches = gradient @ weight if ctx.needs_input_grad[0] else None
        return of_patches, (gradient.transpose(1, 2) @ patches).sum(0), gradient.sum((0, 1))


_of_patches: Callable[[Tensor, Tensor, Tensor], Tensor] = _OfPatches.apply


class PositionEncoding(nn.Module):
    """Sine and cosine of random spatial frequencies (Tancik et al., "Fourier Features", 2020)."""

    positional_encoding_gaussian_matrix: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("positional_encoding_gaussian_matrix", torch.randn(2, channels // 2))

    def forward(self, coordinates: Tensor) -> Tensor:
        """Coordinates float32 [..., 2], (x, y) from 0 to 1 over the image -> float32 [..., channels]."""
        across, down = self.positional_encoding_gaussian_matrix.float()
        x, y = (2 * coordinates - 1).unbind(-1)
        angle = 2 * math.pi * (x[..., None] * across + y[..., None] * down)
        return torch.cat([angle.sin(), angle.cos()], dim=-1)
