"""Several random crops of each image from one decode, for self-supervised learning.

    from sa1b.stream.crops import MultiCrop

    crops = MultiCrop()
    stream = sa1b.Stream("images", masks=0, image_size=crops.image_size, transform=crops, global_batch=64)
    for batch in sa1b.Loader(stream, device="cuda"):
        large, small = crops.split(batch.images)  # uint8 [B, 2, 3, 224, 224] and [B, 6, 3, 96, 96]

A file is decoded once, scaled down by the decoder to the smallest size that no crop enlarges. All crops of an
image lie in its square, so that they travel to the device as one tensor.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from sa1b.arguments import BadValue
from sa1b.stream.transform import Crop, Frame, RandomCrop, Visit


@dataclass(frozen=True, slots=True)
class CropGroup:
    """Crops of one size.

    Args:
        count: number of crops of each image.
        size: pixels of each side.
        area: as of `RandomCrop`.
        aspect: as of `RandomCrop`.
        flip: probability that a crop is mirrored.
    """

    count: int
    size: int
    area: tuple[float, float] = (0.25, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5


@dataclass(frozen=True, slots=True)
class MultiCrop:
    """Several random crops of each image, a transform of a stream with masks=0 and the decoder "cpu".

    Args:
        groups: by default those of DINOv2: two crops of 32 to 100 % of the area, and six of 5 to 32 %.
    """

    groups: tuple[CropGroup, ...] = (CropGroup(2, 224, (0.32, 1.0)), CropGroup(6, 96, (0.05, 0.32)))

    @property
    def image_size(self) -> int:
        """Pixels of the square that all crops fit into."""
        return _sheet(self.groups)[0]

    def __call__(self, frame: Frame, visit: Visit) -> Frame:
        side, places = _sheet(self.groups)
        if frame.image_size != side:
            raise BadValue(f"image_size={frame.image_size} must be {side}, the image_size of {self!r}")
        values = visit.uniforms(5 * len(places)).reshape(-1, 5).tolist()
        crops = []
        for (number, row, column), (*chosen, mirrored) in zip(places, values, strict=True):
            group = self.groups[number]
            x, y, width, height = RandomCrop(group.area, group.aspect).cropped(frame, *chosen).window
            # Corners of blocks of 8 x 8 pixels are corners of pixels at each scale of the decoder, from which
            # a window is resampled in a third of the time.
            window = x - x % 8, y - y % 8, width, height
            crops.append(Crop(window, row, column, group.size, (mirrored < group.flip) != frame.flip))
        return replace(frame, side=side, crops=tuple(crops))

    def split(self, images: Tensor) -> list[Tensor]:
        """The crops of a batch by group: uint8 [B, count, 3, size, size] for `batch.images`."""
        groups: list[list[Tensor]] = [[] for _ in self.groups]
        for group, row, column in _sheet(self.groups)[1]:
            size = self.groups[group].size
            groups[group].append(images[:, :, row : row + size, column : column + size])
        return [torch.stack(crops, 1) for crops in groups]


@cache
def _sheet(groups: tuple[CropGroup, ...]) -> tuple[int, list[tuple[int, int, int]]]:
    """The side of the smallest square for rows of crops, and group, row and column of each crop."""
    sizes = [(group.size, i) for i, group in enumerate(groups) for _ in range(group.count)]
    sizes.sort(key=lambda it: -it[0])
    side = sizes[0][0]
    while True:
        places, row, column, height = [], 0, 0, sizes[0][0]
        for size, number in sizes:
            if column + size > side:
                row, column, height = row + height, 0, size
            places.append((number, row, column))
            column += size
        if row + height <= side:
            return side, places
        side += 1
