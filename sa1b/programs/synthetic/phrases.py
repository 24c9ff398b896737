"""Phrases that describe the objects of synthetic scenes: size, colour, texture and shape.

The words follow from the numbers with which an object was drawn, not from its pixels. Objects of an image may
have the same words, so a phrase may describe several of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

RING, STRIP = "ring", "strip"
SMALL, MEDIUM, LARGE = 0.003, 0.015, 0.05  # smallest area fractions of small, medium and large objects
LONG = 1.5  # smallest aspect ratio of a long object
FAINT = 5.0  # grey levels; a texture of a smaller standard deviation is not seen
GREY = 0.14  # largest saturation of a grey
BLACK = 0.1  # a colour of a smaller value is black, whatever its hue
DARK, BRIGHT = 0.4, 0.7  # largest value (0..1) of a dark colour, smallest of a bright one
_HUES = ("red", "orange", "yellow", "green", "green", "cyan", "blue", "blue", "violet", "pink")
_HUE_ENDS = (0.045, 0.11, 0.19, 0.31, 0.45, 0.54, 0.63, 0.72, 0.82, 0.955)  # of 1, ascending
_TEXTURES = ("mottled", "cloudy", "combed", "brushed", "grainy")  # of the tiles of `scene`
_OUTLINES = {1.6: "diamond", 2.0: "disc", 3.0: "cushion", 6.0: "box"}  # by exponent of the superellipse


@dataclass(frozen=True, slots=True)
class Look:
    """The numbers with which an object was drawn; grey levels are from 0 to 255."""

    colour: tuple[float, float, float]
    tile: int
    contrast: float  # standard deviation of the texture
    striped: bool
    power: float  # exponent of the superellipse of the outline
    aspect: float
    hollow: bool
    thin: bool  # poles, cables and branches


@dataclass(frozen=True, slots=True)
class Words:
    """The words of an object: size, colour, texture and shape."""

    size: str
    colour: str
    texture: str
    shape: str

    def texts(self) -> list[str]:
        """Three wordings of one phrase; the first one is the plainest."""
        kind = " ".join(word for word in (self.colour, self.texture, self.shape) if word)
        with_texture = f", {self.texture}" if self.texture else ""
        return [
            f"{self.size} {kind}",
            f"{self.shape}, {self.size}{with_texture} and {self.colour}",
            f"{kind} of {self.size} size",
        ]


def words_of(look: Look, area: float) -> Words:
    """The words of an object that visibly covers `area` (0 to 1) of the image."""
    size = "large" if area >= LARGE else "medium" if area >= MEDIUM else "small" if area >= SMALL else "tiny"
    shape = STRIP if look.thin else RING if look.hollow else _OUTLINES[look.power]
    if look.aspect >= LONG and not look.thin:
        shape = f"long {shape}"
    texture = "striped" if look.striped else _TEXTURES[look.tile] if look.contrast >= FAINT else "plain"
    return Words(size, colour_name(look.colour), texture, shape)


def colour_name(colour: Sequence[float]) -> str:
    """Name of a colour, such as "dark green": R, G and B in grey levels from 0 to 255."""
    red, green, blue = (level / 255 for level in colour)
    value, least = max(red, green, blue), min(red, green, blue)
    chroma = value - least
    tone = "dark " if value <= DARK else "bright " if value >= BRIGHT else ""
    if chroma <= GREY * value or value < BLACK:
        return "black" if value < 0.22 else "white" if value > 0.85 else f"{tone}grey"
    if value == red:
        hue = (green - blue) / chroma % 6
    elif value == green:
        hue = (blue - red) / chroma + 2
    else:
        hue = (red - green) / chroma + 4
    name = next((name for name, end in zip(_HUES, _HUE_ENDS, strict=True) if hue / 6 < end), "red")
    return tone + ("brown" if name == "orange" and value <= DARK else name)


@dataclass(slots=True)
class Phrases:
    """The phrases of the objects of some images, in ascending order of their ids."""

    rows: list[tuple[int, int, Words]] = field(default_factory=list)

    def add(
        self, image_id: int, mask_ids: Sequence[int], looks: Sequence[Look], areas: Sequence[float]
    ) -> None:
        """Add the objects of an image; areas: see `words_of`."""
        for mask_id, look, area in zip(mask_ids, looks, areas, strict=True):
            self.rows.append((image_id, mask_id, words_of(look, area)))

    def extend(self, other: "Phrases") -> None:
        self.rows.extend(other.rows)

    def table(self) -> "pa.Table":
        """A row for each object: its ids, `text`, `texts` (three wordings) and single words."""
        import pyarrow as pa

        rows = sorted(self.rows, key=lambda row: row[:2])
        words = [words for *_, words in rows]
        ids = {"image_id": [row[0] for row in rows], "mask_id": [row[1] for row in rows]}
        texts = [described.texts() for described in words]
        single = {name: [getattr(described, name) for described in words] for name in Words.__slots__}
        return pa.table({**ids, "text": [some[0] for some in texts], "texts": texts, **single})
