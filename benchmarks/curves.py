"""The loss curves of compressed gradients as an image for the documentation.

    python -m benchmarks.curves                                  the recorded figures of this repository
    python -m benchmarks.curves benchmarks/results/<machine>-parts.json

Writes docs/images/convergence.svg, for light and dark pages: the figures of benchmarks/test_convergence.py.
"""

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

from benchmarks import parts

OUT = Path(__file__).parents[1] / "docs" / "images" / "convergence.svg"
WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 14, 118
LIGHT = ("#1b1f24", "#d5dae1", "#ffffff", ("#1c63d1", "#c2571a", "#2c8a5a", "#8757c9", "#5b636e", "#b23a6f"))
DARK = ("#e6e9ee", "#3a414c", "#15181d", ("#7fb0ff", "#f0905a", "#5fc793", "#b794f0", "#9ba4b0", "#ee86b4"))


def svg(figures: dict[str, Any]) -> str:
    """The image: one line for each form of compression, means of the loss over equally many steps.

    Args:
        figures: "steps", the steps of a mean, and "losses", name -> means in the order of steps.
    """
    losses: dict[str, list[float]] = figures["losses"]
    steps = figures["steps"] * max(map(len, losses.values()))
    low = min(map(min, losses.values())) // 0.1 / 10
    high = -(-max(map(max, losses.values())) // 0.1) / 10
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(step: float) -> str:
        return f"{LEFT + step / steps * (right - LEFT):.1f}"

    def y(loss: float) -> str:
        return f"{bottom - (loss - low) / (high - low) * (bottom - TOP):.1f}"

    drawn = []
    for number in range(round(10 * (high - low)) + 1):
        loss = low + number / 10
        drawn.append(f'<path class="grid" d="M{LEFT} {y(loss)}H{right}"/>')
        drawn.append(f'<text x="{LEFT - 8}" y="{y(loss)}" dy=".35em" text-anchor="end">{loss:.1f}</text>')
    for step in range(0, steps + 1, steps // 4):
        drawn.append(f'<text x="{x(step)}" y="{bottom + 18}" text-anchor="middle">{step}</text>')
    drawn.append(f'<text x="{(LEFT + right) / 2}" y="{bottom + 36}" text-anchor="middle">steps</text>')
    drawn.append(
        f'<text transform="translate(14 {(TOP + bottom) / 2}) rotate(-90)" text-anchor="middle">loss, mean '
        f"of {figures['steps']} steps</text>"
    )
    for number, (name, line) in enumerate(losses.items()):
        points = "L".join(f"{x((i + 0.5) * figures['steps'])} {y(loss)}" for i, loss in enumerate(line))
        drawn.append(f'<path class="line c{number}" d="M{points}"/>')
        column, row = number % 2, number // 2
        left, top = LEFT + column * 340, bottom + 62 + 20 * row
        drawn.append(f'<path class="line c{number}" d="M{left} {top}h26"/>')
        drawn.append(f'<text x="{left + 34}" y="{top}" dy=".35em">{escape(name)}: {line[-1]:.3f}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Loss with compressed gradients"><style>{_style(LIGHT)}'
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
    for path in found:
        measured = json.loads(path.read_bytes())["parts"]
        if "convergence" in measured:
            OUT.write_text(svg(measured["convergence"]["figures"]), encoding="utf-8")
            print(
                f"{OUT.relative_to(Path.cwd()) if OUT.is_relative_to(Path.cwd()) else OUT}: from {path.name}"
            )
            return
    raise SystemExit("no figures of benchmarks/test_convergence.py; run it with --record")


if __name__ == "__main__":
    main()
