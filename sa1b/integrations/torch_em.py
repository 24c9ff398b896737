"""Shards for torch_em and micro-sam: images with an image of instance labels."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from sa1b.integrations import ViewSamples
from sa1b.masks.raster import painted

_OWN = ("view", "layers", "storage_options", "cache", "cache_bytes")


def image_collection(root: str, patch_shape: tuple[int, int] | None, **options: Any) -> Any:
    """The `ImageCollectionDataset` of torch_em that reads a view: see docs/export.md, "micro-sam and
    torch_em". Items are the image, float32 [3, H, W], and the instance labels, float32 [1, H, W].
    """
    own = {name: options.pop(name) for name in _OWN if name in options}
    samples = ViewSamples(root, **own)  # one, so that image and labels read a sample once
    items = _Items(samples, is_label=False), _Items(samples, is_label=True)
    dataset = import_module("torch_em.data").ImageCollectionDataset(*items, patch_shape, **options)
    dataset.have_tensor_data = True  # its images are arrays already, as those of its TensorDataset
    return dataset


@dataclass
class _Items:
    samples: ViewSamples
    is_label: bool

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: int) -> Any:
        sample = self.samples.sample(position)
        if not self.is_label:
            return sample.image
        kept = self.samples.kept(sample)
        order = np.argsort(-sample.annotations.area[kept], kind="stable")  # smaller masks are on top
        return np.ascontiguousarray(painted(sample.annotations.runs(kept[order]))[0])
