"""The output of every contender and the choice of masks, which are the same for all."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

import sa1b
from sa1b.stream.sample import choose

CHOSEN = "chosen.json"


@dataclass(frozen=True, slots=True)
class Task:
    """The requested output.

    Attributes:
        size: height and width of a mask in pixels; None: masks are not rasterised.
        image_size: pixels of the padded square that holds the image.
        masks: largest number of masks per image.
        batch: images per batch.
    """

    size: int | None
    image_size: int = 1024
    masks: int = 64
    batch: int = 2


@dataclass(frozen=True, slots=True, eq=False)
class Delivered:
    """One batch. Its tensors may be overwritten by the next batch.

    Attributes:
        ids: image ids; counts: number of masks of each image.
        images: uint8 [B, 3, S, S], RGB, padded right and below with 0; None: a limit that makes none.
        masks: uint8 [M, size, size] of one image after the other; None: none, or as runs.
        device_bytes: bytes to copy to a GPU.
    """

    ids: list[int]
    counts: list[int]
    images: Tensor | None
    masks: Tensor | None
    device_bytes: int


@dataclass(frozen=True, slots=True)
class Pair:
    """An image and its annotation file as bytes: the source of all contenders' files."""

    image_id: int
    jpeg: bytes
    text: bytes


@dataclass(frozen=True, slots=True)
class Place:
    """The folders of a contender.

    Attributes:
        root: folder of this package's shards.
        folder: folder of the contender's files.
    """

    root: Path
    folder: Path


def pairs(root: Path) -> Iterator[Pair]:
    """All images of a root of this package, with the stored JPEG and the annotation file."""
    dataset = sa1b.open(root)
    for i, sample in enumerate(dataset):
        yield Pair(sample.image_id, sample.jpeg, json.dumps(dataset.annotation_file(i)).encode())


def write_choices(root: Path, limits: Iterable[int], seed: int = 0) -> None:
    """Record the stream's choice of masks for the first visit, which all contenders look up."""
    table = {
        limit: {
            sample.image_id: choose(
                sample.annotations, sample.annotations.runs_count > 1, limit, "uniform", seed, 0
            ).tolist()
            for sample in sa1b.open(root)
        }
        for limit in limits
    }
    (root / CHOSEN).write_text(json.dumps(table))


@cache
def choices(root: Path, limit: int) -> dict[int, npt.NDArray[np.int64]]:
    """Image id to the indices of the masks to deliver, ascending."""
    table = json.loads((root / CHOSEN).read_text())[str(limit)]
    return {int(image_id): np.array(indices) for image_id, indices in table.items()}
