"""Encodings of an image's masks: size and decompression time of the candidates for the mask record.

`pytest benchmarks/test_record.py -s` prints the table that led to the choice, for full-size synthetic images.
"""

import json
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from pytest_benchmark.fixture import BenchmarkFixture

from sa1b.masks import coco
from sa1b.masks.runs import Runs
from sa1b.programs.synthetic.source_tars import scene
from sa1b.shards import annotation


@pytest.fixture(scope="module")
def images() -> list[Runs]:
    return [
        annotation.parse_annotation(json.dumps(scene(image_id)[1]).encode(), image_id).runs
        for image_id in range(1, 9)
    ]


def varint(values: npt.NDArray[np.uint64]) -> bytes:
    """Seven bits per byte; the high bit is set if more bytes follow."""
    out = bytearray()
    for number in values.tolist():
        rest = number
        while rest > 127:
            out.append(rest & 127 | 128)
            rest >>= 7
        out.append(rest)
    return bytes(out)


def deltas(runs: Runs) -> npt.NDArray[np.uint64]:
    """The difference between each run and the run two before, with the sign in the lowest bit."""
    pieces = []
    for mask in runs:
        values = mask.astype(np.int64)
        values[2:] -= mask[:-2].astype(np.int64)
        pieces.append(np.where(values < 0, -2 * values - 1, 2 * values).astype(np.uint64))
    return np.concatenate(pieces)


def split(values: npt.NDArray[np.uint32]) -> bytes:
    return np.ascontiguousarray(values.astype("<u4").view(np.uint8).reshape(-1, 4).T).tobytes()


def short(values: npt.NDArray[np.uint32]) -> bytes:
    escaped = values[values >= 65535]
    return np.minimum(values, 65535).astype("<u2").tobytes() + escaped.astype("<u4").tobytes()


CANDIDATES: dict[str, Callable[[Runs], bytes]] = {
    "COCO strings": lambda runs: b"".join(coco.encode(runs)),
    "deltas, zigzag, varint": lambda runs: varint(deltas(runs)),
    "uint32, bytes split": lambda runs: split(runs.runs),
    "varint": lambda runs: varint(runs.runs.astype(np.uint64)),
    "uint16 with escapes": lambda runs: short(runs.runs),
    "uint32": lambda runs: runs.runs.astype("<u4").tobytes(),
}


@pytest.mark.parametrize("level", [3, 9])
@pytest.mark.parametrize("name", CANDIDATES)
def test_decompress(
    benchmark: BenchmarkFixture,
    images: list[Runs],
    name: str,
    level: int,
    figures: dict[str, dict[str, object]],
) -> None:
    raw = [CANDIDATES[name](runs) for runs in images]
    stored = [zstandard.ZstdCompressor(level=level).compress(data) for data in raw]
    decompressor = zstandard.ZstdDecompressor()
    benchmark(lambda: [decompressor.decompress(data) for data in stored])
    per_image = 1000 * benchmark.stats.stats.median / len(images)
    sizes = sum(map(len, raw)) // len(raw), sum(map(len, stored)) // len(stored)
    benchmark.extra_info["stored bytes an image"] = sizes[1]
    figures.setdefault("mask record", {})[f"{name}, level {level}, bytes"] = sizes[1]
    print(f"\n{name:24s} level {level}: raw {sizes[0]:>8,} stored {sizes[1]:>7,} {per_image:.3f} ms an image")
