"""Each contender does a single part of the work in one process, and so measures the cost of that part.

Several threads are faster, and a loader that records the previous masks need not clear the whole output.
"""

import os
from collections.abc import Iterator
from itertools import chain, repeat

import cv2
import simplejpeg

import sa1b
from benchmarks.peers.pixels import memory
from benchmarks.peers.task import Delivered, Place, Task
from sa1b.masks.grid import framed_size


def _none(size: int) -> Delivered:
    return Delivered([0] * size, [], None, None, 0)


def _starts(count: int, task: Task, endless: bool) -> Iterator[int]:
    """The start of each complete batch, of one epoch or endlessly."""
    batches = range(0, count - task.batch + 1, task.batch)
    return chain.from_iterable(repeat(batches) if endless else [batches])


def reading(
    place: Place, task: Task, workers: int, start: float = 0.0, endless: bool = False
) -> Iterator[Delivered]:
    """Reads the bytes of each sample as one range, without verification."""
    dataset = sa1b.open(place.root)
    table = dataset.table
    files = [os.open(place.root / name, os.O_RDONLY) for name in dataset.shards]
    for first in _starts(len(table), task, endless):
        for row in range(first, first + task.batch):
            length = int(table.jpg_bytes[row]) + int(table.masks_bytes[row]) + 512
            os.pread(files[int(table.shard[row])], length, int(table.offset[row]))
        yield _none(task.batch)


def decoding(
    place: Place, task: Task, workers: int, start: float = 0.0, endless: bool = False
) -> Iterator[Delivered]:
    """Decodes JPEGs from memory at the smallest sufficient scale and resizes them into one buffer."""
    samples = [(s.jpeg, s.annotations.height, s.annotations.width) for s in sa1b.open(place.root)]
    slot = memory("slot", (task.image_size, task.image_size, 3)).numpy()
    for first in _starts(len(samples), task, endless):
        for jpeg, height, width in samples[first : first + task.batch]:
            rows, columns = framed_size(height, width, task.image_size)
            image = simplejpeg.decode_jpeg(jpeg, "RGB", min_height=rows, min_width=columns)
            cv2.resize(image, (columns, rows), dst=slot[:rows, :columns])
        yield _none(task.batch)


def clearing(
    place: Place, task: Task, workers: int, start: float = 0.0, endless: bool = False
) -> Iterator[Delivered]:
    """Fills a used output buffer with zeros: images and masks of a batch."""
    images = memory("images", (task.batch, task.image_size, task.image_size, 3))
    masks = memory("masks", (task.batch * task.masks, task.size or 0, task.size or 0))
    for _ in _starts(len(sa1b.open(place.root)), task, endless):
        images.zero_()
        masks.zero_()
        yield _none(task.batch)
