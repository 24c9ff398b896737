"""A GPU that is the CPU: runs code that is written for a GPU, to find errors in the code itself.

Within `pretended`, tensors of the device "cuda" and pinned tensors are tensors of the CPU, streams and events do
nothing but exist, and a graph is not captured: its calls run once. Functions of torch.cuda that are not replaced
here fail, as do names that torch.cuda does not have. Torch's profiler does not work.

`python -m tests.benchmarks.pretended_gpu --flags` is the training command on such a GPU.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import sa1b
from benchmarks.gpu import raster, timing
from benchmarks.gpu.stand_in import HostLane
from sa1b import train
from sa1b.masks import raster_torch
from sa1b.stream.decoders import DECODERS, CudaLane, GpuDecoder

PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", total_memory=80 << 30, multi_processor_count=132, L2_cache_size=50 << 20,
    uuid="0", major=9, minor=0,
)  # fmt: skip


class OnCpu(TorchFunctionMode):
    """Replaces the device "cuda" by the CPU in all calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:  # what code asks of its device stays the same
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(_on_cpu, (args, kwargs or {}))
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value


class Event:
    """With the interface of torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at: float | None = None

    def record(self, stream: object = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at is not None

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, end: "Event") -> float:
        assert self.at is not None
        assert end.at is not None
        return 1e3 * (end.at - self.at)


class Stream:
    """With the interface of torch.cuda.Stream."""

    cuda_stream = 0

    def __init__(self, device: object = None, priority: int = 0) -> None: ...

    def wait_stream(self, stream: "Stream") -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def synchronize(self) -> None: ...


class CUDAGraph:
    """With the interface of torch.cuda.CUDAGraph."""

    def replay(self) -> None: ...


class SideStream:
    """With the interface of sa1b.stream.device.SideStream; copies are done at once."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda"
        self.device = torch.device("cpu")

    def begin_thread(self) -> None: ...

    def current(self) -> Any:
        return nullcontext()

    def page_lock(self, memory: Any) -> None: ...

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8)

    def copy(self, batch: sa1b.Batch) -> sa1b.Batch:
        assert batch.buffer is not None
        return replace(batch._repacked(batch.buffer.clone()), images=batch.images.clone())

    def event(self) -> Event:
        event = Event()
        event.record()
        return event

    def hand_over(self, batch: sa1b.Batch, ready: Event) -> None:
        ready.synchronize()


class Lane(CudaLane):
    """A lane of a GPU with memory of the host, where libjpeg-turbo decodes."""

    def __init__(self, device: torch.device, memory: type[HostLane]) -> None:
        super().__init__(device)
        self.memory = memory(device)

    def filled(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self.memory.filled(shape)

    def host(self, size: int) -> torch.Tensor:
        return self.memory.host(size)

    def decode(self, files: list[torch.Tensor]) -> list[torch.Tensor]:
        return self.memory.decode(files)


def decoder(memory: type[HostLane] = HostLane) -> GpuDecoder:
    """The decoder "torchcodec" with libjpeg-turbo in place of the library."""
    return GpuDecoder(partial(Lane, memory=memory))


@contextmanager
def pretended(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Context in which the CPU is a GPU for the parts of `make gpu`, except for kernels and training commands."""
    of_cuda = {
        "Stream": Stream, "Event": Event, "CUDAGraph": CUDAGraph,
        "graph": lambda graph: nullcontext(), "stream": lambda stream: nullcontext(),
        "current_stream": lambda device=None: Stream(), "synchronize": lambda device=None: None,
        "is_available": lambda: True, "is_bf16_supported": lambda: True,
        "device_count": lambda: 1, "current_device": lambda: 0, "set_device": lambda device: None,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_capability": lambda device=None: (9, 0),
        "memory_stats": lambda: {"num_device_alloc": 7}, "host_memory_stats": lambda: {"num_host_alloc": 3},
        "memory_reserved": lambda device=None: 1 << 20, "max_memory_allocated": lambda device=None: 1 << 20,
        "reset_peak_memory_stats": lambda device=None: None, "_sleep": lambda cycles: None,
        "set_sync_debug_mode": lambda mode: None,
    }  # fmt: skip
    for name, stand_in in of_cuda.items():
        patch.setattr(torch.cuda, name, stand_in)
    patch.setattr("sa1b.stream.device.SideStream", SideStream)
    patch.setitem(DECODERS, "torchcodec", decoder)
    patch.setitem(sys.modules, "torchcodec.decoders", SimpleNamespace(decode_jpeg=None))
    patch.setattr(timing, "device_of", lambda buffers: "cuda")
    patch.setattr(raster, "kernels", lambda setting: raster_torch)
    with OnCpu():
        yield


if __name__ == "__main__":
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as outer, pretended(outer):
        ended = train.main()
    train.exit_at_once(ended)
