"""webdataset over shards of jpg and json, as its documentation builds a training pipeline.

Shards are shuffled and split by node and worker, samples go through a shuffle buffer while they are bytes and
are batched in the worker. It has no state: a resume within an epoch skips the earlier samples.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import webdataset

from benchmarks.peers import pixels
from benchmarks.peers.task import Delivered, Pair, Place, Task

SHARDS = 4
BUFFER = 8  # samples; 1000 as in its documentation would be all samples here


def convert(pairs: Iterable[Pair], folder: Path) -> None:
    every = list(pairs)
    most = -(-len(every) // SHARDS)
    with webdataset.ShardWriter(f"{folder}/pairs-%06d.tar", maxcount=most, verbose=0) as writer:
        for pair in every:
            writer.write({"__key__": f"sa_{pair.image_id}", "jpg": pair.jpeg, "json": pair.text})


def batches(
    place: Place, task: Task, workers: int, start: float = 0.0, endless: bool = False
) -> Iterator[Delivered]:
    urls = sorted(map(str, place.folder.glob("*.tar")))
    return over(urls, place, task, workers, start)


def over(urls: list[str], place: Place, task: Task, workers: int, start: float = 0.0) -> Iterator[Delivered]:
    dataset = (
        webdataset.WebDataset(
            urls, shardshuffle=len(urls), nodesplitter=webdataset.split_by_node, detshuffle=True, seed=0
        )
        .shuffle(BUFFER, initial=BUFFER // 2)
        .to_tuple("jpg", "json")
    )
    if start:
        images = sum(1 for _ in (place.root / "ids.txt").open())
        dataset = dataset.slice(int(images * start / max(1, workers)), images)
    dataset = dataset.batched(task.batch, collation_fn=partial(pixels.collate, place, task))
    return iter(webdataset.WebLoader(dataset, batch_size=None, num_workers=workers))
