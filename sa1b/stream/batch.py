"""A micro-batch as tensors: images as uint8, masks as ragged runs that become pixels on demand.

torch pickles the batches of a DataLoader's worker process in a background thread: tensors go into shared
memory, and their file descriptors through a Unix socket in the temporary directory. If that fails, Python
prints a traceback in the worker and drops the batch, and the training process waits for it without end. It
fails where TMPDIR is too long for the path of a socket (107 bytes), where `ulimit -n` is low and where
/dev/shm is full. With `send_errors` the error takes the place of the batch and is raised in the training
process.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sa1b.errors import Sa1bError
from sa1b.masks import raster, raster_torch
from sa1b.masks.runs import Runs
from sa1b.stream.buffers import fresh
from sa1b.stream.sample import SampleMasks


@dataclass(frozen=True, slots=True, eq=False)
class _Tensors:
    """A record of tensors that travels as one."""

    def _map(self, function: Any) -> Self:
        changed = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                changed[field.name] = function(field.name, value)
            elif isinstance(value, _Tensors):
                changed[field.name] = value._map(function)
        return replace(self, **changed)

    def pin_memory(self) -> Self:
        """A copy in pinned memory, from which copies to a GPU need not wait."""
        return self._map(lambda name, tensor: tensor.pin_memory())

    def pinned_but_images(self) -> Self:
        """Like pin_memory, for images that lie in pinned memory already."""
        return self._map(lambda name, tensor: tensor if name == "images" else tensor.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that `stream` uses these tensors too."""
        self._map(lambda name, tensor: tensor if name == "sizes" else _recorded(tensor, stream))

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Self:
        """On another device. Source sizes stay on the CPU, where rasters read them without waiting."""
        return self._map(
            lambda name, tensor: tensor if name == "sizes" else tensor.to(device, non_blocking=non_blocking)
        )


@dataclass(frozen=True, slots=True, eq=False)
class RaggedMasks(_Tensors):
    """The masks of a micro-batch as runs, M masks of B images.

    Attributes:
        runs: int32 [R], column-major at source resolution, background first, mirrored where the image is.
        offsets: int64 [M + 1] into runs.
        image: int64 [M], the image in the batch that each mask belongs to, ascending.
        sizes: int64 [M, 2], height and width of that image's source; always on the CPU.
        image_size: pixels of the padded square.
    """

    runs: Tensor
    offsets: Tensor
    image: Tensor
    sizes: Tensor
    image_size: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def dense(self, size: int | None = None, *, out: Tensor | None = None) -> Tensor:
        """Pixels in the padded square at `size` (image_size if None): uint8 [M, size, size] on this device.

        Bit for bit the same on every device: see sa1b.masks.grid.
        """
        size = size or self.image_size
        if self.runs.device.type != "cpu":
            pixels: Tensor = _back_end().rasterize_frame(
                self.runs, self.offsets, self.sizes[:, 0], self.sizes[:, 1], self.image_size, size, out=out
            )
            return pixels
        if out is None:
            out = fresh((len(self), size, size))
        for draw in self.drawings(size, out):
            draw()
        return out

    def drawings(
        self, size: int, out: Tensor, boxes: npt.NDArray[np.int64] | None = None
    ) -> list[Callable[[], object]]:
        """What `dense` does on a CPU, image by image: calls that threads may share.

        Args:
            out: uint8 [M, size, size] on the CPU; each call fills the masks of its image.
            boxes: int64 [M, 4], where `out` is not 0; see `sa1b.masks.raster.rasterize_frame`.
        """
        # The compiled raster takes the masks of one image at a time; they lie together.
        ends = torch.cumsum(torch.bincount(self.image), 0).tolist()
        found: list[Callable[[], object]] = []
        for start, stop in pairwise([0, *ends]):
            if start < stop:
                height, width = self.sizes[start].tolist()
                offsets = self.offsets[start : stop + 1].numpy()
                runs = self.runs[offsets[0] : offsets[-1]].numpy().view(np.uint32)
                own = Runs(runs, offsets - offsets[0], height, width)
                draw = partial(raster.rasterize_frame, own, self.image_size, size)
                known = None if boxes is None else boxes[start:stop]
                found.append(partial(draw, out=out[start:stop].numpy(), boxes=known))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Batch(_Tensors):
    """One micro-batch of one rank: B images and their M masks.

    Attributes:
        images: uint8 [B, 3, S, S], RGB, channels last in memory; padded right and below with 0.
        masks: the masks as runs.
        boxes: float32 [M, 4], x0, y0, x1, y1 in the padded square: the centres of the mask's first and last
            column and row; see sa1b.masks.grid.
        points: float32 [M, 2], x, y in the padded square: the centre of a uniform foreground pixel.
        areas: int64 [M], source pixels.
        predicted_iou, stability_score: float32 [M].
        mask_ids: int64 [M], -1 where the annotation has none; mask_index: int64 [M], the mask's index in its
            record, unique in an image.
        ids: int64 [B], the image ids.
        source_sizes: int64 [B, 2], height and width.
        positions: int64 [B], of each image in the order.
        valid: bool [B]; False for the fill-up of the last evaluation step.
        position: where the stream goes on if this batch was the last one used: behind its step if it is the
            last micro-batch of the step, else at the start of the step, which then is done again as a whole.
        dense: the masks' pixels, uint8 [M, size, size], where the loader was asked for them.
    """

    images: Tensor
    masks: RaggedMasks
    boxes: Tensor
    points: Tensor
    areas: Tensor
    predicted_iou: Tensor
    stability_score: Tensor
    mask_ids: Tensor
    mask_index: Tensor
    ids: Tensor
    source_sizes: Tensor
    positions: Tensor
    valid: Tensor
    position: int
    dense: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)


def collate(
    images: Tensor,
    samples: Sequence[SampleMasks],
    positions: Sequence[int],
    valid: Sequence[bool],
    position: int,
) -> Batch:
    """A batch of drawn images, uint8 [B, S, S, 3], and what belongs to them."""
    counts = [len(sample.runs) for sample in samples]
    lengths = [np.diff(sample.runs.offsets) for sample in samples]
    source_sizes = torch.tensor([[s.height, s.width] for s in samples], dtype=torch.int64).reshape(-1, 2)
    image = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(counts, dtype=torch.int64))
    masks = RaggedMasks(
        runs=_joined([sample.runs.runs.view(np.int32) for sample in samples], np.int32),
        offsets=torch.cat((torch.zeros(1, dtype=torch.int64), _joined(lengths, np.int64).cumsum(0))),
        image=image,
        sizes=source_sizes[image],
        image_size=images.shape[1],
    )
    return Batch(
        images=images.permute(0, 3, 1, 2),
        masks=masks,
        boxes=_joined([sample.boxes for sample in samples], np.float32, 4),
        points=_joined([sample.points for sample in samples], np.float32, 2),
        areas=_joined([sample.areas for sample in samples], np.int64),
        predicted_iou=_joined([sample.predicted_iou for sample in samples], np.float32),
        stability_score=_joined([sample.stability_score for sample in samples], np.float32),
        mask_ids=_joined([sample.mask_ids for sample in samples], np.int64),
        mask_index=_joined([sample.mask_index for sample in samples], np.int64),
        ids=torch.tensor([sample.image_id for sample in samples], dtype=torch.int64),
        source_sizes=source_sizes,
        positions=torch.tensor(positions, dtype=torch.int64),
        valid=torch.tensor(valid, dtype=torch.bool),
        position=position,
    )


def _joined(arrays: list[Any], dtype: Any, width: int | None = None) -> Tensor:
    empty = np.zeros((0,) if width is None else (0, width), dtype)
    return torch.from_numpy(np.concatenate([empty, *arrays]))


@cache
def _back_end() -> ModuleType:
    """Triton's kernels where they are, else plain torch: the same bits."""
    if find_spec("triton") is None:
        return raster_torch
    return import_module("sa1b.masks.raster_triton")


def _recorded(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    tensor.record_stream(stream)
    return tensor


class TransportError(Sa1bError):
    """A worker process cannot send its batches; the message says why and what to change."""


def send_errors() -> None:
    """In a worker process: send the error in place of every batch that cannot be sent."""
    ForkingPickler.register(Batch, _reduce)


def _reduce(batch: Batch) -> tuple[Any, ...]:
    try:
        # A pickle within the pickle: the tensors are shared here, where an error can still be replaced.
        columns = {field.name: getattr(batch, field.name) for field in fields(batch)}
        return _batch, (bytes(ForkingPickler.dumps(columns)),)
    except Exception as error:
        message = (
            f"worker process {os.getpid()} cannot send a batch: {type(error).__name__}: {error}. Tensors go "
            f"through /dev/shm and a socket below {tempfile.gettempdir()}: set TMPDIR to a shorter path, "
            "raise `ulimit -n`, or enlarge /dev/shm (docker run --shm-size)"
        )
        return _fail, (message,)


def _batch(columns: bytes) -> Batch:
    return Batch(**ForkingPickler.loads(columns))


def _fail(message: str) -> NoReturn:
    raise TransportError(message)
