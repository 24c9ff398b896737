"""Utilisation, memory and power of a rank's GPU, or processor time and memory of its process on a CPU.

    sampler = Sampler(rank_info.device)
    sampler.latest()             # {"gpu_utilisation": 0.97, "gpu_memory_gb": 61.2, "gpu_power_w": 640.0}
    sampler.close()

A daemon thread takes a sample every second. The figures of a GPU come from NVML through the module `pynvml`
(package nvidia-ml-py); without it they are unknown.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

GPU = ("gpu_utilisation", "gpu_memory_gb", "gpu_power_w")
CPU = ("cpu_utilisation", "memory_gb")
_INTERVAL = 1.0  # seconds
_PATIENCE = 5.0  # seconds; the driver of a broken GPU may never answer
_LOG = logging.getLogger(__name__)


class Sampler:
    """Samples a device in a thread until `close`.

    `gpu_utilisation`: part of the time in which a kernel ran, 0 to 1. `gpu_memory_gb`: used memory of the GPU
    by all programs, GB (10^9 bytes). `gpu_power_w`: watts. `cpu_utilisation`: processors that this process
    used since the sample before; 1.5: one and a half. `memory_gb`: resident memory of this process, GB.

    Args:
        device: a GPU or the CPU.
        nvml: the module pynvml; by default it is imported if it is installed.
        interval: seconds between samples.
        proc: folder in which /proc is mounted.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        nvml: Any = None,
        interval: float = _INTERVAL,
        proc: Path = Path("/proc"),
    ) -> None:
        on_gpu = device.type == "cuda"
        self._latest = dict.fromkeys(GPU if on_gpu else CPU, math.nan)
        self._sample = _of_gpu(device, nvml) if on_gpu else _of_process(proc)
        self._interval = interval
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="sa1b-sampler", daemon=True)
        if self._sample is not None:
            self._thread.start()

    def latest(self) -> dict[str, float]:
        """The last sample; unknown values are NaN. The names depend on the kind of device only."""
        return dict(self._latest)

    def close(self) -> None:
        """End the thread; one that waits for the driver ends with the process."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(_PATIENCE)

    def _work(self) -> None:
        while self._sample is not None:
            self._latest = {**self._latest, **self._sample()}
            if self._end.wait(self._interval):
                return


def _of_process(proc: Path) -> Callable[[], dict[str, float]]:
    """Samples of this process."""
    before = [time.perf_counter(), time.process_time()]
    page = os.sysconf("SC_PAGESIZE")

    def sample() -> dict[str, float]:
        now = [time.perf_counter(), time.process_time()]
        wall, busy = now[0] - before[0], now[1] - before[1]
        before[:] = now
        try:
            pages = int((proc / "self" / "statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):  # systems without /proc
            return {"cpu_utilisation": busy / wall}
        return {"cpu_utilisation": busy / wall, "memory_gb": pages * page / 1e9}

    return sample


def _of_gpu(device: torch.device, nvml: Any) -> Callable[[], dict[str, float]] | None:
    """Samples of a GPU; None if NVML cannot read it."""
    if nvml is None:
        if find_spec("pynvml") is None:
            return None
        nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
        # The index of NVML differs from torch's if CUDA_VISIBLE_DEVICES selects GPUs.
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except nvml.NVMLError as error:
        _LOG.warning("utilisation of %s is not recorded: %s", device, error)
        return None
    readings: dict[str, Callable[[], float]] = {
        "gpu_utilisation": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "gpu_memory_gb": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / 1e9,
        "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
    }

    def sample() -> dict[str, float]:
        found = {}
        for name, read in readings.items():
            try:
                found[name] = read()
            except nvml.NVMLError:  # not supported by this GPU
                found[name] = math.nan
        return found

    return sample
