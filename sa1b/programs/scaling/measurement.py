"""Measurement of all cases on this machine: groups of processes, round by round.

Other work on a machine changes its speed within minutes, so every round measures every case, and the figures
are medians of the rounds. A case that fails is not measured again; new processes measure the other cases.
"""

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch._C._distributed_c10d import TCPStore

from sa1b.engine.config import Config
from sa1b.engine.watch.signals import PEER_LOST
from sa1b.programs.scaling.cases import Case, Device, Placement, Series, cases_of
from sa1b.programs.scaling.rank import Launch, StepTimes, run
from sa1b.programs.scaling.result import CaseResult, Round, Scaling
from sa1b.report import Bar, bar
from sa1b.workers import Event, Failure, supervise


@dataclass(frozen=True, slots=True)
class Settings:
    config: Config  # gets ranks and batches of each case
    device: Device
    placement: Placement
    steps: int  # of each part of a case in a round
    rounds: int
    timeout: float  # seconds without progress after which a case has failed


def measure(series: Sequence[Series], settings: Settings, *, quiet: bool = False) -> Scaling:
    """Measure the cases of all series. Ctrl-C and errors leave no process."""
    cases = cases_of(series)
    load = os.getloadavg()[0]
    rounds: dict[Case, list[Round]] = {case: [] for case in cases}
    errors: dict[Case, str] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        bar(len(cases) * settings.rounds, "bench scaling", "case", quiet) as progress,
    ):
        for _ in range(settings.rounds):
            for ranks in dict.fromkeys(case.ranks for case in cases):
                same = [case for case in cases if case.ranks == ranks and case not in errors]
                while same:
                    measured, failed = _measure(same, settings, Path(folder), progress)
                    for case, times in measured.items():
                        rounds[case].append(times)
                    if failed is not None:
                        errors[failed[0]] = failed[1]
                        progress.update(settings.rounds - len(rounds[failed[0]]))
                    same = [case for case in same if case not in measured and case not in errors]
    return Scaling(
        series=tuple(series),
        results={case: CaseResult(tuple(rounds[case]), errors.get(case)) for case in cases},
        preset=str(settings.config.preset),
        root=settings.config.data.root,
        masks=settings.config.data.masks,
        device="cpu" if settings.device == "cpu" else torch.cuda.get_device_name(),
        placement=str(settings.placement) if settings.device == "cpu" else "",
        shared_cores=settings.placement.shared_cores,
        threads=settings.placement.threads,
        steps=settings.steps,
        cpus=os.cpu_count() or 1,
        load=load,
    )


def _measure(
    cases: Sequence[Case], settings: Settings, folder: Path, progress: Bar
) -> tuple[dict[Case, Round], tuple[Case, str] | None]:
    """One round of cases with the same number of ranks, up to the first one that fails, with its error."""
    ranks = cases[0].ranks
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launch = Launch(
        config=settings.config,
        cases=tuple(cases),
        steps=settings.steps,
        device=settings.device,
        threads=settings.placement.threads,
        cpus=settings.placement.cpus[:ranks],
        port=store.port,
        folder=folder,
        timeout=settings.timeout,
    )
    events = supervise(
        run,
        [(launch, rank) for rank in range(ranks)],
        workers=ranks,
        retries=0,
        stall_timeout=settings.timeout,
    )
    try:
        return collect(cases, events, progress)
    finally:
        events.close()


def collect(
    cases: Sequence[Case], events: Iterable[Event], progress: Bar
) -> tuple[dict[Case, Round], tuple[Case, str] | None]:
    """The times of cases from the events of their ranks; the case that failed, if one did, with its error.
    The cases have the same number of ranks, and each rank reports them in this order. Tasks of the events of
    `sa1b.workers.supervise` are ranks. The bar is updated when all ranks have reported a case.
    """
    times: list[list[StepTimes]] = [[] for _ in range(cases[0].ranks)]
    failed: tuple[Case, str] | None = None
    for event in events:
        of_rank = times[event.task]
        if event.kind == "progress":
            of_rank.append(event.value)
            progress.update(min(map(len, times)) == len(of_rank))
        elif event.kind != "done" and len(of_rank) < len(cases):
            failed = cases[len(of_rank)], _reason(event)
            if not _lost_another(event):  # else the other rank reports the reason
                break
    # A rank may fail in a case before another rank reports the previous case; that case is then measured
    # again.
    complete = zip(cases, zip(*times, strict=False), strict=False)
    return {case: round_of(of_ranks) for case, of_ranks in complete}, failed


def round_of(ranks: Sequence[StepTimes]) -> Round:
    """The times of a case in one round, from those of all ranks: medians over the steps."""
    whole, synchronised, alone = (
        [median(seconds) for rank in ranks if (seconds := getattr(rank, part))]
        for part in ("whole", "synchronised", "alone")
    )
    step = max(whole or synchronised)
    queued = max(rank.queued for rank in ranks)
    if len(alone) < len(ranks):
        return Round(step, step - max(synchronised), None, None, queued)
    return Round(
        step,
        data=step - max(synchronised),
        # A step ends when the slowest rank has computed and everything is exchanged.
        communication=max(synchronised) - max(alone),
        imbalance=max(alone) / median(alone),
        queued=queued,
    )


def _reason(event: Event) -> str:
    if not isinstance(event.value, Failure):
        return f"rank {event.task}: {event.value}"
    last = event.value.message.strip().rpartition("\n")[2]
    kind = "" if event.value.expected and last else event.value.kind
    return f"rank {event.task}: {': '.join(text for text in (kind, last) if text)}"


def _lost_another(event: Event) -> bool:
    failure = event.value
    return isinstance(failure, Failure) and (
        failure.kind.startswith("Dist") or any(sign in failure.message for sign in PEER_LOST)
    )
