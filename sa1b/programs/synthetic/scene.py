"""Synthetic scenes: images of drawn objects with exact masks and the statistics of SA-1B.

Objects are painted from large to small. An object inside another object becomes a part of it, and the masks
nest. An object across an outline hides the pixels below it, and each mask is the visible region.

The words of a phrase follow from the numbers with which an object was drawn, not from its pixels. Objects of
an image may have the same words, so a phrase may describe several of them.
"""

from colorsys import rgb_to_hsv
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.uint8]
Hues = npt.NDArray[np.float64]  # [3] of 0..1

SIZES = {  # (width, height) in pixels: share of the images
    (2250, 1500): 0.62, (1500, 2250): 0.20, (2000, 1500): 0.07,
    (1500, 2000): 0.04, (2667, 1500): 0.03, (1920, 1080): 0.04,
}  # fmt: skip
HIGH_QUALITY_SHARE = 0.63  # share of images with quality 95; the others have quality 75
MASKS_MEAN, MASKS_LN_SD, MASKS_MAX = 96.0, 0.5, 500
AREA_LN_MEAN, AREA_LN_SD = -6.21, 1.59  # mean and deviation of the logarithm of the area fraction
AREA_LEAST, AREA_MOST, PIXELS_LEAST = 3e-5, 0.95, 20
LARGE_LEAST, LARGE_MOST = 0.04, 0.25  # area fractions of the two or three large masks
AREA_LOST = 0.03  # share of the area that hiding and clipping remove, measured
# JPEG quality -> texture contrast and sensor grain (grey levels) that give SA-1B's bytes per image.
DETAIL = {95: (0.8, 1.85), 75: (0.78, 4.8)}
ROUGHNESS = 0.15  # largest roughness of an outline, as a fraction of the radius
# Simple scenes: objects per image, their area fractions, and factors of roughness, contrast and grain.
SIMPLE_MASKS, SIMPLE_AREAS = (8, 16), (0.008, 0.12)
SIMPLE_ROUGHNESS, SIMPLE_CONTRAST = 0.3, 0.4
TILE = 1024  # pixels, side of the periodic texture tiles
# Words of phrases.
AREA_WORDS = {0.05: "large", 0.015: "medium", 0.003: "small", 0.0: "tiny"}  # by least area fraction
LONG = 1.5  # smallest aspect ratio of a long object
FAINT = 5.0  # grey levels; a texture of a smaller standard deviation is not seen
GREY = 0.14  # largest saturation of a grey
BLACK = 0.1  # a colour of a smaller value is black, whatever its hue
DARK, BRIGHT = 0.4, 0.7  # largest value (0..1) of a dark colour, smallest of a bright one
HUES = {  # by the end of its range, of 1
    0.045: "red", 0.11: "orange", 0.19: "yellow", 0.45: "green", 0.54: "cyan", 0.72: "blue",
    0.82: "violet", 0.955: "pink", 1.0: "red",
}  # fmt: skip
TEXTURES = ("mottled", "cloudy", "combed", "brushed", "grainy")  # of `_tiles`
OUTLINES = {1.6: "diamond", 2.0: "disc", 3.0: "cushion", 6.0: "box"}  # by exponent of the superellipse


@dataclass(slots=True)
class Shape:
    """An object: position and visible region, uint8 [h, w], and the indices of the objects around it."""

    x: int
    y: int
    mask: Mask
    ancestors: frozenset[int] = frozenset()
    look: dict[str, Any] = field(default_factory=dict)  # the numbers with which it was drawn

    def overlap(self, other: "Shape") -> tuple[Mask, Mask]:
        """Views of the regions of both objects in the rectangle that they share."""
        (h, w), (other_h, other_w) = self.mask.shape, other.mask.shape
        x0, y0 = max(self.x, other.x), max(self.y, other.y)
        x1 = max(x0, min(self.x + w, other.x + other_w))
        y1 = max(y0, min(self.y + h, other.y + other_h))
        own = self.mask[y0 - self.y : y1 - self.y, x0 - self.x : x1 - self.x]
        return own, other.mask[y0 - other.y : y1 - other.y, x0 - other.x : x1 - other.x]


def draw(rng: np.random.Generator, long_side: int | None, simple: bool) -> tuple[Mask, int, list[Shape]]:
    """An image, uint8 [height, width, 3] RGB, its JPEG quality and its visible objects in drawing order.

    Size, quality and areas are sampled from SA-1B's distributions. Images with fewer pixels on the longer
    side have fewer masks (about 40 at 640 pixels), with the same distribution of area fractions; None: full
    size. `simple`: a few large objects with smooth outlines and plain surfaces instead.
    """
    shares = np.array([*SIZES.values()])
    width, height = [*SIZES][int(rng.choice(len(SIZES), p=shares / shares.sum()))]
    quality = 95 if rng.random() < HIGH_QUALITY_SHARE else 75
    scale = 1.0 if long_side is None else long_side / max(width, height)
    width, height = max(1, round(width * scale)), max(1, round(height * scale))
    if simple:
        low, high = np.log(SIMPLE_AREAS)
        areas = np.exp(rng.uniform(low, high, int(rng.integers(*SIMPLE_MASKS, endpoint=True))))
    else:
        mean = MASKS_MEAN * min(1.0, scale**0.75)
        count = rng.lognormal(np.log(mean) - MASKS_LN_SD**2 / 2, MASKS_LN_SD)
        n_large = int(rng.integers(2, 4))
        n_small = int(np.clip(round(count), 4, MASKS_MAX)) - n_large
        small = rng.lognormal(AREA_LN_MEAN, AREA_LN_SD, n_small) * (1 + AREA_LOST)
        large = np.exp(rng.uniform(np.log(LARGE_LEAST), np.log(LARGE_MOST), n_large))
        least = max(AREA_LEAST, PIXELS_LEAST / (width * height)) * 1.1
        areas = np.clip(np.concatenate([small, large]), least, AREA_MOST)

    contrast, grain = DETAIL[quality]
    plainness = SIMPLE_CONTRAST if simple else 1
    contrast *= float(rng.lognormal(0, 0.25)) * plainness
    hues = rng.random(3)
    canvas = _background(rng, height, width, hues, contrast)
    owner = np.full((height, width), -1, np.int16)  # the topmost object of each pixel
    shapes: list[Shape] = []
    roughness = ROUGHNESS * (SIMPLE_ROUGHNESS if simple else 1)
    for area in np.sort(areas)[::-1] * (height * width):
        mask, outline = _outline(rng, float(area), height, width, roughness)
        shape = _place(rng, mask, owner, shapes)
        if not shape.mask.any():
            continue
        for index, other in enumerate(shapes):
            if index not in shape.ancestors:  # the new object hides it
                below, above = other.overlap(shape)
                below &= 1 - above
        shape.look = _paint(rng, canvas, shape, hues, contrast) | outline
        h, w = shape.mask.shape
        owner[shape.y : shape.y + h, shape.x : shape.x + w][shape.mask > 0] = len(shapes)
        shapes.append(shape)
    grain *= float(rng.lognormal(0, 0.25)) * plainness
    noise = rng.standard_normal((height, width), dtype=np.float32)
    canvas += (noise * np.float32(grain))[:, :, None]
    least = max(AREA_LEAST * height * width, PIXELS_LEAST)
    visible = [shape for shape in shapes if np.count_nonzero(shape.mask) >= least]
    return np.clip(canvas, 0, 255).astype(np.uint8), quality, visible


def _outline(
    rng: np.random.Generator, area: float, height: int, width: int, roughness: float
) -> tuple[Mask, dict[str, Any]]:
    """A filled random shape of about `area` pixels, without empty border rows or columns, and its look."""
    n = int(np.clip(2.5 * np.sqrt(area), 24, 6000))
    angle = np.linspace(0, 2 * np.pi, n, endpoint=False)
    power = rng.choice([1.6, 2.0, 2.0, 3.0, 6.0])  # superellipse: from diamond to box
    radius = (np.abs(np.cos(angle)) ** power + np.abs(np.sin(angle)) ** power) ** (-1 / power)
    long, bend = float(np.exp(abs(rng.normal(0, 0.2)))), 0.0  # square root of the aspect ratio
    thin = bool(rng.random() < 0.08 and area < 0.02 * height * width)  # poles, cables, branches
    if thin:
        long, bend = rng.uniform(2.0, 3.0), rng.normal(0, 0.4)
    radius *= np.exp(rng.uniform(0.2 * roughness, roughness) / long * _wiggle(rng, n))
    x, y = radius * np.cos(angle) * long, radius * np.sin(angle) / long
    y += bend * long * (x / long) ** 2
    turn = rng.choice([0, np.pi / 2], p=[0.35, 0.65]) + rng.normal(0, 0.15 if power > 2 else 0.5)
    points = np.stack([x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn)], 1)
    hole = rng.uniform(0.3, 0.55) if area > 1500 and bend == 0 and rng.random() < 0.08 else 0.0
    following = np.roll(points, -1, 0)
    unit = abs(float(np.sum(points[:, 0] * following[:, 1] - points[:, 1] * following[:, 0]))) / 2
    unit *= 1 - hole**2
    length = float(np.hypot(*(following - points).T).sum()) * (1 - hole)
    # fillPoly also fills the pixels under the outline, which adds half a pixel along the whole outline.
    size = (np.sqrt(length**2 / 4 + 4 * unit * max(area - 1, 4.0)) - length / 2) / (2 * unit)
    points *= size
    low, high = np.floor(points.min(0)), np.ceil(points.max(0))
    contours = [points - low] + ([points * hole - low] if hole else [])
    w, h = (high - low).astype(int) + 1
    mask = np.zeros((h, w), np.uint8)
    cv2.fillPoly(mask, [np.round(c * 16).astype(np.int32) for c in contours], 1, shift=4)
    look = {"power": float(power), "aspect": float(long) ** 2, "hollow": hole > 0, "thin": thin}
    return mask[:height, :width], look


def _wiggle(rng: np.random.Generator, n: int) -> npt.NDArray[np.float64]:
    """Periodic noise, float64 [n], standard deviation 1: slow waves and finer roughness."""
    k = np.arange(n // 2 + 1)
    spectrum = np.zeros(len(k), np.complex128)
    phases = np.exp(2j * np.pi * rng.random(len(k)))
    spectrum[2:] = phases[2:] * k[2:] ** -rng.uniform(1.7, 3.0)
    wave = np.fft.irfft(spectrum, n)
    return np.asarray(wave / wave.std())


def _place(rng: np.random.Generator, mask: Mask, owner: npt.NDArray[np.int16], shapes: list[Shape]) -> Shape:
    """Position an object: choose the random position that crosses the fewest outlines."""
    height, width = owner.shape
    h, w = mask.shape
    step = max(1, int(np.sqrt(h * w) / 24))  # a subset of the pixels is enough to compare positions
    sample = mask[::step, ::step] > 0
    best, best_share, under = (0, 0), -1.0, -1
    near = shapes[int(rng.integers(len(shapes)))] if shapes and rng.random() < 0.6 else None
    for _ in range(8):
        x, y = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
        if near is not None:  # objects occur in groups and on top of each other
            around = rng.normal(0, 0.4, 2) * max(near.mask.shape) - [w / 2, h / 2]
            x = int(np.clip(near.x + near.mask.shape[1] / 2 + around[0], 0, width - w))
            y = int(np.clip(near.y + near.mask.shape[0] / 2 + around[1], 0, height - h))
        below = owner[y : y + h : step, x : x + w : step][sample]
        counts = np.bincount(below + 1, minlength=1)
        top = int(counts.argmax())
        share = float(counts[top]) / max(1, len(below))
        if share > best_share:
            best, best_share, under = (x, y), share, top - 1
        if share > 0.999:
            break
    x, y = best
    if under < 0 or best_share < 0.7:
        return Shape(x, y, mask)
    parent = shapes[under]  # the new object is a part of it: clip it to the parent's mask
    part = Shape(x, y, np.zeros_like(mask), parent.ancestors | {under})
    inside, of_parent = part.overlap(parent)
    inside[:] = of_parent
    part.mask &= mask
    return part


def _background(rng: np.random.Generator, height: int, width: int, hues: Hues, contrast: float) -> Floats:
    """A shaded, textured background, float32 [height, width, 3] in grey levels."""
    coarse = np.stack([[_colour(rng, hues, 0.5) for _ in range(3)] for _ in range(2)]).astype(np.float32)
    canvas = np.asarray(cv2.resize(coarse, (width, height), interpolation=cv2.INTER_LINEAR), np.float32)
    canvas += _texture(rng, height, width)[0][:, :, None] * np.float32(9 * contrast)
    # Below a soft, uneven horizon the background has another colour and texture.
    skyline = height * (rng.uniform(0.2, 0.6) + 0.04 * _wiggle(rng, 4 * width)[:width])
    depth = (np.arange(height)[:, None] - skyline[None, :]) / (0.01 * height)
    ground = (1 / (1 + np.exp(-np.clip(depth, -20, 20)))).astype(np.float32)[:, :, None]
    soil = _texture(rng, height, width)[0][:, :, None] * np.float32(14 * contrast)
    canvas += ground * (soil + 0.7 * (_colour(rng, hues, 0.7).astype(np.float32) - canvas))
    return canvas


def _paint(
    rng: np.random.Generator, canvas: Floats, shape: Shape, hues: Hues, contrast: float
) -> dict[str, Any]:
    """Draw an object on the canvas, in place: a shadow, then a textured surface; its look."""
    pad = 8
    height, width = canvas.shape[:2]
    h, w = shape.mask.shape
    x0, y0 = max(shape.x - pad, 0), max(shape.y - pad, 0)
    x1, y1 = min(shape.x + w + pad, width), min(shape.y + h + pad, height)
    solid = np.zeros((y1 - y0, x1 - x0), np.float32)
    solid[shape.y - y0 :, shape.x - x0 :][:h, :w] = shape.mask
    ground = canvas[y0:y1, x0:x1]
    behind = np.asarray(cv2.mean(ground, np.asarray(solid, np.uint8))[:3])
    colours = [_colour(rng, hues) for _ in range(4)]
    # Take the first colour with enough contrast to the background, else the colour with most contrast.
    colour = max(colours, key=lambda c: min(float(np.abs(c - behind).sum()), 150.0))
    if rng.random() < 0.5:
        shadow = cv2.GaussianBlur(np.roll(solid, (2, 2), (0, 1)), (0, 0), 2.5)
        ground *= (1 - 0.45 * shadow)[:, :, None]
    v = np.linspace(-1, 1, solid.shape[0], dtype=np.float32)[:, None]
    u = np.linspace(-1, 1, solid.shape[1], dtype=np.float32)[None, :]
    slope = rng.normal(0, 0.14, 2).astype(np.float32)
    light = 1 + slope[0] * u + slope[1] * v
    texture, tile = _texture(rng, *solid.shape)
    deviation = float(contrast * min(rng.lognormal(2.3, 0.5), 30))
    texture *= np.float32(deviation)
    striped = bool(rng.random() < 0.2 and solid.size > 4000)  # slats, windows, cloth
    if striped:
        along, period = rng.normal(0, 1, 2), rng.uniform(6, 40)
        along *= 2 * np.pi / period / np.hypot(*along)
        along *= np.array(solid.shape[::-1]) / 2
        wave = np.sin(u * np.float32(along[0]) + v * np.float32(along[1]))
        texture += np.float32(rng.uniform(5, 16)) * np.tanh(3 * wave)
    alpha = cv2.GaussianBlur(solid, (0, 0), float(rng.uniform(0.5, 0.9)))[:, :, None]
    surface = colour.astype(np.float32) * light[:, :, None]
    surface += texture[:, :, None]
    surface -= ground
    surface *= alpha
    ground += surface
    return {"colour": colour.tolist(), "tile": tile, "contrast": deviation, "striped": striped}


def _colour(rng: np.random.Generator, hues: Hues, strength: float = 1.0) -> npt.NDArray[np.float64]:
    """A colour near the scene's hues, float64 [3] RGB in grey levels; `strength` scales its saturation."""
    hue = float(rng.choice(hues)) + rng.normal(0, 0.06)
    saturation, value = strength * rng.beta(1.6, 3.0), rng.uniform(0.15, 0.92)
    ramp = np.clip(np.abs((hue * 6 + np.array([0.0, 4.0, 2.0])) % 6 - 3) - 1, 0, 1)
    return np.asarray(255 * value * (1 - saturation + saturation * ramp))


def _texture(rng: np.random.Generator, height: int, width: int) -> tuple[Floats, int]:
    """A random crop of a tile, float32 [height, width], mean 0, deviation 1, and the tile's number."""
    number = int(rng.integers(len(_tiles())))
    tile = _tiles()[number]
    top, left = rng.integers(0, TILE, 2)
    rows, columns = np.arange(top, top + height) % TILE, np.arange(left, left + width) % TILE
    return np.asarray(np.take(np.take(tile, rows, 0), columns, 1)), number


@cache
def _tiles() -> tuple[Floats, ...]:
    """Periodic textures float32 [TILE, TILE], the same in every process: noise, fibres, grains."""
    rng = np.random.default_rng(20230405)
    fy, fx = np.fft.fftfreq(TILE)[:, None], np.fft.rfftfreq(TILE)[None, :]
    tiles = []
    kinds = ((1, 1, 1.0, 4), (1, 1, 1.3, 4), (5, 1, 1.0, 8), (1, 5, 1.0, 8), (1, 1, 1.5, 60))
    for sy, sx, power, least in kinds:
        frequency = np.hypot(fy * sy, fx * sx)
        fall = np.maximum(frequency, least / TILE) ** -power
        fall[0, 0] = 0
        wave = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((TILE, TILE))) * fall, (TILE, TILE))
        tiles.append((wave / wave.std()).astype(np.float32))
    return tuple(tiles)


def described(look: dict[str, Any], area: float) -> dict[str, object]:
    """Single words, `text` and `texts` (three wordings) of an object with a look and an area fraction."""
    size = next(name for least, name in AREA_WORDS.items() if area >= least)
    shape = "strip" if look["thin"] else "ring" if look["hollow"] else OUTLINES[look["power"]]
    shape = f"long {shape}" if look["aspect"] >= LONG and not look["thin"] else shape
    texture = TEXTURES[look["tile"]] if look["contrast"] >= FAINT else "plain"
    texture = "striped" if look["striped"] else texture
    hue, saturation, value = rgb_to_hsv(*(level / 255 for level in look["colour"]))
    colour = next(name for end, name in HUES.items() if hue < end)
    colour = "brown" if colour == "orange" and value <= DARK else colour
    if is_grey := saturation <= GREY or value < BLACK:
        colour = "black" if value < 0.22 else "white" if value > 0.85 else "grey"
    if not is_grey or colour == "grey":
        colour = f"{'dark ' if value <= DARK else 'bright ' if value >= BRIGHT else ''}{colour}"
    kind = f"{colour} {texture} {shape}"
    texts = [f"{size} {kind}", f"{shape}, {size}, {texture} and {colour}", f"{kind} of {size} size"]
    words = {"size": size, "colour": colour, "texture": texture, "shape": shape}
    return {"text": texts[0], "texts": texts, **words}
