"""Masks to pixels: times of the kernels beside `Tensor.zero_()` of the same buffer, and the best constants.

16 images with 64 masks each, at 1024 and 256 pixels. On a CPU, plain torch takes the place of the kernels.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sa1b
from benchmarks.gpu import timing
from benchmarks.gpu.material import roots
from benchmarks.gpu.part import Record, Setting
from sa1b.masks import raster_torch
from sa1b.stream.batch import Batch
from sa1b.stream.ragged import RaggedMasks

IMAGE_SIZE = 1024
TARGET = 1.5  # times zero_(), uint8 at 1024
_COMPILERS = 8  # processes; the first launch of a kernel compiles it in one thread


class Masks:
    """Masks of several images on the device.

    Args:
        masks: masks of a batch on the CPU.
        indices: those to take, in any order and any number; None: all.

    Attributes:
        count: number of masks.
        described: their statistics, as text.
    """

    def __init__(self, masks: RaggedMasks, device: str, indices: np.ndarray | None = None) -> None:
        indices = np.arange(len(masks)) if indices is None else indices
        starts, stops = masks.offsets[indices].tolist(), masks.offsets[indices + 1].tolist()
        runs = torch.cat([masks.runs[start:stop] for start, stop in zip(starts, stops, strict=True)])
        lengths = masks.offsets.diff()[indices]
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        self.device, self.count, self.image_size = device, len(indices), masks.image_size
        self._arguments = (
            runs.to(device),
            offsets.to(device),
            *masks.sizes[indices].to(device).T.contiguous(),
            masks.image_size,
        )
        self._taken = masks.taken[indices].to(device)
        self.described = (
            f"{self.count} masks, {offsets[-1] / self.count:.0f} runs a mask (most {lengths.max()})"
        )

    def buffers(self, size: int, dtype: torch.dtype, least_bytes: int = 2**30) -> list[Tensor]:
        """More buffers than fit into any level of cache."""
        bytes_each = self.count * size**2 * dtype.itemsize
        number = max(2, min(timing.CALLS, least_bytes // bytes_each))
        shape = (self.count, size, size)
        return [torch.full(shape, 1, dtype=dtype, device=self.device) for _ in range(number)]

    def call(self, back_end: ModuleType, size: int) -> Callable[[Tensor | None], Tensor]:
        """A function that rasterises the masks into a buffer."""
        return lambda out: back_end.rasterize_frame(*self._arguments, size, taken=self._taken, out=out)


def batch_of(setting: Setting) -> Batch:
    """The first images of the material with their masks, on the CPU."""
    images, masks, size = setting.pick((16, 64, 1024), (2, 4, 64))
    stream = sa1b.Stream(
        roots(setting)["original"], global_batch=images, masks=masks, image_size=size, epochs=None
    )
    batch: Batch = next(iter(stream))
    stream.close()
    return batch


def largest(batch: Batch) -> np.ndarray:
    """The three largest masks of each image, as often as it has masks."""
    image, areas = batch.masks.image.numpy(), batch.areas.numpy()
    found = []
    for one in range(len(batch)):
        own = np.flatnonzero(image == one)
        found.append(np.resize(own[np.argsort(-areas[own])][:3], len(own)))
    return np.concatenate(found)


def work(setting: Setting, record: Record) -> None:
    """Times of 16 x 64 masks at 1024 and 256 pixels, each beside zero_(), and equal bits."""
    sizes = setting.pick((1024, 256), (64, 16))
    back_end, least = kernels(setting), setting.pick(2**30, 1)
    replays = setting.pick(timing.REPLAYS, 1)
    dtypes = setting.pick((torch.uint8, torch.bfloat16, torch.float32), (torch.uint8,))
    batch = batch_of(setting)
    masks = Masks(batch.masks, setting.device)
    print(masks.described)
    one = masks.buffers(1, torch.uint8, least)
    record.figure(
        "measure_masks and one pixel a mask", timing.in_graph(masks.call(back_end, 1), one, replays), "ms"
    )
    for size, dtype in product(sizes, dtypes):
        label = f"{size} {str(dtype)[6:]}"
        with record.attempt(label):
            buffers = masks.buffers(size, dtype, least)
            cleared = timing.in_graph(torch.Tensor.zero_, buffers, replays)
            record.figure(f"{label} zero_()", cleared, "ms")
            record.figure(f"{label} zero_(), bandwidth", buffers[0].nbytes / cleared / 1e6, "GB/s")
            expected = masks.call(raster_torch, size)(None)
            took = timing.in_graph(masks.call(back_end, size), buffers, replays)
            calls = timing.each(masks.call(back_end, size), buffers, replays)
            got = masks.call(back_end, size)(buffers[0].fill_(1))
            record.check(f"{label}: the bits of plain torch", torch.equal(got, expected.to(dtype)))
            limit = TARGET if (size, dtype) == (1024, torch.uint8) else None
            record.figure(label, took, "ms")
            record.figure(f"{label}, times zero_()", took / cleared, "x", at_most=limit)
            record.figure(f"{label}, a call without a graph", calls, "ms")
            del buffers, expected, got
    with record.attempt("large masks"):
        large = Masks(batch.masks, setting.device, largest(batch))
        print(f"large masks only: {large.described}")
        buffers = large.buffers(sizes[0], torch.uint8, least)
        cleared = timing.in_graph(torch.Tensor.zero_, buffers, replays)
        took = timing.in_graph(large.call(back_end, sizes[0]), buffers, replays)
        record.figure(f"large masks only, {sizes[0]} uint8, times zero_()", took / cleared, "x")
        plain = timing.each(masks.call(raster_torch, sizes[0]), buffers[:1], setting.pick(3, 1))
        record.figure(f"{sizes[0]} uint8 plain torch, a call", plain, "ms")


def kernels(setting: Setting) -> ModuleType:
    """The back end of the device."""
    if not setting.on_gpu:
        return raster_torch
    from sa1b.masks import raster_triton

    return raster_triton


@contextmanager
def constants(back_end: ModuleType, values: Mapping[str, Any]) -> Iterator[None]:
    """Context in which the back end has other constants."""
    before = {name: getattr(back_end, name) for name in values if hasattr(back_end, name)}
    for name in before:
        setattr(back_end, name, values[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(back_end, name, value)


def candidates() -> list[dict[str, Any]]:
    """Constants to compare for uint8 at 1024 pixels."""
    return [
        {"TILE_ROWS": rows, "TILE_COLUMNS": columns, "STEP_PIXELS": pixels, "WARPS": warps}
        for rows, columns, (pixels, warps) in product(
            (64, 128, 256), (128, 256), ((2048, 4), (4096, 4), (4096, 8), (8192, 8))
        )
    ]


def candidates_of_runs() -> list[dict[str, Any]]:
    """Constants of the kernel that reads the runs."""
    return [
        {"RUNS_BLOCK": block, "RUNS_WARPS": warps}
        for block, warps in product((256, 512, 1024, 2048), (4, 8, 16))
    ]


def compile_for(values: Mapping[str, Any], size: int) -> None:
    """Compile the kernels with some constants, in a process whose result is in Triton's cache on disk."""
    from sa1b.masks import raster_triton

    side = torch.full((1,), IMAGE_SIZE, device="cuda")
    run = torch.full((1,), IMAGE_SIZE**2, dtype=torch.int32, device="cuda")
    with constants(raster_triton, values):
        raster_triton.rasterize_frame(
            run,
            torch.arange(2, device="cuda"),
            side,
            side,
            IMAGE_SIZE,
            size,
            taken=torch.stack((side, side), 1),
        )
    torch.cuda.synchronize()


def sweep(setting: Setting, record: Record) -> None:
    """Time each candidate; what the time limit does not allow is not measured."""
    size = setting.pick(1024, 64)
    masks, back_end = Masks(batch_of(setting).masks, setting.device), kernels(setting)
    end = time.monotonic() + setting.pick(45, 1)
    least, replays = setting.pick(2**30, 1), setting.pick(5, 1)
    tiles, runs = setting.pick(
        (candidates(), candidates_of_runs()), (candidates()[:2], candidates_of_runs()[:2])
    )
    if setting.on_gpu:
        with record.attempt("compile the candidates in parallel"):
            _compile_all([(one, size) for one in tiles] + [(one, 1) for one in runs])
    for name, each, pixels in (("tiles", tiles, size), ("runs", runs, 1)):
        buffers = masks.buffers(pixels, torch.uint8, least)
        cleared = timing.in_graph(torch.Tensor.zero_, buffers, replays)
        results = []
        for one in each:
            if time.monotonic() > end and results:
                break
            with record.attempt(_described(one)), constants(back_end, one):
                results.append(
                    (timing.in_graph(masks.call(back_end, pixels), buffers, replays), _described(one))
                )
        record.figure(f"{name}: candidates not measured", len(each) - len(results))
        results.sort()
        table = (f"{took:.4f} ms  {took / cleared:.2f} x zero_()  {text}" for took, text in results)
        record.text(name, "\n".join(table))
        for took, text in results[:5]:
            record.figure(f"{name}: {text}", took, "ms")


def _compile_all(jobs: list[tuple[dict[str, Any], int]]) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_COMPILERS, mp_context=context) as pool:
        for future in [pool.submit(compile_for, *job) for job in jobs]:
            future.result()


def _described(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name} {value}" for name, value in values.items())
