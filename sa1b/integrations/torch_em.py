"""Shards for torch_em and micro-sam: images with an image of instance labels.

    from torch_em.segmentation import get_data_loader
    from micro_sam.training import identity, train_sam

    train = image_collection("shards", (512, 512), view="train", raw_transform=identity)
    train_sam("mine", "vit_b", get_data_loader(train, batch_size=2, shuffle=True), ...)

A pixel belongs to one instance. Of masks that overlap, the smaller one is on top, so that parts and what lies
on a large mask stay visible.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.arguments import BadValue, whole_number
from sa1b.integrations import ViewOptions, ViewSamples, module_of
from sa1b.masks.raster import painted


class Images:
    """The images of a view by position, RGB uint8 [height, width, 3]."""

    def __init__(self, samples: ViewSamples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: int) -> npt.NDArray[Any]:
        return self.samples.sample(position).image


class Labels(Images):
    """Their instance labels, int32 [height, width]: 0 is background, others are masks by descending area."""

    def __getitem__(self, position: int) -> npt.NDArray[Any]:
        sample = self.samples.sample(position)
        annotations, kept = sample.annotations, self.samples.kept(sample)
        order = np.argsort(-annotations.area[kept], kind="stable")
        return np.ascontiguousarray(painted(annotations.runs(kept[order]))[0])


def image_collection(root: str, patch_shape: tuple[int, int] | None, **options: Any) -> Any:
    """The `ImageCollectionDataset` of torch_em that reads a view: patches with random positions, as of files.

    Args:
        root: folder that `sa1b reshard` made, or its URL. Images have the size of their masks.
        patch_shape: height and width of a patch in pixels; None: the image.
        options: `view`, the name of a view, whose condition on masks applies; `layers`, `storage_options`,
            `cache` and `cache_bytes` of `sa1b.open`; and arguments of torch_em's class, such as
            `raw_transform`, `label_transform`, `n_samples` or `sampler`.

    Returns:
        Items are the image, float32 [3, H, W], and the labels, float32 [1, H, W], unless the transforms or
        `label_dtype` make others of them.
    """
    if patch_shape is not None:
        sides = patch_shape if isinstance(patch_shape, Sequence) else ()
        if len(sides) != 2 or isinstance(sides, str):
            raise BadValue(f"patch_shape={patch_shape!r}: must be height and width, or None for the image")
        patch_shape = (whole_number("patch_shape", sides[0], 1), whole_number("patch_shape", sides[1], 1))
    view_options = {name: options.pop(name) for name in ViewOptions.__annotations__ if name in options}
    samples = ViewSamples(root, **view_options)
    dataset = module_of("torch_em.data", "torch_em").ImageCollectionDataset(
        Images(samples), Labels(samples), patch_shape, **options
    )
    dataset.have_tensor_data = True  # its images are arrays already, as those of its TensorDataset
    return dataset
