"""Pixels from JPEG bytes and COCO annotations: shared code of the contenders without run lengths.

Only the chosen masks are decoded, one by one, and each pixel is written once, directly into the batch.
Workers write into shared memory, like torch's collation; a single process writes into a reused buffer. OpenCV
resizes masks by the nearest pixel and images by areas.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import torch
from pycocotools import mask as pycocotools
from torch import Tensor
from torch.utils.data import get_worker_info

from benchmarks.peers.task import Delivered, Place, Task, choices
from sa1b.masks.grid import framed, framed_size

cv2.setNumThreads(1)  # one thread per worker, as in sa1b.stream.decode
Pixels = npt.NDArray[np.uint8]
Sample = tuple[bytes, bytes]  # JPEG and annotation file
_BUFFERS: dict[str, Tensor] = {}


def collate(
    place: Place,
    task: Task,
    samples: Sequence[Sample],
    picture: Callable[[bytes, Pixels, int, int], None] | None = None,
    mask: Callable[[dict[str, Any], Pixels, Task], None] | None = None,
) -> Delivered:
    """A batch of undecoded samples."""
    draw_picture, draw_mask = picture or draw, mask or resize
    documents = [json.loads(bytes(text)) for _, text in samples]
    chosen = choices(place.root, task.masks)
    taken = [
        [document["annotations"][i]["segmentation"] for i in chosen[document["image"]["image_id"]]]
        for document in documents
    ]
    side, size = task.image_size, task.size
    images = memory("images", (len(samples), side, side, 3))
    for (jpeg, _), document, slot in zip(samples, documents, images.numpy(), strict=True):
        draw_picture(jpeg, slot, document["image"]["height"], document["image"]["width"])
    masks = None
    if size is not None:
        masks = memory("masks", (sum(map(len, taken)), size, size))
        slots = iter(masks.numpy())
        for segmentations in taken:
            for segmentation in segmentations:
                draw_mask(segmentation, next(slots), task)
    return Delivered(
        [document["image"]["image_id"] for document in documents],
        [len(segmentations) for segmentations in taken],
        images.permute(0, 3, 1, 2),
        masks,
        images.nbytes + (0 if masks is None else masks.nbytes),
    )


def draw(jpeg: bytes, slot: Pixels, height: int, width: int) -> None:
    """A completely decoded image at the top left of its square."""
    rows, columns = framed_size(height, width, len(slot))
    image = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR_RGB)
    cv2.resize(image, (columns, rows), dst=slot[:rows, :columns], interpolation=cv2.INTER_AREA)
    slot[rows:] = 0
    slot[:rows, columns:] = 0


def resize(segmentation: dict[str, Any], slot: Pixels, task: Task) -> None:
    """A completely decoded and resized mask."""
    rows, columns = framed_size(*segmentation["size"], len(slot))
    mask = pycocotools.decode(segmentation)
    slot[:rows, :columns] = cv2.resize(mask, (columns, rows), interpolation=cv2.INTER_NEAREST_EXACT)
    slot[rows:] = 0
    slot[:rows, columns:] = 0


def pick(segmentation: dict[str, Any], slot: Pixels, task: Task) -> None:
    """The same, by selecting pixels along columns in the order of memory, in half the time of `resize`."""
    rows, columns = (
        axis.sources() for axis in framed(tuple(segmentation["size"]), task.image_size, len(slot))
    )
    height, width = int((rows >= 0).sum()), int((columns >= 0).sum())
    mask = pycocotools.decode(segmentation).T
    slot[:height, :width] = mask[columns[:width]][:, rows[:height]].T
    slot[height:] = 0
    slot[:height, width:] = 0


def memory(name: str, shape: tuple[int, ...]) -> Tensor:
    """Uninitialised uint8 memory: shared memory in a worker, else a reused buffer."""
    count = int(np.prod(shape))
    if get_worker_info() is not None:
        storage = torch.UntypedStorage._new_shared(count)
        return torch.empty(0, dtype=torch.uint8).set_(storage).resize_(shape)
    buffer = _BUFFERS.get(name)
    if buffer is None or len(buffer) < count:
        buffer = _BUFFERS[name] = torch.zeros(count, dtype=torch.uint8)
    return buffer[:count].view(shape)
