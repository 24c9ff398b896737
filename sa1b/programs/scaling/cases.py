"""The measured cases: mode, precision, number of ranks and batch; and the series that compare them.

In weak scaling, each rank computes one micro-batch in a step. In strong scaling, the global batch is fixed.
The stages of a pipeline compute all micro-batches of a step together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sa1b.console import counted
from sa1b.engine.settings import ParallelConfig
from sa1b.engine.step.precision import Precision
from sa1b.errors import UsageError
from sa1b.programs.scaling.machine import Device

Kind = Literal["weak", "strong"]
KINDS: tuple[Kind, ...] = ("weak", "strong")
REPLICAS = 2  # copies of the model in fsdp-hybrid
# The settings of ParallelConfig for each mode. The first ones are measured by default.
MODES: dict[str, dict[str, Any]] = {
    "ddp": {"mode": "ddp"},
    "fsdp-full": {"mode": "fsdp"},
    "fsdp-grad_op": {"mode": "fsdp", "shard": "grad_op"},
    "fsdp-hybrid": {"mode": "fsdp", "replicas": REPLICAS},
    "zero1": {"mode": "zero1"},
    "ddp-bucket-1": {"mode": "ddp", "bucket": 1},
    "ddp-bucket-10": {"mode": "ddp", "bucket": 10},
    "ddp-bucket-50": {"mode": "ddp", "bucket": 50},
    "ddp-bf16": {"mode": "ddp", "compress": "bf16"},
    "ddp-powersgd-4": {"mode": "ddp", "compress": "powersgd:4", "compress_after": 2},
    "fsdp-wrap-none": {"mode": "fsdp", "wrap": "none"},
    "fsdp-reduce-bf16": {"mode": "fsdp", "reduce": "bf16"},
    "pipeline": {"mode": "pipeline"},
    "pipeline-gpipe": {"mode": "pipeline", "schedule": "gpipe"},
}
_DEFAULT = 4
HYBRID_RANKS = 2 * REPLICAS  # the fewest ranks of fsdp-hybrid: each copy is sharded over two


@dataclass(frozen=True, slots=True)
class Case:
    """One measured configuration: a mode of `MODES`, and the `images` of each rank in a step."""

    mode: str
    precision: Precision
    ranks: int
    images: int
    micro_batch: int

    def __str__(self) -> str:
        ranks, images = counted(self.ranks, "rank"), counted(self.images, "image")
        return f"{self.mode} {self.precision}, {ranks} x {images}"

    @property
    def global_batch(self) -> int:
        """Images of a step over all ranks."""
        return self.ranks * self.images

    def parallel(self, device: Device, timeout: float) -> ParallelConfig:
        """The settings of training for this case; `timeout`: seconds that a rank waits for the others."""
        return ParallelConfig(
            precision=self.precision,
            device=device,
            timeout_first=timeout,
            timeout=timeout,
            **MODES[self.mode],
        )


@dataclass(frozen=True, slots=True)
class Series:
    """Cases that differ only in the number of ranks, ascending; each is compared with the first."""

    kind: Kind
    mode: str
    precision: Precision
    cases: tuple[Case, ...]

    def __str__(self) -> str:
        return f"{self.kind} scaling, {self.mode} {self.precision}"


def series(
    ranks: Sequence[int],
    modes: Sequence[str],
    precisions: Sequence[Precision],
    *,
    micro_batch: int,
    global_batch: int,
) -> list[Series]:
    """All series, weak scaling first; each of the modes is combined with each precision.

    Args:
        ranks: numbers of ranks, ascending.
        micro_batch: images that a rank computes at a time.
        global_batch: images of a step over all ranks in strong scaling.
    """
    for count in ranks:
        if global_batch % (count * micro_batch):
            raise UsageError(
                f"--global-batch {global_batch}: must be a multiple of {count * micro_batch} images, the "
                f"micro-batches (--micro-batch {micro_batch}) of {counted(count, 'rank')}"
            )
    return [
        Series(kind, mode, precision, cases)
        for kind in KINDS
        for mode in modes
        for precision in precisions
        if (
            cases := tuple(
                Case(
                    _mode_of(mode, count),
                    precision,
                    count,
                    micro_batch if kind == "weak" else global_batch // count,
                    micro_batch,
                )
                for count in _ranks_of(mode, ranks)
            )
        )
    ]


def modes_for(ranks: Sequence[int]) -> tuple[str, ...]:
    """The modes that are measured by default with these numbers of ranks."""
    hybrid = any(count >= HYBRID_RANKS and count % REPLICAS == 0 for count in ranks)
    return tuple(mode for mode in tuple(MODES)[:_DEFAULT] if hybrid or mode != "fsdp-hybrid")


def _ranks_of(mode: str, ranks: Sequence[int]) -> list[int]:
    if mode != "fsdp-hybrid":
        return list(ranks)
    if mode not in modes_for(ranks):
        raise UsageError(
            f"--modes fsdp-hybrid: needs an even number of ranks, at least {HYBRID_RANKS}; add one to "
            "--ranks, or omit the mode"
        )
    return [count for count in ranks if count == 1 or (count >= HYBRID_RANKS and count % REPLICAS == 0)]


def _mode_of(mode: str, count: int) -> str:
    """One rank has one copy of the model, in hybrid mode too."""
    return "fsdp-full" if mode == "fsdp-hybrid" and count == 1 else mode


def cases_of(compared: Sequence[Series]) -> list[Case]:
    """Each case of the series once, in ascending order of ranks."""
    every = dict.fromkeys(case for series in compared for case in series.cases)
    return sorted(every, key=lambda case: case.ranks)
