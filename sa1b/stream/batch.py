"""A micro-batch as tensors: images as uint8, masks as ragged runs, and the forms that other models take."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data._utils.collate import default_collate_fn_map

from sa1b.arguments import BadValue
from sa1b.errors import UsageError
from sa1b.masks.raster_torch import PIXEL_MEAN, PIXEL_STD, normalised
from sa1b.stream.ragged import PaddedMasks, RaggedMasks, Tensors
from sa1b.stream.sample import SampleMasks, no_masks
from sa1b.stream.text import Texts
from sa1b.stream.transform import Frame

_LARGE = ("images", "dense")  # tensors that are not packed with the others
_ALIGNMENT = 64  # bytes; tensors in a packed buffer start at multiples of it, enough for every dtype
_OF_MASKS = ("boxes", "points", "areas", "predicted_iou", "stability_score", "mask_ids", "mask_index")
_NO_MASKS = no_masks(0, Frame.whole_image(1, 1, 1))  # types of a batch without samples


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Tensors):
    """One micro-batch of one rank: B images and their M masks.

    Attributes:
        images: uint8 [B, 3, S, S], RGB, channels last in memory; padded right and below with 0.
        masks: the masks as runs.
        boxes: float32 [M, 4], x0, y0, x1, y1 in the padded square: the centres of the mask's first and last
            column and row; see sa1b.masks.grid.
        points: float32 [M, 2], x, y in the padded square: the centre of a uniform foreground pixel.
        areas: int64 [M], source pixels.
        predicted_iou: float32 [M], from the annotation.
        stability_score: float32 [M], from the annotation.
        mask_ids: int64 [M], -1 where the annotation has none.
        mask_index: int64 [M], the mask's index in its record, unique in an image.
        ids: int64 [B], the image ids.
        source_sizes: int64 [B, 2], height and width of the source, or of its window.
        framed_sizes: int64 [B, 2], rows and columns of the padded square that the image fills.
        windows: int64 [B, 4], x, y, width, height of the visible part of the source, in source pixels; see
            sa1b.stream.transform.
        flipped: bool [B], whether the window is mirrored left to right.
        positions: int64 [B], position of each image in the order.
        valid: bool [B]; False for the padding of the last evaluation step, and for a damaged image in an
            evaluation.
        position: where to resume if this is the last batch that was used. After the last micro-batch of a
            step it is the start of the next step. Otherwise it is the start of this step, which is repeated
            completely.
        dense: the masks as pixels, uint8 [M, size, size]; None unless the loader has `dense` set.
        extra: joined columns (`Stream(join=...)`), on the host: name -> list of B or M Python values, None
            if the table has no row; see sa1b.stream.columns.
        source: the name of each image's source in a mixture (`sa1b.Mix`), B of them, on the host; else empty.
        source_index: int64 [B], the number of each image's source in the mixture; else None.
        texts: one text for each image or mask (`Stream(text=...)`), as tokens; else None.
        buffer: uint8, the memory of all tensors except `images` and `dense` after `pack`, else None.
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
    framed_sizes: Tensor
    windows: Tensor
    flipped: Tensor
    positions: Tensor
    valid: Tensor
    position: int
    dense: Tensor | None = None
    extra: dict[str, list[Any]] = field(default_factory=dict)
    source: tuple[str, ...] = ()
    source_index: Tensor | None = None
    texts: Texts | None = None
    buffer: Tensor | None = None

    def __repr__(self) -> str:
        # Shapes only: values would make the host wait for the device.
        parts = [f"images {list(self.images.shape)}", f"{len(self.masks):,} masks"]
        if self.dense is not None:
            parts.append(f"dense {list(self.dense.shape)}")
        parts += [str(self.ids.device), f"position {self.position:,}"]
        if self.extra:
            parts.append(f"extra {', '.join(self.extra)}")
        return f"Batch({'; '.join(parts)})"

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def boxes_xyxy(self) -> Tensor:
        """Edges of the boxes, x0, y0, x1, y1 in the padded square: float32 [M, 4].

        `boxes` has the centres of the first and last source pixel; the edges are half a source pixel outside
        of the centres. It is the form of torchvision's detectors: a box of one pixel is not empty.
        """
        half = (self.framed_sizes / self.source_sizes / 2).flip(1)[self.masks.image]  # x, y
        return self.boxes + torch.cat((-half, half), dim=1)

    def padded(self, size: int | None = None) -> PaddedMasks:
        """Masks, points and boxes as [B, N, ...], padded to the N masks of the image with most.

        The pixels are those of `masks.dense(size)`. For them the result has B * N * size**2 bytes. On a CUDA
        device the host does not wait.

        Args:
            size: height and width of the masks; None: those of `dense`, or of the images without it.

        Raises:
            sa1b.masks.SizeError: `size` is not a valid size of a square in pixels.
        """
        dense = self.dense
        if dense is None or size not in (None, dense.shape[-1]):
            dense = self.masks.dense(size)
        columns = torch.arange(max(self.masks.counts, default=0))
        number = torch.tensor(self.masks.counts, dtype=torch.int64)[:, None]
        index = torch.where(columns < number, number.cumsum(0) - number + columns, -1)
        row, column = (
            indices.to(self.ids.device, non_blocking=True) for indices in (index >= 0).nonzero().unbind(1)
        )

        def padded(flat: Tensor) -> Tensor:
            empty = flat.new_zeros(*index.shape, *flat.shape[1:])
            return empty.index_put_((row, column), flat)

        return PaddedMasks(
            masks=padded(dense),
            points=padded(self.points),
            boxes=padded(self.boxes),
            index=index.to(self.ids.device, non_blocking=True),
            valid=padded(self.valid[self.masks.image]),
        )

    def normalised(self, mean: Sequence[float] = PIXEL_MEAN, std: Sequence[float] = PIXEL_STD) -> Tensor:
        """Images as encoders take them, (value - mean) / std: float32 [B, 3, S, S], padding 0 after that.

        `mean` and `std` are of red, green and blue for values from 0 to 255, by default those of SAM and
        ImageNet. Multiply those for values from 0 to 1 by 255.
        """
        mean_rgb, std_rgb = (
            torch.tensor(values, device=self.ids.device).view(3, 1, 1) for values in (mean, std)
        )
        return normalised(self.images, self.framed_sizes, mean_rgb, std_rgb)

    def to_source(self, coordinates: Tensor, image: Tensor | None = None) -> Tensor:
        """Points or boxes of the padded square as pixel indices in the source image, for any crop and flip.

        Args:
            coordinates: float [N, 2] (x, y) or [N, 4] (x0, y0, x1, y1), such as `points` and `boxes`.
            image: int64 [N], the image in the batch that each row belongs to; None: `masks.image`.

        Returns:
            Of the shape of `coordinates`. Of a mirrored image, x0 and x1 are exchanged.

        Raises:
            ValueError: the shape of `coordinates` is wrong.
        """
        (x, y, width, height), (rows, columns), flipped = self._frame(coordinates, image)
        across, down = coordinates[:, ::2] * width / columns, coordinates[:, 1::2] * height / rows
        across = torch.where(flipped, width - across.flip(1), across)
        return torch.stack((x + across, y + down), dim=2).flatten(1) - 0.5

    def to_square(self, coordinates: Tensor, image: Tensor | None = None) -> Tensor:
        """The inverse of `to_source`: pixel indices in the source image as points or boxes of the square."""
        (x, y, width, height), (rows, columns), flipped = self._frame(coordinates, image)
        across, down = coordinates[:, ::2] + 0.5 - x, coordinates[:, 1::2] + 0.5 - y
        across = torch.where(flipped, width - across.flip(1), across)
        return torch.stack((across * columns / width, down * rows / height), dim=2).flatten(1)

    def _frame(self, coordinates: Tensor, image: Tensor | None) -> tuple[Any, Any, Tensor]:
        """Window, size in the square and flip of the image of each row, [N, 1] each."""
        image = self.masks.image if image is None else image
        if coordinates.ndim != 2 or coordinates.shape[1] not in (2, 4) or len(coordinates) != len(image):
            actual = list(coordinates.shape)
            raise BadValue(f"coordinates: must be [{len(image)}, 2] or [{len(image)}, 4], got {actual}")
        columns = (self.windows[image], self.framed_sizes[image])
        window, framed = (column[:, :, None].unbind(1) for column in columns)
        return window, framed, self.flipped[image, None]

    def for_transformers(self, prompts: str = "points") -> dict[str, Tensor]:
        """The arguments of `transformers.SamModel` for this batch: `SamModel(**batch.for_transformers())`.

        The model adds half a pixel to coordinates itself. Prompts are padded as in `padded`, so its
        predictions are [B, N, ...]; leave out those that are not `padded().valid`.

        Args:
            prompts: "points", "boxes" or "both".

        Raises:
            ValueError: `prompts` is none of them.
        """
        if prompts not in ("points", "boxes", "both"):
            raise BadValue(f"prompts={prompts!r}: must be 'points', 'boxes' or 'both'")
        padded = self.padded(1)
        inputs = {"pixel_values": self.normalised()}
        if prompts != "boxes":
            inputs["input_points"] = padded.points[:, :, None] - 0.5
            inputs["input_labels"] = torch.where(padded.index < 0, -10, 1)[:, :, None]  # -10: no point
        if prompts != "points":
            inputs["input_boxes"] = padded.boxes - 0.5
        return inputs

    def pack(self, allocate: Callable[[int], Tensor]) -> "Batch":
        """A copy with all tensors except `images` and `dense` in one buffer, for one copy to a device.
        `allocate` takes a number of bytes and returns uint8 [n] of at least that size, at a multiple of 64.
        """
        starts = [0]

        def counted(name: str, tensor: Tensor) -> Tensor:
            if name not in _LARGE:
                starts.append(starts[-1] - (-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
            return tensor

        def moved(name: str, tensor: Tensor) -> Tensor:
            return tensor if name in _LARGE else _view(buffer, next(places), tensor).copy_(tensor)

        loose = replace(self, buffer=None).map_tensors(counted)
        buffer, places = allocate(starts[-1])[: starts[-1]], iter(starts)
        return replace(loose.map_tensors(moved), buffer=buffer)

    def _repacked(self, buffer: Tensor) -> "Batch":
        """A batch with a copy of its buffer: the tensors in the old buffer become views of the new one."""
        old = self.buffer
        assert old is not None
        first, stop = old.data_ptr(), old.data_ptr() + old.nbytes

        def moved(name: str, tensor: Tensor) -> Tensor:
            if tensor is old:
                return buffer
            if name not in _LARGE and first <= tensor.data_ptr() < stop:
                return _view(buffer, tensor.data_ptr() - first, tensor)
            return tensor

        return self.map_tensors(moved)

    def pin_memory(self) -> "Batch":
        """A packed copy in pinned memory, from which copies to a GPU need not wait."""
        packed = self.pack(lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))
        return packed.map_tensors(lambda name, tensor: tensor.pin_memory() if name in _LARGE else tensor)

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> "Batch":
        """A copy on another device: one copy for `images`, one for `dense`, one for all other tensors.

        Args:
            non_blocking: see `Tensors.to`.
        """
        non_blocking &= torch.device(device).type != "cpu"
        if torch.device(device).type == self.ids.device.type:
            return Tensors.to(self, device, non_blocking=non_blocking)
        packed = self
        if self.buffer is None:
            packed = self.pack(lambda size: torch.empty(size, dtype=torch.uint8, device=self.ids.device))
        assert packed.buffer is not None
        moved = packed._repacked(packed.buffer.to(device, non_blocking=non_blocking))
        return Tensors.to(moved, device, non_blocking=non_blocking)


def collate(
    images: Tensor,
    samples: Sequence[SampleMasks],
    positions: Sequence[int],
    valid: Sequence[bool],
    position: int,
) -> Batch:
    """A batch of decoded images, uint8 [B, S, S, 3], with their masks and positions."""
    # numpy, because a torch function on a few numbers takes several times as long.
    frames = [sample.frame for sample in samples]
    windows = np.array([frame.window for frame in frames], np.int64).reshape(-1, 4)
    framed_sizes = np.array([frame.taken for frame in frames], np.int64).reshape(-1, 2)
    source_sizes = np.stack((windows[:, 3], windows[:, 2]), axis=1)
    counts = [len(sample.runs) for sample in samples]
    image = np.repeat(np.arange(len(samples)), counts)
    every = [_NO_MASKS, *samples]
    lengths = [np.zeros(1, np.int64), *(np.diff(sample.runs.offsets) for sample in samples)]
    runs = [sample.runs.runs.view(np.int32) for sample in every]
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(sample, name) for sample in every]) for name in _OF_MASKS
    }
    arrays |= {
        "ids": np.array([sample.image_id for sample in samples], np.int64),
        "source_sizes": source_sizes,
        "framed_sizes": framed_sizes,
        "windows": windows,
        "flipped": np.array([frame.flip for frame in frames], np.bool_),
        "positions": np.array(positions, np.int64),
        "valid": np.array(valid, np.bool_),
    }
    masks = RaggedMasks(
        runs=torch.from_numpy(np.concatenate(runs)),
        offsets=torch.from_numpy(np.concatenate(lengths).cumsum()),
        image=torch.from_numpy(image),
        counts=tuple(counts),
        sizes=torch.from_numpy(source_sizes[image]),
        taken=torch.from_numpy(framed_sizes[image]),
        image_size=images.shape[1],
    )
    columns: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Batch(images=images.permute(0, 3, 1, 2), masks=masks, position=position, **columns)


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _collate_batches(batches: object, **options: object) -> NoReturn:
    raise UsageError("DataLoader(stream): has whole batches; pass batch_size=None, and Stream(micro_batch=)")


default_collate_fn_map[Batch] = _collate_batches
