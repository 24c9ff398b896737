"""The four histograms of a page as inline SVG: numbers of masks, areas and scores of the images shown."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.shards.annotation import Annotations

_BARS, _LEFT, _TOP, _WIDTH, _HEIGHT = 24, 34, 8, 260, 90  # bars at most, and their frame in pixels


def charts(images: Sequence[Annotations]) -> str:
    """Histograms of all masks of some images, at least one, as four HTML figures."""
    area = np.concatenate([100 * one.area / (one.width * one.height) for one in images])
    return (
        _chart("Masks per image", "images", np.array([len(one) for one in images]))
        + _chart("Area in % of the image, log scale", "masks", np.where(area > 0, area, np.nan), is_log=True)
        + _chart("Predicted IoU", "masks", np.concatenate([one.predicted_iou for one in images]))
        + _chart("Stability score", "masks", np.concatenate([one.stability_score for one in images]))
    )


def _chart(title: str, unit: str, values: npt.NDArray[Any], *, is_log: bool = False) -> str:
    known, said, drawing = values[np.isfinite(values)], "no values", ""
    if len(known):
        said = f"mean {known.mean():,.4g}, from {known.min():,.4g} to {known.max():,.4g}"
        bins: int | npt.NDArray[Any] = _BARS
        if unit == "images":  # whole numbers, as many in each bar
            each = np.ptp(known) // _BARS + 1
            bins = known.min() - 0.5 + each * np.arange(np.ptp(known) // each + 2)
        counts, edges = np.histogram(np.log10(known) if is_log else known, bins)
        at = _LEFT + _WIDTH * (edges - edges[0]) / (edges[-1] - edges[0])
        named = 10**edges if is_log else edges
        if unit == "images":
            named = np.append(edges[:-1] + 0.5, edges[-1] - 0.5)
        base, top = _TOP + _HEIGHT, int(counts.max())
        drawing = f'<svg viewBox="0 0 {_LEFT + _WIDTH + 6} {base + 20}" role="img" aria-label="{title}">'
        drawing += "".join(
            f'<path d="M{at[i]:.1f} {base}V{base - _HEIGHT * count / top:.1f}H{at[i + 1]:.1f}V{base}z">'
            f"<title>from {named[i]:,.4g}: {count:,} {unit}</title></path>"
            for i, count in enumerate(counts.tolist())
            if count
        )
        drawing += f'<path class="axis" d="M{_LEFT} {base}h{_WIDTH}"/>' + "".join(
            f'<text x="{at[i]:.0f}" y="{base + 14}" text-anchor="{anchor}">{named[i]:,.4g}</text>'
            for i, anchor in {len(counts) // 2: "middle", 0: "start", len(counts): "end"}.items()
        )
        drawing += f'<text x="{_LEFT - 5}" y="{_TOP + 8}" text-anchor="end">{top:,}</text></svg>'
    if len(known) < len(values):
        said += f"; {len(values) - len(known):,} {unit} without a value"
    return f'<figure class="chart"><figcaption><b>{title}</b> {said}</figcaption>{drawing}</figure>\n'
