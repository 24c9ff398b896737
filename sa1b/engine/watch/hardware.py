"""GPUs by name, with the dense products and one-way links of their data sheets, and numbers of a device."""

import math
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from sa1b.engine.model import Model
from sa1b.engine.precision import Precision
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.errors import UsageError


@dataclass(frozen=True, slots=True)
class Gpu:
    """A type of GPU. Products are operations per second; fp16 is as fast as bf16."""

    name: str  # as a flag
    bf16: float
    tf32: float
    fp32: float
    memory: float  # bytes
    link: float  # bytes per second to other GPUs of the node, in one direction
    reported: tuple[str, ...] = ()  # names that the driver reports, without "NVIDIA"

    def peak(self, precision: Precision) -> float:
        return float(getattr(self, "bf16" if precision == "fp16" else precision))


def _gpu(name: str, bf16: float, tf32: float, fp32: float, memory: float, link: float, *reported: str) -> Gpu:
    return Gpu(name, bf16 * 1e12, tf32 * 1e12, fp32 * 1e12, memory * 1e9, link * 1e9, reported or (name,))


# Name, 10^12 operations per second (bf16, tf32, fp32), GB of memory, GB/s to other GPUs, names of the driver.
GPUS = (
    _gpu("H100 PCIe", 756, 378, 51, 80, 64),
    _gpu("H200", 989, 494, 67, 141, 450),
    _gpu("H100", 989, 494, 67, 80, 450, "H100 80GB HBM3"),
    _gpu("A100-40GB", 312, 156, 19.5, 40, 300, "A100-SXM4-40GB", "A100-PCIE-40GB"),
    _gpu("A100", 312, 156, 19.5, 80, 300, "A100-SXM4-80GB", "A100 80GB PCIe"),
    _gpu("L40S", 362, 183, 91.6, 48, 32),
    _gpu("L4", 121, 60, 30.3, 24, 32),
    _gpu("A10", 125, 62.5, 31.2, 24, 32),
    _gpu("B200", 2250, 1125, 75, 180, 900),
)


def gpu_named(name: str) -> Gpu:
    wanted = name.casefold().replace("nvidia", "").replace("-", " ").strip()
    for gpu in GPUS:
        if gpu.name.casefold().replace("-", " ") == wanted:
            return gpu
    known = ", ".join(repr(gpu.name) for gpu in GPUS)
    raise UsageError(f"--gpu {name}: not known; pass one of {known}, or --tflops and --gpu-memory")


def peak_flops(device: torch.device, precision: Precision) -> float | None:
    """Peak operations per second of a GPU with --parallel.precision; None if unknown, as on a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).removeprefix("NVIDIA ")
    return next((gpu.peak(precision) for gpu in GPUS if name in gpu.reported), None)


def peak_seconds(
    model: Model, images: float, masks: float, precision: Precision, rank_info: RankInfo
) -> float | None:
    peak = peak_flops(rank_info.device, precision)
    return model.flops(images, masks) / (peak * rank_info.world_size) if peak else None


_GPU: dict[str, Callable[[torch.device], float]] = {
    "gpu_utilisation": lambda device: torch.cuda.utilization(device) / 100,
    "gpu_memory_gb": lambda device: torch.cuda.device_memory_used(device) / 1e9,
    "gpu_power_w": lambda device: torch.cuda.power_draw(device) / 1e3,
    "gpu_clock_mhz": torch.cuda.clock_rate,
}
SAMPLED = (*_GPU, "cpu_utilisation", "memory_gb")
_INTERVAL = 1.0  # seconds between samples


class Sampler:
    """Numbers of a rank's device, at most once a second, and of its last forward pass of the step before."""

    def __init__(self, device: torch.device, module: nn.Module) -> None:
        self._device, self._is_gpu, self._sample = device, device.type == "cuda", dict[str, float]()
        self._before = time.perf_counter(), time.process_time()
        self._begin: Any = None
        # Beginning and end of the last pass, on a GPU events, and of one that the device has completed.
        self._last: tuple[Any, Any] | None = None
        self._complete: tuple[Any, Any] | None = None
        module.register_forward_pre_hook(lambda *_: setattr(self, "_begin", self._now()))
        module.register_forward_hook(lambda *_: setattr(self, "_last", (self._begin, self._now())))

    def latest(self) -> dict[str, float]:
        before, now = self._before, (time.perf_counter(), time.process_time())
        if not self._sample or now[0] - before[0] >= _INTERVAL:
            self._before = now
            if self._is_gpu:
                self._sample = {name: self._read(read) for name, read in _GPU.items()}
            else:
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                busy = (now[1] - before[1]) / max(now[0] - before[0], 1e-9)
                resident = pages * os.sysconf("SC_PAGESIZE") / 1e9
                self._sample = {"cpu_utilisation": busy, "memory_gb": resident}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self._is_gpu:
            peak = torch.cuda.max_memory_allocated(self._device)
        forward, self._complete = self._complete, self._last
        return {"forward": self._seconds(forward), "peak_memory": peak, **self._sample}

    def _read(self, read: Callable[[torch.device], float]) -> float:
        try:
            return read(self._device)
        except Exception:  # without pynvml, or not supported by this GPU
            return math.nan

    def _now(self) -> Any:
        if not self._is_gpu:
            return time.perf_counter()
        event = cast(Any, torch.cuda.Event)(enable_timing=True)
        event.record()
        return event

    def _seconds(self, forward: tuple[Any, Any] | None) -> float:
        if forward is None:
            return math.nan
        begin, end = forward
        return float(begin.elapsed_time(end)) / 1e3 if self._is_gpu else float(end - begin)
