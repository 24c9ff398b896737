"""The mask decoder: four masks and their predicted IoU from the embeddings of image and prompts.

"Segment Anything", Kirillov et al., 2023. Parameters have the published names and shapes.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sa1b.sam.image_encoder import EPSILON, ChannelNorm
from sa1b.sam.transformer import (
    SharedImage,
    TwoWayTransformer,
    kernels_of,
    layer_norm,
    product_with_transposed,
)

MASKS = 4  # one mask for unambiguous prompts, three for ambiguous prompts
ALL = slice(0, MASKS)
SINGLE, AMBIGUOUS = slice(0, 1), slice(1, MASKS)  # candidates for several prompts, and for one prompt
HEAD_LENGTH = 32  # numbers per head of the self-attention: 8 heads for the published 256 channels
HIDDEN_RATIO = 8  # hidden width / channels of the feed-forward network: 2048 for the published 256 channels


class MaskDecoder(nn.Module):
    """Masks at four times the size of the image embedding; `channels` is a multiple of 32."""

    # The cost of one mask in one iteration of training, with 256 channels, 4,096 image tokens and 12 tokens
    # (the mean over the iterations), by torch's FlopCounterMode and as inputs and outputs of every operator.
    # In parentheses: the published order of products with checkpointed iterations.
    #
    #     forward                  2.6 GFLOP, 222 MB in float32, 120 MB under bfloat16    (3.7, 297, 258)
    #     forward and backward     7.9 GFLOP, 594 MB in float32, 316 MB under bfloat16    (15, 1052, 899)
    #
    # For an image with 64 masks and 11 iterations: 5.6 TFLOP and 418 or 222 GB (10.5 TFLOP, 741 or 633 GB).
    # `upscale_triton` saves 21 MB of the 120 and 61 MB of the 316 on a GPU.
    # `benchmarks/test_decoder.py` measures the time.

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
        first, norm, _, second, _ = self.output_upscaling
        weight, bias = as_matrix(first)
        x = F.linear(image, weight.to(image.dtype), bias.repeat(4).to(image.dtype))
        logits = quarter_logits(x.view(*image.shape[:2], 4, len(bias)), norm, second, weights)
        (masks, count, _), side = weights.shape, math.isqrt(image.shape[1])
        # Rows, columns of tokens, halves, quarters.
        logits = logits.view(masks, count, side, side, 2, 2, 2, 2)
        return logits.permute(0, 1, 2, 4, 6, 3, 5, 7).reshape(masks, count, 4 * side, 4 * side)


def quarter_logits(x: Tensor, norm: nn.Module, second: nn.Module, weights: Tensor) -> Tensor:
    """Tokens x [M, N, 4, C] after the first convolution, and weights [M, K, C / 2] -> logits [M, K, 16 N]."""
    gain, shift = (norm.get_parameter(name) for name in ("weight", "bias"))
    matrix, bias = as_matrix(second)
    kernels = kernels_of("upscale", x)
    if kernels is not None and x.dtype in kernels.FORMATS and x.shape[-1] in kernels.CHANNELS:
        inputs = (x.contiguous(), gain, shift, matrix, bias, weights.to(x.dtype))
        logits: Tensor = kernels.Upscaling.apply(*inputs, EPSILON)
        return logits
    x = layer_norm(x, gain, shift, EPSILON, gelu=True)
    x = F.gelu(F.linear(x, matrix.to(x.dtype), bias.repeat(4).to(x.dtype)))
    return product_with_transposed(weights, x.view(*x.shape[:-1], 4, len(bias)).flatten(1, 3))


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
