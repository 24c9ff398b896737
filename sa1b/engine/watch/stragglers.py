"""Ranks that are slower than the others: their times over a window of steps, a table and a verdict.

    stragglers = Stragglers(hosts, size=50)                       # on rank 0
    stragglers.add(times)                                         # of all ranks, after each step
    stragglers.line(), stragglers.table()                         # of the last steps
    for found in stragglers.judge(): print(found.message())       # at the end of each window

The times are those of `RankTime`: own work in `data`, `compute` and `update`, without waiting
for other ranks, which is in `sync`. A rank is compared with the median of the *other* ranks: with two ranks,
the median of both would be their mean, and a rank that takes twice as long would be only 1.33 times slower.

Each window of `--logging.window` steps adds two lines to RUN/metrics.jsonl, {"step": ..., "ranks": ...} and
{"step": ..., "loader": ...}. A slow rank and a loader that limits the run are printed. SIGUSR2 to any rank
prints the table of the ranks after the current step. The numbers of all ranks are part of the exchange of
each step, so this module needs no collective.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.console import command
from sa1b.engine.watch.metrics import Metrics
from sa1b.engine.watch.phase import WORK
from sa1b.stream.bottleneck import LoaderSettings, LoaderWindow

PARTS = ("data", "compute", "sync", "update")
LIMIT = 1.3  # times the median of the other ranks
_OWN = [PARTS.index(name) for name in WORK]
_ROWS = 32  # ranks in a table

Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Straggler:
    """A slow rank."""

    rank: int
    host: str  # its machine
    factor: float  # its own work in seconds, divided by the median of the other ranks
    part: str  # of the step, with the largest difference: data, compute or update
    seconds: float  # mean seconds of the part in a step, of this rank
    others: float  # and the median of the others

    def message(self) -> str:
        """One line about an incident."""
        return (
            f"rank {self.rank} on {self.host} is {self.factor:.2f} times slower than the other ranks, which "
            f"wait for it: {self.part} takes {self.seconds:.3f} s a step, {self.others:.3f} s on the others"
        )

    def document(self) -> dict[str, Any]:
        """The straggler in metrics.jsonl."""
        return {"rank": self.rank, "host": self.host, "factor": round(self.factor, 3), "part": self.part}


class Stragglers:
    """The times of all ranks in the last `size` steps. `hosts` are their machines, `separable` is that of
    `RankTime`.
    """

    def __init__(self, hosts: Sequence[str], size: int, *, separable: bool = True) -> None:
        self.count = 0  # steps so far
        self._hosts = list(hosts)
        self._separable = separable
        self._times = np.zeros((size, len(PARTS), len(hosts)))
        self._windows = np.zeros(len(hosts), np.int64)  # consecutive windows in which a rank was slow

    def add(self, times: Mapping[str, Sequence[float]]) -> bool:
        """Add the seconds of a step, one value for each rank, if all are known. Return whether a window is
        complete.
        """
        row = np.array([times[name] for name in PARTS])
        if np.isnan(row).any():
            return False
        self._times[self.count % len(self._times)] = row
        self.count += 1
        return self.count % len(self._times) == 0

    @property
    def steps(self) -> int:
        """Number of steps in the table."""
        return min(self.count, len(self._times))

    def waits(self) -> list[float]:
        """Share of each rank's time in which it waited for data, from 0 to 1."""
        sums = self._times[: self.steps].sum(axis=0)
        return [float(data / max(total, 1e-9)) for data, total in zip(sums[0], sums.sum(axis=0), strict=True)]

    def slow(self) -> list[Straggler]:
        """The ranks whose own work takes longer than `LIMIT` times the median of the others."""
        means = self._times[: self.steps].mean(axis=0)[_OWN]  # [parts, ranks]
        if means.shape[1] < 2:
            return []
        total = means.sum(axis=0)
        stragglers = []
        for rank in np.flatnonzero(total >= np.median(total)):
            others = np.delete(means, rank, axis=1)
            middle = float(np.median(others.sum(axis=0)))
            if total[rank] <= LIMIT * middle:
                continue
            of_parts = np.median(others, axis=1)
            part = int(np.argmax(means[:, rank] - of_parts))
            stragglers.append(
                Straggler(
                    rank=int(rank),
                    host=self._hosts[rank],
                    factor=float(total[rank]) / max(middle, 1e-9),
                    part=WORK[part],
                    seconds=float(means[part, rank]),
                    others=float(of_parts[part]),
                )
            )
        return stragglers

    def judge(self) -> list[Straggler]:
        """At the end of a window, the ranks that were slow in the last two windows, once per incident."""
        slow = {straggler.rank: straggler for straggler in self.slow()}
        for rank in range(len(self._hosts)):
            self._windows[rank] = self._windows[rank] + 1 if rank in slow else 0
        return [straggler for rank, straggler in slow.items() if self._windows[rank] == 2]

    def document(self) -> dict[str, Any]:
        """The table as JSON values: seconds of each rank in each part, median and maximum."""
        median, largest = self._summary()
        seconds = {
            name: {"median": _rounded(median[part]), "max": _rounded(largest[part])}
            for part, name in enumerate(PARTS)
        }
        slow = [straggler.document() for straggler in self.slow()]
        return {"steps": self.steps, "hosts": self._hosts, "seconds": seconds, "slow": slow}

    def table(self) -> str:
        """The table as text, the slowest ranks first."""
        if not self.steps:
            return "times of the ranks: no complete step yet"
        median, largest = self._summary()
        slow = {straggler.rank: straggler for straggler in self.slow()}
        work = self._times[: self.steps].mean(axis=0)[_OWN].sum(axis=0)
        width = max(map(len, self._hosts))
        lines = [
            f"times of the ranks in the last {self.steps} steps, in seconds: median and maximum",
            f"{'rank':>5}  {'host':<{width}}" + "".join(f"{name:>17}" for name in PARTS),
        ]
        for rank in np.argsort(-work, kind="stable")[:_ROWS]:
            columns = "".join(
                f"{m:>9.3f}{x:>8.3f}" for m, x in zip(median[:, rank], largest[:, rank], strict=True)
            )
            mark = f"  {slow[rank].factor:.2f} times the others: {slow[rank].part}" if rank in slow else ""
            lines.append(f"{rank:>5}  {self._hosts[rank]:<{width}}{columns}{mark}")
        if len(self._hosts) > _ROWS:
            lines.append(f"{len(self._hosts) - _ROWS} faster ranks are left out; metrics.jsonl has all")
        lines.append(
            "compute: own work; sync: waiting for other ranks and communication"
            if self._separable
            else "compute includes waiting for other ranks: this version of torch does not separate it"
        )
        return "\n".join(lines)

    def _summary(self) -> tuple[Times, Times]:
        times = self._times[: self.steps]
        return np.median(times, axis=0), times.max(axis=0)


def _rounded(values: Times) -> list[float]:
    return [round(float(value), 6) for value in values]


class Window:
    """The last `size` steps of all ranks; see `Stragglers`."""

    def __init__(
        self,
        hosts: Sequence[str],
        size: int,
        metrics: Metrics,
        loader: LoaderSettings,
        *,
        run: str,
        separable: bool,
    ) -> None:
        self._stragglers = Stragglers(hosts, size, separable=separable)
        self._loader = LoaderWindow(loader)
        self._metrics = metrics
        self._run = run

    def add(self, step: int, ranks: Mapping[str, Sequence[float]], *, requested: bool) -> None:
        before = self._stragglers.count
        complete = self._stragglers.add(ranks)
        if self._stragglers.count == before:
            self._loader.start(ranks)  # no step of the first window yet
        if (complete or requested) and self._stragglers.steps:
            self._metrics.window(step, "ranks", self._stragglers.document())
        if requested:
            images = f"\nimages of this step: {self._replay(step)}" if self._stragglers.steps else ""
            self._metrics.say(self._stragglers.table() + images)
        if not complete:
            return
        for slow in self._stragglers.judge():
            self._metrics.say(f"{slow.message()}; images of this step: {self._replay(step)}")
        line, message = self._loader.end(ranks, self._stragglers.waits())
        self._metrics.window(step, "loader", line)
        if message is not None:
            self._metrics.say(message)

    def _replay(self, step: int) -> str:
        return command("replay", self._run, "--step", step)
