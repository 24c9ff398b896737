"""litData: chunks by its own `optimize`, read from a local folder, shuffled by its default."""

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import litdata

from benchmarks.peers import pixels
from benchmarks.peers.task import Delivered, Pair, Place, Task

CHUNK_BYTES = "64MB"  # the value in its documentation


def convert(pairs: Iterable[Pair], folder: Path) -> None:
    # litData installs handlers that end any process with code 0, also processes that it did not start.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        litdata.optimize(
            fn=_unchanged,
            inputs=[(pair.jpeg, pair.text) for pair in pairs],
            output_dir=str(folder),
            chunk_bytes=CHUNK_BYTES,
            num_workers=1,
            verbose=False,
        )
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def batches(
    place: Place, task: Task, workers: int, start: float = 0.0, endless: bool = False
) -> Iterator[Delivered]:
    loader = _loader(place.folder, task.batch, workers, partial(pixels.collate, place, task))
    if start:
        loader.load_state_dict(prepare(place, task, workers, start))
    return iter(loader)


def _loader(
    folder: Path, batch: int, workers: int, collate: Callable[[Sequence[pixels.Sample]], Any]
) -> "litdata.StreamingDataLoader":
    dataset = litdata.StreamingDataset(str(folder), shuffle=True)
    return litdata.StreamingDataLoader(dataset, batch_size=batch, num_workers=workers, collate_fn=collate)


@cache
def prepare(place: Place, task: Task, workers: int, start: float) -> dict[str, Any]:
    """Its state at `start` of an epoch, as a checkpoint of a resumed run."""
    loader = _loader(place.folder, task.batch, workers, len)
    wanted = int(len(loader.dataset) * start) // task.batch
    for done, _ in enumerate(loader, 1):
        if done >= wanted:
            break
    state: dict[str, Any] = loader.state_dict()
    return state


def _unchanged(pair: pixels.Sample) -> pixels.Sample:
    return pair
