"""The machine: versions of what the figures depend on, and the rates that bound them."""

import importlib.metadata
import platform
import shutil
import subprocess
from functools import partial

import torch

from benchmarks.gpu import timing
from benchmarks.gpu.part import Record, Setting
from sa1b.engine.watch.hardware import peak_flops
from sa1b.workers import available_cpus

PACKAGES = (
    *("torch", "triton", "numpy", "numba", "opencv-python-headless", "simplejpeg", "torchcodec"),
    "nvidia-ml-py",
)


def work(setting: Setting, record: Record) -> None:
    """Versions, and the rates of memory, copies and matrix products."""
    record.about(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        cpus=available_cpus(),
        **{name: _version(name) for name in PACKAGES},
    )
    if setting.on_gpu:
        properties = torch.cuda.get_device_properties(0)
        record.about(
            cuda=torch.version.cuda,
            cudnn=torch.backends.cudnn.version(),
            driver=_driver(),
            gpu=properties.name,
            gpu_memory=properties.total_memory,
            multiprocessors=properties.multi_processor_count,
            l2=properties.L2_cache_size,
        )
        peak = peak_flops(torch.device("cuda", 0), "bf16")
        record.check(
            "the peak of this GPU is known", peak, f"{properties.name}: without it no MFU is printed"
        )
        record.check("bf16 is supported", torch.cuda.is_bf16_supported())
    with record.attempt("rates"):
        _rates(setting, record)


def _rates(setting: Setting, record: Record) -> None:
    device, replays = setting.device, setting.pick(timing.REPLAYS, 1)
    size = setting.pick(4 << 30, 1 << 20)
    source, target = (torch.randint(0, 255, (size,), dtype=torch.uint8, device=device) for _ in range(2))
    copy = timing.each(target.copy_, [source], replays)
    record.figure("device memory, copy, read and written", 2 * size / copy / 1e6, "GB/s")
    cleared = timing.each(torch.Tensor.zero_, [target], replays)
    record.figure("device memory, zero_(), written", size / cleared / 1e6, "GB/s")
    del source, target
    size = setting.pick(1 << 28, 1 << 16)
    pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=setting.on_gpu)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    copies = {"to the device": (there, pinned), "to the host": (pinned, there)}
    for name, (into, out_of) in copies.items():
        copy = partial(into.copy_, out_of, non_blocking=True)
        took = min(timing.between(copy, device) for _ in range(2))
        record.figure(f"pinned memory {name}", size / took / 1e6, "GB/s")
    size = setting.pick(8192, 64)
    for dtype in (torch.bfloat16, torch.float32):
        one = torch.randn(size, size, device=device, dtype=dtype)
        took = timing.each(lambda other, one=one: one @ other, [torch.randn_like(one)], setting.pick(5, 1))
        record.figure(f"matrix product, {str(dtype)[6:]}", 2 * size**3 / took / 1e9, "TFLOP/s")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() or None
