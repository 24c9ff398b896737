"""The time of this package by stage, and the stage that limits a machine."""

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import sa1b
from benchmarks.peers.task import Task
from benchmarks.tables import SIZES

PASSES = 4
_ENOUGH = 256 << 20  # bytes to read from a disk


def stages(root: Path, task: Task) -> dict[str, float]:
    """Milliseconds per image in each stage, with one thread on one core and files in the page cache.

    Rasterising clears only the previous masks, as with `Loader(dense=..., read_only=True)`. The times with a
    completely cleared buffer and with new memory are measured too.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sizes = {"image_size": task.image_size, "masks": task.masks}
    stream = sa1b.Stream(root, global_batch=task.batch, epochs=None, **sizes)
    size = task.size or task.image_size
    buffer = torch.zeros((task.batch * task.masks, size, size), dtype=torch.uint8)
    boxes = np.zeros((len(buffer), 4), np.int64)
    batches = iter(stream)
    next(batches).masks.dense(size)
    before = stream.stats.snapshot()
    steps = PASSES * len(stream.view) // task.batch
    raster = again = fresh = 0.0
    began, busy = time.perf_counter(), time.process_time()
    for _ in range(steps):
        masks = next(batches).masks
        start = time.perf_counter()
        for job in masks.raster_jobs(size, buffer, boxes[: len(masks)]):
            job()
        known = time.perf_counter()
        masks.dense(size, out=buffer[: len(masks)])
        middle = time.perf_counter()
        masks.dense(size)
        raster += known - start
        again += middle - known
        fresh += time.perf_counter() - middle
    whole = time.perf_counter() - began
    # On a busy machine, wall time includes other processes, so all parts are scaled by the same factor.
    scale = 1e3 * (time.process_time() - busy) / whole / (steps * task.batch)
    batches.close()
    torch.set_num_threads(threads)
    after = stream.stats.snapshot()
    stages = {"read": "read", "image": "decode", "masks": "pick"}
    seconds = {name: after[stage]["seconds"] - before[stage]["seconds"] for name, stage in stages.items()}
    seconds["raster"] = raster
    seconds["rest"] = max(0.0, whole - again - fresh - sum(seconds.values()))
    seconds |= {"raster, all cleared": again, "raster, fresh memory": fresh}
    return {name: scale * value for name, value in seconds.items()}


def storage(folder: Path, root: Path, data: str | None = None) -> dict[str, float]:
    """Bytes per second of sequential reads, from the disk and from the page cache.

    Args:
        folder: without `data`, a file with the dataset's bytes is written here, read and removed.
        data: the user's shards, of which the first 256 MB are read. If they are remote, nothing is measured.
    """
    if data is not None:
        return {} if "://" in data else _rates(sorted(Path(data).glob("*.tar")))
    path = folder / "storage.bin"
    bytes_of_root = next(root.glob("*.tar")).read_bytes()
    with path.open("wb") as out:
        for _ in range(max(1, _ENOUGH // len(bytes_of_root))):
            out.write(bytes_of_root)
        out.flush()
        os.fsync(out.fileno())
    rates = _rates([path])
    path.unlink()
    return rates


def _rates(paths: list[Path]) -> dict[str, float]:
    return {"disk": _reading(paths, forget=True), "page cache": _reading(paths, forget=False)}


def _reading(paths: list[Path], *, forget: bool) -> float:
    """Bytes per second; with `forget`, the file is dropped from the page cache first."""
    buffer, got, seconds = bytearray(1 << 20), 0, 0.0
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        if forget:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        began, at = time.perf_counter(), 0
        while got < _ENOUGH and (size := os.preadv(handle, [buffer], at)):
            at += size
            got += size
        seconds += time.perf_counter() - began
        os.close(handle)
    return got / seconds


def verdict(document: dict[str, Any]) -> dict[str, Any]:
    """The limit of this machine and advice, from the measurements.

    The stages share the cores; reading from storage and copying to a device run in parallel.
    """
    cores = document["machine"]["cores"]
    times: dict[str, dict[str, float]] = document["stages"]
    kind = "original" if "original" in times else next(iter(times))
    own = times[kind]
    names = {"read": "reading", "image": "JPEG decoding", "masks": "choosing masks", "raster": "raster"}
    output = "masks as 1024 x 1024 pixels"
    if document["machine"]["gpu"]:
        del names["raster"]  # runs are copied and rasterised on the device
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
    text = f"{cores} cores can make {rates['processor']:.0f} images/s of {SIZES[kind]} JPEGs with {output}"
    if disk:
        text += f"; this disk can deliver {rates['storage']:.0f}"
    advice = {"storage": "Faster storage, or smaller files: sa1b reshard --image-size 1024."}
    if limiting == "processor":
        share = work[largest] / milliseconds
        limiting = largest
        text += f". The processor limits, and most of its time ({share:.0%}) is {largest}"
    else:
        text += f". The {limiting} limits"
    if limiting == "JPEG decoding" and {"original", "1024"} <= times.keys():
        small = times["1024"]
        faster = milliseconds / (sum(small[name] for name in names) + small["rest"])
        advice[limiting] = (
            f"Shards of 1024 px (sa1b reshard --image-size 1024) give {faster:.1f} times the images/s "
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


def device(root: Path, task: Task, folder: Path) -> dict[str, float]:
    """On a GPU: time to rasterise compared with zeroing, batches per second, and the waiting time of a model.

    Returns:
        copy: images a second of the copy alone, from pinned memory; raster_milliseconds, zero_milliseconds:
        of the masks of an image to pixels, and of zeros into as many bytes; batches: a second from `Loader`
        on the device, masks as pixels; model: images a second of training ViT-B, data_wait: the part of the
        time that its steps wait for data.
    """
    sizes = {"image_size": task.image_size, "masks": task.masks}
    stream = sa1b.Stream(root, global_batch=task.batch, epochs=None, **sizes)
    batch = next(iter(stream))
    pinned = batch.pin_memory()
    there = pinned.to("cuda")
    out = there.masks.dense(task.size)
    times = []
    for _ in range(20):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        marks[0].record()
        there = pinned.to("cuda")
        marks[1].record()
        there.masks.dense(task.size, out=out)
        marks[2].record()
        out.zero_()
        marks[3].record()
        torch.cuda.synchronize()
        times.append([start.elapsed_time(end) for start, end in pairwise(marks)])
    copy, raster, zeros = (median(each) / len(batch) for each in zip(*times, strict=True))
    return {
        "copy": 1e3 / copy,
        "raster_milliseconds": raster,
        "zero_milliseconds": zeros,
        "batches": _batches(sa1b.Loader(stream, device="cuda", dense=task.size, quiet=True)),
        **training(root, folder / "training", "vit_b", 4, steps=30),
    }


def _batches(loader: sa1b.Loader, count: int = 40) -> float:
    """Calls per second after all memory is allocated."""
    batches = iter(loader)
    for _ in range(10):
        next(batches)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        next(batches)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    batches.close()
    return count / seconds


def training(root: Path, out: Path, preset: str, batch: int, steps: int) -> dict[str, float]:
    """Images per second and waiting time of the training command, after its warm-up."""
    command = [sys.executable, "sa1b/train.py", "--preset", preset, "--data.root", str(root)]
    command += ["--data.global-batch", str(batch), "--optim.steps", str(steps), "--optim.warmup", "1"]
    command += ["--logging.every", "1", "--checkpoint.every", str(steps), "--out", str(out)]
    subprocess.run(command, cwd=Path(__file__).parents[1], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    warm = [line for line in lines if "data_wait" in line][steps // 3 :]
    return {
        "model": median(line["images_per_s"] for line in warm),
        "data_wait": median(line["data_wait"] for line in warm),
    }
