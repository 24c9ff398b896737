"""Masks to pixels: times of the kernels beside `Tensor.zero_()` of the same buffer.

16 images with 64 masks each, at 1024 and 256 pixels. On a CPU, plain torch takes the place of the kernels.
"""

from collections.abc import Callable
from itertools import product
from types import ModuleType

import torch
from torch import Tensor

import sa1b
from benchmarks.gpu import timing
from benchmarks.gpu.material import roots
from benchmarks.gpu.part import Record, Setting
from sa1b.masks import raster_torch
from sa1b.stream.batch import Batch
from sa1b.stream.ragged import RaggedMasks

IMAGE_SIZE = 1024
TARGET = 1.5  # times zero_(), uint8 at 1024


class Masks:
    """Masks of several images on the device.

    Args:
        masks: masks of a batch on the CPU.

    Attributes:
        count: number of masks.
    """

    def __init__(self, masks: RaggedMasks, device: str) -> None:
        self.device, self.count = device, len(masks)
        sizes = masks.sizes.to(device).T.contiguous()
        self._arguments = (masks.runs.to(device), masks.offsets.to(device), *sizes, masks.image_size)
        self._taken = masks.taken.to(device)

    def buffers(self, size: int, dtype: torch.dtype, least_bytes: int = 2**30) -> list[Tensor]:
        """More buffers than fit into any level of cache."""
        bytes_each = self.count * size**2 * dtype.itemsize
        number = max(2, min(timing.CALLS, least_bytes // bytes_each))
        shape = (self.count, size, size)
        return [torch.full(shape, 1, dtype=dtype, device=self.device) for _ in range(number)]

    def call(self, back_end: ModuleType, size: int) -> Callable[[Tensor | None], Tensor]:
        """A function that rasterises the masks into a buffer."""
        return lambda out: back_end.rasterize_frame(*self._arguments, size, taken=self._taken, out=out)


def batch_of(setting: Setting) -> Batch:
    """The first images of the material with their masks, on the CPU."""
    images, masks, size = setting.pick((16, 64, 1024), (2, 4, 64))
    stream = sa1b.Stream(
        roots(setting)["original"], global_batch=images, masks=masks, image_size=size, epochs=None
    )
    batch: Batch = next(iter(stream))
    stream.close()
    return batch


def work(setting: Setting, record: Record) -> None:
    """Times of 16 x 64 masks at 1024 and 256 pixels, each beside zero_(), and equal bits."""
    sizes = setting.pick((1024, 256), (64, 16))
    back_end, least = kernels(setting), setting.pick(2**30, 1)
    replays = setting.pick(timing.REPLAYS, 1)
    dtypes = setting.pick((torch.uint8, torch.bfloat16, torch.float32), (torch.uint8,))
    batch = batch_of(setting)
    masks = Masks(batch.masks, setting.device)
    one = masks.buffers(1, torch.uint8, least)
    record.figure(
        "measure_masks and one pixel a mask", timing.in_graph(masks.call(back_end, 1), one, replays), "ms"
    )
    for size, dtype in product(sizes, dtypes):
        label = f"{size} {str(dtype)[6:]}"
        with record.attempt(label):
            buffers = masks.buffers(size, dtype, least)
            cleared = timing.in_graph(torch.Tensor.zero_, buffers, replays)
            record.figure(f"{label} zero_()", cleared, "ms")
            record.figure(f"{label} zero_(), bandwidth", buffers[0].nbytes / cleared / 1e6, "GB/s")
            expected = masks.call(raster_torch, size)(None)
            took = timing.in_graph(masks.call(back_end, size), buffers, replays)
            calls = timing.each(masks.call(back_end, size), buffers, replays)
            got = masks.call(back_end, size)(buffers[0].fill_(1))
            record.check(f"{label}: the bits of plain torch", torch.equal(got, expected.to(dtype)))
            limit = TARGET if (size, dtype) == (1024, torch.uint8) else None
            record.figure(label, took, "ms")
            record.figure(f"{label}, times zero_()", took / cleared, "x", at_most=limit)
            record.figure(f"{label}, a call without a graph", calls, "ms")
            del buffers, expected, got


def kernels(setting: Setting) -> ModuleType:
    """The back end of the device."""
    if not setting.on_gpu:
        return raster_torch
    from sa1b.masks import raster_triton

    return raster_triton
