"""This package: `sa1b.Loader`, and `sa1b.Stream` in torch's DataLoader. Masks travel as runs.

Masks are rasterised in the process that consumes the batch, as a training loop would do on its device, in one
buffer that is cleared each time. `drawn` uses the loader's read-only masks, in reused memory that is cleared
only where masks were.
"""

from collections.abc import Iterator
from itertools import count

from torch.utils.data import DataLoader

import sa1b
from benchmarks.peers.pixels import memory
from benchmarks.peers.task import Delivered, Place, Task


def stream_of(place: Place, task: Task, start: float) -> sa1b.Stream:
    stream = sa1b.Stream(
        place.root,
        global_batch=task.batch,
        epochs=None,
        image_size=task.image_size,
        masks=task.masks,
        damage_log=place.folder / "damaged.jsonl",
    )
    at = int(len(stream.view) * start) // task.batch * task.batch
    stream.load_state_dict(stream.state_dict() | {"position": at})
    return stream


def delivered(batch: sa1b.Batch, task: Task) -> Delivered:
    runs = batch.masks
    pixels = batch.dense
    if pixels is None and task.size is not None:
        out = memory("masks", (task.batch * task.masks, task.size, task.size))
        pixels = runs.dense(task.size, out=out[: len(runs)])
    parts = (batch.images, runs.runs, runs.offsets, runs.image)
    counts = runs.image.bincount(minlength=len(batch)).tolist()
    return Delivered(batch.ids.tolist(), counts, batch.images, pixels, sum(part.nbytes for part in parts))


def loader(
    place: Place, task: Task, workers: int, start: float = 0.0, endless: bool = False, drawn: bool = False
) -> Iterator[Delivered]:
    stream = stream_of(place, task, start)
    steps = range(len(stream.view) // task.batch)
    dense = task.size if drawn else None
    batches = iter(sa1b.Loader(stream, threads=max(1, workers), dense=dense, read_only=True, quiet=True))
    for _ in count() if endless else steps:
        yield delivered(next(batches), task)
    batches.close()


def drawn(
    place: Place, task: Task, workers: int, start: float = 0.0, endless: bool = False
) -> Iterator[Delivered]:
    return loader(place, task, workers, start, endless, drawn=True)


def dataloader(
    place: Place, task: Task, workers: int, start: float = 0.0, endless: bool = False
) -> Iterator[Delivered]:
    stream = stream_of(place, task, start)
    steps = range(len(stream.view) // task.batch)
    batches = iter(DataLoader(stream, batch_size=None, num_workers=workers))
    for _ in count() if endless else steps:
        yield delivered(next(batches), task)
