"""The prompt encoder, and the mask decoder: four masks and their predicted IoU from image and prompts.

"Segment Anything", Kirillov et al., 2023. Parameters have the published names and shapes. The encoder embeds
points, box corners and an earlier mask in float32: half precision would shift a coordinate by up to 2 pixels
at 1024, and TF32 by half a pixel. So autocast is disabled there, and coordinates are multiplied by the
frequencies element by element, not in a matrix product.

Labels of points, which are prompts of any kind:

    -1  empty: its coordinates have no effect. The published code adds an empty point to prompts without a
        box; here the caller must do this.
     0  background     1  foreground     2  first corner of a box (x0, y0)     3  second corner (x1, y1)
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sa1b.sam.image_encoder import EPSILON, ChannelNorm
from sa1b.sam.image_tokens import SharedImage, kernels_of, product_with_transposed
from sa1b.sam.transformer import TwoWayTransformer, layer_norm

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
        self.image_size, self.side = image_size, side
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
        kinds = (self.not_a_point_embed, *self.point_embeddings)
        of_label = torch.cat([kind.get_parameter("weight") for kind in kinds])
        return position + F.embedding(labels + 1, of_label.float())

    def embed_masks(self, low_res: Tensor | None, has_low_res: Tensor | None) -> DenseEmbedding:
        nothing = self.no_mask_embed.weight[0].float()
        *_, last = self.mask_downscaling
        if low_res is None:
            unused = torch.stack([x.float().sum() for x in self.mask_downscaling.parameters()])
            return DenseEmbedding(nothing + 0 * unused.sum(), None, nothing[None][:0])
        has = None if has_low_res is None else has_low_res[:, None, None]
        if has is not None:
            # Replace missing masks by zeros: a NaN would reach the gradient in spite of a weight of zero.
            low_res = torch.where(has[..., None], low_res, 0)
        weight, bias = last.get_parameter("weight"), last.get_parameter("bias").float()
        features, basis = self.mask_features(low_res), weight.flatten(1).T.float()
        if has is None:
            return DenseEmbedding(bias + 0 * nothing, features, basis)
        present = has.to(features.dtype).expand(-1, -1, features.shape[2])
        features = torch.cat([features * present, present, 1 - present], dim=1)
        return DenseEmbedding(0 * nothing, features, torch.cat([basis, bias[None], nothing[None]]))

    def mask_features(self, low_res: Tensor) -> Tensor:
        """Logits [M, 1, 4 side, 4 side] -> float [M, 16, side * side]."""
        layers = list(self.mask_downscaling)[:5]
        kernels = kernels_of("downscale", low_res)
        if kernels is not None and kernels.fits(low_res, MASK_CHANNELS):
            parameters = [x for layer in layers for x in layer.parameters()]
            features: Tensor = kernels.Downscaling.apply(low_res, EPSILON, *parameters)
            return features
        x = low_res
        for convolution, norm in (layers[:2], layers[3:5]):
            x = norm(convolution(x.to(convolution.get_parameter("weight").dtype)), gelu=True)
        return x.permute(0, 2, 3, 1).flatten(1, 2).transpose(1, 2).float()

    def image_position(self) -> Tensor:
        """The position of each token of the image, encoded like points: float32 [1, channels, side, side]."""
        centres = (torch.arange(self.side, device=self.no_mask_embed.weight.device) + 0.5) / self.side
        rows, columns = torch.meshgrid(centres, centres, indexing="ij")
        with torch.autocast(centres.device.type, enabled=False):
            position: Tensor = self.pe_layer(torch.stack([columns, rows], dim=-1))
        return position.permute(2, 0, 1)[None]


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


MASKS = 4  # one mask for unambiguous prompts, three for ambiguous prompts
ALL = slice(0, MASKS)
SINGLE, AMBIGUOUS = slice(0, 1), slice(1, MASKS)  # candidates for several prompts, and for one prompt
HEAD_LENGTH = 32  # numbers per head of the self-attention: 8 heads for the published 256 channels
HIDDEN_RATIO = 8  # hidden width / channels of the feed-forward network: 2048 for the published 256 channels


class MaskDecoder(nn.Module):
    """Masks at four times the size of the image embedding; `channels` is a multiple of 32."""

    # The cost of one mask in one iteration of training, with 256 channels, 4,096 image tokens and 12 tokens
    # (the mean over the iterations): operations by torch's FlopCounterMode, and bytes of the inputs and
    # outputs of all operators. In parentheses: the published order of products with checkpointed iterations.
    #
    #     forward                  2.6 GFLOP, 222 MB in float32, 120 MB under bfloat16    (3.7, 297, 258)
    #     forward and backward     7.9 GFLOP, 594 MB in float32, 316 MB under bfloat16    (15, 1052, 899)
    #
    # For an image with 64 masks and 11 iterations: 5.6 TFLOP and 418 or 222 GB (10.5 TFLOP, 741 or 633 GB).
    # With the kernels for a GPU, `python -m benchmarks.account` counts 81 MB in place of the 316.

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.transformer = TwoWayTransformer(
            depth=2, width=channels, heads=channels // HEAD_LENGTH, hidden=HIDDEN_RATIO * channels
        )
        self.iou_token = nn.Embedding(1, channels)
        self.mask_tokens = nn.Embedding(MASKS, channels)
        self.output_upscaling = nn.Sequential(
            nn.ConvTranspose2d(channels, channels // 4, kernel_size=2, stride=2),
            ChannelNorm(channels // 4),
            nn.GELU(),
            nn.ConvTranspose2d(channels // 4, channels // 8, kernel_size=2, stride=2),
            nn.GELU(),
        )
        self.output_hypernetworks_mlps = nn.ModuleList(
            Perceptron(channels, channels, channels // 8) for _ in range(MASKS)
        )
        self.iou_prediction_head = Perceptron(channels, channels, MASKS)

    def forward(
        self, image: SharedImage, image_position: Tensor, sparse: Tensor, candidates: slice = ALL
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [M, K, 4h, 4w] of K candidates, their predicted IoU [M, K], not bounded; tokens [M, K, C].

        Mask 0 is for unambiguous prompts, 1 to 3 are for ambiguous ones. `image` has the number format of the
        products; `image_position` is float [N, C], `sparse`, the points and box corners, [M, T, C].
        """
        learned = torch.cat([self.iou_token.weight, self.mask_tokens.weight])
        tokens = torch.cat([learned.expand(len(sparse), -1, -1), sparse.to(learned.dtype)], dim=1)
        chosen = range(MASKS)[candidates]
        tokens, attended = self.transformer(
            image, image_position, tokens, (0, *(1 + mask for mask in chosen))
        )
        networks = list(self.output_hypernetworks_mlps)
        weights = torch.stack([networks[mask](tokens[:, 1 + k]) for k, mask in enumerate(chosen)], dim=1)
        # The networks of other candidates are used with weight zero, because DDP waits for every gradient.
        rest = [networks[mask] for mask in range(MASKS) if mask not in chosen]
        unused = [parameter.sum() for network in rest for parameter in network.parameters()]
        weights = weights + 0 * sum(unused)
        logits = self.upscale(attended, weights.to(attended.dtype))
        return logits, self.iou_prediction_head(tokens[:, 0])[:, candidates], tokens[:, 1:]

    def upscale(self, image: Tensor, weights: Tensor) -> Tensor:
        """Image tokens [M, N, C] and weights [M, K, C / 8] -> logits [M, K, 4h, 4w]."""
        # Both convolutions have kernels of 2 x 2 without overlap, so they are matrix products for each token.
        # Only the logits have to be reordered to pixels.
        layers, norm = self.output_upscaling, self.output_upscaling[1]
        first, second = as_matrix(layers[0]), as_matrix(layers[3])
        gain, shift = (norm.get_parameter(name) for name in ("weight", "bias"))
        kernels = kernels_of("upscale", image)
        if kernels is not None and kernels.fits(image, len(gain)):
            inputs = (image, *first, gain, shift, *second, weights.to(image.dtype))
            logits: Tensor = kernels.Upscaling.apply(*inputs, EPSILON)
        else:
            x = expanded(image, *first).view(*image.shape[:2], 4, len(gain))
            x = F.gelu(expanded(layer_norm(x, gain, shift, EPSILON, gelu=True), *second))
            logits = product_with_transposed(weights, x.view(*x.shape[:-1], 4, len(second[1])).flatten(1, 3))
        (masks, count, _), side = weights.shape, math.isqrt(image.shape[1])
        # Each token has 4 x 4 pixels: rows and columns of tokens, then of their halves and quarters.
        logits = logits.view(masks, count, side, side, 2, 2, 2, 2)
        return logits.permute(0, 1, 2, 4, 6, 3, 5, 7).reshape(masks, count, 4 * side, 4 * side)


def expanded(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A linear layer from a token to the four tokens of its square, whose bias is the same."""
    return F.linear(x, weight.to(x.dtype), bias.repeat(4).to(x.dtype))


def as_matrix(convolution: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight [4 D, C], from a token to the four tokens of its square in row-major order, and bias [D]."""
    weight, bias = (convolution.get_parameter(name) for name in ("weight", "bias"))
    return weight.permute(2, 3, 1, 0).flatten(0, 2), bias


class Perceptron(nn.Module):
    """Three linear layers with ReLU between them."""

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        sizes = (width, hidden, hidden, out)
        self.layers = nn.ModuleList(nn.Linear(sizes[i], sizes[i + 1]) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., out]."""
        first, second, last = self.layers
        out: Tensor = last(second(first(x).relu()).relu())
        return out
