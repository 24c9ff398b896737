"""Time of work on the device: CUDA events and graphs, or this process's clock on a CPU."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

CALLS, REPLAYS = 10, 20


def device_of(buffers: Sequence[Tensor]) -> str:
    """Type of the device of all buffers: "cuda" or "cpu"."""
    return buffers[0].device.type


def synchronize() -> None:
    """Wait for the GPU, if this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def between(work: Callable[[], object], device: str) -> float:
    """Milliseconds on the device from the begin of work to its end."""
    if device == "cpu":
        began = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - began)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def in_graph(call: Callable[[Tensor], object], buffers: Sequence[Tensor], replays: int = REPLAYS) -> float:
    """Milliseconds of one call on the device, without the time between launches.

    Args:
        call: fills a buffer; it must not wait for the device.
        buffers: used in turn, more than fit into the caches.
        replays: measurements, of which the median counts.
    """
    if device_of(buffers) == "cpu":
        return each(call, buffers, replays)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which fills the buffers
    with torch.cuda.stream(side):
        for buffer in buffers:
            call(buffer)  # compiles
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(buffers[i % len(buffers)])
    graph.replay()
    return median(between(graph.replay, "cuda") for _ in range(replays)) / CALLS


def each(call: Callable[[Tensor], object], buffers: Sequence[Tensor], replays: int = REPLAYS) -> float:
    """Milliseconds of one of many calls, with the time between launches."""
    device = device_of(buffers)
    count = CALLS if device == "cuda" else 1

    def calls() -> None:
        for i in range(count):
            call(buffers[i % len(buffers)])

    calls()
    return median(between(calls, device) for _ in range(replays)) / count
