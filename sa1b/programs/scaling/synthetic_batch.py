"""A micro-batch without a dataset: images of a pattern, and rectangles as masks.

It has the shapes and dtypes of the loader's batches, and each image has the largest number of masks. A step
therefore takes as long as a step with real images that have at least this number of masks.
"""

from dataclasses import replace

import numpy as np
import torch

from sa1b.masks import geometry
from sa1b.masks.dense import runs_of
from sa1b.stream.batch import Batch, collate
from sa1b.stream.sample import SampleMasks
from sa1b.stream.transform import Frame


def synthetic_batch(
    images: int, masks: int, image_size: int, target_size: int, first: int, device: torch.device
) -> Batch:
    """A micro-batch on a device: images that fill the padded square, each with `masks` masks.

    `target_size` is the size of the dense masks; another position `first` has other images.
    """
    across = torch.arange(image_size)
    pattern = (across[:, None] * 7 + across[None] * 13)[..., None] + torch.tensor([0, 85, 170])
    pixels = torch.stack([(pattern + 31 * (first + number)) % 256 for number in range(images)])
    samples = [_rectangles(first + number, masks, image_size) for number in range(images)]
    positions = list(range(first, first + images))
    batch = collate(pixels.to(torch.uint8), samples, positions, [True] * images, position=first)
    batch = batch.to(device)
    return replace(batch, dense=batch.masks.dense(target_size))


def _rectangles(position: int, count: int, size: int) -> SampleMasks:
    number = np.arange(count) + position
    side = np.maximum(size // 8, size // 2 - number * 5 % (size // 2))
    left, top = number * 37 % (size - side + 1), number * 61 % (size - side + 1)
    along = np.arange(size)
    rows = (along >= top[:, None]) & (along < (top + side)[:, None])
    columns = (along >= left[:, None]) & (along < (left + side)[:, None])
    runs = runs_of(rows[:, :, None] & columns[:, None, :])
    corner = np.stack([left, top], 1).astype(np.float32)
    far = (side[:, None] - 1).astype(np.float32)
    ones = np.ones(count, np.float32)
    return SampleMasks(
        image_id=position,
        frame=Frame.whole_image(size, size, size),
        runs=runs,
        boxes=np.concatenate([corner, corner + far], 1),
        points=corner + np.floor(far / 2),
        areas=geometry.area(runs),
        predicted_iou=ones,
        stability_score=ones,
        mask_ids=np.full(count, -1),
        mask_index=np.arange(count),
    )
