"""Features of regions: the mean of an image embedding over each mask."""

from collections.abc import Sequence

import torch
from torch import Tensor


def region_features(
    embeddings: Tensor, masks: Tensor, points: Tensor, counts: Sequence[int], image_size: int
) -> Tensor:
    """The mean of the embedding [B, C, side, side] over the pixels of each mask: float [M, C].

    A mask without a pixel at the resolution of the embedding gets the vector at its point. The masks, uint8
    [M, side, side], are in the order of the images; `points` are foreground pixels in the padded square.
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
