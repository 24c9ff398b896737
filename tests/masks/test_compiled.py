"""Compiled kernels and their plain form, imports, and threads."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import sa1b.masks
from sa1b.kernel import plain
from sa1b.masks import grid, pixel_kernels, raster, shape_kernels, string_kernels
from tests.masks.samples import examples, masks_and_runs, to_runs

ROOT = Path(__file__).parents[2]


def both(kernel, make_arguments):
    """Run a kernel compiled and plain on fresh arguments; all arrays must be equal afterwards."""
    compiled, uncompiled = make_arguments(), make_arguments()
    assert kernel(*compiled) == plain(kernel)(*uncompiled)
    for left, right in zip(compiled, uncompiled, strict=True):
        np.testing.assert_array_equal(left, right)
    return compiled


@examples
@given(masks_and_runs, st.integers(1, 30), st.integers(0, 2**16))
def test_kernels_do_the_same_compiled_and_plain(drawn, size, seed):
    _, runs = drawn
    random = np.random.default_rng(seed)
    count, height, width = len(runs), runs.height, runs.width
    pair = (runs.runs, runs.offsets)
    text, lengths = sa1b.masks.encode_joined(runs)
    damaged = text.copy()
    if len(text):
        damaged[random.integers(len(text))] = random.integers(256)

    for source in (text, damaged):
        both(string_kernels.count_numbers, lambda source=source: (source,))
        both(string_kernels.judge, lambda source=source: (source, height * width))
        both(
            string_kernels.parse,
            lambda source=source: (
                source,
                np.cumsum(lengths) - lengths,
                lengths,
                height * width,
                np.zeros(len(source), np.uint32),
                np.zeros(count + 1, np.int64),
                np.zeros(count, np.uint8),
            ),
        )
    both(string_kernels.count_characters, lambda: (*pair, np.zeros(count, np.int64)))
    both(string_kernels.write, lambda: (*pair, np.zeros(len(text), np.uint8)))
    both(shape_kernels.area, lambda: (*pair, np.zeros(count, np.int64)))
    boxes = both(shape_kernels.bbox, lambda: (*pair, height, width, np.zeros((count, 4), np.int64)))[-1]
    turned = both(
        shape_kernels.reverse,
        lambda: (*pair, np.zeros(len(runs.runs) + count, np.uint32), np.zeros(count + 1, np.int64)),
    )
    assert turned[-1][-1] >= len(runs.runs)
    rows, columns = grid.framed((height, width), size, size)
    both(
        shape_kernels.remap,
        lambda: (
            *pair,
            height,
            width,
            boxes,
            columns.sources(),
            grid.firsts(rows),
            size,
            np.zeros((size * size + 1) * count + 1, np.uint32),
            np.zeros(count + 1, np.int64),
        ),
    )
    masks = np.arange(count)
    drawn = [0, size, 0, size // 2]
    both(
        pixel_kernels.rasterize,
        lambda: (
            *(*pair, masks, grid.firsts(rows), grid.firsts(columns)),
            np.full((count, size, size), 7, np.uint8),
            np.tile(drawn, (count, 1)),
        ),
    )
    painting = (np.zeros(height * width, np.int32), np.zeros(count, np.bool_))
    both(pixel_kernels.paint, lambda: (*pair, 0.4, *(one.copy() for one in painting)))
    pixel = random.integers(-1, height * width, count)
    both(shape_kernels.contains, lambda: (*pair, pixel, np.zeros(count, np.bool_)))
    both(shape_kernels.nth_foreground, lambda: (*pair, pixel, np.zeros(count, np.int64)))
    words = random.integers(0, 2**64, count, np.uint64)
    both(
        shape_kernels.boxes_and_points,
        lambda: (
            *(*pair, (height, width), (0.7, 1.3), words),
            *(np.zeros((count, n), np.float32) for n in (4, 2)),
            np.zeros(count, np.int64),
        ),
    )
    ends, spans = both(
        shape_kernels.cumulate,
        lambda: (*pair, np.zeros(len(runs.runs), np.int64), np.zeros((count, 2), np.int64)),
    )[-2:]
    side = (ends, runs.offsets, spans, boxes)
    both(shape_kernels.intersection, lambda: (*side, *side, np.zeros((count, count), np.int64)))


def python(code, **environment):
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_masks_import_neither_torch_nor_pycocotools():
    python(
        "import sys, sa1b.masks\n"
        "for name in sa1b.masks.__all__: getattr(sa1b.masks, name)\n"
        "import sa1b.masks.coco, sa1b.masks.geometry, sa1b.masks.raster\n"
        "assert not {'torch', 'pycocotools', 'cv2'} & set(sys.modules)"
    )


def test_the_package_itself_imports_no_numba_until_a_function_is_asked_for():
    python("import sys, sa1b.masks; assert 'numba' not in sys.modules")


def test_threads_get_the_same():
    random = np.random.default_rng(5)
    images = [to_runs(random.random((4, 50, 60)) < 0.5) for _ in range(32)]

    def work(runs):
        decoded = sa1b.masks.decode(sa1b.masks.encode(runs), 50, 60)
        return raster.rasterize_frame(decoded, 64, 32), sa1b.masks.iou(decoded, decoded)

    with ThreadPoolExecutor(4) as pool:
        for (pixels, ratios), runs in zip(pool.map(work, images), images, strict=True):
            np.testing.assert_array_equal(pixels, raster.rasterize_frame(runs, 64, 32))
            np.testing.assert_array_equal(ratios, sa1b.masks.iou(runs, runs))
