"""The targets of a micro-batch for training and evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sa1b.hashing import Purpose
from sa1b.sam.random_values import random_words


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """The targets of the M masks of a micro-batch of B images.

    Attributes:
        masks: uint8 [M, R, R], 1 is foreground; the padded square in R x R pixels, R at least
            image_size / 4.
        boxes: float32 [M, 4], x0, y0, x1, y1 in the padded square: the centres of the first and last column
            and row; see sa1b.masks.grid.
        points: float32 [M, 2], x and y in the padded square, the centre of a foreground pixel.
        image: int64 [M], index in the micro-batch of each mask's image.
        weights: float32 [M], weight of each mask; 0 for padding, and for masks without a pixel at R.
        keys: int64 [M], a hash for each mask, from which its random values are computed.
        sizes: int64 [B, 2], rows and columns of each image in the padded square.
        counts: number of masks of each image, B numbers on the host; `image` must be ascending. The masks of
            an image then share products with its embedding. None: each mask gets a copy of the embedding.
    """

    masks: Tensor
    boxes: Tensor
    points: Tensor
    image: Tensor
    weights: Tensor
    keys: Tensor
    sizes: Tensor
    counts: Sequence[int] | None = None


class MaskIndex(Protocol):
    """The image of each mask of a batch; see `Samples`."""

    @property
    def image(self) -> Tensor: ...
    @property
    def image_size(self) -> int: ...
    @property
    def counts(self) -> Sequence[int] | None: ...


class Samples(Protocol):
    """A micro-batch of B images and M masks as `inputs_of` reads it: `sa1b.stream.batch.Batch`."""

    @property
    def images(self) -> Tensor: ...
    @property
    def masks(self) -> MaskIndex: ...
    @property
    def dense(self) -> Tensor | None: ...
    @property
    def boxes(self) -> Tensor: ...
    @property
    def points(self) -> Tensor: ...
    @property
    def mask_index(self) -> Tensor: ...
    @property
    def framed_sizes(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def valid(self) -> Tensor: ...


def inputs_of(batch: Samples, seed: int) -> tuple[Tensor, Targets, Tensor]:
    """The arguments of `Interactive.forward`; keys are hashes of seed, positions and mask indices.

    A mask counts if its image is valid and it has a pixel at the size of the dense masks.
    """
    assert batch.dense is not None, "the loader was not asked for dense masks"
    image, positions = batch.masks.image, batch.positions
    key = torch.full((), seed, dtype=torch.int64, device=positions.device)
    targets = Targets(
        masks=batch.dense,
        boxes=batch.boxes,
        points=batch.points,
        image=image,
        weights=(batch.valid[image] & batch.dense.flatten(1).any(dim=1)).float(),
        # The index is used, not the id, because all masks without an id have the id -1.
        keys=random_words(key, int(Purpose.PROMPT), positions[image], batch.mask_index),
        sizes=batch.framed_sizes,
        counts=batch.masks.counts,
    )
    return batch.images, targets, random_words(key, int(Purpose.VISIT), positions)


def with_equal_counts(targets: Targets) -> Targets:
    """Targets with as many masks for each image as the image with most has; M must be positive.

    An image is padded with copies of its last mask with the weight 0, an image without masks with copies of a
    mask of another image. The host does not wait for the device.
    """
    assert targets.counts is not None
    most, images = max(targets.counts), len(targets.counts)
    if min(targets.counts) == most:
        return targets
    numbers = torch.arange(images, device=targets.image.device)
    begins = torch.searchsorted(targets.image, numbers)
    ends = torch.searchsorted(targets.image, numbers, right=True)
    chosen = begins[:, None] + torch.arange(most, device=targets.image.device)
    present = (chosen < ends[:, None]).flatten()
    source = torch.minimum(chosen, ends[:, None] - 1).clamp(min=0).flatten()
    return replace(
        targets,
        masks=targets.masks[source],
        boxes=targets.boxes[source],
        points=targets.points[source],
        image=numbers[:, None].expand(-1, most).flatten(),
        weights=targets.weights[source] * present,
        keys=targets.keys[source],
        counts=(most,) * images,
    )
