"""Shards for torch_em and micro-sam: images with an image of instance labels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sa1b.arguments import BadValue, whole_number
from sa1b.integrations import ViewOptions, ViewSamples, module_of
from sa1b.masks.raster import painted


def image_collection(root: str, patch_shape: tuple[int, int] | None, **options: Any) -> Any:
    """The `ImageCollectionDataset` of torch_em that reads a view. Items are the image, float32 [3, H, W], and
    the instance labels, float32 [1, H, W], 0 for background, unless transforms or `label_dtype` change them.

    Args:
        root: folder that `sa1b reshard` made, or its URL. Images have the size of their masks.
        patch_shape: height and width of a patch in pixels, at a random position; None: the image.
        options: `view`, the name of a view, and arguments of `sa1b.open` and of torch_em's class.
    """
    if patch_shape is not None:
        if not isinstance(patch_shape, Sequence) or len(patch_shape) != 2:
            raise BadValue(f"patch_shape={patch_shape!r}: must be height and width, or None for the image")
        height, width = (whole_number("patch_shape", side, 1) for side in patch_shape)
        patch_shape = height, width
    own = {name: options.pop(name) for name in ViewOptions.__annotations__ if name in options}
    samples = ViewSamples(root, **own)  # one, so that image and labels read a sample once
    items = _Items(samples, _image), _Items(samples, _labels)
    dataset = module_of("torch_em.data", "torch_em").ImageCollectionDataset(*items, patch_shape, **options)
    dataset.have_tensor_data = True  # its images are arrays already, as those of its TensorDataset
    return dataset


@dataclass
class _Items:
    samples: ViewSamples
    read: Callable[[ViewSamples, int], Any]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: int) -> Any:
        return self.read(self.samples, position)


def _image(samples: ViewSamples, position: int) -> Any:
    return samples.sample(position).image


def _labels(samples: ViewSamples, position: int) -> Any:
    sample = samples.sample(position)
    kept = samples.kept(sample)
    order = np.argsort(-sample.annotations.area[kept], kind="stable")  # smaller masks are on top
    return np.ascontiguousarray(painted(sample.annotations.runs(kept[order]))[0])
