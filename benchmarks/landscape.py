"""A landscape with the masks of its parts, drawn from noise and polygons: the image on the first page."""

from collections.abc import Sequence

import cv2
import numpy as np
import numpy.typing as npt

WIDTH, HEIGHT = 1500, 1000
Mask = npt.NDArray[np.bool_]
Pixels = npt.NDArray[np.float32]


class Painting:
    """An image that is painted from back to front; each part hides what was painted before it."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.image = np.zeros((HEIGHT, WIDTH, 3), np.float32)
        self.masks: list[Mask] = []
        self.y, self.x = np.mgrid[:HEIGHT, :WIDTH].astype(np.float32)

    def noise(self, coarse: float, octaves: int = 6, stretch: float = 1.0) -> Pixels:
        """Fractal noise with values about from -1 to 1; `coarse`: pixels of its largest details."""
        total = np.zeros((HEIGHT, WIDTH), np.float32)
        for octave in range(octaves):
            step = coarse / 2**octave
            shape = (max(2, int(HEIGHT / step * stretch)), max(2, int(WIDTH / step)))
            values = self.rng.standard_normal(shape).astype(np.float32)
            total += cv2.resize(values, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC) / 1.8**octave
        return total / 2

    def ridge(self, height: float, rough: float, coarse: float) -> Mask:
        """What lies below an outline of noise around a height."""
        line = height + rough * self.noise(coarse, 7)[0]
        return self.y > line[None, :]

    def polygon(self, points: Sequence[tuple[float, float]]) -> Mask:
        canvas = np.zeros((HEIGHT, WIDTH), np.uint8)
        cv2.fillPoly(canvas, [np.round(points).astype(np.int32)], 1)
        return canvas.astype(bool)

    def paint(self, mask: Mask, colour: Pixels | Sequence[float], *, keep: bool = True) -> None:
        """Paint a part, with a soft edge; `keep`: it gets a mask."""
        soft = cv2.GaussianBlur(mask.astype(np.float32), (3, 3), 0)[..., None]
        self.image = self.image * (1 - soft) + np.asarray(colour, np.float32) * soft
        if keep:
            self.masks = [one & ~mask for one in self.masks]
            self.masks.append(mask)

    def shade(self, colour: Sequence[float], amount: Pixels) -> Pixels:
        """A colour that is lighter or darker by a factor for each pixel."""
        return np.asarray(colour, np.float32) * (1 + amount[..., None])

    def tree(self, x: float, foot: float, height: float) -> None:
        """A pine, in one mask with its trunk."""
        edge, bark = self.noise(9, 4), self.noise(40, 5)
        down = (self.y - (foot - height)) / height
        width = height * 0.24 * down * (0.72 + 0.28 * ((down * 7) % 1)) * (1 + 0.35 * edge)
        crown = (np.abs(self.x - x) < width) & (down > 0) & (down < 0.93)
        trunk = (np.abs(self.x - x) < height * 0.02) & (down > 0.5) & (down < 1)
        light = np.clip((self.x - x) / (height * 0.2), -1, 1) * -0.35
        self.paint(trunk, self.shade((74, 54, 38), 0.3 * bark), keep=False)
        self.paint(crown, self.shade((38, 74, 44), light + 0.45 * bark - 0.2), keep=False)
        whole = crown | trunk
        self.masks = [one & ~whole for one in self.masks]
        self.masks.append(whole)

    def house(self, x: float, y: float, size: float) -> None:
        """A cabin: walls, roof, door, windows and chimney."""
        grain = self.noise(120, 6, stretch=6)
        planks = 0.16 * ((self.y - y) / size * 14 % 1 - 0.5) + 0.18 * grain

        def at(*points: tuple[float, float]) -> Mask:
            return self.polygon([(x + size * dx, y + size * dy) for dx, dy in points])

        chimney = at((0.70, -0.52), (0.80, -0.52), (0.80, -0.20), (0.70, -0.20))
        self.paint(chimney, self.shade((128, 92, 80), 0.35 * self.noise(16, 4)))
        self.paint(at((0, 0), (0.46, 0), (0.46, 0.5), (0, 0.5)), self.shade((150, 102, 64), planks))
        self.paint(at((0.46, 0), (1, 0), (1, 0.46), (0.46, 0.5)), self.shade((118, 78, 50), planks))
        self.paint(at((0, 0), (0.23, -0.36), (0.46, 0)), self.shade((156, 108, 70), planks))
        rows = 0.2 * ((self.y - y) / size * 22 % 1 - 0.5) + 0.2 * self.noise(20, 4)
        roof = at((0.19, -0.42), (0.80, -0.36), (1.07, 0.05), (0.47, 0.06))
        self.paint(roof, self.shade((122, 52, 44), rows))
        glass = -0.35 + 0.5 * (self.y - y) / size + 0.12 * self.noise(60, 3)
        for left in (0.55, 0.82):
            frame = (left - 0.015, 0.12), (left + 0.135, 0.115), (left + 0.135, 0.285), (left - 0.015, 0.295)
            self.paint(at(*frame), (226, 220, 206), keep=False)
            self.paint(at((left, 0.135), (left + 0.12, 0.13), (left + 0.12, 0.27), (left, 0.28)),
                       self.shade((128, 168, 196), glass))  # fmt: skip
        self.paint(at((0.14, 0.16), (0.31, 0.16), (0.31, 0.5), (0.14, 0.5)),
                   self.shade((64, 82, 74), 0.1 * grain))  # fmt: skip


def landscape(seed: int = 4) -> tuple[npt.NDArray[np.uint8], list[Mask]]:
    """uint8 RGB [HEIGHT, WIDTH, 3], and the masks of its parts, which do not overlap."""
    scene = Painting(seed)
    x, y = scene.x, scene.y
    down = (y / 480)[..., None]
    sky = np.float32((86, 142, 204)) * (1 - down) + np.float32((232, 222, 206)) * down
    clouds = np.clip(scene.noise(420, 7, stretch=2.2) * 1.3 - 0.25 - 0.5 * (y / 480 - 0.5), 0, 0.9)[..., None]
    everything = np.ones((HEIGHT, WIDTH), bool)
    scene.paint(everything, sky * (1 - clouds) + 250 * clouds)
    for height, rough, coarse, colour, snow in (
        (250, 120, 700, (142, 156, 178), 265),
        (330, 70, 480, (104, 122, 136), 0),
    ):
        rock = scene.noise(150, 7) - 0.9 * scene.noise(260, 6)
        white = np.clip((snow - y) / 60 + 0.8 * scene.noise(60, 5), 0, 1)[..., None] if snow else 0
        stone = scene.shade(colour, 0.22 * rock)
        scene.paint(
            scene.ridge(height, rough, coarse), stone * (1 - white) + np.float32((240, 243, 248)) * white
        )
    trees = scene.noise(14, 4)
    hills = scene.ridge(430, 34, 300) | (y > 470 + 16 * trees)
    scene.paint(hills, scene.shade((62, 88, 74), 0.35 * trees + 0.1 * scene.noise(200)))
    shore = scene.noise(500, 6)[500]
    water = y > 520 + 6 * scene.noise(90, 4)[0][None, :]
    mirrored = scene.image[np.clip(1040 - np.arange(HEIGHT), 0, HEIGHT - 1)]
    mirrored = cv2.GaussianBlur(mirrored, (31, 3), 0)
    ripples = scene.noise(60, 5, stretch=7)
    scene.paint(water, mirrored * 0.82 * (1 + 0.09 * ripples[..., None]) + np.float32((4, 14, 22)))
    hull = scene.polygon([(330, 596), (470, 596), (448, 622), (352, 622)])
    sail = scene.polygon([(396, 470), (396, 588), (466, 588)])
    scene.paint(scene.polygon([(391, 462), (396, 462), (396, 598), (391, 598)]), (92, 74, 58), keep=False)
    scene.paint(sail, scene.shade((242, 238, 228), 0.08 * scene.noise(60, 3)))
    scene.paint(hull, scene.shade((168, 44, 40), 0.12 * scene.noise(40, 3) - (y - 600) / 120))
    meadow = y > 668 + 40 * shore[None, :] + 36 * np.sin((x - 300) / 560)
    grass = scene.noise(9, 4, stretch=0.6) * 0.34 + scene.noise(240, 5) * 0.22
    near = ((y - 650) / 350)[..., None]
    green = np.float32((112, 142, 72)) * (1 - near) + np.float32((72, 104, 46)) * near
    scene.paint(meadow, green * (1 + grass[..., None]))
    bend = 80 * np.sin((y - 700) / 90)
    track = (np.abs(x - (807 + bend - (y - 790) * 0.5)) < 14 + (y - 760) * 0.22) & (y > 772) & meadow
    scene.paint(track, scene.shade((176, 152, 118), 0.22 * scene.noise(20, 4)))
    scene.house(800, 620, 330)
    for place in ((150, 850, 400), (265, 800, 300), (1235, 838, 420), (1340, 800, 320), (1432, 860, 430)):
        scene.tree(*place)
    light = 1.05 - 0.18 * (((x - 700) / 1100) ** 2 + ((y - 480) / 900) ** 2)
    grain = scene.rng.standard_normal((HEIGHT, WIDTH, 1)).astype(np.float32) * 2.2
    image = np.clip(scene.image * light[..., None] + grain, 0, 255).astype(np.uint8)
    return image, [mask for mask in scene.masks if mask.sum() > 60]
