"""Decoders of JPEG for the GPU: are pixels right, is memory in use left alone, images a second.

decoders         torchcodec: the same pixels alone, in a batch and in threads; broken files; colours beside
                 libjpeg-turbo
decoder-race     10,000 decodes after work that still reads freed memory (pytorch/vision#9606)
decoder-rates    torchcodec alone, with resizing, and in the loader

On a CPU, libjpeg-turbo with repeated chroma takes the place of torchcodec.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast
from unittest import mock

import numpy as np
import simplejpeg
import torch
from torch import Tensor

from benchmarks.gpu import timing
from benchmarks.gpu.loader import stream_of
from benchmarks.gpu.material import KINDS
from benchmarks.gpu.part import Record, Setting, Skipped
from benchmarks.gpu.stand_in import HostLane
from sa1b.stream.decode import CpuDecoder, EncodedImage
from sa1b.stream.decoders import DECODERS, GpuDecoder, decoded_on
from sa1b.stream.throughput import measure
from sa1b.stream.transform import Frame

NAME = "torchcodec"
_CYCLES = 2_000_000  # of the GPU's clock: about 1 ms
_WRONG = 3.0  # mean difference of values at 1024 pixels: half a pixel of a shift gives more


def torchcodec(setting: Setting) -> GpuDecoder:
    """The decoder of the package, or one with the stand-in; Skipped: it is not installed."""
    if not setting.on_gpu:
        return GpuDecoder(partial(HostLane, fast=True), device="cpu")
    try:
        return cast(GpuDecoder, DECODERS[NAME]())
    except ValueError as error:
        raise Skipped(str(error)) from None


def images_of(setting: Setting, kind: str, count: int) -> list[EncodedImage]:
    """JPEG files of the material, with their frames."""
    stream = stream_of(setting, kind, global_batch=2)
    found: list[EncodedImage] = []
    for piece in stream.plan.micro_batches(0):
        pending = stream.submit(piece)
        pending.pick(0, len(pending), pending.busy)
        found += filter(None, pending.encoded)
        if len(found) >= count:
            break
    stream.close()
    return found[:count]


def device_of(setting: Setting) -> torch.device:
    return torch.empty(0, device=setting.device).device  # with its index


def decoded(
    setting: Setting, decoder: GpuDecoder, images: list[EncodedImage], device: torch.device
) -> Tensor:
    """Decode images on a stream of the calling thread, and wait for them."""
    size = images[0].frame.image_size
    out = torch.full((len(images), size, size, 3), 7, dtype=torch.uint8, device=device)
    if not setting.on_gpu:
        errors = decoder.decode(images, out)
    else:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            errors = decoder.decode(images, out)
        side.synchronize()
    for error in errors:
        if error is not None:
            raise error
    return out


def checks(setting: Setting, record: Record) -> None:
    """Pixels of torchcodec."""
    count = setting.pick(16, 3)
    images = [image for kind in KINDS for image in images_of(setting, kind, count)]
    decoder, device = torchcodec(setting), device_of(setting)
    with record.attempt(f"{NAME}: pixels"):
        expected = decoded(setting, decoder, images, device)
        alone = torch.cat([decoded(setting, decoder, [image], device) for image in images])
        worst = int((alone.int() - expected.int()).abs().max())
        record.check(f"{NAME}: the same pixels alone and in a batch", worst == 0, worst)
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(decoded, setting, decoder, images, device) for _ in range(8)]
            same = [torch.equal(one.result(), expected) for one in jobs]
        record.check(f"{NAME}: the same pixels in threads at once", all(same), f"{sum(same)} of 8")
        record.check(f"{NAME}: all images on the GPU", set(decoder.counts) == {"gpu"}, decoder.counts)
        turbo = torch.empty(tuple(expected.shape), dtype=torch.uint8)
        CpuDecoder().decode(images, turbo)
        differ = (expected.cpu().int() - turbo.int()).abs().float()
        record.figure(
            f"{NAME}: share of values that differ by more than 8", float((differ > 8).float().mean())
        )
        mean = float(differ.mean())
        record.figure(f"{NAME}: mean difference from libjpeg-turbo", mean)
        record.check(f"{NAME}: images are those of the CPU, apart from resizing", mean < _WRONG, mean)
    with record.attempt(f"{NAME}: broken files"):  # last: after an error of the device, nothing runs here
        _broken(setting, record, decoder, images)


def _broken(setting: Setting, record: Record, decoder: GpuDecoder, images: list[EncodedImage]) -> None:
    """Files with damage at random places, between good ones, whose pixels must not change."""
    good, random = images[:2], np.random.default_rng(0)
    expected = decoded(setting, decoder, good, device_of(setting))
    size = good[0].frame.image_size
    wrong = refused = 0
    count = setting.pick(60, 6)
    for number in range(count):
        data = bytearray(images[number % len(images)].jpeg)
        if number % 3 == 0:  # truncated, with the marker of the end
            data = data[: int(random.integers(700, len(data)))] + b"\xff\xd9"
        else:
            first = 0 if number % 3 == 1 else 700  # in the header, or in the coded data
            for place in random.integers(first, min(len(data) - 2, first + 700), 8):
                data[int(place)] = int(random.integers(256))
        middle = EncodedImage(bytes(data), images[number % len(images)].frame)
        out = torch.empty((3, size, size, 3), dtype=torch.uint8, device=setting.device)
        errors = decoder.decode([good[0], middle, good[1]], out)
        timing.synchronize()
        refused += errors[1] is not None
        wrong += errors[0] is not None or errors[2] is not None or not torch.equal(out[::2], expected)
    record.figure(f"{NAME}: broken files that are refused", refused / count)
    record.check(f"{NAME}: broken files leave other images alone", wrong == 0, f"{wrong} of {count}")


def race(setting: Setting, record: Record) -> None:
    """Decodes while work of the default stream still reads memory that it has freed."""
    count, seconds, side = setting.pick((10_000, 30.0, 640), (20, 20.0, 64))
    files = [_pattern(side, number) for number in range(4)]
    images = [EncodedImage(file, Frame.whole_image(side, side, side)) for file in files]
    decoder = torchcodec(setting)
    stream = torch.cuda.Stream() if setting.on_gpu else None

    def decode(out: Tensor) -> None:
        """Decode as a loader does: on a stream of its own, for which the default stream then waits."""
        with torch.cuda.stream(stream):
            decoder.decode(images, out)
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)

    with record.attempt(f"{NAME}: memory in use"):
        expected = decoded(setting, decoder, images, device_of(setting))
        done, overwritten, wrong = _overwritten(setting, decode, expected, count, seconds, side)
        record.figure(f"{NAME}: decodes after work that reads freed memory", done, at_least=count)
        record.check(f"{NAME}: memory in use is not overwritten", not overwritten, f"{overwritten} of {done}")
        record.check(f"{NAME}: pixels are right meanwhile", not wrong, f"{wrong} of {done}")


def _pattern(side: int, number: int) -> bytes:
    coarse = np.random.default_rng(number).integers(0, 256, (side // 8, side // 8, 3), np.uint8)
    pixels = np.ascontiguousarray(coarse.repeat(8, 0).repeat(8, 1))
    return bytes(simplejpeg.encode_jpeg(pixels, 90, "RGB", "420", False))


def _overwritten(
    setting: Setting,
    decode: Callable[[Tensor], None],
    expected: Tensor,
    count: int,
    seconds: float,
    side: int,
) -> tuple[int, int, int]:
    """Repeat the pattern; return how often, how often memory was overwritten, how often pixels were wrong."""
    end = time.monotonic() + seconds
    shape, flags, pixels = (3, side, side), [], []
    done = 0
    for number in range(count):
        value = number % 251
        blocks = [
            torch.full(shape, value, dtype=torch.uint8, device=setting.device) for _ in range(len(expected))
        ]
        out = torch.empty_like(expected)
        timing.synchronize()
        if setting.on_gpu:
            torch.cuda._sleep(_CYCLES)
        flags.append(torch.stack([(block != value).any() for block in blocks]).any())
        del blocks  # free on the host, but read after the sleep
        decode(out)
        pixels.append((out != expected).any())
        done += 1
        if time.monotonic() > end:
            break
    timing.synchronize()
    return done, int(torch.stack(flags).sum()), int(torch.stack(pixels).sum())


def rates(setting: Setting, record: Record) -> None:
    """Images a second of torchcodec alone, with resizing, and of the loader."""
    batch, seconds, dense = setting.pick((16, 4.0, 256), (2, 0.3, 16))
    decoder, device = torchcodec(setting), device_of(setting)
    for kind in KINDS:
        label = f"{NAME}, {kind}"
        with record.attempt(f"{label}: rates"), mock.patch.dict(DECODERS, {NAME: lambda: decoder}):
            decoder.counts.clear()
            images = images_of(setting, kind, 2 * batch)
            decoded(setting, decoder, images, device)
            calls = {
                "the library alone": partial(_library, decoder, images, device),
                "resized into the batch": partial(decoded, setting, decoder, images, device),
            }
            found = {name: _rate(setting, call, len(images), seconds / 2) for name, call in calls.items()}
            stream = stream_of(setting, kind, global_batch=batch, decoder=NAME)
            throughput = measure(stream, seconds=seconds, dense=dense, device=setting.device, quiet=True)
            found[f"loader with masks at {dense}"] = loader = throughput["images_per_second"]["loader"]
            for name, rate in found.items():
                record.figure(f"{label}: {name}", rate, "images/s")
            part = loader / found["the library alone"]
            record.figure(f"{label}: loader / library alone", part, at_least=setting.pick(0.9, None))
            on_cpu = throughput["on_cpu"] or 0.0
            record.figure(f"{label}: share of images on the CPU", on_cpu, at_most=0.0)


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
    timing.synchronize()
    return done * images / (time.perf_counter() - began)
