"""The results as one self-contained HTML page: verdict, curves of the speed-up, split of the steps, table.

`charts` gives the middle part alone, for a page with the same CSS classes (`benchmarks/report.html`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from sa1b.charts import Line, line_chart
from sa1b.charts import page as frame
from sa1b.programs.scaling.cases import KINDS, Kind
from sa1b.programs.scaling.result import Point, Scaling, milliseconds
from sa1b.stream.bottleneck import BUSY_MACHINE, GOOD_EFFICIENCY, NAMED_PART, StepSettings, remedies


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a measurement has a low efficiency."""

    # a line if the machine was busy, one for each series with a low efficiency, one for all other series
    lines: tuple[str, ...]
    advice: tuple[str, ...]  # reasons and what to change, for all of these series

    def __str__(self) -> str:
        return "\n".join([*self.lines, *(f"  - {line}" for line in self.advice)])


def judge(scaling: Scaling) -> Verdict:
    """The verdict of a measurement, on the case with the most ranks of each series."""
    compared = {series: points[-1] for series, points in scaling.points.items() if len(points) > 1}
    if not compared:
        return Verdict(("No verdict: no series has two cases that were measured.",), ())
    low = {series: point for series, point in compared.items() if point.efficiency < GOOD_EFFICIENCY}
    lines = [
        f"{str(series).capitalize()}, {point.case.ranks} ranks: efficiency {point.efficiency:.0%}: "
        f"{_causes(point)}{_noise(point)}"
        for series, point in low.items()
    ]
    if len(low) < len(compared):
        good = {series: point for series, point in compared.items() if series not in low}
        series, worst = min(good.items(), key=lambda item: item[1].efficiency)
        lines.append(
            f"{len(good)} of {len(compared)} series: efficiency at least {GOOD_EFFICIENCY:.0%} with the most "
            f"ranks; the lowest of them is {series} with {worst.efficiency:.0%}"
        )
    queued = max(point.result.queued for points in scaling.points.values() for point in points)
    if queued >= BUSY_MACHINE:
        lines.insert(
            0,
            f"The machine was busy: ranks waited for a CPU up to {queued:.0%} of the time, because other "
            "processes use the same CPUs; measure on an idle machine",
        )
    return Verdict(tuple(lines), tuple(_remedies(list(low.values()), scaling)))


def _parts(point: Point) -> dict[str, float]:
    """The parts of the lost efficiency of at least `NAMED_PART`, the largest first."""
    parts = {"communication": point.communication or 0.0, "data": point.data, "compute": point.compute}
    named = {name: share for name, share in parts.items() if share >= NAMED_PART}
    return dict(sorted(named.items(), key=lambda part: -part[1]))


def _causes(point: Point) -> str:
    texts = {
        "communication": "communication exposed {:.0%}",
        "data": "data wait {:.0%}",
        "compute": "slower computation {:.0%}",
    }
    if point.communication is None:
        reason = "stages wait for each other" if point.case.mode.startswith("pipeline") else "out of memory"
        texts["compute"] = f"slower computation and communication {{:.0%}} (not separated: {reason})"
    causes = [texts[name].format(share) for name, share in _parts(point).items()]
    return ", ".join(causes) or "many small causes"


def _noise(point: Point) -> str:
    low, high = point.result.range
    spread = (high - low) / point.result.step
    return f" (the rounds differ by {spread:.0%}: measure again)" if spread > 1 - point.efficiency else ""


def _remedies(points: Sequence[Point], scaling: Scaling) -> Iterator[str]:
    for part in ("communication", "data", "compute"):
        named = [point for point in points if part in _parts(point)]
        if named:
            settings = StepSettings(
                modes=tuple((point.case.mode, point.case.precision) for point in named),
                root=scaling.root,
                shared_cores=scaling.shared_cores,
                imbalance=max(point.result.imbalance for point in named),
                on_gpu=scaling.device != "cpu",
            )
            yield from remedies(part, settings)


_PARTS = ("compute", "communication", "data")
_COLORS = {"compute": 1, "communication": 3, "data": 2}  # numbers of the classes s0, s1, ...


def page(scaling: Scaling, verdict: Verdict) -> str:
    lines = "".join(f"<p>{escape(line)}</p>" for line in verdict.lines)
    advice = "".join(f"<li>{escape(reason)}</li>" for reason in verdict.advice)
    parts = {
        "VERDICT": lines + (f"<ul>{advice}</ul>" if advice else ""),
        "FACTS": "".join(f"<p>{escape(line)}</p>" for line in scaling.heading()),
        "CHARTS": charts(scaling),
        "TABLE": escape(scaling.table()),
    }
    return frame("How training scales", f"{scaling.preset}, {scaling.device}", parts)


def charts(scaling: Scaling) -> str:
    """Curves and bars of both kinds of scaling, as HTML with inline SVG."""
    return "".join(
        _kind(kind, scaling) for kind in KINDS if any(series.kind == kind for series in scaling.series)
    )


def _kind(kind: Kind, scaling: Scaling) -> str:
    precisions = dict.fromkeys(series.precision for series in scaling.series)
    curves = "".join(_curves(kind, precision, scaling) for precision in precisions)
    rule = (
        "Each rank computes one micro-batch in a step; the global batch grows with the ranks."
        if kind == "weak"
        else "The global batch is fixed; each rank computes a smaller part of it when there are more ranks."
    )
    return (
        f'<h2>{kind.capitalize()} scaling of training</h2><p>{rule}</p><div class="curves">{curves}</div>'
        f'<section class="card"><figcaption>Where the time of a step goes</figcaption>{_bars(kind, scaling)}'
        "</section>"
    )


def _curves(kind: Kind, precision: str, scaling: Scaling) -> str:
    lines = {
        series.mode: points
        for series, points in scaling.points.items()
        if series.kind == kind and series.precision == precision and points
    }
    title = f"{kind.capitalize()} scaling, {precision}: speed-up"
    if not lines:
        return f'<figure class="card"><figcaption>{title}</figcaption><p>All cases failed.</p></figure>'
    curves = [
        Line(
            mode,
            [(point.case.ranks, point.speed_up) for point in points],
            [
                f"{point.case.ranks} ranks: {point.speed_up:.2f}, efficiency {point.efficiency:.0%}"
                for point in points
            ],
        )
        for mode, points in lines.items()
    ]
    ranks = sorted({point.case.ranks for points in lines.values() for point in points})
    return line_chart(title, curves, ("ranks", "speed-up"), ranks, ideal=True)


def _bars(kind: Kind, scaling: Scaling) -> str:
    rows = [
        (point, number == 0)
        for series, points in scaling.points.items()
        if series.kind == kind
        for number, point in enumerate(points)
    ]
    longest = max((point.result.step for point, _ in rows), default=1.0)
    parts = _PARTS if scaling.root else _PARTS[:2]
    key = "".join(f'<span><b class="stage s{_COLORS[name]}"></b>{name}</span>' for name in parts)
    return "".join(_bar(point, longest, first) for point, first in rows) + f'<p class="key">{key}</p>'


def _bar(point: Point, longest: float, first: bool) -> str:
    case, result = point.case, point.result
    segments = "".join(
        f'<span class="stage s{_COLORS[name]}" style="width:{100 * seconds / longest:.2f}%" '
        f'title="{name}: {milliseconds(seconds)} ms"></span>'
        for name, seconds in _seconds(point)
    )
    low, high = (milliseconds(seconds) for seconds in result.range)
    return (
        f'<div class="row{" first" * first}" title="from {low} to {high} ms">'
        f'<span class="name">{case.mode} {case.precision}, {case.ranks} rank{"s" * (case.ranks > 1)}</span>'
        f'<span class="track stages">{segments}</span>'
        f'<span class="value">{milliseconds(result.step)} ms, efficiency {point.efficiency:.0%}</span></div>'
    )


def _seconds(point: Point) -> Iterator[tuple[str, float]]:
    for name in _PARTS:
        seconds = getattr(point.result, name)
        if seconds:
            yield name, seconds
