"""MosaicML Streaming: MDS shards by its own writer, read from a local folder, shuffled by its default."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.peers import pixels, torchvision_stand_in
from benchmarks.peers.task import Delivered, Pair, Place, Task
from sa1b.storage.atomic import lock

torchvision_stand_in.install()
streaming = import_module("streaming")

SHARD_BYTES = 1 << 26  # its default


def convert(pairs: Iterable[Pair], folder: Path) -> None:
    with streaming.MDSWriter(
        out=str(folder), columns={"jpg": "bytes", "json": "bytes"}, size_limit=SHARD_BYTES
    ) as writer:
        for pair in pairs:
            writer.write({"jpg": pair.jpeg, "json": pair.text})


def batches(
    place: Place, task: Task, workers: int, start: float = 0.0, endless: bool = False
) -> Iterator[Delivered]:
    with tempfile.TemporaryDirectory() as scratch:
        # Two readers on one machine must have different folders.
        local = Path(scratch) / "shards"
        local.symlink_to(place.folder)
        with lock(
            place.folder, wait=True
        ):  # readers that start at the same time would use the same name of shared memory
            dataset = streaming.StreamingDataset(local=str(local), shuffle=True, batch_size=task.batch)
        loader = streaming.StreamingDataLoader(
            dataset, batch_size=task.batch, num_workers=workers, collate_fn=partial(_collate, place, task)
        )
        if start:
            seen = int(len(dataset) * start) // task.batch * task.batch
            loader.load_state_dict(dataset.state_dict(seen, True) | {"epoch": 0})
        for batch in loader:
            yield batch["delivered"]


def _collate(place: Place, task: Task, samples: Sequence[dict[str, bytes]]) -> dict[str, Any]:
    made = pixels.collate(place, task, [(sample["jpg"], sample["json"]) for sample in samples])
    return {"ids": made.ids, "delivered": made}  # its loader counts the first value's items
