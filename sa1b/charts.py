"""Line charts as inline SVG, and the self-contained HTML page around them (light and dark)."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

_FRAME = Path(__file__).with_name("charts.html")
_COLORS = 6  # in charts.html
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 460, 250, 48, 14, 26, 46
_CIRCLES = 40  # points of a line, above which it has no circles


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart. `texts`: for each point, what its tooltip says after the name of the line."""

    name: str
    points: Sequence[tuple[float, float]]
    texts: Sequence[str] = ()


def page(heading: str, title: str, parts: Mapping[str, str]) -> str:
    """The page as HTML, with the HTML of its parts: VERDICT, FACTS, CHARTS and TABLE."""
    text = _FRAME.read_text(encoding="utf-8")
    for name, part in {"HEADING": escape(heading), "TITLE": escape(title), **parts}.items():
        text = text.replace(f"<!--{name}-->", part)
    return text


def line_chart(
    title: str,
    lines: Sequence[Line],
    axes: tuple[str, str],
    ticks: Iterable[float] = (),
    *,
    ideal: bool = False,
) -> str:
    """A chart of lines that begins at 0 on the y axis, as an HTML figure with inline SVG.

    Args:
        title: above the chart.
        lines: at least one; each has a colour, which the key below the chart names.
        axes: names of the x and the y axis.
        ticks: numbers on the x axis; by default round ones.
        ideal: also draw y = x, over the range of x.
    """
    xs = sorted({x for line in lines for x, _ in line.points})
    if not xs:
        return f'<figure class="card"><figcaption>{escape(title)}</figcaption><p>No values.</p></figure>'
    first = 0.0 if len(xs) == 1 else xs[0]  # a single number is at the right edge
    last = xs[-1] if xs[-1] > first else first + 1
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    top = max([*([xs[-1]] if ideal else []), *(y for line in lines for _, y in line.points)]) or 1.0

    def x(value: float) -> str:
        return f"{_LEFT + 10 + (value - first) / (last - first) * (right - _LEFT - 20):.1f}"

    def y(value: float) -> str:
        return f"{bottom - value / top * (bottom - _TOP):.1f}"

    across = "".join(
        f'<path class="grid" d="M{_LEFT} {y(tick)}H{right}"/>'
        f'<text x="{_LEFT - 6}" y="{y(tick)}" dy=".35em" text-anchor="end">{short_number(tick)}</text>'
        for tick in _inside(0.0, top)
    )
    along = "".join(
        f'<path class="tick" d="M{x(tick)} {bottom}v4"/>'
        f'<text x="{x(tick)}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'
        for tick in ticks or _inside(first, last)
    )
    straight = f'<path class="ideal" d="M{x(xs[0])} {y(xs[0])}L{x(xs[-1])} {y(xs[-1])}"/>' if ideal else ""
    plots = "".join(
        f'<g class="line l{number % _COLORS}">'
        f'<path d="M{"L".join(f"{x(a)} {y(b)}" for a, b in line.points)}"/>{_circles(line, x, y)}</g>'
        for number, line in enumerate(lines)
        if line.points
    )
    key = "".join(
        f'<span><b class="l{number % _COLORS}"></b>{escape(line.name)}</span>'
        for number, line in enumerate(lines)
    )
    dashed = "<span>dashed: ideal</span>" if ideal else ""
    return (
        f'<figure class="card"><figcaption>{escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'{across}<path class="tick" d="M{_LEFT} {bottom}H{right}"/>{along}{straight}{plots}'
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(axes[0])}</text>'
        f'<text x="4" y="12">{escape(axes[1])}</text></svg><p class="key">{key}{dashed}</p></figure>'
    )


def _circles(line: Line, x: Callable[[float], str], y: Callable[[float], str]) -> str:
    if len(line.points) > _CIRCLES:
        return ""
    texts = line.texts or [f"{a:g}: {b:,.4g}" for a, b in line.points]
    return "".join(
        f'<circle cx="{x(a)}" cy="{y(b)}" r="3.5"><title>{escape(f"{line.name}, {text}")}</title></circle>'
        for (a, b), text in zip(line.points, texts, strict=True)
    )


def round_numbers(low: float, high: float, most: int, *, whole: bool) -> list[float]:
    """About `most` round numbers that cover low..high; the first is at or below low."""
    wide = max((high - low) / most, 1e-9)
    power = 10.0 ** math.floor(math.log10(wide))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= wide * 0.999)
    if whole:
        step = max(1.0, step)
    first = math.floor(low / step + 1e-9)
    return [round(n * step, 10) for n in range(first, math.ceil(high / step - 1e-9) + 1)]


def short_number(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g} {letter}"
    return f"{value:g}"


def _inside(low: float, high: float) -> list[float]:
    """At most seven round numbers in [low, high]."""
    return [tick for tick in round_numbers(low, high, 6, whole=False) if low <= tick <= high]
