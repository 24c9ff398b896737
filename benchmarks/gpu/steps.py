"""Time of the host and of the device in a training step of ViT-B, by micro-batch and attention back end.

The batch stays on the device, so the loader takes no part; "with loader threads" repeats the measurement
while the loader prepares further batches. Host: from the start of the step until its last launch. Whole:
until the device has computed it.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.part import Record, Setting
from benchmarks.gpu.training import common
from sa1b.engine import config as settings
from sa1b.engine.ranks.process_group import start, stop
from sa1b.engine.step.gradients import clear
from sa1b.engine.watch.watchdog import Phases
from sa1b.recipes import presets
from sa1b.sam.kernel_proof import prove_for_run
from sa1b.stream.batch import Batch
from sa1b.train import Run, begin, close

Change = Callable[[], AbstractContextManager[Any]]
WITHOUT_GRAPHS = ("--model.no-cuda-graphs",)
WITHOUT_KERNELS = ("--model.kernels", "none")
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def work(setting: Setting, record: Record) -> None:
    """Micro-batches of 8, 4, 2 and 1 images; 8 and 1 without CUDA graphs, 8 with other kernels."""
    cases: list[tuple[str, int, Change, tuple[str, ...]]] = [
        ("8 images", 8, nullcontext, ()),
        ("8 images, without CUDA graphs", 8, nullcontext, WITHOUT_GRAPHS),
        ("1 image", 1, nullcontext, ()),
        ("1 image, without CUDA graphs", 1, nullcontext, WITHOUT_GRAPHS),
        ("8 images, kernels of torch", 8, nullcontext, WITHOUT_KERNELS),
        ("4 images", 4, nullcontext, ()),
        ("2 images", 2, nullcontext, ()),
        ("8 images, without cuDNN attention", 8, partial(sdpa_kernel, WITHOUT_CUDNN), ()),
    ]
    for label, images, changed, flags in setting.pick(cases, [("2 images", 2, nullcontext, WITHOUT_KERNELS)]):
        with record.attempt(label), ExitStack() as stack:
            stack.enter_context(changed())
            run, batch = stack.enter_context(_run(setting, images, flags))
            _measure(setting, record, label, run, batch, images)


@contextmanager
def _run(setting: Setting, images: int, more: tuple[str, ...]) -> Iterator[tuple[Run, Batch]]:
    sizes = setting.pick(("--preset", "vit_b", "--parallel.precision", "bf16"), ())
    flags = (*common(setting, setting.folder / "steps"), *sizes, "--data.global-batch", images)
    flags += ("--data.masks", setting.pick(64, 4), "--optim.steps", 1000, *more)
    config = settings.parse([*map(str, flags)], None, presets.PRESETS, "train")
    rank_info = start(config.parallel)
    prove_for_run(config, rank_info.device, rank_info.local_rank)
    run = begin(config.resolved(), rank_info, Phases())
    run.training.module.train()
    try:
        yield run, next(run.feed.step())
    finally:
        close(run)
        stop()
        del run
        gc.collect()
        if setting.on_gpu:
            torch.cuda.empty_cache()


def _measure(setting: Setting, record: Record, label: str, run: Run, batch: Batch, images: int) -> None:
    first = _step(setting, run, batch)
    record.figure(f"{label}: first step", first[1], "s")
    record.figure(f"{label}: second step, which records the graph", _step(setting, run, batch)[1], "s")
    figures: dict[str, Any] = {}
    for kind in ("alone", "with loader threads"):
        found = []
        for _ in range(setting.pick(4, 1)):
            if kind != "alone":
                next(run.feed.step())  # its place is filled while the step runs
            found.append(_step(setting, run, batch))
        host, whole = (median(times) for times in zip(*found, strict=True))
        figures |= {f"{kind}: host": host, f"{kind}: whole": whole}
    for name, seconds in figures.items():
        record.figure(f"{label}, {name}", 1e3 * seconds, "ms")
    record.figure(f"{label}: rate", images / figures["alone: whole"], "images/s")
    if setting.on_gpu:
        record.figure(f"{label}: peak memory", torch.cuda.max_memory_allocated() / 1e9, "GB")


def _step(setting: Setting, run: Run, batch: Batch) -> tuple[float, float]:
    """Seconds of the host, and until the device has ended."""
    _wait(setting)
    began = time.perf_counter()
    training = run.training
    training.finish(training.forward_backward(batch)["count"])
    training.scaler.step(training.optimizer)
    clear(training.module, training.optimizer)
    host = time.perf_counter() - began
    _wait(setting)
    return host, time.perf_counter() - began


def _wait(setting: Setting) -> None:
    if setting.on_gpu:
        torch.cuda.synchronize()
