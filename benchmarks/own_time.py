"""Where this package's own time goes, and what limits a machine: storage, decoding, masks, raster, copy."""

import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import cv2
import numpy as np
import torch

import sa1b
from benchmarks.peers.task import Task

PASSES = 4


def stages(root: Path, task: Task) -> dict[str, float]:
    """Milliseconds of one core and image in each stage, one thread, files in the page cache.

    The raster clears where masks were, as `Loader(dense=..., read_only=True)`; beside it, what it takes when
    all is cleared, and in memory fresh from the system.
    """
    threads, cv_threads = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    stream = sa1b.Stream(root, global_batch=task.batch, image_size=task.image_size, masks=task.masks)
    size = task.size or task.image_size
    buffer = torch.zeros((task.batch * task.masks, size, size), dtype=torch.uint8)
    boxes = np.zeros((len(buffer), 4), np.int64)
    batches = iter(stream)
    next(batches).masks.dense(size)
    before = stream.stages.snapshot()
    steps = PASSES * len(stream.view) // task.batch
    raster = again = fresh = 0.0
    began, busy = time.perf_counter(), time.process_time()
    for _ in range(steps):
        masks = next(batches).masks
        start = time.perf_counter()
        for draw in masks.drawings(size, buffer, boxes[: len(masks)]):
            draw()
        known = time.perf_counter()
        masks.dense(size, out=buffer[: len(masks)])
        middle = time.perf_counter()
        masks.dense(size)
        raster += known - start
        again += middle - known
        fresh += time.perf_counter() - middle
    whole = time.perf_counter() - began
    # On a busy machine clocks run on while others work: the clocks of the parts are cut down alike.
    scale = 1e3 * (time.process_time() - busy) / whole / (steps * task.batch)
    batches.close()
    torch.set_num_threads(threads)
    cv2.setNumThreads(cv_threads)
    after = stream.stages.snapshot()
    seconds = {name: after[name]["seconds"] - before[name]["seconds"] for name in ("read", "image", "masks")}
    seconds["raster"] = raster
    seconds["rest"] = max(0.0, whole - again - fresh - sum(seconds.values()))
    seconds |= {"raster, all cleared": again, "raster, fresh memory": fresh}
    return {name: scale * value for name, value in seconds.items()}


def storage(folder: Path, root: Path, chunk: int = 1 << 20) -> dict[str, float]:
    """Bytes a second of reading a file in order, from the disk below the page cache and from the cache."""
    path = folder / "storage.bin"
    data = next(root.glob("*.tar")).read_bytes()
    with path.open("wb") as out:
        for _ in range(max(1, (256 << 20) // len(data))):
            out.write(data)
        out.flush()
        os.fsync(out.fileno())
    rates = {}
    handle = os.open(path, os.O_RDONLY)
    size = os.fstat(handle).st_size
    buffer = bytearray(chunk)
    for name in ("disk", "page cache"):
        if name == "disk":
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        for at in range(0, size, chunk):
            os.preadv(handle, [buffer], at)
        rates[name] = size / (time.perf_counter() - began)
    os.close(handle)
    path.unlink()
    return rates


def verdict(document: dict[str, Any]) -> dict[str, Any]:
    """What limits this machine and what to change, from what was measured.

    The stages of an image share the cores; storage and the copy to a device go on beside them.
    """
    cores = document["machine"]["cores"]
    times: dict[str, dict[str, float]] = document["stages"]
    kind = "original" if "original" in times else next(iter(times))
    own = times[kind]
    names = {"read": "reading", "image": "JPEG decoding", "masks": "choosing masks", "raster": "raster"}
    output = "masks as 1024 x 1024 pixels"
    if document["machine"]["gpu"]:
        del names["raster"]  # runs travel, and become pixels there
        output = "masks as runs"
    work = {label: own[name] for name, label in names.items()}
    milliseconds = sum(work.values()) + own["rest"]
    rates = {"processor": cores * 1e3 / milliseconds}
    disk = document.get("storage")
    if disk:
        rates["storage"] = disk["disk"] / document["material"]["bytes_per_image"][kind]
    for name in ("copy", "model"):
        gpu = document.get("gpu") or {}
        if gpu.get(name):
            rates[name] = gpu[name]
    limiting = min(rates, key=lambda name: rates[name])
    largest = max(work, key=lambda name: work[name])
    text = f"{cores} cores can make {rates['processor']:.0f} images/s of {kind}-size JPEGs with {output}"
    if disk:
        text += f"; this disk can deliver {rates['storage']:.0f}"
    advice = {"storage": "Faster storage, or smaller files: tools/reshard.py --image-size 1024."}
    if limiting == "processor":
        share = work[largest] / milliseconds
        limiting = largest
        text += f". The processor limits, and most of its time ({share:.0%}) is {largest}"
    else:
        text += f". The {limiting} limits"
    if limiting == "JPEG decoding" and "1024" in times:
        small = times["1024"]
        faster = milliseconds / (sum(small[name] for name in names) + small["rest"])
        advice[limiting] = (
            f"Shards of 1024 px (tools/reshard.py --image-size 1024) give {faster:.1f} times the images/s "
            "here; then more cores."
        )
    elif limiting == "raster":
        advice[limiting] = "Take masks at 256 px, or leave the raster to the GPU: the loader ships runs."
    return {
        "limit": limiting,
        "images_per_second": rates,
        "text": text + ".",
        "change": advice.get(limiting, "More cores."),
        "not_run": [name for name in ("copy", "model") if name not in rates],
    }


def device(root: Path, task: Task) -> dict[str, float]:
    """On a GPU: images a second of the copy (pinned, runs and pictures), milliseconds of the raster."""
    stream = sa1b.Stream(root, global_batch=task.batch, image_size=task.image_size, masks=task.masks)
    batch = next(iter(stream))
    pinned = batch.pin_memory()
    there = pinned.to("cuda")
    there.masks.dense(task.size)
    copies, rasters = [], []
    for _ in range(20):
        start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        start.record()
        there = pinned.to("cuda")
        middle.record()
        there.masks.dense(task.size)
        end.record()
        torch.cuda.synchronize()
        copies.append(start.elapsed_time(middle))
        rasters.append(middle.elapsed_time(end))
    return {
        "copy": 1e3 * len(batch) / median(copies),
        "raster_milliseconds": median(rasters) / len(batch),
    }
