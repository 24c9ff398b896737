"""Control of a run: exchange of figures, timings and reasons to stop between ranks, once a step.

A signal or a full disk may concern one rank only, which sets its own `asked` or `failure`. `stop` is the same
on all ranks, and changes in `exchange` and `poll` only.
"""

import json
import logging
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sa1b.arguments import Range, check_fields
from sa1b.engine.checkpoint.folder import AGAIN
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.watch.signals import SIGNALS, Stop, WriteError
from sa1b.errors import Sa1bError
from sa1b.limit import Limited, OverdueError
from sa1b.storage.atomic import append_line

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
# Agents of torchrun look for new machines every second (torch 2.13, dynamic_rendezvous.py, cache_duration).
_AGENTS_NOTICE = 5.0
_STEPS = 16  # number of last steps of which the longest counts


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of a step over all ranks; all except `own_loss` are the same on all ranks."""

    # the model's figures, divided by `count`; of a source of a mixture "loss/NAME", divided by "count/NAME"
    means: dict[str, float]
    count: float  # number of summed terms; for SAM, masks
    images: int  # of all ranks
    norm: float  # of the gradient before clipping
    own_loss: float  # this rank's sum of the loss
    ranks: Mapping[str, list[float]]  # further numbers by name, one of each rank


class Control:
    """The run stops before `deadline`, in seconds of time.time. `limit`: seconds that a write may take."""

    def __init__(self, rank_info: RankInfo, deadline: float | None = None, limit: float = 300.0) -> None:
        self.failure: WriteError | None = None  # this rank's first failed write
        self.asked = Stop.NONE  # why this rank was asked to stop
        self.stop = Stop.NONE  # why the run stops and saves a checkpoint; the same on all ranks
        self._rank_info, self._deadline = rank_info, math.inf if deadline is None else deadline
        self._limit, self._limited = limit, Limited()
        self._steps, self._checkpoint = deque([0.0], maxlen=_STEPS), 0.0

    def exchange(
        self,
        totals: Mapping[str, Tensor],
        norm: Tensor,
        images: int,
        numbers: Mapping[str, float],
        of_rank: Mapping[str, Tensor] | None = None,
    ) -> StepFigures:
        """The figures of a step over all ranks: one collective, one wait for the device."""
        sums = {f"sum/{name}": value for name, value in totals.items()}
        ranks = self._gather({**sums, "norm": norm, **(of_rank or {})}, {**numbers, "images": images})
        of_all = {name: sum(ranks[f"sum/{name}"]) for name in totals}
        count, own, means = of_all.pop("count"), self._rank_info.rank, {}
        for name, total in of_all.items():
            kind, _, source = name.partition("/")
            divisor = of_all[f"count/{source}"] if source else count
            means[name] = total if kind == "count" else total / divisor if divisor else 0.0
        images = round(sum(ranks["images"]))
        return StepFigures(means, count, images, ranks["norm"][own], ranks["sum/loss"][own], ranks)

    def poll(self) -> bool:
        self._gather({}, {})
        return bool(self.stop)

    def _gather(
        self, on_device: Mapping[str, Tensor], on_host: Mapping[str, float]
    ) -> dict[str, list[float]]:
        device, ranks = self._rank_info.device, self._rank_info.world_size
        on_host = {**on_host, "stop": self.own_stop()}
        host = torch.tensor([*on_host.values()], dtype=torch.float64, pin_memory=device.type == "cuda")
        values = [value.detach().reshape(1) for value in on_device.values()]
        moved = [value.to(device, torch.float64, non_blocking=True) for value in (*values, host)]
        gathered = torch.zeros((ranks, len(on_device) + len(on_host)), dtype=torch.float64, device=device)
        gathered[self._rank_info.rank] = torch.cat(moved)
        if ranks > 1:
            dist.all_reduce(gathered)  # zeros of other ranks do not change the sum
        columns: list[list[float]] = gathered.T.tolist()  # waits for the device
        found = dict(zip((*on_device, *on_host), columns, strict=True))
        self.stop = Stop(max(self.stop, *map(round, found["stop"])))
        return found

    def install(self) -> None:
        # Not in another thread: a process such as a worker of Ray belongs to a program that handles them.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._on_signal)

    def took(self, step: float, checkpoint: float) -> None:
        self._steps.append(step)
        self._checkpoint = checkpoint

    def own_stop(self) -> Stop:
        """Why this rank stops: a failed write, a signal, or no time for a step and a checkpoint."""
        if self.failure is not None:
            return Stop.FAILED
        needed = max(self._steps) + self._checkpoint
        return Stop.DEADLINE if time.time() + needed >= self._deadline else self.asked

    @property
    def restarts(self) -> bool:
        """Whether ranks end with an error after the stop, because one of several machines leaves or joins."""
        # Every torchrun sends SIGTERM to its ranks if a machine joins, and if it gets SIGTERM itself. If a
        # rank of another machine ended with 0, its torchrun would take the run for complete.
        machines = int(os.environ.get("GROUP_WORLD_SIZE", "0"))
        return self.stop is Stop.TERMINATED and machines > 1

    def wait_for_agent(self) -> None:
        """Wait until torchrun asks this rank to end: it does not count a restart that it begins itself."""
        end = time.monotonic() + _AGENTS_NOTICE
        while self.asked is Stop.NONE and time.monotonic() < end:
            time.sleep(0.05)

    def write(self, path: Path, work: Callable[[], object]) -> None:
        """Write a file; if that fails, log the error and stop all ranks after their step."""
        try:
            self.within(path, work)
        except OSError as error:
            if self.failure is None:
                file, why = error.filename or path, f"cannot be written ({error.strerror or error})"
                self.failure = WriteError(f"{file}: {why}; free space or repair the disk, {AGAIN}")
                _LOG.error("rank %d: %s", self._rank_info.rank, self.failure)

    def within(self, path: Path, work: Callable[[], T]) -> T:
        """The result of work on a file; WriteError: the disk hangs."""
        try:
            return self._limited.call(work, self._limit)
        except OverdueError as error:
            raise WriteError(f"{path}: {error} (--data.deadline); check the disk, {AGAIN}") from None

    def check(self) -> None:
        """At the end of a run, raise the WriteError that stopped it, with the rank that had it."""
        if self.failure is not None:
            raise self.failure
        if self.stop is Stop.FAILED:
            raise WriteError("--out: another rank cannot write its files; see that rank's message")

    def _on_signal(self, number: int, frame: object) -> None:
        self.asked = max(self.asked, Stop.TERMINATED if number == signal.SIGTERM else Stop.ASKED)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return  # after Ctrl-C, which the process group gets, torchrun sends another signal
        signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
        if self._rank_info.rank == 0:
            name = signal.Signals(number).name
            text = f"{name}: stopping after this step, with a checkpoint; {name} again ends the run at once, "
            with suppress(OSError):  # a terminal may be closed
                os.write(2, f"\n{text}without one\n".encode())  # print may have been interrupted


class HealthError(Sa1bError):
    """Too many consecutive steps were not finite to continue training."""


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """Handling of losses that are not finite, and of ranks that hang.

    If a loss is not finite, all ranks skip the step, and the images are logged.

    Attributes:
        patience: Number of consecutive steps with a loss or gradient that is not finite after which the run
            still continues. With fp16, overflows, after which the scaler lowers its scale, count as well.
        stall: Seconds without progress after which a table names the rank that the others wait for, where it
            is and what it reads, and each rank writes its stacks to RUN/stacks-<rank>.txt. By default two
            thirds of --parallel.timeout, or of --parallel.timeout-first in the first step. One of several
            ranks that makes no progress for 10 seconds longer than that timeout exits. 0: none of this.
    """

    patience: Annotated[int, Range(0)] = 20
    stall: Annotated[float | None, Range(0, unit=" seconds")] = None

    def __post_init__(self) -> None:
        check_fields(self, "health")


class Health:
    def __init__(self, config: HealthConfig, run: Path, rank_info: RankInfo, control: Control) -> None:
        self.path, self.skipped = run / "not-finite.jsonl", 0  # steps of this process that were not taken
        self.lost = 0  # last consecutive steps without a finite loss; the weights may be bad
        self._patience, self._rank, self._control, self._in_row = config.patience, rank_info.rank, control, 0

    def is_good(self, step: int, loss: float, norm: float, own_loss: float, ids: list[Tensor]) -> bool:
        """Whether the optimizer may take the step; if the own loss is not finite, the ids are logged."""
        self.lost = 0 if math.isfinite(loss) else self.lost + 1
        if math.isfinite(loss) and math.isfinite(norm):
            self._in_row = 0
            return True
        self.skipped += 1
        self._in_row += 1
        if not math.isfinite(own_loss):
            images = [image_id for micro in ids for image_id in micro.tolist()]
            line = {"step": step, "rank": self._rank, "loss": str(own_loss), "image_ids": images}
            self._control.write(self.path, lambda: append_line(self.path, json.dumps(line)))
        if self._in_row > self._patience:
            raise self._error(self._in_row, step, f"loss {loss}, gradient norm {norm}")
        return False

    def end(self, step: int) -> None:
        """HealthError at the end of a run or of a part whose last steps had no finite loss."""
        if self.lost:
            raise self._error(self.lost, step, "loss")

    def _error(self, steps: int, step: int, what: str) -> HealthError:
        return HealthError(
            f"step {step}: the last {steps} steps had a loss or gradient that is not finite ({what}); lower "
            "--optim.lr, or pass --parallel.precision bf16 in place of fp16, and start the command again. "
            f"Images whose loss was not finite are listed in {self.path}"
        )
