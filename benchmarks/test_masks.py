"""Masks beside pycocotools: `pytest benchmarks/test_masks.py`. All calls use one thread, and each call has
another image.

The images are synthetic, 2250x1500 with 100 masks each, areas and runs as in SA-1B: area fraction lognormal
(ln-mean -6.21, ln-sd 1.59) and two large masks; about 330 runs a mask and 1.16 bytes a run.
"""

from itertools import cycle

import cv2
import numpy as np
import pytest
import torch
from pycocotools import mask as pycocotools

from sa1b.masks import coco, geometry, raster
from sa1b.masks.runs import Runs
from sa1b.sam.prediction import at_source

HEIGHT, WIDTH = 1500, 2250
MASKS, CHOSEN = 100, 64

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def blob(area: float, random: np.random.Generator) -> np.ndarray:
    """Runs of one mask: a disc of about this area with a rough outline, stretched."""
    radius, stretch = np.sqrt(area / np.pi), np.exp(random.normal(0, 0.35))
    radii = np.array([radius * stretch, radius / stretch])
    centre = random.uniform(0, (WIDTH, HEIGHT))
    left, top = np.clip(centre - 1.6 * radii - 1, 0, (WIDTH - 1, HEIGHT - 1)).astype(int)
    right, bottom = np.clip(centre + 1.6 * radii + 2, 1, (WIDTH, HEIGHT)).astype(int)
    x = (np.arange(left, right)[:, None] - centre[0]) / radii[0]
    y = (np.arange(top, bottom)[None, :] - centre[1]) / radii[1]
    angle = np.arctan2(y, x)
    edge = np.ones_like(angle)
    for wave in range(2, 24):
        edge += random.normal(0, 0.3 / wave**1.25) * np.cos(wave * angle + random.uniform(0, 2 * np.pi))
    columns = np.zeros((right - left, HEIGHT), np.int8)
    columns[:, top:bottom] = np.hypot(x, y) <= edge
    changes = np.flatnonzero(np.diff(columns.reshape(-1), prepend=0, append=0)) + left * HEIGHT
    return np.diff(changes, prepend=0, append=HEIGHT * WIDTH).astype(np.uint32)


def image_masks(seed: int) -> Runs:
    random = np.random.default_rng(seed)
    fractions = np.clip(np.exp(random.normal(-6.21, 1.59, MASKS)), 3e-5, 0.95)
    fractions[:2] = random.uniform(0.1, 0.4, 2)
    random.shuffle(fractions)
    lists = [blob(fraction * HEIGHT * WIDTH, random) for fraction in fractions]
    offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    return Runs(np.concatenate(lists), offsets, HEIGHT, WIDTH).check()


@pytest.fixture(scope="module")
def images():
    cv2.setNumThreads(1)  # the reference also uses one core
    torch.set_num_threads(1)
    return [image_masks(seed) for seed in range(12)]


def coded(runs: Runs) -> list[dict[str, object]]:
    """The masks as pycocotools takes them."""
    return [{"size": [HEIGHT, WIDTH], "counts": string} for string in coco.encode(runs)]


def run(benchmark, function, inputs, reference=False):
    """Call the function with different inputs in turn, so that branch predictors do not learn one input."""
    turns = cycle(inputs)
    benchmark.extra_info["reference"] = reference
    benchmark.pedantic(
        lambda: function(next(turns)), rounds=4 * len(inputs) if not reference else 10, warmup_rounds=2
    )


@pytest.mark.benchmark(group="strings to runs")
@pytest.mark.parametrize("kind", ["str", "bytes", "joined"])
def test_strings_decode(benchmark, images, kind):
    if kind == "joined":
        inputs = [coco.encode_joined(image) for image in images]
        run(benchmark, lambda pair: coco.decode_joined(*pair, HEIGHT, WIDTH), inputs)
    else:
        inputs = [coco.encode(image) for image in images]
        if kind == "str":
            inputs = [[string.decode() for string in strings] for strings in inputs]
        run(benchmark, lambda strings: coco.decode(strings, HEIGHT, WIDTH), inputs)


@pytest.mark.benchmark(group="strings to runs")
def test_strings_pycocotools_area(benchmark, images):
    run(benchmark, pycocotools.area, [coded(image) for image in images] * 4, reference=True)


@pytest.mark.benchmark(group="runs to strings")
def test_strings_encode(benchmark, images):
    run(benchmark, coco.encode, images)


@pytest.mark.benchmark(group="64 masks to 1024x1024")
@pytest.mark.parametrize("form", ["resized", "frame"])
def test_raster_1024(benchmark, images, form):
    raster_of(benchmark, images, form, 1024)


@pytest.mark.benchmark(group="64 masks to 1024x1024")
def test_raster_1024_pycocotools(benchmark, images):
    run(
        benchmark,
        lambda masks: decode_and_resize(masks, 1024),
        [coded(i)[:CHOSEN] for i in images],
        reference=True,
    )


@pytest.mark.benchmark(group="64 masks to 256x256")
@pytest.mark.parametrize("form", ["resized", "frame"])
def test_raster_256(benchmark, images, form):
    raster_of(benchmark, images, form, 256)


@pytest.mark.benchmark(group="64 masks to 256x256")
def test_raster_256_pycocotools(benchmark, images):
    run(
        benchmark,
        lambda masks: decode_and_resize(masks, 256),
        [coded(i)[:CHOSEN] for i in images],
        reference=True,
    )


def raster_of(benchmark, images, form, size):
    """Rasterise chosen masks into a reused buffer."""
    chosen, buffer = np.arange(CHOSEN), np.empty((CHOSEN, size, size), np.uint8)
    rasterize = raster.rasterize_frame if form == "frame" else raster.rasterize
    run(benchmark, lambda runs: rasterize(runs, size, size, select=chosen, out=buffer), images)


def decode_and_resize(masks, size):
    """Mask by mask, which is faster than decoding all masks at once."""
    return [
        cv2.resize(pycocotools.decode(mask), (size, size), interpolation=cv2.INTER_NEAREST) for mask in masks
    ]


@pytest.mark.benchmark(group="boxes")
def test_boxes(benchmark, images):
    run(benchmark, geometry.bbox, images)


@pytest.mark.benchmark(group="boxes")
def test_boxes_pycocotools(benchmark, images):
    run(benchmark, pycocotools.toBbox, [coded(image) for image in images], reference=True)


@pytest.mark.benchmark(group="iou 100 x 100")
def test_iou(benchmark, images):
    run(benchmark, lambda runs: geometry.iou(runs, runs), images)


@pytest.mark.benchmark(group="iou 100 x 100")
def test_iou_pycocotools(benchmark, images):
    run(
        benchmark,
        lambda masks: pycocotools.iou(masks, masks, [0] * MASKS),
        [coded(i) for i in images],
        reference=True,
    )


@pytest.mark.benchmark(group="other geometry, 100 masks")
@pytest.mark.parametrize(
    "operation",
    [
        lambda runs: geometry.resize(runs, 683, 1024),
        lambda runs: geometry.frame(runs, 1024, 256),
        lambda runs: geometry.crop(runs, 500, 300, 1024, 1024),
        geometry.flip_horizontal,
        geometry.flip_vertical,
        lambda runs: geometry.uniform_point(runs, np.arange(MASKS, dtype=np.uint64) << np.uint64(57)),
    ],
    ids=["resize", "frame", "crop", "flip horizontal", "flip vertical", "uniform point"],
)
def test_geometry(benchmark, images, operation):
    run(benchmark, operation, images)


def predicted(seed: int) -> np.ndarray:
    """Logits of 16 masks in the padded square of 1024 pixels: discs of 4 % of the image."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:256, :256].astype(np.float32)
    at = random.uniform(30, (226, 140), (16, 2))
    return np.stack([0.8 * (23.6 - np.hypot(x - one[0], y - one[1])) for one in at]).astype(np.float32)


@pytest.mark.benchmark(group="16 masks from logits")
def test_logits(benchmark, images):
    rows = raster.logit_axis(HEIGHT, 683, 1024, 256)
    columns = raster.logit_axis(WIDTH, 1024, 1024, 256)

    def enlarged(found):
        raster.areas(found, rows, columns, 1.0)
        return raster.runs_of_logits(found, np.arange(len(found)), rows, columns)

    run(benchmark, enlarged, [predicted(seed) for seed in range(3)])


@pytest.mark.benchmark(group="16 masks from logits")
def test_logits_enlarged_by_torch(benchmark, images):
    def enlarged(found):
        return Runs.from_pixels(
            at_source(torch.from_numpy(found), (HEIGHT, WIDTH), (683, 1024), 1024).numpy()
        )

    run(benchmark, enlarged, [predicted(seed) for seed in range(3)], reference=True)


@pytest.mark.benchmark(group="suppression of 3,000 boxes")
def test_suppress(benchmark, images):
    boxes = np.concatenate([geometry.bbox_sa1b(image) for image in images])
    boxes = np.concatenate([boxes, boxes + 5, boxes + 300])[:3000]
    run(benchmark, lambda scores: geometry.suppress(boxes, scores, 0.7), [np.arange(3000) % 97])
