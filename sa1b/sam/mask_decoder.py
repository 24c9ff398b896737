"""The mask decoder: embeddings of image and prompts to four masks, and how good each is.

"Segment Anything", Kirillov et al., 2023. Parameters have the published names and shapes.
"""

import torch
from torch import Tensor, nn

from sa1b.sam.image_encoder import ChannelNorm
from sa1b.sam.transformer import TwoWayTransformer

MASKS = 4  # one for prompts that leave no doubt, three for those that do
HEAD_LENGTH = 32  # numbers a head of the self-attention: 8 heads in the published 256 channels
HIDDEN_RATIO = 8  # of the feed-forward network: 2048 in the published 256 channels


class MaskDecoder(nn.Module):
    """Masks at four times the size of the image embedding.

    Args:
        channels: of all embeddings, a multiple of 32.
    """

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
        self, embeddings: Tensor, image_position: Tensor, sparse: Tensor, dense: Tensor
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            embeddings: float [M, C, h, w], the image embedding of each mask.
            image_position: float [1, C, h, w].
            sparse: float [M, T, C], of points and box corners.
            dense: float [M, C, h, w], of an earlier mask, or of its absence.

        Returns:
            Logits [M, 4, 4h, 4w]: mask 0 the single one, 1 to 3 the three. And the predicted IoU of each,
            [M, 4], not bounded to 0..1.
        """
        height, width = embeddings.shape[-2:]
        own = torch.cat([self.iou_token.weight, self.mask_tokens.weight])
        tokens = torch.cat([own.expand(len(sparse), -1, -1), sparse.to(own.dtype)], dim=1)
        image = (embeddings + dense).to(own.dtype).flatten(2).transpose(1, 2)
        position = image_position.to(own.dtype).flatten(2).transpose(1, 2)

        tokens, image = self.transformer(image, position, tokens)

        upscaled = self.output_upscaling(image.transpose(1, 2).unflatten(-1, (height, width)))
        weights = [network(tokens[:, 1 + i]) for i, network in enumerate(self.output_hypernetworks_mlps)]
        logits = torch.stack(weights, dim=1) @ upscaled.flatten(2)
        iou = self.iou_prediction_head(tokens[:, 0])
        return logits.unflatten(-1, upscaled.shape[-2:]), iou


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
