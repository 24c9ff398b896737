"""Shards for the training of EfficientViT-SAM, in place of its `OnlineDataset` and the extracted files."""

import random
from collections.abc import Callable
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from sa1b.arguments import BadType, of_type, whole_number
from sa1b.integrations import ViewOptions, ViewSamples, position_of, takes_view
from sa1b.masks.raster import rasterize


class OnlineShards:
    """The images of a view by position: EfficientViT's `OnlineDataset`, whose arguments it takes.

    Args:
        root: folder that `sa1b reshard` made, or its URL. Images must have a mask.
        masks_at_once: number of masks that one call of `transform` takes, to need less memory. All calls for
            a sample start with the same random state. None: all, for a transform that compares masks.
        options: `view`, the name of a view, and arguments of `sa1b.open`.
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
        self.train, self.transform = of_type("train", train, bool), transform or dict
        self.num_masks = whole_number("num_masks", num_masks, 1)
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
        annotations, chosen = sample.annotations, kept[self._chosen(len(kept))]
        image = torch.from_numpy(sample.image).float().permute(2, 0, 1)
        state, parts = random.getstate(), []
        for first in range(0, len(chosen), self.at_once):
            some = chosen[first : first + self.at_once]
            of_masks = {
                "masks": rasterize(annotations.runs(some)),
                "points": annotations.point_coords[some],
                "bboxs": annotations.bbox[some],
            }
            made = {"image": image} | {name: torch.from_numpy(of_masks[name]).float() for name in of_masks}
            random.setstate(state)
            parts.append(
                self.transform(made | {"shape": torch.tensor([annotations.height, annotations.width])})
            )
        joined = {name: torch.cat([part[name] for part in parts]) for name in ("masks", "points", "bboxs")}
        return parts[0] if len(parts) == 1 else parts[0] | joined

    def _chosen(self, count: int) -> Any:
        """The masks of a sample among `count`, with the random numbers that EfficientViT takes."""
        repeats, number = divmod(self.num_masks, count)
        once = np.random.choice(count, number, replace=False) if self.train else np.arange(number)
        return np.concatenate([np.tile(np.arange(count), repeats), once])
