"""Distributions over an input, counted in one pass.

Values are counted in fine bins of fixed width, so that memory does not grow with the input. A chart merges
adjacent bins into at most 40 bars.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_BARS = 40
_JOINS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)  # fine bins in a bar
_MOST_MASKS = 20_000  # per image; larger numbers are counted as outside


@dataclass(slots=True, eq=False)
class Distribution:
    """A histogram with the sum and the range of its values.

    Attributes:
        unit: plural noun for the counted items.
        low, step: lower edge of the first bin and width of a bin (in decades if `log`).
        outside: number of values outside the bins.
        missing: number of NaN values, from annotations that lack the number.
    """

    title: str
    axis: str
    unit: str
    low: float
    step: float
    counts: npt.NDArray[np.int64]
    log: bool = False
    outside: int = 0
    missing: int = 0
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


@dataclass(slots=True, eq=False)
class Survey:
    """Counts and distributions of an input."""

    images: int = 0
    masks: int = 0
    runs: int = 0
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)  # (width, height) of annotated images
    masks_per_image: Distribution = field(
        default_factory=lambda: Distribution(
            "Masks per image",
            "masks in an image",
            "images",
            low=-0.5,
            step=1,
            counts=np.zeros(_MOST_MASKS, np.int64),
        )
    )
    area: Distribution = field(
        default_factory=lambda: Distribution(
            "Area of masks",
            "part of the image",
            "masks",
            low=-9,
            step=0.05,
            counts=np.zeros(190, np.int64),
            log=True,
        )
    )
    predicted_iou: Distribution = field(
        default_factory=lambda: Distribution(
            "Predicted IoU", "predicted_iou", "masks", low=0, step=0.001, counts=np.zeros(1500, np.int64)
        )
    )
    stability_score: Distribution = field(
        default_factory=lambda: Distribution(
            "Stability score", "stability_score", "masks", low=0, step=0.001, counts=np.zeros(1500, np.int64)
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
