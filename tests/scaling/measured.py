"""Results of a measurement with given times."""

from collections.abc import Mapping

from sa1b.programs.scaling.cases import Case, Series
from sa1b.programs.scaling.result import CaseResult, Round, Scaling


def case(ranks: int, images: int = 2, mode: str = "ddp", precision: str = "fp32") -> Case:
    return Case(mode, precision, ranks, images, 1)  # type: ignore[arg-type]


def result(
    step: float,
    communication: float | None = 0.0,
    data: float = 0.0,
    *,
    imbalance: float = 1.0,
    queued: float = 0.0,
    spread: float = 0.0,
) -> CaseResult:
    """Three rounds; the first and the last differ by `spread` of the step."""
    return CaseResult(
        tuple(
            Round(step * (1 + part * spread / 2), data, communication, imbalance, queued)
            for part in (-1, 0, 1)
        )
    )


def scaling(results: Mapping[Case, CaseResult], *, kind: str = "weak", **changed: object) -> Scaling:
    """A measurement with one series for each mode and precision of the cases."""
    kinds = dict.fromkeys((one.mode, one.precision) for one in results)
    series = tuple(
        Series(
            kind,  # type: ignore[arg-type]
            mode,
            precision,
            tuple(one for one in results if (one.mode, one.precision) == (mode, precision)),
        )
        for mode, precision in kinds
    )
    settings: dict[str, object] = {
        "preset": "tiny",
        "root": "",
        "masks": 16,
        "device": "cpu",
        "placement": "1 thread a rank, bound to CPUs: rank 0 on 0, rank 1 on 1",
        "shared_cores": False,
        "threads": 1,
        "steps": 5,
        "cpus": 4,
        "load": 0.1,
    }
    return Scaling(series=series, results=results, **{**settings, **changed})  # type: ignore[arg-type]
