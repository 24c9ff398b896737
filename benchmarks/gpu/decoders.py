"""Decoders of JPEG for the GPU: are pixels right, is memory in use left alone, images a second.

decoders         torchcodec: the same pixels alone, in a batch and in threads; broken files; colours beside
                 libjpeg-turbo
decoder-race     10,000 decodes after work that still reads freed memory (pytorch/vision#9606)

On a CPU, libjpeg-turbo with repeated chroma takes the place of torchcodec.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import cast

import numpy as np
import simplejpeg
import torch
from torch import Tensor

from benchmarks.gpu.loader import stream_of
from benchmarks.gpu.material import KINDS
from benchmarks.gpu.part import Record, Setting, Skipped
from benchmarks.gpu.stand_in import HostLane
from sa1b.stream.decode import CpuDecoder, EncodedImage
from sa1b.stream.decoders import DECODERS, GpuDecoder
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
    return torch.empty(0, device=setting.device).device


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
    decoder = torchcodec(setting)
    with record.attempt(f"{NAME}: pixels"):
        device = device_of(setting)
        expected = decoded(setting, decoder, images, device)
        alone = torch.cat([decoded(setting, decoder, [image], device) for image in images])
        differ = (alone.int() - expected.int()).abs()
        record.figure(f"{NAME}: images that differ alone and in a batch", int(differ.flatten(1).any(1).sum()))
        worst = int(differ.max())
        record.check(f"{NAME}: the same pixels alone and in a batch", worst == 0, worst)
        with ThreadPoolExecutor(4) as pool:
            work = partial(decoded, setting, decoder, images, device)
            same = [torch.equal(one.result(), expected) for one in [pool.submit(work) for _ in range(8)]]
        record.check(f"{NAME}: the same pixels in threads at once", all(same), f"{sum(same)} of 8")
        flipped = [replace(one, frame=replace(one.frame, flip=True)) for one in images]
        mirrored = decoded(setting, decoder, flipped, device)
        record.check(f"{NAME}: mirrored images", _are_mirrored(images, expected, mirrored))
        for way in ("gpu", "cpu", "refused", "skipped"):
            record.figure(f"{NAME}: images, {way}", decoder.counts[way])
        record.check(f"{NAME}: all images on the GPU", set(decoder.counts) == {"gpu"}, decoder.counts)
        _colours(setting, record, decoder, images, expected)
    with record.attempt(f"{NAME}: broken files"):  # last: after an error of the device, nothing runs here
        _broken(setting, record, decoder, images)


def _are_mirrored(images: list[EncodedImage], plain: Tensor, mirrored: Tensor) -> bool:
    columns = [image.frame.taken[1] for image in images]
    return all(
        torch.equal(one[:, :width].flip(1), other[:, :width])
        for width, one, other in zip(columns, plain, mirrored, strict=True)
    )


def _colours(
    setting: Setting,
    record: Record,
    decoder: GpuDecoder,
    images: list[EncodedImage],
    expected: Tensor,
) -> None:
    """Differences of values from libjpeg-turbo, at the size of the file and at that of the square."""
    stored = torch.zeros(256, dtype=torch.int64)
    for image in images:
        pixels = torch.from_numpy(simplejpeg.decode_jpeg(image.jpeg, "RGB"))
        height, width, _ = pixels.shape
        whole = EncodedImage(image.jpeg, Frame.whole_image(height, width, max(height, width)))
        own = decoded(setting, decoder, [whole], expected.device)[0, :height, :width].cpu()
        stored += _histogram(own, pixels)
    _differences(record, f"{NAME}: stored size", stored)
    turbo = torch.empty(tuple(expected.shape), dtype=torch.uint8)
    CpuDecoder().decode(images, turbo)
    mean = _differences(record, f"{NAME}: {expected.shape[1]} pixels", _histogram(expected.cpu(), turbo))
    record.check(
        f"{NAME}: images are those of the CPU, apart from resizing", mean < _WRONG, f"mean {mean:.2f}"
    )


def _histogram(one: Tensor, other: Tensor) -> Tensor:
    """Number of values by the difference of two images, int64 [256]."""
    return torch.bincount((one.int() - other.int()).abs().flatten(), minlength=256)


def _differences(record: Record, label: str, histogram: Tensor) -> float:
    """Record differences of values; return their mean."""
    share = histogram.double() / histogram.sum()
    mean = float(share @ torch.arange(256, dtype=torch.float64))
    record.figure(f"{label}: mean difference from libjpeg-turbo", mean)
    record.figure(f"{label}: largest difference", int(histogram.nonzero().max()))
    for limit in (2, 8):
        name = f"{label}: share of values that differ by more than {limit}"
        record.figure(name, float(share[limit + 1 :].sum()))
    return mean


def _broken(setting: Setting, record: Record, decoder: GpuDecoder, images: list[EncodedImage]) -> None:
    """Files with damage at random places, between good ones, whose pixels must not change."""
    good, device = images[:2], device_of(setting)
    expected = decoded(setting, decoder, good, device)
    random = np.random.default_rng(0)
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
        synchronize(setting)
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
    with record.attempt(f"{NAME}: memory in use"):
        expected = decoded(setting, decoder, images, device_of(setting))
        call = partial(_decode_into, setting, decoder, images)
        done, overwritten, wrong = _overwritten(setting, call, expected, count, seconds, side)
        record.figure(f"{NAME}: decodes after work that reads freed memory", done, at_least=count)
        record.check(f"{NAME}: memory in use is not overwritten", not overwritten, f"{overwritten} of {done}")
        record.check(f"{NAME}: pixels are right meanwhile", not wrong, f"{wrong} of {done}")
    if setting.on_gpu:
        with record.attempt(f"{NAME} alone, without guards"):
            call = partial(_unguarded, files, setting.device)
            done, overwritten, _ = _overwritten(setting, call, expected, 200, 10.0, side)
            record.figure(f"{NAME} alone, on the default stream: overwrites", overwritten / done)


def _unguarded(files: list[bytes], device: str, out: Tensor) -> None:
    """Decode with torchcodec on the current stream, in memory that is shared with it."""
    found = import_module("torchcodec.decoders").decode_jpeg(files, mode="RGB", device=device)
    out.copy_(torch.stack(found).permute(0, 2, 3, 1))


def _pattern(side: int, number: int) -> bytes:
    coarse = np.random.default_rng(number).integers(0, 256, (side // 8, side // 8, 3), np.uint8)
    pixels = np.ascontiguousarray(coarse.repeat(8, 0).repeat(8, 1))
    return bytes(simplejpeg.encode_jpeg(pixels, 90, "RGB", "420", False))


def _decode_into(setting: Setting, decoder: GpuDecoder, images: list[EncodedImage], out: Tensor) -> None:
    """Decode as a loader does: on a stream of its own, for which the default stream then waits."""
    if not setting.on_gpu:
        decoder.decode(images, out)
        return
    current, side = torch.cuda.current_stream(), _side_stream()
    with torch.cuda.stream(side):
        decoder.decode(images, out)
    current.wait_stream(side)


_STREAMS: list[torch.cuda.Stream] = []


def _side_stream() -> torch.cuda.Stream:
    if not _STREAMS:
        _STREAMS.append(torch.cuda.Stream())
    return _STREAMS[0]


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
        synchronize(setting)
        if setting.on_gpu:
            torch.cuda._sleep(_CYCLES)
        flags.append(torch.stack([(block != value).any() for block in blocks]).any())
        del blocks  # free on the host, but read after the sleep
        decode(out)
        pixels.append((out != expected).any())
        done += 1
        if time.monotonic() > end:
            break
    synchronize(setting)
    return done, int(torch.stack(flags).sum()), int(torch.stack(pixels).sum())


def synchronize(setting: Setting) -> None:
    if setting.on_gpu:
        torch.cuda.synchronize()
