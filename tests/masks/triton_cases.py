"""Seeded cases for the Triton back end, each compared bit for bit with the CPU back end.

`TRITON_INTERPRET=1 python -m tests.masks.triton_cases FIRST STOP` runs the cases of these seeds and the
special cases in Triton's interpreter. The interpreter must be selected before the import of the kernels, so
it needs a separate process.
"""

import re
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import sa1b.masks
from sa1b.masks import Runs, raster, raster_torch
from tests.masks.samples import fill, to_runs

DTYPES = (torch.uint8, torch.bool, torch.bfloat16, torch.float32)
RUN_TYPES = (np.uint32, np.int32, np.int64)
# Rows and columns of a tile, pixels of a step. Small values make many small tiles.
TILES = ((128, 256, 4096), (16, 32, 256), (32, 32, 64), (8, 16, 64))


def draw_masks(random: np.random.Generator, height: int, width: int, count: int) -> np.ndarray:
    """bool [N, H, W]: noise, rectangles, runs over columns, single pixels, empty and full."""
    masks = np.zeros((count, height, width), np.bool_)
    kinds = ["noise", "boxes", "boxes", "columns", "stripes", "corner", "empty", "full"]
    for mask in masks:
        fill(mask, random.choice(kinds), random)
    return masks


@dataclass(frozen=True)
class Batch:
    """Masks of several images as arguments of the back ends for devices and for the CPU."""

    images: list[Runs]
    runs: np.ndarray
    offsets: np.ndarray
    heights: np.ndarray
    widths: np.ndarray

    def __len__(self) -> int:
        return len(self.heights)

    def expected(
        self,
        name: str,
        sizes: tuple[int, int],
        flip: bool | np.ndarray,
        taken: list[tuple[int, int]] | None = None,
    ) -> np.ndarray:
        """uint8 [N, H, W] from sa1b.masks.raster; flipped masks are rasterised from mirrored runs.

        taken: rows and columns of the square that each image covers.
        """
        function = getattr(raster, name)
        each = [{}] * len(self.images) if taken is None else [{"taken": one} for one in taken]
        images = list(zip(self.images, each, strict=True))
        straight = np.concatenate([function(image, *sizes, **one) for image, one in images])
        mirrored = np.concatenate(
            [function(sa1b.masks.flip_horizontal(image), *sizes, **one) for image, one in images]
        )
        return np.where(np.broadcast_to(flip, len(self))[:, None, None], mirrored, straight)


def join(images: list[Runs]) -> Batch:
    counts = np.concatenate([np.diff(image.offsets) for image in images])
    lengths = [len(image) for image in images]
    return Batch(
        images,
        np.concatenate([image.runs for image in images]),
        np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        np.repeat([image.height for image in images], lengths),
        np.repeat([image.width for image in images], lengths),
    )


def draw_side(random: np.random.Generator) -> int:
    return int(
        random.choice([1, random.integers(1, 6), 16, 32, random.integers(1, 41), random.integers(1, 97)])
    )


def check_case(seed: int, device: str, tiles: tuple[tuple[int, int, int], ...] = TILES) -> int:
    """One random call of each function; returns the number of compared masks."""
    from sa1b.masks import raster_triton

    random = np.random.default_rng(seed)
    tile = tiles[random.integers(len(tiles))]
    raster_triton.TILE_ROWS, raster_triton.TILE_COLUMNS, raster_triton.STEP_PIXELS = tile
    raster_triton.RUNS_BLOCK = int(random.choice([16, 512])) if device == "cpu" else 512

    images = []
    for _ in range(random.integers(1, 4)):
        height, width = draw_side(random), draw_side(random)
        masks = draw_masks(random, height, width, int(random.integers(4)))
        images.append(to_runs(masks, int(random.integers(2**16)) if random.random() < 0.5 else None))
    one_size = random.random() < 0.4
    batch = join(images[:1] if one_size else images)
    runs = torch.from_numpy(batch.runs.astype(RUN_TYPES[random.integers(3)])).to(device)
    offsets = torch.from_numpy(batch.offsets).to(device)
    sources = (images[0].height, images[0].width)
    if not one_size:
        where, kind = random.choice(["cpu", device]), random.choice(["int32", "int64"])
        sources = tuple(
            torch.from_numpy(side.astype(kind)).to(where) for side in (batch.heights, batch.widths)
        )
    flip = random.random(len(batch)) < 0.5 if random.random() < 0.5 else bool(random.integers(2))
    mirror = torch.from_numpy(flip).to(device) if isinstance(flip, np.ndarray) else flip

    for name in ("rasterize", "rasterize_frame"):
        sizes = draw_side(random), draw_side(random)
        sizes = tuple(min(size, 4 * tile[1]) for size in sizes)  # the interpreter takes 5 ms per tile
        dtype = DTYPES[random.integers(4)]
        taken, options = None, {"flip": mirror}
        if name == "rasterize_frame" and random.random() < 0.5:
            taken = [tuple(random.integers(1, sizes[0] + 1, 2).tolist()) for _ in batch.images]
            each = torch.tensor(taken).repeat_interleave(
                torch.tensor([len(image) for image in batch.images]), 0
            )
            options["taken"] = each.to(random.choice(["cpu", device]))
        expected = batch.expected(name, sizes, flip, taken)
        arguments = (runs, offsets, *sources, *sizes)
        if random.random() < 0.5:
            out = torch.full(expected.shape, 1, dtype=dtype, device=device)
            got = getattr(raster_triton, name)(*arguments, **options, out=out)
            assert got is out
        else:
            got = getattr(raster_triton, name)(*arguments, **options, dtype=dtype)
        told = f"seed {seed}, {name}, {sizes}, {dtype}, tile {tile}"
        assert got.dtype == dtype, told
        assert torch.equal(got.cpu().float(), torch.from_numpy(expected).float()), told
        assert torch.equal(got, getattr(raster_torch, name)(*arguments, **options, dtype=dtype)), told
    return 2 * len(batch)


def check_a_buffer_anywhere(device: str) -> None:
    """A buffer at an odd address is written exactly, and nothing outside it."""
    from sa1b.masks import raster_triton

    masks = draw_masks(np.random.default_rng(1), 20, 32, 3)
    runs = to_runs(masks)
    memory = torch.full((3 * 20 * 32 + 8,), 9, dtype=torch.uint8, device=device)
    out = memory[3:-5].view(3, 20, 32)
    raster_triton.rasterize(
        torch.from_numpy(runs.runs).to(device),
        torch.from_numpy(runs.offsets).to(device),
        20,
        32,
        20,
        32,
        out=out,
    )
    assert torch.equal(out.cpu(), torch.from_numpy(masks).to(torch.uint8))
    assert (memory[:3] == 9).all()
    assert (memory[-5:] == 9).all()


def check_runs_that_break_their_promise(device: str) -> None:
    """Runs with a wrong sum: the call ends, and writes only 0 and 1, and only into its buffer."""
    from sa1b.masks import raster_triton

    broken = ([1, 5, 2**32 - 1, 2**32 - 1, 3], [], [7], [0, 2**32 - 1], [0, 0, 0, 0], [3, 2])
    offsets = np.cumsum([0, *map(len, broken)])
    runs = torch.from_numpy(np.array([run for mask in broken for run in mask], np.uint32)).to(device)
    memory = torch.full(((len(broken) + 2) * 144,), 9, dtype=torch.uint8, device=device)
    out = memory[144:-144].view(len(broken), 12, 12)
    raster_triton.rasterize(runs, torch.from_numpy(offsets).to(device), 3, 4, 12, 12, flip=True, out=out)
    assert (out <= 1).all()
    assert (memory[:144] == 9).all()
    assert (memory[-144:] == 9).all()


def check_no_masks(device: str) -> None:
    from sa1b.masks import raster_triton

    runs = torch.empty(0, dtype=torch.int32, device=device)
    offsets = torch.zeros(1, dtype=torch.int64, device=device)
    sizes = torch.empty(0, dtype=torch.int64)
    assert raster_triton.rasterize(runs, offsets, 3, 4, 5, 6).shape == (0, 5, 6)
    assert raster_triton.rasterize_frame(runs, offsets, sizes, sizes, 64, 16).shape == (0, 16, 16)


def check_many_masks(device: str, count: int) -> None:
    """More masks than the limit of a grid's second axis, on a GPU."""
    from sa1b.masks import raster_triton

    batch = join([to_runs(draw_masks(np.random.default_rng(2), 9, 7, 24))])
    times = -(-count // 24)
    ends = [batch.offsets[1:] + i * len(batch.runs) for i in range(times)]
    runs = torch.from_numpy(np.tile(batch.runs, times)).to(device)
    offsets = torch.from_numpy(np.concatenate([[0], *ends])).to(device)
    expected = torch.from_numpy(batch.expected("rasterize", (8, 16), False)).to(device)
    got = raster_triton.rasterize(runs, offsets, 9, 7, 8, 16)
    assert (got.view(times, 24, 8, 16) == expected).all()


def check_arguments(device: str) -> None:
    """Invalid arguments are refused, and the message names them."""
    from sa1b.masks import raster_triton

    runs = torch.tensor([3, 9, 12], dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 2, 3], device=device)
    cases = (
        ((runs, offsets, 3, 4, 0, 4), {}, "must be at least 1"),
        ((runs, offsets, 0, 4, 3, 4), {}, "must be at least 1"),
        ((runs, offsets, 3, 4, 2**30, 1), {}, "too large for int64"),
        ((runs.float(), offsets, 3, 4, 3, 4), {}, "runs must be integers"),
        ((runs, offsets.int(), 3, 4, 3, 4), {}, "offsets int64"),
        ((runs, offsets, 3, 4, 3, 4), {"dtype": torch.float64}, "got torch.float64"),
        ((runs, offsets, 3, 4, 3, 4), {"out": torch.empty((2, 4, 3), device=device)}, "float32 [2, 4, 3]"),
    )
    for arguments, options, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            raster_triton.rasterize(*arguments, **options)


def check_odd_cases(device: str, many: int) -> None:
    check_a_buffer_anywhere(device)
    check_runs_that_break_their_promise(device)
    check_no_masks(device)
    check_many_masks(device, many)
    check_arguments(device)


if __name__ == "__main__":
    first, stop = map(int, sys.argv[1:])
    compared = sum(check_case(seed, "cpu") for seed in range(first, stop))
    check_odd_cases("cpu", 24)
    print(f"{stop - first} cases, {compared} masks")
