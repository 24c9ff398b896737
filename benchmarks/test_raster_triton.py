"""The Triton back end compared with Tensor.zero_() of the same buffer: `pytest -s
benchmarks/test_raster_triton.py`.

Needs a CUDA device; about two minutes. One call has 16 images of 64 masks, with the statistics and image
sizes of SA-1B. Device time: ten calls in one CUDA graph, over buffers in turn, the median of 20 replays. Call
time: many calls without a graph, one after the other, with the launches from Python.
"""

from itertools import product
from statistics import median

import numpy as np
import pytest
import torch

from sa1b.masks import raster_torch
from sa1b.synthetic import scene as synthetic_scene

raster_triton = pytest.importorskip("sa1b.masks.raster_triton", exc_type=ImportError)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

IMAGES, MASKS, IMAGE_SIZE = 16, 64, 1024
CALLS, REPLAYS = 10, 20
TARGET = 1.5  # times zero_(), uint8 at 1024


def column_runs(x: int, y: int, mask: np.ndarray, height: int, width: int) -> np.ndarray:
    """Runs of a mask whose top left pixel is at x, y of the image."""
    columns = np.zeros((mask.shape[1], height), np.int8)
    columns[:, y : y + mask.shape[0]] = mask.T > 0
    changes = np.flatnonzero(np.diff(columns.reshape(-1), prepend=0)) + x * height
    return np.diff(changes, prepend=0, append=height * width)


class Batch:
    """Masks of several images on the device: `arguments` of the functions, and a description."""

    def __init__(self, choose) -> None:
        runs, sizes, boxes = [], [], []
        for seed in range(IMAGES):
            random = np.random.default_rng(seed)
            scene = synthetic_scene.plan(random)
            _, shapes = synthetic_scene.draw(random, scene)
            for i in choose(random, len(shapes)):
                shape = shapes[i]
                runs.append(column_runs(shape.x, shape.y, shape.mask, scene.height, scene.width))
                sizes.append((scene.height, scene.width))
                boxes.append(shape.mask.size / scene.height / scene.width)
        offsets = np.cumsum([0, *map(len, runs)], dtype=np.int64)
        self.arguments = (
            torch.from_numpy(np.concatenate(runs).astype(np.int32)).cuda(),
            torch.from_numpy(offsets).cuda(),
            *torch.tensor(sizes).cuda().T.contiguous(),
        )
        self.count = len(runs)
        self.told = (
            f"{len(runs)} masks, {offsets[-1] / len(runs):.0f} runs a mask (most {np.diff(offsets).max()}), "
            f"boxes {100 * np.mean(boxes):.2f} % of an image (mean), {100 * np.median(boxes):.2f} % (p50)"
        )


@pytest.fixture(scope="module")
def batch():
    return Batch(lambda random, count: random.permutation(np.resize(random.permutation(count), MASKS)))


def device_ms(call, buffers) -> float:
    """Milliseconds of one call on the device."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for buffer in buffers:
            call(buffer)  # compiles
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(buffers[i % len(buffers)])
    graph.replay()
    return median(between_events(graph.replay) for _ in range(REPLAYS)) / CALLS


def call_ms(call, buffers) -> float:
    """Milliseconds of one of many calls, without a graph."""

    def calls() -> None:
        for i in range(CALLS):
            call(buffers[i % len(buffers)])

    calls()
    return median(between_events(calls) for _ in range(REPLAYS)) / CALLS


def between_events(work) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def buffers_of(batch: Batch, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """More buffers than fit into any level of cache."""
    bytes_each = batch.count * size**2 * dtype.itemsize
    number = max(2, min(CALLS, 2**30 // bytes_each))
    return [torch.full((batch.count, size, size), 1, dtype=dtype, device="cuda") for _ in range(number)]


def frame(batch: Batch, size: int, back_end=raster_triton):
    return lambda out: back_end.rasterize_frame(*batch.arguments, IMAGE_SIZE, size, out=out)


def test_beside_zero(batch, monkeypatch):
    print(f"\n\n{torch.cuda.get_device_name()}, torch {torch.__version__}: {batch.told}")
    buffers = buffers_of(batch, 1, torch.uint8)
    print(f"measure_masks and one pixel a mask: {device_ms(frame(batch, 1), buffers):.4f} ms\n")
    print("size  dtype       zero_ ms    GB/s   design     device ms  ratio   call ms  ratio (calls)")
    ratios = {}
    for size, dtype in product((1024, 256), (torch.uint8, torch.bfloat16, torch.float32)):
        buffers = buffers_of(batch, size, dtype)
        cleared, cleared_call = device_ms(torch.Tensor.zero_, buffers), call_ms(torch.Tensor.zero_, buffers)
        rate = buffers[0].nbytes / cleared / 1e6
        for design in ("fused", "cleared"):
            monkeypatch.setattr(raster_triton, "DESIGN", design)
            taken, taken_call = device_ms(frame(batch, size), buffers), call_ms(frame(batch, size), buffers)
            ratios[size, dtype, design] = taken / cleared
            print(
                f"{size:4}  {str(dtype)[6:]:9}  {cleared:9.4f}  {rate:6.0f}   {design:8}  {taken:10.4f}  "
                f"{taken / cleared:5.2f}  {taken_call:8.4f}  {taken_call / cleared_call:5.2f}"
            )
        if dtype == torch.uint8:
            taken = call_ms(frame(batch, size, raster_torch), buffers)
            print(
                f"{size:4}  uint8      plain torch: {taken:.3f} ms a call, {taken / cleared_call:.1f} x zero_"
            )
            expected = frame(batch, size, raster_torch)(None)
            assert all(torch.equal(frame(batch, size)(out.fill_(9)), expected) for out in buffers[:1])
        del buffers
    assert min(ratios[1024, torch.uint8, design] for design in ("fused", "cleared")) <= TARGET


def test_large_masks_only(monkeypatch):
    batch = Batch(lambda random, count: np.arange(MASKS) % 3)  # painted from large to small
    buffers = buffers_of(batch, 1024, torch.uint8)
    cleared = device_ms(torch.Tensor.zero_, buffers)
    print(f"\n\nlarge masks only: {batch.told}")
    for design in ("fused", "cleared"):
        monkeypatch.setattr(raster_triton, "DESIGN", design)
        taken = device_ms(frame(batch, 1024), buffers)
        print(f"1024  uint8  {design:8}  {taken:.4f} ms  {taken / cleared:.2f} x zero_")


def test_tiles(batch, monkeypatch):
    """The best constants of the module, for uint8 at 1024."""
    buffers = buffers_of(batch, 1024, torch.uint8)
    cleared = device_ms(torch.Tensor.zero_, buffers)
    one = buffers_of(batch, 1, torch.uint8)
    print("\n\nRUNS_BLOCK  RUNS_WARPS  ms of measure_masks and one pixel a mask")
    for block, warps in product((256, 512, 1024, 2048), (4, 8, 16)):
        with monkeypatch.context() as patch:
            patch.setattr(raster_triton, "RUNS_BLOCK", block)
            patch.setattr(raster_triton, "RUNS_WARPS", warps)
            print(f"{block:10}  {warps:10}  {device_ms(frame(batch, 1), one):.4f}")
    tiles = [
        {"DESIGN": design, "TILE_ROWS": rows, "TILE_COLUMNS": columns, "STEP_PIXELS": pixels, "WARPS": warps}
        for design, rows, columns, (pixels, warps) in product(
            ("fused", "cleared"), (64, 128, 256), (128, 256), ((2048, 4), (4096, 4), (4096, 8), (8192, 8))
        )
    ]
    tiles += [
        {"DESIGN": "cleared", "WORKERS": workers, "TILE_ROWS": rows}
        for workers in (8, 64)
        for rows in (32, 64, 128)
    ]
    results = []
    for constants in tiles:
        with monkeypatch.context() as patch:
            for name, value in constants.items():
                patch.setattr(raster_triton, name, value)
            results.append((device_ms(frame(batch, 1024), buffers), constants))
    for taken, constants in sorted(results, key=lambda result: result[0]):
        told = "  ".join(f"{name} {value}" for name, value in constants.items())
        print(f"{taken:.4f} ms  {taken / cleared:.2f} x  {told}")
