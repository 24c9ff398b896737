"""Shards for the training of EfficientViT-SAM, in place of its `OnlineDataset` and the extracted files.

Before the lines of `applications/efficientvit_sam/train_efficientvit_sam_model.py`:

    from functools import partial
    from efficientvit.samcore.data_provider import sam
    from sa1b.integrations.efficientvit import OnlineShards

    sam.OnlineDataset = partial(OnlineShards, view="train", masks_at_once=16)

Then `data_provider.root` names the dataset directory or its URL. With the same random state, samples equal
those of `OnlineDataset` on the exported files, bit for bit.
"""

import random
from collections.abc import Callable
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from sa1b.arguments import BadType, of_type, whole_number
from sa1b.integrations import ViewOptions, ViewSamples, position_of, takes_view
from sa1b.masks.raster import rasterize
from sa1b.shards.sample import Sample

_OF_MASKS = ("masks", "points", "bboxs")


class OnlineShards:
    """The images of a view by position: the contract of EfficientViT's `OnlineDataset`.

    Args:
        root: folder that `sa1b reshard` made, or its URL. Images must have a mask.
        train: the first 99 % of the images, with masks chosen by numpy's global generator; False: the rest,
            with the first masks.
        num_masks: number of masks of a sample, repeated if an image has fewer.
        transform: takes and returns a sample, such as those of `SAMDataProvider`.
        masks_at_once: number of masks that one call of `transform` takes, to need less memory. All calls for
            a sample start with the same random state. None: all masks in one call, for a transform whose
            result for a mask depends on other masks.
        options: `view`, the name of a view, whose condition on masks applies; `layers`, `storage_options`,
            `cache` and `cache_bytes` of `sa1b.open`.
    """

    @takes_view
    def __init__(
        self,
        root: str,
        train: bool = True,
        num_masks: int = 64,
        transform: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
        *,
        masks_at_once: int | None = None,
        **options: Unpack[ViewOptions],
    ) -> None:
        if transform is not None and not callable(transform):
            raise BadType(f"transform={transform!r}: not a function; pass one that takes a sample, or None")
        self.samples = ViewSamples(root, **options)
        self.train = of_type("train", train, bool)
        self.num_masks = whole_number("num_masks", num_masks, 1)
        self.transform = transform or dict
        at_once = num_masks if masks_at_once is None else masks_at_once
        self.at_once = whole_number("masks_at_once", at_once, 1)
        first = int(len(self.samples) * 0.99)
        self.positions = range(first) if train else range(first, len(self.samples))

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """image float32 [3, H, W], masks float32 [K, H, W] of 0 and 1, points [K, 2] and bboxs [K, 4] (x, y,
        width, height) in pixels of the source image, shape int64 [2], its height and width; transformed.
        """
        sample, kept = self.samples.with_masks(self.positions[position_of(index, len(self))], smallest=0)
        chosen = kept[self._chosen(len(kept))]
        image = torch.from_numpy(sample.image).float().permute(2, 0, 1)
        state, parts = random.getstate(), []
        for first in range(0, len(chosen), self.at_once):
            random.setstate(state)
            parts.append(self.transform(self._arguments(sample, chosen[first : first + self.at_once], image)))
        joined = {name: torch.cat([part[name] for part in parts]) for name in _OF_MASKS}
        return parts[0] if len(parts) == 1 else parts[0] | joined

    def _arguments(self, sample: Sample, chosen: Any, image: Tensor) -> dict[str, Tensor]:
        annotations = sample.annotations
        return {
            "image": image,
            "masks": torch.from_numpy(rasterize(annotations.runs(chosen))).float(),
            "points": torch.from_numpy(annotations.point_coords[chosen]).float(),
            "bboxs": torch.from_numpy(annotations.bbox[chosen]).float(),
            "shape": torch.tensor([annotations.height, annotations.width]),
        }

    def _chosen(self, count: int) -> Any:
        """The masks of a sample among `count`, with the random numbers that EfficientViT takes."""
        number = self.num_masks if count > self.num_masks else self.num_masks % count
        once = np.random.choice(count, number, replace=False) if self.train else np.arange(number)
        repeats = 0 if count > self.num_masks else self.num_masks // count
        return np.concatenate([np.tile(np.arange(count), repeats), once])
