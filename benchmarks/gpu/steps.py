"""A training step of ViT-B with all kernels, with some and with none, beside the account of its operators.

The batch stays on the device, so the loader takes no part. A step is timed with CUDA graphs, and profiled
without replays, because only then the trace says which operator has launched a kernel; `benchmarks.account`
predicts the shortest time of each.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.account import Account, Sum, compared, of_step, table_of
from benchmarks.gpu import timing
from benchmarks.gpu.part import Record, Setting
from benchmarks.gpu.training import common, costliest_kernels, profiled
from sa1b.engine import config as settings
from sa1b.engine.ranks.process_group import start, stop
from sa1b.engine.step.gradients import clear
from sa1b.engine.watch.watchdog import Phases
from sa1b.masks.proved import recorded
from sa1b.recipes import presets
from sa1b.sam import kernel_proof
from sa1b.sam.image_tokens import IN_USE
from sa1b.sam.iteration import Graphs
from sa1b.sam.kernel_proof import KERNELS, Kind, prove_for_run, sizes_of
from sa1b.sam.model import PRESETS as MODELS
from sa1b.stream.batch import Batch
from sa1b.train import Run, begin, close

# Kernels that are left out, and the least images a second that are expected of the rest.
CASES: dict[str, tuple[tuple[str, ...], float | None]] = {
    "right kernels": ((), 40.0),
    "without image_to_tokens": (("image_to_tokens",), 17.0),
    "without kernels": (KERNELS, None),
}
IMAGES, MASKS, H200 = 8, 64, (4.27e12, 705e12)  # bytes a second, operations a second in bfloat16


def work(setting: Setting, record: Record) -> None:
    """Rate, memory and costliest kernels of each case, and what misses its prediction most."""
    cases = setting.pick(CASES, {"without kernels": CASES["without kernels"]})
    kind = Kind("bf16", sizes_of(MODELS["vit_b"]))  # compared in an earlier part
    right = kernel_proof.right(kind.found(recorded()) if setting.on_gpu else {}) or {*KERNELS}
    with ProcessPoolExecutor(len(cases), get_context("spawn")) as pool:
        accounts = {
            label: pool.submit(predicted, setting, sorted(right - {*left_out}))
            for label, (left_out, _) in cases.items()
        }
        for label, (left_out, goal) in cases.items():
            with record.attempt(label), _right_but(left_out):
                _case(setting, record, label, goal, accounts[label])
            gc.collect()  # the run of this case, which nothing holds any more
            if setting.on_gpu:
                torch.cuda.empty_cache()


def _case(
    setting: Setting, record: Record, label: str, goal: float | None, sums: "Future[dict[Any, Sum]]"
) -> None:
    with _run(setting) as (run, batch):
        _timed(setting, record, label, goal, run, batch)
        record.text(f"{label}: kernels", " ".join(sorted(IN_USE)))
        if setting.on_gpu:
            graphs = run.training.module._graphs
            record.check(f"{label}: iterations are replayed", any(graphs._found.values()), graphs._fails)
        events = _trace(run, batch)
        record.text(f"{label}: costliest kernels", costliest_kernels(events))
        account = Account(*H200, sums=sums.result())
        record.figure(f"{label}: shortest step by the account", 1e3 * account.total().seconds, "ms")
        record.text(f"{label}: longer than predicted", table_of(compared(events, account)))


def predicted(setting: Setting, kernels: Sequence[str]) -> dict[tuple[bool, str], Sum]:
    """The sums of the account of a step at the rates of an H200."""
    account = Account(*H200)
    if setting.on_gpu:  # takes half a minute
        of_step("vit_b", IMAGES, MASKS, account, kernels)
    return account.sums


@contextmanager
def _right_but(left_out: Sequence[str]) -> Iterator[None]:
    """Context in which these kernels count as wrong."""
    right = kernel_proof.right
    with patch.object(kernel_proof, "right", lambda found: right(found) - {*left_out}):
        yield


@contextmanager
def _run(setting: Setting) -> Iterator[tuple[Run, Batch]]:
    """A run that has begun, and its first batch."""
    sizes = setting.pick(("--preset", "vit_b", "--parallel.precision", "bf16"), ())
    flags = (*common(setting, setting.folder / "steps"), *sizes)
    flags += ("--data.global-batch", setting.pick(IMAGES, 2), "--data.masks", setting.pick(MASKS, 4))
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


def _timed(setting: Setting, record: Record, label: str, goal: float | None, run: Run, batch: Batch) -> None:
    if setting.on_gpu:  # what a recording reserves counts too; replays allocate nothing
        torch.cuda.reset_peak_memory_stats()
    record.figure(f"{label}: first step", _step(run, batch)[1], "s")
    record.figure(f"{label}: second step, which records the graph", _step(run, batch)[1], "s")
    steps = [_step(run, batch) for _ in range(setting.pick(5, 1))]
    host, whole = (median(times) for times in zip(*steps, strict=True))
    record.figure(f"{label}: host", 1e3 * host, "ms")
    record.figure(f"{label}: step", 1e3 * whole, "ms")
    record.figure(f"{label}: rate", len(batch) / whole, "images/s", at_least=goal)
    if setting.on_gpu:
        record.figure(f"{label}: peak memory", torch.cuda.max_memory_allocated() / 1e9, "GB")


def _trace(run: Run, batch: Batch) -> list[dict[str, Any]]:
    """The events of a step with the tensors of a recording, but without one."""
    with patch.object(Graphs, "__call__", lambda _, function, inputs, *__: function(*inputs)):
        _step(run, batch)
        return profiled(lambda: _step(run, batch))


def _step(run: Run, batch: Batch) -> tuple[float, float]:
    """Seconds of the host, and until the device has ended."""
    timing.synchronize()
    began = time.perf_counter()
    training = run.training
    training.finish(training.forward_backward(batch)["count"])
    training.scaler.step(training.optimizer)
    clear(training.module, training.optimizer)
    host = time.perf_counter() - began
    timing.synchronize()
    return host, time.perf_counter() - began
