"""The measured cases: mode, precision, number of ranks and batch; and the series that compare them.

In weak scaling, each rank computes one micro-batch in a step. In strong scaling, the global batch is fixed.
The stages of a pipeline compute all micro-batches of a step together.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from sa1b.console import counted
from sa1b.engine.settings import ParallelConfig, Precision
from sa1b.errors import UsageError
from sa1b.workers import available_cpus

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs and CPUs that this process may use."""

    device: Device
    gpus: int  # 0 if the device is cpu
    cpus: int  # how many of `numbers` may be used
    numbers: tuple[int, ...]  # of the CPUs in the affinity mask; empty if this system cannot bind processes

    @classmethod
    def of_this_process(cls, device: Literal["auto", "cuda", "cpu"]) -> "Machine":
        """The machine of this process; UsageError without a GPU for cuda, or in one of several ranks."""
        if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
            raise UsageError(
                f"WORLD_SIZE {ranks}: this command starts its ranks itself, on one machine; run it without "
                "torchrun, and with one task of srun"
            )
        gpus = 0 if device == "cpu" else torch.cuda.device_count()
        if device == "cuda" and not gpus:
            raise UsageError("--device cuda: torch finds no GPU; omit the flag to measure on the CPU")
        numbers = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        return cls("cuda" if gpus else "cpu", gpus, available_cpus(), tuple(numbers))

    def ranks(self, requested: Sequence[int] | None, threads: int | None) -> tuple[int, ...]:
        """The numbers of ranks to measure, by default 1, 2, 4, ...; UsageError: too few GPUs or CPUs."""
        each = threads or 1
        if self.device == "cpu" and each > self.cpus:
            raise UsageError(f"--threads {each}: this job may use {counted(self.cpus, 'CPU')}; pass fewer")
        most = self.gpus or self.cpus // each
        if requested is None:
            return tuple(dict.fromkeys([*(1 << n for n in range(most.bit_length())), most]))
        if max(requested) > most:
            cpus = f"{counted(self.cpus, 'CPU')} for --threads {each}"
            has = counted(self.gpus, "GPU") if self.gpus else cpus
            raise UsageError(f"--ranks {max(requested)}: this job may use {has}; pass at most {most}")
        return tuple(requested)

    def placement(self, ranks: int, threads: int | None, root: Path = Path("/")) -> "Placement":
        """Threads and CPUs of `ranks` ranks: equal parts by default, on GPUs unbound. `root` has /sys."""
        each = threads or max(1, self.cpus // ranks)
        if self.device == "cuda" or not self.numbers:
            return Placement(each, ())
        cores: dict[str, list[int]] = {}
        for cpu in self.numbers:
            cores.setdefault(_siblings(cpu, root), []).append(cpu)
        # The first CPU of every core, then the second of every core, ...
        order = sorted((number, cpu) for same in cores.values() for number, cpu in enumerate(same))
        chosen = [cpu for _, cpu in order[: ranks * each]]
        return Placement(
            each,
            tuple(tuple(chosen[rank * each : (rank + 1) * each]) for rank in range(ranks)),
            shared_cores=len(chosen) > len(cores),
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """Threads of each rank, the same for any number of ranks, and its CPUs."""

    threads: int
    cpus: tuple[tuple[int, ...], ...]  # on different cores as far as possible; empty: not bound
    shared_cores: bool = False  # two CPUs are threads of the same core

    def __str__(self) -> str:
        threads = f"{counted(self.threads, 'thread')} a rank"
        if not self.cpus:
            return f"{threads}, not bound to CPUs"
        ranks = [f"rank {rank} on {'+'.join(map(str, cpus))}" for rank, cpus in enumerate(self.cpus[:8])]
        more = ", ..." if len(self.cpus) > len(ranks) else ""
        shared = "; some of these CPUs are threads of the same core" if self.shared_cores else ""
        return f"{threads}, bound to CPUs: {', '.join(ranks)}{more}{shared}"


def _siblings(cpu: int, root: Path) -> str:
    """The CPUs of the same core, as the kernel writes them; the CPU itself if the kernel lists none."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)


def bind(cpus: Sequence[int]) -> None:
    """Restrict all threads of this process to these CPUs; threads that start later inherit them."""
    if cpus:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), cpus)


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
    """All series, weak scaling first; each of the modes is combined with each precision. The numbers of ranks
    are ascending. `micro_batch`: images that a rank computes at a time; `global_batch`: images of a step over
    all ranks in strong scaling.
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
