"""Similarity to clicks: an addition to the published model that learns the effect of a click in minutes.

The published mask decoder has to learn from scratch that the mask of a click contains pixels near the clicked
pixel and similar to it. This module adds a term to the decoder's logits that has this effect from the first
step. Each pixel of the masks has a short feature vector f. The distance of pixel p from click c is

    d(p, c) = a * |f(p) - f(c)|**2 + b * |p - c|**2          positions as fractions of the padded square

Let d1 and d0 be the distances from the nearest foreground and background click. The term is

    e - d1(p) - softplus(g - d0(p))

The decoder's token of the mask gives a, b, e and g. A few convolutions over the pixels and the image
embedding compute f, once per image. The centre of a box counts as a foreground click.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sa1b.sam.image_encoder import ChannelNorm

HIDDEN, CONTEXT = 32, 2  # channels of the convolutions, and number of 3 x 3 convolutions on the embedding
_FAR = 30.0  # largest distance, also used without a click: sigmoid and softplus are flat there


class Clicks(NamedTuple):
    """The clicks of M masks."""

    pixels: Tensor  # features of all pixels, [B, R * R, D]
    features: Tensor  # of the clicked pixels, [M, P, D]
    positions: Tensor  # [M, P, 2], x and y as fractions of the padded square
    labels: Tensor  # [M, P]: 1 foreground, 0 background, -1 no click


class PixelFeatures(nn.Module):
    """Features of the pixels of masks, each of patch_size / 4 pixels of the image per axis."""

    def __init__(self, patch_size: int, channels: int, features: int) -> None:
        super().__init__()
        self.pool, stride = (patch_size // 8, 2) if patch_size % 8 == 0 else (patch_size // 4, 1)
        self.first = nn.Conv2d(3, HIDDEN, kernel_size=3, stride=stride, padding=1)
        self.norm = ChannelNorm(HIDDEN)
        self.colour = nn.Conv2d(HIDDEN, features, kernel_size=1)
        self.embedding = nn.Conv2d(channels, HIDDEN, kernel_size=1)
        self.context = nn.ModuleList(
            nn.Conv2d(HIDDEN, HIDDEN, kernel_size=3, padding=1) for _ in range(CONTEXT)
        )
        self.last = nn.Conv2d(HIDDEN, features, kernel_size=1)
        # The embedding is meaningless at first; colours are meaningful under any projection.
        for parameter in self.last.parameters():
            nn.init.zeros_(parameter)

    def forward(self, pixels: Tensor, embedding: Tensor) -> Tensor:
        """Normalised pixels [B, 3, S, S] and embedding [B, channels, h, w] -> [B, features, 4 h, 4 w]."""
        # The mean over pixels, because noise of single pixels would dominate features of random weights.
        colours = F.avg_pool2d(pixels, self.pool).to(self.first.weight.dtype)
        near = self.norm(self.first(colours.contiguous(memory_format=torch.channels_last)), gelu=True)
        x = near + F.interpolate(self.embedding(embedding), scale_factor=4.0, mode="nearest")
        for convolution in self.context:
            x = x + F.gelu(convolution(x))
        features: Tensor = self.colour(near) + self.last(x)
        return features


class ClickSimilarity(nn.Module):
    """The term of the logits, and an embedding of the clicked pixels for the decoder's tokens."""

    def __init__(self, patch_size: int, channels: int, features: int) -> None:
        super().__init__()
        self.features = features
        self.pixels = PixelFeatures(patch_size, channels, features)
        self.clicked = nn.Linear(features, channels)
        self.terms = nn.Linear(channels, 4)  # log a, log b, e, g from the token of a mask
        nn.init.zeros_(self.terms.weight)
        with torch.no_grad():
            self.terms.bias.copy_(torch.tensor([0.0, math.log(8.0), 2.0, 2.0]))

    def with_features(self, pixels: Tensor, embedding: Tensor) -> Tensor:
        """The image embedding with the features of the 4 x 4 mask pixels of each token as further channels.

        Normalised pixels [B, 3, S, S], embedding [B, channels, h, w] -> [B, channels + 16 * features, h, w].
        """
        return torch.cat((embedding, F.pixel_unshuffle(self.pixels(pixels, embedding), 4)), dim=1)

    def split(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `with_features`: embedding, and features float32 [B, 4 h * 4 w, D]."""
        channels = embeddings.shape[1] - 16 * self.features
        features = F.pixel_shuffle(embeddings[:, channels:], 4).float()
        return embeddings[:, :channels], features.flatten(2).transpose(1, 2).contiguous()

    def clicks(
        self, pixels: Tensor, image: Tensor, points: Tensor, labels: Tensor, image_size: int
    ) -> Clicks:
        """The clicks of masks; pixels: the features of `split`, points and labels: as for `Sam.decode`."""
        corners = (labels >= 2)[..., None]
        centre = (points * corners).sum(dim=1, keepdim=True) / corners.sum(dim=1, keepdim=True).clamp(min=1)
        points = torch.where((labels == 2)[..., None], centre, points)
        labels = torch.where(labels == 2, 1, torch.where(labels == 3, -1, labels))
        positions, side = (points.float() + 0.5) / image_size, math.isqrt(pixels.shape[1])
        columns, rows = (positions * side).long().clamp(0, side - 1).unbind(-1)
        index = (image[:, None] * side + rows) * side + columns
        # The gradient of this form is summed in a fixed order, unlike the gradient of indexing with tensors.
        features = pixels.flatten(0, 1).index_select(0, index.flatten()).view(*index.shape, pixels.shape[2])
        return Clicks(pixels, features, positions, labels)

    def embed(self, clicks: Clicks) -> Tensor:
        """The clicked pixels as embeddings for the prompts: [M, P, channels], zeros without a click."""
        embedded: Tensor = self.clicked(clicks.features.to(self.clicked.weight.dtype))
        return embedded * (clicks.labels >= 0)[..., None]

    def forward(self, clicks: Clicks, counts: Sequence[int], tokens: Tensor) -> Tensor:
        """The term for each candidate, float32 [M, K, R, R]; tokens [M, K, C] are the decoder's."""
        side = math.isqrt(clicks.pixels.shape[1])
        with torch.autocast(clicks.pixels.device.type, enabled=False):
            terms = self.terms(tokens.to(self.terms.weight.dtype)).float()
            colour, position, foreground, background = terms[..., None].unbind(2)  # (M, K, 1)
            colour, position = colour.exp(), position.exp()
            # Squared distances from the clicks, (M, P, R * R): of features, image by image, and of centres.
            squares = (clicks.pixels**2).sum(dim=2)[:, None]
            parts = []
            by_image = torch.split(clicks.features, list(counts))
            for features, pixels, square in zip(by_image, clicks.pixels, squares, strict=True):
                product = (features.flatten(0, 1) @ pixels.T).view(*features.shape[:2], len(pixels))
                parts.append(square - 2 * product)
            unlike = (torch.cat(parts) + (clicks.features**2).sum(dim=2, keepdim=True)).clamp(min=0)
            centres = (torch.arange(side, device=clicks.positions.device) + 0.5) / side
            across, down = ((centres - clicks.positions[..., axis, None]) ** 2 for axis in (0, 1))
            away = (down[..., :, None] + across[..., None, :]).flatten(2)
            of_label = _nearest_in_a_graph if torch.compiler.is_compiling() else _nearest
            nearest = [of_label(clicks.labels == label, colour, unlike, position, away) for label in (1, 0)]
            term = foreground - nearest[0] - F.softplus(background - nearest[1])
            clicked = (clicks.labels == 1).any(dim=1)[:, None, None]
            logits: Tensor = (term * clicked).view(*term.shape[:2], side, side)
            return logits


def _nearest(counts: Tensor, colour: Tensor, unlike: Tensor, position: Tensor, away: Tensor) -> Tensor:
    """The smallest distance from the clicks that count, bool [M, P]: [M, K, R * R], at most _FAR."""
    # `colour` and `position` [M, K, 1] are factors of the distances `unlike` and `away`, [M, P, R * R].
    nearest = unlike.new_full((1, 1, unlike.shape[2]), _FAR)
    for column in range(counts.shape[1]):
        distance = colour * unlike[:, None, column] + position * away[:, None, column]
        nearest = torch.minimum(nearest, distance.masked_fill(~counts[:, column, None, None], _FAR))
    return nearest


def _nearest_in_a_graph(
    counts: Tensor, colour: Tensor, unlike: Tensor, position: Tensor, away: Tensor
) -> Tensor:
    """`_nearest` without a loop, which would make the number of clicks a constant of the graph."""
    distances = colour[..., None] * unlike[:, None] + position[..., None] * away[:, None]
    return distances.masked_fill(~counts[:, None, :, None], _FAR).amin(dim=2).clamp(max=_FAR)
