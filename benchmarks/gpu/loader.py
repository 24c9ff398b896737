"""The loader on the device: the batches of a CPU, no races, no allocations, no waits, images a second.

equal     every tensor of some batches, from JPEGs of original size and of 1024 pixels
race      2,000 small batches, while the default stream is busy and the caller slow, so that the loader's
          copies and the caller's work overlap in every order
rates     images a second, beside the JPEG decoder alone
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import islice
from typing import Any

import torch
from torch import Tensor

import sa1b
from benchmarks.gpu.material import roots
from benchmarks.gpu.part import Record, Setting
from sa1b.stream.batch import Batch
from sa1b.stream.ragged import Tensors
from sa1b.stream.throughput import measure

_CYCLES = 2_000_000  # of the GPU's clock: about 1 ms
_LAG = 24  # batches that the default stream may be behind the caller


def stream_of(setting: Setting, kind: str, **options: Any) -> sa1b.Stream:
    """An endless stream of the material."""
    sizes = {"image_size": setting.pick(1024, 64), "masks": setting.pick(64, 4), "epochs": None}
    return sa1b.Stream(roots(setting)[kind], damage_log=setting.folder / "damaged.jsonl", **(sizes | options))


def equal(setting: Setting, record: Record) -> None:
    """Compare batches on the device with those of the stream on the CPU."""
    count, batch, dense = setting.pick((16, 8, 256), (2, 2, 16))
    for kind in roots(setting):
        with record.attempt(f"{kind}: batches"):
            options = {"global_batch": batch, "flip": 0.5}
            expected = islice(stream_of(setting, kind, **options), count)
            loader = sa1b.Loader(
                stream_of(setting, kind, **options), device=setting.device, dense=dense, quiet=True
            )
            wrong: set[str] = set()
            for one, other in zip(expected, loader, strict=False):
                wrong |= differences(one, other)
                if not torch.equal(one.masks.dense(dense), other.dense.cpu()):
                    wrong.add("dense")
            record.check(f"{kind}: {count} batches equal those of the CPU", not wrong, sorted(wrong))


def differences(one: Tensors, other: Tensors) -> set[str]:
    """Names of the fields that differ, except `buffer` and `dense`."""
    found: set[str] = set()
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name in ("buffer", "dense"):
            continue
        if isinstance(a, Tensors):
            found |= {f"{field.name}.{name}" for name in differences(a, b)}
        elif isinstance(a, Tensor):
            if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a, b.cpu()):
                found.add(field.name)
        elif a != b:
            found.add(field.name)
    return found


def race(setting: Setting, record: Record) -> None:
    """Batches whose content is summed late, on a stream that is busy, by a caller that is slow at times."""
    count, dense = setting.pick((2000, 64), (12, 16))
    options = {
        "global_batch": 4,
        "image_size": setting.pick(256, 64),
        "masks": setting.pick(16, 4),
        "flip": 0.5,
    }
    for prefetch in (1, 3):
        with record.attempt(f"race, prefetch {prefetch}"):
            loaders = [
                sa1b.Loader(
                    stream_of(setting, "1024", **options),
                    prefetch=prefetch,
                    device=device,
                    dense=dense,
                    quiet=True,
                )
                for device in (setting.device, "cpu")
            ]
            _race(setting, record, *loaders, count // 2)


def _race(setting: Setting, record: Record, loader: sa1b.Loader, on_cpu: sa1b.Loader, count: int) -> None:
    """Sums of each batch on the device, compared with those of a loader on the CPU afterwards."""
    label, names = f"prefetch {loader.prefetch}", ("images", "runs", "points", "dense")
    sums, ids, held, marks = [], [], [], deque()
    busy, weights = _copies(setting), _weights(setting)
    batches, pinned = iter(loader), 0
    began = time.perf_counter()
    for number in range(count):
        if number == count // 2:
            pinned = _pinned_allocations(setting)
        batch = next(batches)
        if setting.on_gpu:
            torch.cuda._sleep(_CYCLES * (number % 5))  # the default stream comes late to the batch
            if number % 16 == 0:
                next(busy)  # and the copies of the loader to the device
        sums.append(_sums(batch, weights))
        ids.append((batch.position, batch.ids))
        held = [*held, batch][-(number % 4) :] if number % 4 else []  # the caller keeps some for a while
        if setting.on_gpu:
            marks.append(torch.cuda.Event())
            marks[-1].record()
            if len(marks) > _LAG:
                marks.popleft().synchronize()
        if number % 50 == 49:
            time.sleep(setting.pick(0.05, 0.0))  # all prefetched batches become complete
    found = torch.stack(sums).cpu()
    record.figure(f"{label}: batches a second, with the waits", count / (time.perf_counter() - began), "/s")
    more = _pinned_allocations(setting) - pinned
    record.check(f"{label}: no pinned memory is allocated after warm-up", more == 0, f"{more} allocations")
    batches.close()
    wrong, wrong_ids, weights = torch.zeros(len(names), dtype=torch.int64), 0, weights.cpu()
    for number, expected in enumerate(islice(on_cpu, count)):
        position, own = ids[number]
        wrong_ids += position != expected.position or own.tolist() != expected.ids.tolist()
        wrong += _sums(expected, weights) != found[number]
    record.figure(f"{label}: compared batches", count)
    record.check(f"{label}: the sequence is that of the CPU", wrong_ids == 0, f"{wrong_ids} batches differ")
    for name, differ in zip(names, wrong.tolist(), strict=True):
        record.check(f"{label}: {name} are those of the CPU", differ == 0, f"{differ} of {count} batches")


def _weights(setting: Setting) -> Tensor:
    """A factor for each place in a tensor, on the device."""
    largest = setting.pick(4 * 3 * 256**2, 4 * 3 * 64**2)
    return torch.arange(1, largest + 1, device=setting.device) * 2_654_435_761 % 1_000_003


def _sums(batch: Batch, weights: Tensor) -> Tensor:
    """Sums of images, runs, points and dense masks that depend on values and places: int64 [4].

    Sums of integers modulo 2**64 are the same in any order; floating-point numbers are taken as their bits.
    """
    assert batch.dense is not None
    values = (batch.images, batch.masks.runs, batch.points.view(torch.int32), batch.dense)
    return torch.stack(
        [(value.flatten().to(torch.int64) * weights[: value.numel()]).sum() for value in values]
    )


def _copies(setting: Setting) -> Iterator[None]:
    """Large copies to the device on a stream of their own."""
    side = torch.cuda.Stream()
    source = torch.empty(128 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=setting.device)
    while True:
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
        yield


def _pinned_allocations(setting: Setting) -> int:
    """Allocations of pinned memory by torch so far."""
    return int(torch.cuda.host_memory_stats().get("num_host_alloc", 0)) if setting.on_gpu else 0


def rates(setting: Setting, record: Record) -> None:
    """Images a second of storage, decoder and loader; nothing in the loader waits for the device."""
    seconds, dense = setting.pick((12.0, 256), (0.3, 16))
    batch = setting.pick(16, 2)
    with record.attempt("no hidden waits for the device"):
        stream = stream_of(setting, "1024", global_batch=batch)
        batches = iter(sa1b.Loader(stream, device=setting.device, dense=dense, quiet=True))
        for _ in range(setting.pick(30, 2)):
            next(batches)
            _wait(setting)
        before = _device_allocations(setting)
        with _no_waits(setting):
            taken = 0
            for _ in range(setting.pick(60, 2)):
                taken += len(next(batches))
                _wait(setting)  # as a training step, which uses one batch at a time
        batches.close()
        more = _device_allocations(setting) - before
        record.check("no hidden waits for the device", taken > 1)
        record.check("no memory of the device is allocated after warm-up", more == 0, f"{more} allocations")
    for kind in roots(setting):
        with record.attempt(f"{kind}: rates"):
            stream = stream_of(setting, kind, global_batch=batch)
            found = measure(stream, seconds=seconds, dense=dense, device=setting.device, quiet=True)
            print(found.table())
            for name, rate in (rates := found["images_per_second"]).items():
                record.figure(f"{kind}: {name}", rate, "images/s")
            ratio = rates["loader"] / rates["decode"]
            record.figure(f"{kind}: loader / decoder alone", ratio, at_least=setting.pick(0.9, None))
            for stage, share in found["shares"].items():
                record.figure(f"{kind}: busy time, {stage}", share)
    for processes, threads in setting.pick(((1, 8), (4, 2), (8, 1), (16, 1)), ()):
        label = f"1024, {processes} x {threads} threads"
        with record.attempt(label):
            stream = stream_of(setting, "1024", global_batch=batch)
            number = {"processes": processes, "threads": threads}
            found = measure(
                stream, seconds=seconds / 3, **number, dense=dense, device=setting.device, quiet=True
            )
            for name in ("decode", "loader"):
                record.figure(f"{label}: {name}", found["images_per_second"][name], "images/s")


@contextmanager
def _no_waits(setting: Setting) -> Iterator[None]:
    """Context in which an operation that waits for the device raises an error, in any thread."""
    if not setting.on_gpu:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _wait(setting: Setting) -> None:
    """Wait for the caller's stream, by an event: to synchronise a stream is an error in `_no_waits`."""
    if setting.on_gpu:
        event = torch.cuda.Event()
        event.record()
        event.synchronize()


def _device_allocations(setting: Setting) -> int:
    """Calls of cudaMalloc by torch so far."""
    return int(torch.cuda.memory_stats()["num_device_alloc"]) if setting.on_gpu else 0
