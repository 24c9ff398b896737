"""The masks of a micro-batch: ragged runs, which become pixels on demand, and the padded form of a batch."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sa1b.masks import raster, raster_torch
from sa1b.masks.proved import raster_in_use
from sa1b.masks.runs import Runs, check_size

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Tensors:
    """A dataclass of tensors that are moved together, also those in nested dataclasses of this kind."""

    def map_tensors(self, function: Callable[[str, Tensor], Tensor]) -> Self:
        """A copy in which function(name, tensor) replaces each tensor, also in nested dataclasses."""
        changed: dict[str, Any] = {}
        for member in fields(self):
            value = getattr(self, member.name)
            if isinstance(value, Tensor):
                changed[member.name] = function(member.name, value)
            elif isinstance(value, Tensors):
                changed[member.name] = value.map_tensors(function)
        return replace(self, **changed)

    def pin_memory(self) -> Self:
        """A copy in pinned memory, from which copies to a GPU need not wait."""
        return self.map_tensors(lambda name, tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell CUDA's allocator that `stream` uses these tensors too."""

        def record(name: str, tensor: Tensor) -> Tensor:
            tensor.record_stream(stream)
            return tensor

        self.map_tensors(record)

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Self:
        """A copy on another device; tensors that are already there are not copied. Copies to the CPU are
        always complete on return: nothing else would keep the caller from reading them too early.
        """
        non_blocking &= torch.device(device).type != "cpu"
        return self.map_tensors(lambda name, tensor: tensor.to(device, non_blocking=non_blocking))


def fresh(shape: tuple[int, ...], device: torch.device = _CPU) -> Tensor:
    """New memory for pixels, uint8, not initialised."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=torch.uint8, device=device)
    # By numpy in huge pages: the first write to 1024 x 1024 pixels takes 0.11 ms instead of 0.32. Shaped by
    # torch: numpy gives an array without elements other strides.
    return torch.from_numpy(np.empty(int(np.prod(shape, dtype=np.int64)), np.uint8)).view(shape)


@dataclass(frozen=True, slots=True, eq=False)
class RaggedMasks(Tensors):
    """The masks of a micro-batch as runs, M masks of B images.

    Attributes:
        runs: int32 [R], column-major at source resolution, background first, mirrored where the image is.
        offsets: int64 [M + 1] into runs.
        image: int64 [M], the image in the batch that each mask belongs to, ascending.
        counts: number of masks of each image, as integers on the host: reading them does not wait for the
            device.
        sizes: int64 [M, 2], height and width of the mask's source image, or of its window.
        taken: int64 [M, 2], rows and columns of the padded square that the image fills.
        image_size: pixels of the padded square.
    """

    runs: Tensor
    offsets: Tensor
    image: Tensor
    counts: tuple[int, ...]
    sizes: Tensor
    taken: Tensor
    image_size: int

    def __repr__(self) -> str:
        return (
            f"RaggedMasks({len(self):,} masks of {len(self.counts)} images, {len(self.runs):,} runs, "
            f"frame of {self.image_size} pixels, {self.runs.device})"
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def dense(self, size: int | None = None, *, out: Tensor | None = None) -> Tensor:
        """Pixels in the padded square at `size` (image_size if None): uint8 [M, size, size] on this device.

        The result is the same on every device, bit for bit: see sa1b.masks.grid. On a CUDA device nothing is
        copied, and the host does not wait where the Triton kernels are proved (sa1b.masks.proved).

        Raises:
            sa1b.masks.SizeError: `size` is not a valid size of a square in pixels.
        """
        size = self.image_size if size is None else check_size(size, size)[0]
        device = self.runs.device
        if device.type == "cuda":
            masks = (self.runs, self.offsets, *self.sizes.unbind(1))
            # Triton's kernels where they are proved, else plain torch. Results are identical.
            back_end = import_module("sa1b.masks.raster_triton") if raster_in_use() else raster_torch
            pixels: Tensor = back_end.rasterize_frame(
                *masks, self.image_size, size, taken=self.taken, out=out
            )
            return pixels
        if device.type != "cpu":  # no kernels there: rasterised on the CPU
            there = self.to("cpu").dense(size).to(device)
            return there if out is None else out.copy_(there)
        if out is None:
            out = fresh((len(self), size, size))
        for job in self.raster_jobs(size, out):
            job()
        return out

    def empty(self, size: int | None = None) -> Tensor:
        """Which masks have no pixel in the padded square at `size` (image_size if None): bool [M].

        `dense` may read none of the source pixels of a small mask. The mask stays in the batch, with its
        point, box and scores, as a target without foreground. Leave it out of the loss, or exclude such masks
        with `Stream(min_pixels=)`. The result is that of the pixels, which are made for it: `dense(size)`.

        Raises:
            sa1b.masks.SizeError: `size` is not a valid size of a square in pixels.
        """
        return self.dense(size).flatten(1).any(1) == 0

    def raster_jobs(
        self, size: int, out: Tensor, boxes: npt.NDArray[np.int64] | None = None
    ) -> list[Callable[[], object]]:
        """The work of `dense` on a CPU as one call per image, which fills its masks in `out`, uint8 [M, size,
        size]; `boxes`, int64 [M, 4]: see `sa1b.masks.raster.rasterize_frame`.
        """
        jobs: list[Callable[[], object]] = []
        for start, stop in pairwise(accumulate(self.counts, initial=0)):
            if start < stop:
                offsets = self.offsets[start : stop + 1].numpy()
                runs = self.runs[offsets[0] : offsets[-1]].numpy().view(np.uint32)
                of_image = Runs(runs, offsets - offsets[0], *self.sizes[start].tolist())
                taken = tuple(self.taken[start].tolist())
                job = partial(raster.rasterize_frame, of_image, self.image_size, size, taken=taken)
                known = None if boxes is None else boxes[start:stop]
                jobs.append(partial(job, out=out[start:stop].numpy(), boxes=known))
        return jobs


@dataclass(frozen=True, slots=True, eq=False)
class PaddedMasks(Tensors):
    """The masks of a batch with one row for each image: B images of N masks, N of the image with most.

    Attributes:
        masks: uint8 [B, N, size, size], pixels in the padded square.
        points: float32 [B, N, 2], as `Batch.points`.
        boxes: float32 [B, N, 4], as `Batch.boxes`.
        index: int64 [B, N], the mask's index among the M masks of the batch; -1: there is none, and masks,
            points and boxes are 0.
        valid: bool [B, N], whether there is a mask, and its image is valid (`Batch.valid`).
    """

    masks: Tensor
    points: Tensor
    boxes: Tensor
    index: Tensor
    valid: Tensor
