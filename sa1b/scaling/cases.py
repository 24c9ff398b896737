"""The measured cases: mode, precision, number of ranks and batch; and the series that compare them.

    kinds = series((1, 2, 4), ("ddp", "fsdp-full"), ("fp32",), micro_batch=4, global_batch=16)
    kinds[0].cases                             # weak scaling, ddp, fp32: 1, 2 and 4 ranks of 4 images
    cases_of(kinds)                            # each case once, although two series may contain it

Weak scaling: each rank computes one micro-batch in a step, so the global batch grows with the ranks. Strong
scaling: the global batch is fixed, so a rank computes fewer micro-batches when there are more ranks. If the
global batch is one micro-batch for each of the most ranks, both have the same case for the most ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sa1b.console import counted
from sa1b.engine.gradients import Precision
from sa1b.engine.parallel import ParallelConfig
from sa1b.errors import UsageError
from sa1b.scaling.machine import Device

Kind = Literal["weak", "strong"]
Mode = Literal["ddp", "fsdp-full", "fsdp-grad_op", "fsdp-hybrid"]
KINDS: tuple[Kind, ...] = ("weak", "strong")
MODES: tuple[Mode, ...] = ("ddp", "fsdp-full", "fsdp-grad_op", "fsdp-hybrid")
REPLICAS = 2  # copies of the model in fsdp-hybrid
HYBRID_RANKS = 2 * REPLICAS  # the fewest ranks of fsdp-hybrid: each copy is sharded over two


@dataclass(frozen=True, slots=True)
class Case:
    """One measured configuration.

    Attributes:
        mode: ddp; or FSDP with shard "full" or "grad_op", or "full" with two copies of the model (hybrid).
        precision: number format of the matrix products.
        ranks: number of ranks.
        images: images of each rank in a step.
        micro_batch: images that a rank computes at a time; divides `images`.
    """

    mode: Mode
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
        """The settings of training for this case.

        Args:
            timeout: seconds that a rank waits for the others.
        """
        return ParallelConfig(
            mode="ddp" if self.mode == "ddp" else "fsdp",
            precision=self.precision,
            device=device,
            shard="grad_op" if self.mode == "fsdp-grad_op" else "full",
            replicas=REPLICAS if self.mode == "fsdp-hybrid" else 1,
            timeout_first=timeout,
            timeout=timeout,
        )


@dataclass(frozen=True, slots=True)
class Series:
    """Cases that differ only in the number of ranks, ascending; each is compared with the first."""

    kind: Kind
    mode: Mode
    precision: Precision
    cases: tuple[Case, ...]

    def __str__(self) -> str:
        return f"{self.kind} scaling, {self.mode} {self.precision}"


def series(
    ranks: Sequence[int],
    modes: Sequence[Mode],
    precisions: Sequence[Precision],
    *,
    micro_batch: int,
    global_batch: int,
) -> list[Series]:
    """All series, weak scaling first.

    Args:
        ranks: numbers of ranks, ascending.
        modes, precisions: each is combined with each.
        micro_batch: images that a rank computes at a time.
        global_batch: images of a step over all ranks in strong scaling.

    Raises:
        UsageError: the batches cannot be divided among the ranks, or there are too few ranks for a mode.
    """
    for count in ranks:
        if global_batch % (count * micro_batch):
            raise UsageError(
                f"--global-batch {global_batch}: must be a multiple of {count * micro_batch} images, the "
                f"micro-batches (--micro-batch {micro_batch}) of {count} ranks"
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


def modes_for(ranks: Sequence[int]) -> tuple[Mode, ...]:
    """The modes that these numbers of ranks allow."""
    hybrid = any(count >= HYBRID_RANKS and count % REPLICAS == 0 for count in ranks)
    return tuple(mode for mode in MODES if hybrid or mode != "fsdp-hybrid")


def _ranks_of(mode: Mode, ranks: Sequence[int]) -> list[int]:
    if mode != "fsdp-hybrid":
        return list(ranks)
    if mode not in modes_for(ranks):
        raise UsageError(
            f"--modes fsdp-hybrid: needs an even number of ranks, at least {HYBRID_RANKS}; add one to "
            "--ranks, or omit the mode"
        )
    return [count for count in ranks if count == 1 or (count >= HYBRID_RANKS and count % REPLICAS == 0)]


def _mode_of(mode: Mode, count: int) -> Mode:
    """One rank has one copy of the model, in hybrid mode too."""
    return "fsdp-full" if mode == "fsdp-hybrid" and count == 1 else mode


def cases_of(found: Sequence[Series]) -> list[Case]:
    """Each case of the series once, those of few ranks first."""
    every = dict.fromkeys(case for one in found for case in one.cases)
    return sorted(every, key=lambda case: case.ranks)
