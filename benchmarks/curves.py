"""The curves of a benchmark as an image for the documentation.

    python -m benchmarks.curves                                  the recorded figures of this repository
    python -m benchmarks.curves benchmarks/results/<machine>-parts.json

Writes docs/images/time-to-score.svg, for light and dark pages: the figures of
benchmarks/test_time_to_score.py.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from benchmarks import parts

OUT = Path(__file__).parents[1] / "docs" / "images"
WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 14, 118
LIGHT = ("#1b1f24", "#d5dae1", "#ffffff", ("#1c63d1", "#c2571a", "#2c8a5a", "#8757c9", "#5b636e", "#b23a6f"))
DARK = ("#e6e9ee", "#3a414c", "#15181d", ("#7fb0ff", "#f0905a", "#5fc793", "#b794f0", "#9ba4b0", "#ee86b4"))
CLICKS = "miou_3_clicks"  # the score of the image


@dataclass(frozen=True, slots=True)
class Line:
    """A line of an image; `label`: its text in the legend, None for a line without one."""

    color: int
    points: Sequence[tuple[float, float]]
    label: str | None = None


def time_to_score(figures: dict[str, Any]) -> str:
    """One line for each loader and seed: mean IoU after three clicks over the seconds of training.

    Args:
        figures: "seconds", the budget of a run, and "runs", "shards" or "files" -> a list of runs, each a
            list of {"seconds", "images", "scores"}.
    """
    lines = []
    for color, (kind, runs) in enumerate(figures["runs"].items()):
        last = [run[-1] for run in runs]
        score = sum(each["scores"][CLICKS] for each in last) / len(last)
        images = sum(each["images"] for each in last) / len(last)
        name = {"shards": "sa1b.Loader", "files": "extracted files"}[kind]
        for number, run in enumerate(runs):
            label = None if number else f"{name}: {score:.3f}, {images:,.0f} images"
            points = [(min(each["seconds"], figures["seconds"]), each["scores"][CLICKS]) for each in run]
            lines.append(Line(color, points, label))
    what = "Score over wall time with two loaders"
    return svg(lines, figures["seconds"], "seconds of training", "mean IoU, 3 clicks", what)


IMAGES = {"time to score": time_to_score}


def svg(lines: Sequence[Line], end: float, x_axis: str, y_axis: str, what: str) -> str:
    """An image of lines from 0 to `end`, with a legend below."""
    values = [value for line in lines for _, value in line.points]
    low, high = min(values) // 0.1 / 10, -(-max(values) // 0.1) / 10
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(position: float) -> str:
        return f"{LEFT + position / end * (right - LEFT):.1f}"

    def y(value: float) -> str:
        return f"{bottom - (value - low) / (high - low) * (bottom - TOP):.1f}"

    drawn = []
    for number in range(round(10 * (high - low)) + 1):
        value = low + number / 10
        drawn.append(f'<path class="grid" d="M{LEFT} {y(value)}H{right}"/>')
        drawn.append(f'<text x="{LEFT - 8}" y="{y(value)}" dy=".35em" text-anchor="end">{value:.1f}</text>')
    for quarter in range(5):
        position = end * quarter / 4
        drawn.append(f'<text x="{x(position)}" y="{bottom + 18}" text-anchor="middle">{position:.0f}</text>')
    drawn.append(f'<text x="{(LEFT + right) / 2}" y="{bottom + 36}" text-anchor="middle">{x_axis}</text>')
    drawn.append(
        f'<text transform="translate(14 {(TOP + bottom) / 2}) rotate(-90)" text-anchor="middle">'
        f"{y_axis}</text>"
    )
    labelled = 0
    for line in lines:
        points = "L".join(f"{x(position)} {y(value)}" for position, value in line.points)
        drawn.append(f'<path class="line c{line.color}" d="M{points}"/>')
        if line.label is None:
            continue
        left, top = LEFT + labelled % 2 * 340, bottom + 62 + 20 * (labelled // 2)
        labelled += 1
        drawn.append(f'<path class="line c{line.color}" d="M{left} {top}h26"/>')
        drawn.append(f'<text x="{left + 34}" y="{top}" dy=".35em">{escape(line.label)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{what}"><style>{_style(LIGHT)}'
        f"@media (prefers-color-scheme: dark) {{ {_style(DARK)} }}</style>"
        f'<rect width="{WIDTH}" height="{HEIGHT}"/>{"".join(drawn)}</svg>\n'
    )


def _style(colors: tuple[str, str, str, tuple[str, ...]]) -> str:
    text, grid, page, lines = colors
    rules = [
        f"rect {{ fill: {page}; }} text {{ fill: {text}; font: 13px system-ui, sans-serif; }}",
        f".grid {{ stroke: {grid}; }} .line {{ fill: none; stroke-width: 2; }}",
        *(f".c{number} {{ stroke: {color}; }}" for number, color in enumerate(lines)),
    ]
    return " ".join(rules)


def main() -> None:
    found = [Path(sys.argv[1])] if len(sys.argv) > 1 else sorted(parts.RESULTS.glob("*-parts.json"))
    measured = [(path, json.loads(path.read_bytes())["parts"]) for path in found]
    for name, draw in IMAGES.items():
        path, figures = newest = next(
            ((p, m[name]["figures"]) for p, m in measured if name in m), (None, None)
        )
        if newest == (None, None):
            print(f"{name}: no figures; run its benchmark with --record")
            continue
        out = OUT / f"{name.replace(' ', '-')}.svg"
        out.write_text(draw(figures), encoding="utf-8")
        print(f"{out.name}: from {path.name}")


if __name__ == "__main__":
    main()
