"""Charts of distributions as inline SVG: bars, labelled axes, and a caption with statistics.

Values are counted in fine bins, so that memory does not grow with the input. A chart has at most 40 bars.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.charts import round_numbers, short_number

MAX_BARS = 40
_JOINS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)  # fine bins in a bar
_MOST_MASKS = 20_000  # per image; larger numbers are counted as outside


@dataclass(slots=True, eq=False)
class Distribution:
    """A histogram with the sum and the range of its values."""

    title: str
    axis: str
    unit: str  # plural noun for the counted items
    low: float  # lower edge of the first bin
    step: float  # width of a bin (in decades if `log`)
    counts: npt.NDArray[np.int64]
    log: bool = False
    outside: int = 0  # values outside the bins
    missing: int = 0  # NaN values, from annotations that lack the number
    total: float = 0.0
    smallest: float = math.inf
    largest: float = -math.inf

    def add(self, values: npt.NDArray[Any]) -> None:
        """Count values of any number type; NaN counts as missing."""
        values = values.astype(np.float64)
        known = values[~np.isnan(values)]
        self.missing += len(values) - len(known)
        if not len(known):
            return
        self.total += float(known.sum())
        self.smallest = min(self.smallest, float(known.min()))
        self.largest = max(self.largest, float(known.max()))
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.log10(known) if self.log else known
        # A value on an edge, such as 0.95, belongs to the bin above it, regardless of rounding errors.
        bins = np.floor((scaled - self.low) / self.step + 1e-6)
        inside = (bins >= 0) & (bins < len(self.counts))
        self.outside += int(len(known) - inside.sum())
        self.counts += np.bincount(bins[inside].astype(np.int64), minlength=len(self.counts))

    @property
    def known(self) -> int:
        """Number of values that are not missing."""
        return int(self.counts.sum()) + self.outside

    def bars(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Edges [bars + 1] and counts [bars] over the occupied range, at most MAX_BARS bars."""
        occupied = np.flatnonzero(self.counts)
        if not len(occupied):
            return np.empty(0), np.empty(0, np.int64)
        first, last = int(occupied[0]), int(occupied[-1])
        join = next(j for j in _JOINS if last // j - first // j < MAX_BARS)
        first, last = first // join, last // join
        padded = np.pad(self.counts, (0, -len(self.counts) % join)).reshape(-1, join).sum(axis=1)
        edges = self.low + np.arange(first, last + 2, dtype=np.float64) * (join * self.step)
        return edges, padded[first : last + 1]


def _empty(
    title: str, axis: str, unit: str, low: float, step: float, bins: int, *, log: bool = False
) -> Distribution:
    return Distribution(
        title=title, axis=axis, unit=unit, low=low, step=step, counts=np.zeros(bins, np.int64), log=log
    )


@dataclass(slots=True, eq=False)
class Survey:
    """Counts and distributions of an input."""

    images: int = 0
    masks: int = 0
    runs: int = 0
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)  # (width, height) of annotated images
    masks_per_image: Distribution = field(
        default_factory=lambda: _empty(
            "Masks per image", "masks in an image", "images", low=-0.5, step=1, bins=_MOST_MASKS
        )
    )
    area: Distribution = field(
        default_factory=lambda: _empty(
            "Area of masks", "part of the image", "masks", low=-9, step=0.05, bins=190, log=True
        )
    )
    predicted_iou: Distribution = field(
        default_factory=lambda: _empty(
            "Predicted IoU", "predicted_iou", "masks", low=0, step=0.001, bins=1500
        )
    )
    stability_score: Distribution = field(
        default_factory=lambda: _empty(
            "Stability score", "stability_score", "masks", low=0, step=0.001, bins=1500
        )
    )

    @property
    def distributions(self) -> tuple[Distribution, ...]:
        return self.masks_per_image, self.area, self.predicted_iou, self.stability_score

    def add(
        self,
        widths: npt.NDArray[Any],
        heights: npt.NDArray[Any],
        masks: npt.NDArray[Any],
        area: npt.NDArray[Any],
        predicted_iou: npt.NDArray[Any],
        stability_score: npt.NDArray[Any],
        runs_count: npt.NDArray[Any],
    ) -> None:
        """Count N images and all their masks.

        Sizes and numbers of masks are [N], in pixels; the other arrays have all masks, image after image. An
        area below 0 is unknown.
        """
        self.images += len(masks)
        self.masks += len(area)
        self.runs += int(runs_count.sum())
        self.sizes.update(zip(widths.tolist(), heights.tolist(), strict=True))
        self.masks_per_image.add(masks)
        pixels = np.repeat(widths.astype(np.float64) * heights, masks)
        # An area below zero means that the annotation has none.
        self.area.add(np.where(area < 0, np.nan, area / pixels))
        self.predicted_iou.add(predicted_iou)
        self.stability_score.add(stability_score)


# The chart in SVG units, which are about pixels.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 348, 194, 56, 20, 10, 46
_LETTER = 7  # largest width of a digit at the font size of the labels


def charts(survey: Survey) -> str:
    """All distributions as HTML figures with inline SVG."""
    return "\n".join(_chart(distribution) for distribution in survey.distributions)


def _chart(distribution: Distribution) -> str:
    edges, counts = distribution.bars()
    caption = f"<figcaption><b>{escape(distribution.title)}</b> {_summary(distribution)}</figcaption>"
    if not len(counts):
        return f'<figure class="chart">{caption}</figure>'
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    y_ticks = round_numbers(0, int(counts.max()), 4, whole=True)
    top = max(int(counts.max()), y_ticks[-1])
    # The bin of an integer n ranges from n - 0.5 to n + 0.5.
    x_low, x_high = float(edges[0]), float(edges[-1])

    def x(value: float) -> str:
        return f"{_LEFT + (value - x_low) / (x_high - x_low) * (right - _LEFT):.2f}"

    def y(value: float) -> str:
        return f"{bottom - value / top * (bottom - _TOP):.2f}"

    bars = "".join(
        f'<path d="M{x(start)} {bottom}V{y(count)}H{x(stop)}V{bottom}z">'
        f"<title>{_span(distribution, start, stop)}: {count:,} {distribution.unit}</title></path>"
        for start, stop, count in zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True)
        if count
    )
    across = "".join(
        f'<path class="grid" d="M{_LEFT} {y(tick)}H{right}"/>'
        f'<text x="{_LEFT - 6}" y="{y(tick)}" dy=".35em" text-anchor="end">{short_number(tick)}</text>'
        for tick in y_ticks
    )
    along = "".join(
        f'<path class="tick" d="M{x(tick)} {bottom}v4"/>'
        f'<text x="{x(tick)}" y="{bottom + 19}" text-anchor="middle">{label}</text>'
        for tick, label in _x_ticks(distribution, x_low, x_high)
    )
    labels = (
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(distribution.axis)}'
        f"{' (log scale)' if distribution.log else ''}</text>"
        f'<text transform="translate(11 {(_TOP + bottom) / 2}) rotate(-90)" text-anchor="middle">'
        f"{distribution.unit}</text>"
    )
    name = escape(f"Histogram: {distribution.title}")
    return (
        f'<figure class="chart">{caption}'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}">'
        f'{across}<g class="bars">{bars}</g><path class="tick" d="M{_LEFT} {bottom}H{right}"/>{along}{labels}'
        "</svg></figure>"
    )


def _summary(distribution: Distribution) -> str:
    known = distribution.known
    parts = []
    if known:
        form = _percent if distribution.log else (lambda value: f"{value:,.4g}")
        mean = distribution.total / known
        parts.append(f"mean {form(mean)}, from {form(distribution.smallest)} to {form(distribution.largest)}")
    if distribution.missing:
        parts.append(f"{distribution.missing:,} {distribution.unit} without a value")
    if distribution.outside:
        parts.append(f"{distribution.outside:,} out of range")
    return "; ".join(parts) or "no values"


def _span(distribution: Distribution, start: float, stop: float) -> str:
    if distribution.log:
        return f"{_percent(10**start)} to {_percent(10**stop)}"
    if distribution.step == 1:
        first, last = round(start + 0.5), round(stop - 0.5)
        return f"{first:,}" if first == last else f"{first:,} to {last:,}"
    return f"{start:.3f} to {stop:.3f}"


def _x_ticks(distribution: Distribution, low: float, high: float) -> list[tuple[float, str]]:
    if not distribution.log:
        whole = distribution.step == 1
        for most in range(6, 0, -1):
            values = [tick for tick in round_numbers(low, high, most, whole=whole) if low <= tick <= high]
            ticks = [(tick, f"{tick:,.10g}") for tick in values]
            if _fit(ticks, low, high):
                break
        return ticks
    decades = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
    if len(decades) < 2:
        return [(low, _percent(10**low)), (high, _percent(10**high))]
    for step in range(1, len(decades)):
        ticks = [(decade, _percent(10.0**decade)) for decade in decades[::-1][::step]]
        if _fit(ticks, low, high):
            break
    return ticks


def _fit(ticks: list[tuple[float, str]], low: float, high: float) -> bool:
    """Whether adjacent labels, each centred on its tick, are at least the width of a digit apart."""
    scale = (_WIDTH - _RIGHT - _LEFT) / (high - low)
    spans = sorted(
        ((value - low) * scale - len(label) * _LETTER / 2, (value - low) * scale + len(label) * _LETTER / 2)
        for value, label in ticks
    )
    return all(left[1] + _LETTER <= right[0] for left, right in pairwise(spans))


def _percent(fraction: float) -> str:
    percent = fraction * 100
    if percent >= 99.5:
        return f"{percent:.0f} %"
    return f"{float(f'{percent:.2g}'):.12f}".rstrip("0").rstrip(".") + " %"
