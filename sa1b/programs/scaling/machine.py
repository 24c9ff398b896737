"""GPUs and CPUs of this machine, and their assignment to ranks."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from sa1b.console import counted
from sa1b.errors import UsageError
from sa1b.workers import available_cpus

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs and CPUs that this process may use; `gpus` is 0 if the device is cpu.

    `numbers` are those of the CPUs in the affinity mask, of which `cpus` may be used; empty if this system
    cannot bind processes.
    """

    device: Device
    gpus: int
    cpus: int
    numbers: tuple[int, ...]

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
        """The numbers of ranks to measure, ascending; UsageError if there are too few GPUs or CPUs.

        Args:
            requested: the user's choice; None: 1, 2, 4, ... up to the number of GPUs, or of CPUs / threads.
            threads: threads of each rank, if chosen.
        """
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
        """Threads and CPUs of `ranks` ranks; on GPUs, ranks are not bound to CPUs.

        Args:
            threads: threads of each rank; None: an equal part of the CPUs.
            root: folder in which /sys is mounted.
        """
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
    """Threads of each rank, the same for any number of ranks, and its CPUs; empty: not bound.

    The CPUs are on different cores as far as possible; with `shared_cores`, two are threads of the same core.
    """

    threads: int
    cpus: tuple[tuple[int, ...], ...]
    shared_cores: bool = False

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
