"""The process in which one contender is measured: `python -m benchmarks.peers.program`, see `main`.

It delivers its first batch and prints the time since its parent started it. Then it executes the commands on
its standard input, one JSON document per line, and answers each with one line of JSON:

    {"do": "pass"}                one epoch, untimed: what came, bytes read
    {"do": "round", "images": n}  n images in the steady state: seconds, processor seconds
    {"do": "resume", "start": f}  seconds until the first batch from f of an epoch on, in this process
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import process_tree
from benchmarks.peers.contenders import CONTENDERS, Contender
from benchmarks.peers.task import Delivered, Place, Task

_WARM = 6  # batches


def once(contender: Contender, place: Place, task: Task, workers: int) -> dict[str, Any]:
    """One epoch: ids, masks, foreground pixels, mean of the images, bytes for a device, and bytes read."""
    ids: list[int] = []
    own = os.getpid()
    begun = process_tree.bytes_read(own).get(own, 0)
    read: dict[int, int] = {}
    masks = foreground = device_bytes = 0
    level = 0.0
    for batch in contender.batches(place, task, workers):
        ids += batch.ids
        read |= process_tree.bytes_read(own)  # the counters of ended workers are lost
        device_bytes += batch.device_bytes
        if batch.images is not None:
            level += float(batch.images.sum(dtype=torch.int64)) / batch.images[0].numel()
        if batch.masks is not None:
            masks += len(batch.masks)
            foreground += int(torch.count_nonzero(batch.masks))
    return {
        "ids": sorted(ids),
        "masks": masks,
        "foreground": foreground,
        "level": level / len(ids),
        "device_bytes": device_bytes / len(ids),
        "read": (sum(read.values()) - begun) / len(ids),
    }


def timed(contender: Contender, place: Place, task: Task, workers: int, images: int) -> dict[str, Any]:
    """Time of some images, after every worker has delivered a batch."""
    own = os.getpid()
    batches = contender.batches(place, task, workers, endless=True)
    # Memory that is used again is touched for the first time before the clock runs; the others have no more
    # images than these to spare.
    for _ in range(_WARM if contender.kind == "ours" else max(1, workers)):
        next(batches)
    busy, began = process_tree.processor_seconds(own), time.monotonic()
    got = 0
    while got < images and (batch := next(batches, None)) is not None:
        got += len(batch.ids)
    seconds = time.monotonic() - began
    # The workers of a finite epoch may have ended; their time is then part of the parent's.
    busy = process_tree.processor_seconds(own) - busy
    _close(batches)
    return {"images": got, "seconds": seconds, "cpu": busy}


def resumed(contender: Contender, place: Place, task: Task, workers: int, start: float) -> dict[str, Any]:
    if start and contender.prepare is not None:
        contender.prepare(place, task, workers, start)
    began = time.monotonic()
    batches = contender.batches(place, task, workers, start)
    next(batches)
    seconds = time.monotonic() - began
    _close(batches)
    return {"seconds": seconds}


def _close(batches: Iterator[Delivered]) -> None:
    close = getattr(batches, "close", None)
    if close is not None:
        close()


def main(name: str, root: str, folder: str, task_json: str, workers_text: str, began: str) -> None:
    torch.set_num_threads(1)
    contender, place = CONTENDERS[name], Place(Path(root), Path(folder))
    task, workers = Task(**json.loads(task_json)), int(workers_text)
    batches = contender.batches(place, task, workers)
    next(batches)
    say({"first": time.monotonic() - float(began)})
    _close(batches)
    del batches
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "pass":
            say(once(contender, place, task, workers))
        elif asked["do"] == "round":
            say(timed(contender, place, task, workers, asked["images"]))
        else:
            say(resumed(contender, place, task, workers, asked["start"]))


def say(document: dict[str, Any]) -> None:
    print(json.dumps(document), file=_OUT, flush=True)


if __name__ == "__main__":
    # Output of libraries goes to standard error, because standard output has the answers.
    _OUT = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(*sys.argv[1:])
