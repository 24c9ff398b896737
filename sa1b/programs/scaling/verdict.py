"""Why the efficiency of a series is low, and what to change."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sa1b.console import command
from sa1b.programs.scaling.cases import Case
from sa1b.programs.scaling.result import Point, Scaling

GOOD = 0.8  # at this efficiency or above, nothing has to be explained
_NAMED = 0.03  # a smaller part of the step is not named as a cause
_BUSY = 0.05  # share of the time in which a rank waits for a CPU
_UNEVEN = 1.1  # computation of the slowest rank relative to the median rank


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a measurement has a low efficiency.

    Attributes:
        lines: whether the machine was busy, one for each series with a low efficiency, one about all others.
        advice: reasons and what to change, for all of these series.
    """

    lines: tuple[str, ...]
    advice: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([*self.lines, *(f"  - {line}" for line in self.advice)])


def judge(scaling: Scaling) -> Verdict:
    """The verdict of a measurement, on the case with the most ranks of each series."""
    compared = {series: points[-1] for series, points in scaling.points.items() if len(points) > 1}
    if not compared:
        return Verdict(("No verdict: no series has two cases that were measured.",), ())
    low = {series: point for series, point in compared.items() if point.efficiency < GOOD}
    lines = [
        f"{str(series).capitalize()}, {point.case.ranks} ranks: efficiency {point.efficiency:.0%}: "
        f"{_causes(point)}{_noise(point)}"
        for series, point in low.items()
    ]
    if len(low) < len(compared):
        good = {series: point for series, point in compared.items() if series not in low}
        series, worst = min(good.items(), key=lambda item: item[1].efficiency)
        lines.append(
            f"{len(good)} of {len(compared)} series: efficiency at least {GOOD:.0%} with the most ranks; the "
            f"lowest of them is {series} with {worst.efficiency:.0%}"
        )
    queued = max(point.result.queued for points in scaling.points.values() for point in points)
    if queued >= _BUSY:
        lines.insert(
            0,
            f"The machine was busy: ranks waited for a CPU up to {queued:.0%} of the time, because other "
            "processes use the same CPUs; measure on an idle machine",
        )
    points = list(low.values())
    advice = [*_on_communication(points), *_on_data(points, scaling), *_on_compute(points, scaling)]
    return Verdict(tuple(lines), tuple(advice))


def _parts(point: Point) -> dict[str, float]:
    """The parts of the lost efficiency of at least `_NAMED`, the largest first."""
    parts = {"communication": point.communication or 0.0, "data": point.data, "compute": point.compute}
    named = {name: share for name, share in parts.items() if share >= _NAMED}
    return dict(sorted(named.items(), key=lambda part: -part[1]))


def _causes(point: Point) -> str:
    texts = {
        "communication": "communication exposed {:.0%}",
        "data": "data wait {:.0%}",
        "compute": "slower computation {:.0%}",
    }
    if point.communication is None:
        reason = "stages wait for each other" if _is_pipeline(point.case) else "out of memory"
        texts["compute"] = f"slower computation and communication {{:.0%}} (not separated: {reason})"
    causes = [texts[name].format(share) for name, share in _parts(point).items()]
    return ", ".join(causes) or "many small causes"


def _is_pipeline(case: Case) -> bool:
    return case.mode.startswith("pipeline")


def _noise(point: Point) -> str:
    low, high = point.result.range
    spread = (high - low) / point.result.step
    return f" (the rounds differ by {spread:.0%}: measure again)" if spread > 1 - point.efficiency else ""


def _on_communication(points: Sequence[Point]) -> Iterator[str]:
    cases = [point.case for point in points if "communication" in _parts(point)]
    if not cases:
        return
    yield (
        "communication: compute more for each exchange: a larger --data.micro-batch, or a larger "
        "--data.global-batch with the same one"
    )
    if any(case.mode == "fsdp-full" for case in cases):
        yield "communication: --parallel.shard grad_op gathers parameters once a micro-batch, full twice"
    if any(case.mode.startswith("fsdp") and case.precision == "fp32" for case in cases):
        yield "communication: with FSDP, --parallel.precision bf16 halves the bytes of gathered parameters"
    yield f"communication: `{command('doctor')}` measures the bandwidth between the ranks"


def _on_data(points: Sequence[Point], scaling: Scaling) -> Iterator[str]:
    if any("data" in _parts(point) for point in points):
        yield (
            f"data: `{command('bench')} {scaling.root}` names the stage of the loader that limits; more "
            "--data.threads, or shards of a smaller --image-size"
        )


def _on_compute(points: Sequence[Point], scaling: Scaling) -> Iterator[str]:
    results = [point.result for point in points if "compute" in _parts(point)]
    if not results:
        return
    imbalance = max(result.imbalance for result in results)
    if any(_is_pipeline(point.case) for point in points if "compute" in _parts(point)):
        yield (
            "pipeline: stages wait for each other; a larger --data.global-batch with the same "
            "--data.micro-batch has more micro-batches, and the last stage also has the decoder"
        )
    if scaling.shared_cores:
        yield "computation: ranks share cores; pass fewer --ranks or --threads"
    if imbalance >= _UNEVEN:
        yield (
            f"computation: the slowest rank takes up to {imbalance:.2f} times as long as the median, and the "
            "others wait for it; look for another load, power or cooling on its device"
        )
    if scaling.device == "cpu":
        yield (
            "computation: ranks share caches and memory bandwidth; fewer ranks with more --threads each may "
            "be faster"
        )
    else:
        yield "computation: small batches do not fill a GPU; a larger --data.micro-batch"
