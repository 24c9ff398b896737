"""Phrases that describe the objects of synthetic scenes: size, colour, texture and shape.

The words follow from the numbers with which an object was drawn, not from its pixels. Objects of an image may
have the same words, so a phrase may describe several of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

SIZES = {0.05: "large", 0.015: "medium", 0.003: "small", 0.0: "tiny"}  # by least area fraction
LONG = 1.5  # smallest aspect ratio of a long object
FAINT = 5.0  # grey levels; a texture of a smaller standard deviation is not seen
GREY = 0.14  # largest saturation of a grey
BLACK = 0.1  # a colour of a smaller value is black, whatever its hue
DARK, BRIGHT = 0.4, 0.7  # largest value (0..1) of a dark colour, smallest of a bright one
_HUES = ("red", "orange", "yellow", "green", "green", "cyan", "blue", "blue", "violet", "pink")
_HUE_ENDS = (0.045, 0.11, 0.19, 0.31, 0.45, 0.54, 0.63, 0.72, 0.82, 0.955)  # of 1, ascending
_TEXTURES = ("mottled", "cloudy", "combed", "brushed", "grainy")  # of the tiles of `scene`
_OUTLINES = {1.6: "diamond", 2.0: "disc", 3.0: "cushion", 6.0: "box"}  # by exponent of the superellipse


class Look(NamedTuple):
    """The numbers with which an object was drawn; grey levels are from 0 to 255."""

    colour: Sequence[float]
    tile: int
    contrast: float  # standard deviation of the texture
    striped: bool
    power: float  # exponent of the superellipse of the outline
    aspect: float
    hollow: bool
    thin: bool  # poles, cables and branches


def described(look: Look, area: float) -> dict[str, object]:
    """Single words, `text` and `texts` (three wordings) of an object that covers `area` (0 to 1)."""
    size = next(name for least, name in SIZES.items() if area >= least)
    shape = "strip" if look.thin else "ring" if look.hollow else _OUTLINES[look.power]
    shape = f"long {shape}" if look.aspect >= LONG and not look.thin else shape
    texture = "striped" if look.striped else _TEXTURES[look.tile] if look.contrast >= FAINT else "plain"
    colour = colour_name(look.colour)
    kind = f"{colour} {texture} {shape}"
    texts = [f"{size} {kind}", f"{shape}, {size}, {texture} and {colour}", f"{kind} of {size} size"]
    words = {"size": size, "colour": colour, "texture": texture, "shape": shape}
    return {"text": texts[0], "texts": texts, **words}


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
