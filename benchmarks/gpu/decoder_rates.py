"""Rates of the decoder of JPEG for the GPU: torchcodec alone, with resizing, and the loader.

Also use of the JPEG engine, and data wait of training steps of the encoder alone.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from unittest import mock

import simplejpeg
import torch

import sa1b
from benchmarks.gpu.decoders import NAME, decoded, device_of, images_of, synchronize, torchcodec
from benchmarks.gpu.loader import stream_of
from benchmarks.gpu.material import KINDS
from benchmarks.gpu.part import Record, Setting
from benchmarks.gpu.training import encoder_step
from sa1b.stream.decode import EncodedImage
from sa1b.stream.decoders import DECODERS, GpuDecoder, decoded_on
from sa1b.stream.throughput import measure


def work(setting: Setting, record: Record) -> None:
    """Images a second, and what they depend on."""
    batch, seconds, dense = setting.pick((16, 4.0, 256), (2, 0.3, 16))
    decoder, device = torchcodec(setting), device_of(setting)
    for kind in KINDS:
        label = f"{NAME}, {kind}"
        with record.attempt(f"{label}: rates"), mock.patch.dict(DECODERS, {NAME: lambda: decoder}):
            decoder.counts.clear()
            images = images_of(setting, kind, 2 * batch)
            decoded(setting, decoder, images, device)
            with _jpeg_engine(setting) as used:
                alone = _rate(setting, partial(_library, decoder, images, device), 2 * batch, seconds / 2)
            record.figure(f"{label}: the library alone", alone, "images/s")
            if used:
                record.figure(f"{label}: use of the JPEG engine", max(used), "%", at_least=1)
            resized = _rate(
                setting, partial(decoded, setting, decoder, images, device), 2 * batch, seconds / 2
            )
            record.figure(f"{label}: resized into the batch", resized, "images/s")
            stream = stream_of(setting, kind, global_batch=batch, decoder=NAME)
            found = measure(stream, seconds=seconds, dense=dense, device=setting.device, quiet=True)
            print(found.table())
            loader = found["images_per_second"]["loader"]
            record.figure(f"{label}: loader with masks at {dense}", loader, "images/s")
            record.figure(
                f"{label}: loader / library alone", loader / alone, at_least=setting.pick(0.9, None)
            )
            record.figure(f"{label}: share of images on the CPU", found["on_cpu"] or 0.0, at_most=0.0)
            record.figure(f"{label}: data wait of the encoder", _wait(setting, kind), at_most=0.01)


def _library(decoder: GpuDecoder, images: list[EncodedImage], device: torch.device) -> None:
    """Decode without resizing."""
    sizes = [simplejpeg.decode_jpeg_header(image.jpeg)[:2] for image in images]
    with decoder._borrowed(device) as lane, lane.current():
        decoded_on([image.jpeg for image in images], sizes, lane)


def _rate(setting: Setting, call: Callable[[], object], images: int, seconds: float) -> float:
    """Images a second of calls from two threads, as many as a decoder serves at a time."""
    began = time.perf_counter()

    def work() -> int:
        done = 0
        while time.perf_counter() < began + seconds:
            call()
            done += 1
        return done

    with ThreadPoolExecutor(2) as pool:
        done = sum(one.result() for one in [pool.submit(work), pool.submit(work)])
    synchronize(setting)
    return done * images / (time.perf_counter() - began)


@contextmanager
def _jpeg_engine(setting: Setting) -> Iterator[list[float]]:
    """Percent of the time in which the JPEG engine runs, sampled during the context; [] if unknown."""
    found: list[float] = []
    if not setting.on_gpu:
        yield found
        return
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        nvml.nvmlDeviceGetJpgUtilization(handle)
    except Exception as error:
        print(f"use of the JPEG engine is unknown: {type(error).__name__}: {error}")
        yield found
        return
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(0.1):
            found.append(float(nvml.nvmlDeviceGetJpgUtilization(handle)[0]))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def _wait(setting: Setting, kind: str) -> float:
    """Share of the time that training steps of the encoder alone wait for data."""
    steps, batch = setting.pick((20, 8), (2, 2))
    step = encoder_step(setting)
    stream = stream_of(setting, kind, global_batch=batch, decoder=NAME)
    batches = iter(sa1b.Loader(stream, device=setting.device, quiet=True))
    waited = began = 0.0
    for number in range(steps + 4):
        if number == 4:  # after compilation of kernels and allocation
            synchronize(setting)
            waited, began = 0.0, time.perf_counter()
        asked = time.perf_counter()
        images = next(batches).images
        waited += time.perf_counter() - asked
        step(images)
        synchronize(setting)  # the host must not run ahead: it would hide waits
    batches.close()
    return waited / (time.perf_counter() - began)
