"""Control of a run: exchange of stop requests, failed writes, figures and timings between ranks.

    control = Control(rank_info, deadline)
    control.install()      # SIGTERM, SIGINT and SIGUSR1 ask to stop, SIGUSR2 asks for the table of the ranks
    while step < steps and not control.stopping:
        ...
        figures = control.exchange(totals, norm, images, numbers)  # one collective, one copy to the host
        with control.writing():
            metrics.step(...)
    control.check()

A signal may reach only one rank, and a full disk may affect only one rank. If that rank left the loop alone,
the others would wait for it. So each rank sets its own `asked` and `failure` at any time. `stopping` and
`failed` are the same on all ranks and change only in `exchange` and `poll`, which all ranks call together.
The clocks of machines may differ: all ranks stop when the first one reaches the deadline on its own clock.
"""

import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from sa1b.engine.ranks import RankInfo
from sa1b.errors import Sa1bError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last one is often sent by SLURM's --signal
TABLE_SIGNAL = signal.SIGUSR2
_AGENT_PATIENCE = 30.0  # seconds from SIGTERM to SIGKILL of torchrun, by default
_STEPS = 16  # number of last steps of which the longest counts
# Agents of torchrun look for new machines every second (torch 2.13, dynamic_rendezvous.py, cache_duration).
_AGENTS_NOTICE = 5.0
_AGENT = ("GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT")
_LOG = logging.getLogger(__name__)


def handle(number: signal.Signals, handler: Callable[[int, object], None] | signal.Handlers) -> None:
    """Set the handler of a signal, unless training runs in another thread than the main one.

    Python accepts handlers from the main thread only. A process whose main thread does not train, such as a
    worker of Ray, belongs to another program, which handles the signals itself.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, handler)


class Stop(IntEnum):
    """Why a run stops; if ranks have different reasons, the largest one counts."""

    NONE = 0
    TERMINATED = 1  # SIGTERM; from torchrun, it may concern one machine only
    ASKED = 2  # SIGINT or SIGUSR1
    DEADLINE = 3


class WriteError(Sa1bError):
    """A file of the run cannot be written; the message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of a step over all ranks; all except `own_loss` are the same on all ranks.

    Attributes:
        means: the model's figures, each divided by `count`; 0 if the count is 0.
        count: number of summed terms; for SAM, masks.
        images: images of all ranks.
        norm: gradient norm before clipping.
        own_loss: this rank's sum of the loss.
        ranks: further numbers by name, one of each rank.
    """

    means: dict[str, float]
    count: float
    images: int
    norm: float
    own_loss: float
    ranks: dict[str, list[float]]


class Control:
    """Stop requests and failures of all ranks, exchanged together with the figures of each step.

    Args:
        deadline: time before which the run stops, in seconds of `clock`; None: no deadline.
        clock: this rank's clock.

    Attributes:
        asked: why this rank was asked to stop.
        table_asked: whether a signal to this rank requested the table of the ranks.
        failure: this rank's first failed write.
        stop: why the run stops; the same on all ranks.
        failed: whether the run stops because a write has failed; the same on all ranks.
    """

    def __init__(
        self, rank_info: RankInfo, deadline: float | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.asked = Stop.NONE
        self.table_asked = False
        self.failure: WriteError | None = None
        self.stop = Stop.NONE
        self.failed = False
        self._rank_info = rank_info
        self._table = False
        self._deadline = deadline
        self._clock = clock
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._checkpoint = 0.0

    @property
    def stopping(self) -> bool:
        """Whether the run stops and saves a checkpoint; the same on all ranks."""
        return self.stop is not Stop.NONE or self.failed

    def took(self, step: float, checkpoint: float) -> None:
        """Record the seconds of a step and of the newest checkpoint, which must fit before the deadline."""
        self._steps.append(step)
        self._checkpoint = checkpoint

    def install(self) -> None:
        """Install handlers of the signals to stop and to print the table of the ranks; see `handle`."""
        for number in SIGNALS:
            handle(number, self._on_signal)
        handle(TABLE_SIGNAL, self._on_table_signal)

    def exchange(
        self, totals: Mapping[str, Tensor], norm: Tensor, images: int, numbers: Mapping[str, float]
    ) -> StepFigures:
        """The figures of a step over all ranks, once a step: one collective, one wait for the device.

        Args:
            totals: this rank's sums, tensors without dimensions: "loss", "count" and further figures. Names
                and their order are the same on all ranks.
            norm: norm of the gradient, the same on all ranks.
            images: number of images of this rank.
            numbers: further numbers of this rank, such as its timings. Names and their order are the same on
                all ranks; NaN: unknown.
        """
        device = self._rank_info.device
        names = [name for name in totals if name != "count"]
        values = [*(totals[name] for name in names), totals["count"], norm]
        own = torch.stack([value.detach().to(device, torch.float64, non_blocking=True) for value in values])
        columns = list(zip(*self._gather(own, [images, *numbers.values()]), strict=True))
        *sums, count, _, all_images = (sum(column) for column in columns[: len(values) + 1])
        mine = [column[self._rank_info.rank] for column in columns]
        return StepFigures(
            means={name: total / count if count else 0.0 for name, total in zip(names, sums, strict=True)},
            count=count,
            images=round(all_images),
            norm=mine[len(names) + 1],
            own_loss=mine[names.index("loss")],
            ranks=dict(zip(numbers, map(list, columns[len(values) + 1 :]), strict=True)),
        )

    def poll(self) -> bool:
        """Whether the run stops. Collective; an evaluation calls it once per micro-batch."""
        self._gather(torch.zeros(0, dtype=torch.float64, device=self._rank_info.device), [])
        return self.stopping

    def any_rank(self, flag: bool) -> bool:
        """Whether a flag is set on any rank. Collective."""
        none = torch.zeros(0, dtype=torch.float64, device=self._rank_info.device)
        return any(row[0] for row in self._gather(none, [float(flag)]))

    def take_table_request(self) -> bool:
        """Whether the table was requested on any rank since the last call; the same on all ranks."""
        asked, self._table = self._table, False
        return asked

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Context for writing a file: if the write fails, log the error and stop all ranks.

        The ranks stop after their step and try to save a checkpoint. Older checkpoints are kept.
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

    @property
    def restarts(self) -> bool:
        """Whether torchrun starts this rank again after the stop, because a machine leaves or joins.

        Every torchrun sends SIGTERM to its ranks if a machine joins, and if it gets SIGTERM itself. A rank of
        another machine must then end with an error: if it ended with 0, its torchrun would take the run for
        complete and end it on all machines (torch 2.13, torch/distributed/elastic/agent/server/api.py).
        """
        machines, limit, used = (int(os.environ.get(name, "0")) for name in _AGENT)
        return self.stop is Stop.TERMINATED and not self.failed and machines > 1 and limit > used

    def wait_for_agent(self) -> None:
        """Wait until torchrun asks this rank to end: it does not count a restart that it begins itself."""
        end = time.monotonic() + _AGENTS_NOTICE
        while self.asked is Stop.NONE and time.monotonic() < end:
            time.sleep(0.05)

    def check(self) -> None:
        """At the end of a run, raise the error that stopped it.

        Raises:
            WriteError: a rank could not write a file; on other ranks, the message refers to that rank.
        """
        if self.failure is not None:
            raise self.failure
        if self.failed:
            raise WriteError("--out: another rank cannot write its files; see that rank's message")

    def _gather(self, own: Tensor, numbers: list[float]) -> list[list[float]]:
        """Gather the values and numbers of each rank, together with requests and failures."""
        device, ranks = self._rank_info.device, self._rank_info.world_size
        table, self.table_asked = self.table_asked, False
        of_host = torch.tensor(
            [*numbers, table, self._own_stop(), self.failure is not None],
            dtype=torch.float64,
            pin_memory=device.type == "cuda",
        )
        own = torch.cat((own, of_host.to(device, non_blocking=True)))
        gathered = torch.zeros((ranks, len(own)), dtype=torch.float64, device=device)
        gathered[self._rank_info.rank] = own
        if ranks > 1:
            dist.all_reduce(gathered)  # zeros of other ranks do not change the sum
        rows: list[list[float]] = gathered.tolist()  # waits for the device
        self.failed = self.failed or any(row[-1] for row in rows)
        self.stop = Stop(max(self.stop, *(round(row[-2]) for row in rows)))
        self._table = self._table or any(row[-3] for row in rows)
        return [row[:-3] for row in rows]

    def _on_table_signal(self, number: int, frame: object) -> None:
        self.table_asked = True

    def _own_stop(self) -> Stop:
        """Why this rank asks to stop; the deadline is due if another step and a checkpoint may not fit."""
        due = self._deadline is not None and self._clock() + self._needed() >= self._deadline
        return Stop.DEADLINE if due else self.asked

    def _needed(self) -> float:
        """Seconds of a step and a checkpoint."""
        return max(self._steps, default=0.0) + self._checkpoint

    def _on_signal(self, number: int, frame: object) -> None:
        self.asked = max(self.asked, Stop.TERMINATED if number == signal.SIGTERM else Stop.ASKED)
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            # A second signal ends the process at once. If the first one went to the whole process group, as
            # Ctrl-C does, torchrun sends the second one itself, and kills after 30 s.
            signal.signal(number, signal.SIG_DFL)
            if self._rank_info.rank == 0:
                name = signal.Signals(number).name
                _write(
                    f"\n{name}: stopping after this step, with a checkpoint; {name} again ends the run at "
                    "once, without one\n"
                )
        elif number != signal.SIGUSR1 and self._needed() > _AGENT_PATIENCE:
            _write(self._too_slow(signal.Signals(number).name))

    def _too_slow(self, name: str) -> str:
        return (
            f"\nrank {self._rank_info.rank}: {name}: torchrun kills ranks {_AGENT_PATIENCE:.0f} s after it, "
            f"and a step and a checkpoint took {self._needed():.0f} s; if they do not fit, the run resumes "
            "from an older checkpoint; --deadline, and SIGUSR1 to a rank, have no such limit\n"
        )


def _write(text: str) -> None:
    """Write to stderr in a signal handler; not by print, which the signal may have interrupted."""
    with suppress(OSError):  # a closed terminal or pipe must not end the run
        os.write(2, text.encode())
