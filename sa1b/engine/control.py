"""The one owner of control of a run: stop requests, failed writes, figures and timings of all ranks.

    control = Control(rank_info)
    control.install()                                              # SIGTERM, SIGINT and SIGUSR1 ask to stop
    while step < steps and not control.stopping:
        ...
        figures = control.exchange(totals, norm, images, seconds)  # one collective, one copy to the host
        with control.writing():
            metrics.step(...)
    control.check()

A signal may reach one rank, and a full disk may fail the writes of one. A rank that left the loop alone would
leave the others waiting for it. So `stop_asked` and `failure` belong to a rank, at any moment; `stopping` and
`failed` are the same on all ranks and change only in `exchange` and `poll`, which all ranks call together.
"""

import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from sa1b.engine.ranks import RankInfo
from sa1b.errors import Sa1bError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last is what SLURM's --signal often sends
_LOG = logging.getLogger(__name__)


class WriteError(Sa1bError):
    """A file of the run cannot be written; the message names it and the remedy."""


@dataclass(slots=True)
class StepTime:
    """Where the seconds of a step went, on this process's clock.

    On a GPU the kernels of `compute` may end in `update`, where the figures are read and the device is waited
    for, and those of the optimizer in the next step.

    Attributes:
        data: waiting for batches.
        compute: forward and backward.
        update: reduction and clipping of the gradient, exchange with the other ranks, optimizer.
        checkpoint: saving; an asynchronous save only copies here.
        began: on the clock of time.perf_counter.
    """

    data: float = 0.0
    compute: float = 0.0
    update: float = 0.0
    checkpoint: float = 0.0
    began: float = field(default_factory=time.perf_counter)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of a block to a part."""
        began = time.perf_counter()
        yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - began)

    def total(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self.began


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of a step over all ranks; the same on all of them but for `own_loss`.

    Attributes:
        means: the model's figures, each divided by `count`; 0 where nothing counts.
        count: what the model counts, for SAM masks.
        images: of all ranks.
        norm: of the gradient before clipping.
        own_loss: the sum of this rank.
        data, compute: seconds of each rank.
    """

    means: dict[str, float]
    count: float
    images: int
    norm: float
    own_loss: float
    data: list[float]
    compute: list[float]

    @property
    def slowest(self) -> int:
        """The rank whose data and computation took longest: the one that the others waited for."""
        times = [data + compute for data, compute in zip(self.data, self.compute, strict=True)]
        return times.index(max(times))


class Control:
    """Stop requests and failures of all ranks, exchanged together with the figures of each step.

    Attributes:
        stop_asked: of this rank.
        failure: of this rank: the first write that failed.
        stopping: whether the run ends, with a checkpoint; the same on all ranks.
        failed: whether it ends because a rank has a failure; the same on all ranks.
    """

    def __init__(self, rank_info: RankInfo) -> None:
        self.stop_asked = False
        self.failure: WriteError | None = None
        self.stopping = False
        self.failed = False
        self._rank_info = rank_info

    def install(self) -> None:
        """Let signals ask this rank to stop; only in the main thread."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def exchange(
        self, totals: Mapping[str, Tensor], norm: Tensor, images: int, seconds: StepTime
    ) -> StepFigures:
        """The figures of a step over all ranks, once a step: one collective, one wait for the device.

        Args:
            totals: this rank's sums, tensors without dimensions: "loss", "count" and further figures, of the
                same names in the same order on all ranks.
            norm: of the gradient, the same on all ranks.
            images: of this rank.
            seconds: of this rank, up to now.
        """
        device = self._rank_info.device
        names = [name for name in totals if name != "count"]
        values = [*(totals[name] for name in names), totals["count"], norm]
        own = torch.stack([value.detach().to(device, torch.float64, non_blocking=True) for value in values])
        rows = self._gather(own, [images, seconds.data, seconds.compute])
        *sums, count, _, all_images, _, _ = (sum(column) for column in zip(*rows, strict=True))
        mine = rows[self._rank_info.rank]
        return StepFigures(
            means={name: total / count if count else 0.0 for name, total in zip(names, sums, strict=True)},
            count=count,
            images=round(all_images),
            norm=mine[len(names) + 1],
            own_loss=mine[names.index("loss")],
            data=[row[-2] for row in rows],
            compute=[row[-1] for row in rows],
        )

    def poll(self) -> bool:
        """Whether the run ends. Collective: for evaluations, once a micro-batch."""
        self._gather(torch.zeros(0, dtype=torch.float64, device=self._rank_info.device), [])
        return self.stopping

    def any_rank(self, flag: bool) -> bool:
        """Whether a flag is set on any rank. Collective."""
        none = torch.zeros(0, dtype=torch.float64, device=self._rank_info.device)
        return any(row[0] for row in self._gather(none, [float(flag)]))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around the writing of a file: if it fails, the error is logged and all ranks stop in order.

        They stop after their step, with the attempt of a checkpoint; older checkpoints stay as they are.
        """
        try:
            yield
        except OSError as error:
            if self.failure is None:
                self.failure = WriteError(
                    f"{error.filename or 'a file of --out'}: cannot be written ({error.strerror or error}); "
                    "free space or repair the disk, then start the same command again: it resumes from the "
                    "newest checkpoint"
                )
                _LOG.error("rank %d: %s", self._rank_info.rank, self.failure)

    def check(self) -> None:
        """Raise what made the run fail, at its end.

        Raises:
            WriteError: a rank could not write a file; on the other ranks the message refers to it.
        """
        if self.failure is not None:
            raise self.failure
        if self.failed:
            raise WriteError("--out: another rank cannot write its files; see that rank's message")

    def _gather(self, own: Tensor, numbers: list[float]) -> list[list[float]]:
        """The values and numbers of each rank; takes the stop requests and failures on the way."""
        device, ranks = self._rank_info.device, self._rank_info.world_size
        of_host = torch.tensor(
            [*numbers, self.stop_asked, self.failure is not None],
            dtype=torch.float64,
            pin_memory=device.type == "cuda",
        )
        own = torch.cat((own, of_host.to(device, non_blocking=True)))
        gathered = torch.zeros((ranks, len(own)), dtype=torch.float64, device=device)
        gathered[self._rank_info.rank] = own
        if ranks > 1:
            dist.all_reduce(gathered)  # a sum with zeros
        rows: list[list[float]] = gathered.tolist()  # waits for the device
        self.failed = self.failed or any(row[-1] for row in rows)
        self.stopping = self.stopping or self.failed or any(row[-2] for row in rows)
        return [row[:-2] for row in rows]

    def _on_signal(self, number: int, frame: object) -> None:
        self.stop_asked = True
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            # The second time means at once. torchrun sends a second one itself, when the first one went to
            # the whole group as Ctrl-C does, and kills after 30 s.
            signal.signal(number, signal.SIG_DFL)
