"""The image lies where its masks lie: the centroid of a disc, compared with the true one and with Pillow's."""

import io
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import simplejpeg
import torch
from PIL import Image

from sa1b.shards.jpeg import Edges, scaled_size
from sa1b.stream.decode import decode
from sa1b.stream.decoders import paint
from sa1b.stream.transform import Frame

SIZES = (256, 512, 768, 1024)
STORED = [(1500, width) for width in (2250, 2247, 2253, 2265, 2347, 2667, 2000)]  # edges are between pixels
RADIUS, BACKGROUND = 24, 20
MOST = 0.02  # pixels of the square
Pixels = npt.NDArray[np.uint8]
Point = npt.NDArray[np.float64]  # x, y


def disc(height: int, width: int, centre: Point, radius: float, soft: float) -> Pixels:
    """A disc whose edge fades over `soft` pixels."""
    image = np.full((height, width, 3), BACKGROUND, np.uint8)
    left, top = (max(0, int(value - radius - soft)) for value in centre)
    part = image[top : int(centre[1] + radius + soft) + 1, left : int(centre[0] + radius + soft) + 1]
    x, y = (np.arange(count) + 0.5 for count in part.shape[1::-1])
    distance = np.hypot(left + x - centre[0], (top + y - centre[1])[:, None])
    inside = ((radius - distance) / soft + 0.5).clip(0, 1)[..., None]
    part[:] = np.rint(BACKGROUND + inside * (210, 120, 180))
    return image


def centroid(square: Pixels, near: Point, radius: float) -> Point:
    """Centre of a disc near a point, x and y in pixels of the square."""
    left, top = (max(0, int(value - radius)) for value in near)
    right, bottom = (int(value + radius) + 1 for value in near)
    light = square[top:bottom, left:right].sum(2, dtype=np.float64) - 3 * BACKGROUND
    light[light < 12] = 0  # ripples of the DCT beside the disc
    x, y = (np.arange(count) + 0.5 for count in light.shape[::-1])
    return np.array([left + (light.sum(0) @ x) / light.sum(), top + (light.sum(1) @ y) / light.sum()])


def random_frame(random: np.random.Generator, largest: int) -> tuple[Frame, tuple[int, int]]:
    """A frame of an image of up to `largest` pixels, and the size at which the image is stored."""
    height, width = (int(random.integers(largest // 2, largest + 1)) for _ in range(2))
    frame = Frame.whole_image(height, width, int(random.choice(SIZES)), stretch=random.random() < 0.2)
    kind = random.choice(["whole", "square", "window"])
    if kind == "square":
        frame = frame.center_square()
    if kind == "window":
        across, down = (int(random.integers(n // 2, n + 1)) for n in (width, height))
        x, y = int(random.integers(width - across + 1)), int(random.integers(height - down + 1))
        side = int(random.integers(frame.image_size * 2 // 3, frame.image_size + 1))
        frame = replace(frame.crop(x, y, across, down), side=side)
    frame = replace(frame, flip=bool(random.random() < 0.5))
    if random.random() < 0.7:
        return frame, (height, width)
    return frame, scaled_size(height, width, int(random.integers(largest // 3, largest)))


def by_pillow(jpeg: bytes, frame: Frame, edges: Edges) -> Pixels:
    rows, columns = frame.taken
    top, bottom, left, right = edges
    image = Image.open(io.BytesIO(jpeg))
    image = image.resize((columns, rows), Image.Resampling.BILINEAR, (left, top, right, bottom))
    return np.asarray(image)[:, ::-1] if frame.flip else np.asarray(image)


def displacements(seed: int, frame: Frame, stored: tuple[int, int], gpu: bool) -> npt.NDArray[np.float64]:
    """Largest displacements of a random disc, in pixels of the square: from the true centre, from Pillow's."""
    random = np.random.default_rng(seed)
    rows, columns = frame.taken
    x, y, across, down = frame.window
    per_pixel = np.array([stored[1] / frame.width, stored[0] / frame.height])  # of the file, per source pixel
    edges = (y * per_pixel[1], (y + down) * per_pixel[1], x * per_pixel[0], (x + across) * per_pixel[0])
    size = np.array([edges[3] - edges[2], edges[1] - edges[0]])  # of the window, in pixels of the file
    scale = (columns, rows) / size
    radius, soft = RADIUS / min(1, scale.min()), 5 / min(1, scale.min())  # in pixels of the file
    centre = random.uniform(1.2 * radius, size - 1.2 * radius)
    pixels = disc(*stored, centre + np.array([edges[2], edges[0]]), radius, soft)
    jpeg = bytes(simplejpeg.encode_jpeg(pixels, 98, "RGB", "420"))
    true = centre * scale
    if frame.flip:
        true[0] = columns - true[0]
    square = np.zeros((frame.image_size, frame.image_size, 3), np.uint8)
    if gpu:
        paint(torch.from_numpy(simplejpeg.decode_jpeg(jpeg)), stored, frame, torch.from_numpy(square))
    else:
        decode(jpeg, frame, square)
    reach = 1.3 * radius * scale.max()
    found = centroid(square, true, reach)
    pillow = centroid(by_pillow(jpeg, frame, edges), true, reach)
    return np.array([np.abs(found - true).max(), np.abs(found - pillow).max()])


def campaign(seeds: range, largest: int) -> npt.NDArray[np.float64]:
    """Displacements for random frames, [frames, 2]; every third one on the GPU's resampling."""
    frames = (random_frame(np.random.default_rng(seed), largest) for seed in seeds)
    return np.array(
        [displacements(seed, *one, seed % 3 == 0) for seed, one in zip(seeds, frames, strict=True)]
    )


@pytest.mark.parametrize("size", SIZES)
def test_an_image_whose_scaled_size_is_not_whole_lies_where_its_masks_lie(size: int) -> None:
    for stored in STORED:
        found = displacements(size, Frame.whole_image(*stored, size), stored, gpu=False)
        assert found.max() < MOST, (stored, found)


def test_the_image_of_any_frame_lies_where_its_masks_lie() -> None:
    found = campaign(range(72), largest=600)
    assert found.max() < MOST, (found.max(1).argmax(), found.max(0))


@pytest.mark.slow
def test_images_of_original_size_lie_where_their_masks_lie() -> None:
    found = campaign(range(2000), largest=2700)
    assert found.max() < MOST, (found.max(1).argmax(), found.max(0))
