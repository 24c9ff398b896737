"""GPUs by name, the cluster that a run is planned for, and samples of the device of a rank.

    sampler = Sampler(rank_info.device)
    sampler.latest()             # {"gpu_utilisation": 0.97, "gpu_memory_gb": 61.2, "gpu_power_w": 640.0}
    sampler.close()

A daemon thread takes a sample every second. The figures of a GPU come from NVML through the module `pynvml`
(package nvidia-ml-py); without it they are unknown.

Figures of GPUs are those of the vendors' data sheets: operations per second of dense matrix products, without
sparsity; memory in 10^9 bytes; the rate in one direction between the GPUs of a node, by NVLink if the GPU has
it, else by PCIe.
"""

import difflib
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sa1b.arguments import Range
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
        """Operations per second with --parallel.precision."""
        return {"bf16": self.bf16, "fp16": self.bf16, "tf32": self.tf32, "fp32": self.fp32}[precision]


def _gpu(name: str, bf16: float, tf32: float, fp32: float, memory: float, link: float, *reported: str) -> Gpu:
    return Gpu(
        name=name,
        bf16=bf16 * 1e12,
        tf32=tf32 * 1e12,
        fp32=fp32 * 1e12,
        memory=memory * 1e9,
        link=link * 1e9,
        reported=reported or (name,),
    )


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
    """The GPU of --gpu in any case, "NVIDIA" may be omitted; UsageError if it is not in the list."""
    wanted = name.casefold().replace("nvidia", "").replace("-", " ").strip()
    for gpu in GPUS:
        if gpu.name.casefold().replace("-", " ") == wanted:
            return gpu
    known = [gpu.name for gpu in GPUS]
    near = difflib.get_close_matches(name.upper(), known, 1, cutoff=0.5)
    raise UsageError(
        f"--gpu {name}: unknown; {f'did you mean {near[0]!r}? ' if near else ''}"
        f"known are {', '.join(known)}; for others pass --tflops and --gpu-memory"
    )


def peak_flops(device: torch.device, precision: Precision) -> float | None:
    """Peak operations per second of a GPU with --parallel.precision; None if unknown, as on a CPU."""
    # A GPU is known by its exact name: a part of it may be the name of another one, such as L4 of L40.
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).removeprefix("NVIDIA ")
    return next((gpu.peak(precision) for gpu in GPUS if name in gpu.reported), None)


@dataclass(frozen=True, slots=True)
class Cluster:
    """GPUs, and the assumptions under which their time is estimated. Rates are of one direction."""

    gpu: str  # name of the type of GPU
    nodes: int
    gpus: int  # GPUs of a node, and ranks on it
    flops: float  # operations per second of a GPU at its peak
    gpu_memory: float  # bytes of a GPU
    link: float  # bytes per second between GPUs of a node
    network: float  # bytes per second of a node to others
    mfu: float  # fraction of the peak that a step without communication reaches
    exposed: float  # fraction of the communication that computation does not hide, at least
    cpus: int  # CPU cores of a node for decoding
    # images per second that a core reads and decodes; None: measured, see `StoredImages`
    decode_rate: float | None
    storage: float | None  # bytes per second that the storage delivers to all nodes; None: not limited
    reserved: float  # bytes of a GPU that tensors cannot use
    fragmentation: float  # fraction of the tensors' bytes that the allocator cannot reuse
    price: float | None  # dollars for a GPU hour

    def __post_init__(self) -> None:
        for flag, number in (("nodes", self.nodes), ("gpus", self.gpus), ("cpus", self.cpus)):
            Range(1).check(f"--{flag}", number)
        for flag, value, unit in (
            ("tflops", self.flops, 1e12),
            ("link-rate", self.link, 1e9),
            ("gpu-memory", self.gpu_memory, 1e9),
            ("network-gbit", self.network, 1e9 / 8),
            ("decode-rate", self.decode_rate, 1),
            ("storage-rate", self.storage, 1e9),
        ):
            Range(above=0, below=math.inf).check(f"--{flag}", None if value is None else value / unit)
        Range(above=0, most=1).check("--mfu", self.mfu)
        Range(0, 1).check("--exposed", self.exposed)
        Range(0, 1).check("--fragmentation", self.fragmentation)
        most = self.gpu_memory / 1e9
        Range(0, most, unit=", the --gpu-memory").check("--reserved", self.reserved / 1e9)
        Range(0, below=math.inf).check("--price", self.price)

    @property
    def world_size(self) -> int:
        """Number of ranks, one for each GPU."""
        return self.nodes * self.gpus


def peak_seconds(
    model: Model, images: float, masks: float, precision: Precision, rank_info: RankInfo
) -> float | None:
    """Seconds of a training step at the devices' peak. Divided by the real seconds, they give the MFU."""
    peak = peak_flops(rank_info.device, precision)
    return model.flops(images, masks) / (peak * rank_info.world_size) if peak else None


GPU = ("gpu_utilisation", "gpu_memory_gb", "gpu_power_w")
CPU = ("cpu_utilisation", "memory_gb")
_INTERVAL = 1.0  # seconds
_PATIENCE = 5.0  # seconds; the driver of a broken GPU may never answer
_LOG = logging.getLogger(__name__)


class Sampler:
    """Samples a device in a thread, each `interval` seconds, until `close`.

    `gpu_utilisation`: part of the time in which a kernel ran, 0 to 1. `gpu_memory_gb`: used memory of the GPU
    by all programs, GB (10^9 bytes). `gpu_power_w`: watts. `cpu_utilisation`: processors that this process
    used since the sample before; 1.5: one and a half. `memory_gb`: resident memory of this process, GB.
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
        values = {}
        for name, read in readings.items():
            try:
                values[name] = read()
            except nvml.NVMLError:  # not supported by this GPU
                values[name] = math.nan
        return values

    return sample
