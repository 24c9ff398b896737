"""Shards for the training of EfficientViT-SAM, in place of its `OnlineDataset` and the extracted files."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sa1b.integrations import ViewSamples
from sa1b.masks.raster import rasterize


class OnlineShards:
    """EfficientViT's `OnlineDataset` of a view: see docs/export.md, "EfficientViT-SAM without an export"."""

    def __init__(
        self,
        root: str,
        train: bool = True,
        num_masks: int = 64,
        transform: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
        *,
        masks_at_once: int | None = None,
        **options: Any,
    ) -> None:
        self.samples, self.train, self.transform = ViewSamples(root, **options), train, transform or dict
        self.num_masks, self.at_once = num_masks, masks_at_once or num_masks
        positions, first = range(len(self.samples)), int(len(self.samples) * 0.99)
        self.positions = positions[:first] if train else positions[first:]

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """image float32 [3, H, W], masks float32 [K, H, W] of 0 and 1, points [K, 2] and bboxs [K, 4] (x, y,
        width, height) in pixels of the source image, shape int64 [2], its height and width; transformed.
        """
        sample, kept = self.samples.with_masks(self.positions[index], smallest=0)
        annotations, (repeats, number) = sample.annotations, divmod(self.num_masks, len(kept))
        once = np.random.choice(len(kept), number, replace=False) if self.train else np.arange(number)
        chosen = np.concatenate([np.tile(kept, repeats), kept[once]])
        image = torch.from_numpy(sample.image).float().permute(2, 0, 1)
        shape, state, parts = (annotations.height, annotations.width), random.getstate(), []
        for some in np.split(chosen, range(self.at_once, len(chosen), self.at_once)):
            masks, points = rasterize(annotations.runs(some)), annotations.point_coords[some]
            of_masks = {"masks": masks, "points": points, "bboxs": annotations.bbox[some]}
            made = {"image": image} | {name: torch.from_numpy(of_masks[name]).float() for name in of_masks}
            random.setstate(state)
            parts.append(self.transform(made | {"shape": torch.tensor(shape)}))
        joined = {name: torch.cat([part[name] for part in parts]) for name in ("masks", "points", "bboxs")}
        return parts[0] if len(parts) == 1 else parts[0] | joined
