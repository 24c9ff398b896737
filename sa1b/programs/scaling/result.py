"""Results of a measurement: speed-up, efficiency, split of the step, as a table and as a JSON document.

The efficiency of N ranks is their images per second for each rank, relative to the fewest measured ranks.
The lost efficiency has three parts, which add up exactly: exposed communication, waiting for data, and
computation that takes longer than its share of the computation in the case with the fewest ranks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from statistics import median
from typing import Any

from sa1b.console import counted
from sa1b.programs.scaling.cases import Case, Kind, Series
from sa1b.report import aligned


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of a step of one case in one round; differences may be slightly negative."""

    step: float
    data: float  # additional, with data from the loader
    communication: float | None  # additional, with exchange between the ranks; None: not measured
    imbalance: float | None  # computation of the slowest rank relative to the median rank
    queued: float  # largest share of the time in which a rank waited for a CPU that other threads used


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The rounds of a case, in order; a case with an error has no figures."""

    rounds: tuple[Round, ...]
    error: str | None = None

    @property
    def step(self) -> float:
        """Seconds of a step: the median of the rounds."""
        return median(times.step for times in self.rounds)

    @property
    def range(self) -> tuple[float, float]:
        """The shortest and the longest step of the rounds."""
        return min(times.step for times in self.rounds), max(times.step for times in self.rounds)

    @property
    def data(self) -> float:
        """Seconds of a step in which data is waited for."""
        return max(0.0, median(times.data for times in self.rounds))

    @property
    def communication(self) -> float | None:
        """Seconds of exposed communication."""
        seconds = [times.communication for times in self.rounds if times.communication is not None]
        return max(0.0, median(seconds)) if seconds else None

    @property
    def compute(self) -> float:
        """Seconds of all other work, including communication if it was not measured."""
        return self.step - self.data - (self.communication or 0.0)

    @property
    def queued(self) -> float:
        """Share of the time in which a rank was ready to compute, but other threads used its CPUs."""
        return median(times.queued for times in self.rounds)

    @property
    def imbalance(self) -> float:
        return median([times.imbalance for times in self.rounds if times.imbalance is not None] or [1.0])


@dataclass(frozen=True, slots=True)
class Point:
    """A case of a series, compared with the case that has the fewest ranks.

    `communication`, `data` and `compute` are shares of the step that exceed the ideal step; they add up to 1
    - efficiency. Communication is None if it was not measured, and is then in `compute`.
    """

    case: Case
    result: CaseResult
    speed_up: float  # images per second relative to one rank
    efficiency: float  # images per second of a rank relative to a rank of the first case
    communication: float | None
    data: float
    compute: float


def compare(case: Case, result: CaseResult, first: Case, base: CaseResult) -> Point:
    """A case compared with the first one of its series; both have rounds."""
    scale = case.images / first.images  # of the ideal time
    efficiency = base.step * scale / result.step
    communication = None
    compute = result.compute - base.compute * scale
    if result.communication is not None:
        communication = (result.communication - (base.communication or 0.0) * scale) / result.step
    return Point(
        case,
        result,
        speed_up=efficiency * case.ranks,
        efficiency=efficiency,
        communication=communication,
        data=(result.data - base.data * scale) / result.step,
        compute=compute / result.step,
    )


@dataclass(frozen=True)
class Scaling:
    series: tuple[Series, ...]
    results: Mapping[Case, CaseResult]
    preset: str
    root: str  # dataset directory; empty: synthetic batches, which take no time
    masks: int  # largest number of an image
    device: str  # "cpu", or the name of the GPU
    placement: str  # the CPUs of the ranks; empty on GPUs
    shared_cores: bool  # two of these CPUs are threads of the same core
    threads: int
    steps: int  # of each part of a case in a round
    cpus: int
    load: float  # average of the machine before the measurement

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> "Scaling":
        names = {entry.name for entry in fields(Case)}
        cases = [Case(**{name: entry[name] for name in names}) for entry in document["cases"]]
        results = {
            case: CaseResult(tuple(Round(**part) for part in entry["rounds"]), entry["error"])
            for case, entry in zip(cases, document["cases"], strict=True)
        }
        series = tuple(
            Series(
                entry["kind"],
                entry["mode"],
                entry["precision"],
                tuple(cases[number] for number in entry["cases"]),
            )
            for entry in document["series"]
        )
        others = {entry.name for entry in fields(cls)} - {"series", "results"}
        texts = {name: document[name] or "" for name in ("root", "placement")}
        return cls(series, results, **({name: document[name] for name in others} | texts))

    @cached_property
    def points(self) -> dict[Series, list[Point]]:
        """The cases of each series that were measured; the first one has the efficiency 1."""
        points: dict[Series, list[Point]] = {}
        for series in self.series:
            good = [case for case in series.cases if self.results[case].error is None]
            points[series] = [
                compare(case, self.results[case], good[0], self.results[good[0]]) for case in good
            ]
        return points

    @property
    def failed(self) -> dict[Case, str]:
        return {case: result.error for case, result in self.results.items() if result.error is not None}

    @property
    def rounds(self) -> int:
        return max((len(result.rounds) for result in self.results.values()), default=0)

    def exit_code(self) -> int:
        """0: all cases were measured. 1: some failed. 2: all failed."""
        return 2 if len(self.failed) == len(self.results) else int(bool(self.failed))

    def heading(self) -> Iterator[str]:
        data = f"data from {self.root}" if self.root else "synthetic batches in memory, so no time for data"
        yield f"{self.preset}, up to {counted(self.masks, 'mask')} an image, {self.device}; {data}"
        if self.placement:
            yield self.placement
        yield (
            f"{counted(self.rounds, 'round')} of {counted(self.steps, 'step')} a part; "
            f"load of the machine before: {self.load:.1f} on {counted(self.cpus, 'CPU')}"
        )

    def table(self) -> str:
        """The measurement as text, without the verdict."""
        lines = [*self.heading()]
        for kind in dict.fromkeys(series.kind for series in self.series):
            lines += ["", _title(kind), *aligned(self._rows(kind), [False, False, *[True] * 10], "  ")]
        lines += ["", *(f"FAILED  {case}: {error}" for case, error in self.failed.items())]
        return "\n".join(lines).rstrip()

    def _rows(self, kind: Kind) -> Iterator[tuple[str, ...]]:
        yield (
            "mode", "precision", "ranks", "images/step", "step ms", "from-to", "images/s", "speed-up",
            "efficiency", "compute", "communication", "data",
        )  # fmt: skip
        for series in (series for series in self.series if series.kind == kind):
            points = {point.case: point for point in self.points[series]}
            for case in series.cases:
                head = (series.mode, case.precision, str(case.ranks), f"{case.global_batch:,}")
                if case not in points:
                    yield (*head, "failed")
                    continue
                point, result = points[case], self.results[case]
                low, high = result.range
                yield (
                    *head,
                    milliseconds(result.step),
                    f"{milliseconds(low)}-{milliseconds(high)}",
                    f"{case.global_batch / result.step:,.1f}",
                    f"{point.speed_up:.2f}",
                    f"{point.efficiency:.0%}",
                    f"{result.compute / result.step:.0%}",
                    "-" if result.communication is None else f"{result.communication / result.step:.0%}",
                    f"{result.data / result.step:.0%}" if self.root else "-",
                )

    def document(self) -> dict[str, Any]:
        """The measurement as JSON values; `Scaling.of_document` is the inverse."""
        numbers = {case: number for number, case in enumerate(self.results)}
        return {
            "preset": self.preset,
            "root": self.root or None,
            "masks": self.masks,
            "device": self.device,
            "placement": self.placement or None,
            "threads": self.threads,
            "shared_cores": self.shared_cores,
            "cpus": self.cpus,
            "load": self.load,
            "rounds": self.rounds,
            "steps": self.steps,
            "cases": [
                {
                    **asdict(case),
                    "rounds": [asdict(series) for series in result.rounds],
                    "error": result.error,
                }
                for case, result in self.results.items()
            ],
            "series": [
                {
                    "kind": series.kind,
                    "mode": series.mode,
                    "precision": series.precision,
                    "cases": [numbers[case] for case in series.cases],  # indices in the list of cases
                    "points": [_point(point) for point in points],
                }
                for series, points in self.points.items()
            ],
            "exit_code": self.exit_code(),
        }


def _point(point: Point) -> dict[str, Any]:
    result = point.result
    return {
        "ranks": point.case.ranks,
        "global_batch": point.case.global_batch,
        "step_seconds": result.step,
        "step_seconds_range": list(result.range),
        "images_per_second": point.case.global_batch / result.step,
        "speed_up": point.speed_up,
        "efficiency": point.efficiency,
        "compute_seconds": result.compute,
        "communication_seconds": result.communication,
        "data_seconds": result.data,
        "imbalance": result.imbalance,
        "queued": result.queued,
    }


def _title(kind: Kind) -> str:
    if kind == "weak":
        return "Weak scaling: each rank computes one micro-batch in a step"
    return "Strong scaling: the ranks share a fixed global batch"


def milliseconds(seconds: float) -> str:
    """Seconds as a number of milliseconds with three digits."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.0995 else f"{1e3 * seconds:.3g}"
