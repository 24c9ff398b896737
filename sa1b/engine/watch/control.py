"""Control of a run: exchange of stop requests, failed writes, figures and timings between ranks.

    control = Control(rank_info, deadline)
    control.install()      # SIGTERM, SIGINT and SIGUSR1 ask to stop, SIGUSR2 asks for the table of the ranks
    while step < steps and not control.stopping:
        ...
        figures = control.exchange(totals, norm, images, numbers)  # one collective, one copy to the host
        control.write(path, lambda: append_line(path, ...))
    control.check()

A signal may reach only one rank, and a full disk may affect only one rank. If that rank left the loop alone,
the others would wait for it. So each rank sets its own `asked` and `failure` at any time. `stopping` and
`failed` are the same on all ranks and change only in `exchange` and `poll`, which all ranks call together.
The clocks of machines may differ: all ranks stop when the first one reaches the deadline on its own clock.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor

from sa1b.arguments import Range, check_fields
from sa1b.console import command
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.watch.signals import Requests, Stop
from sa1b.errors import Sa1bError
from sa1b.storage.atomic import append_line


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of a step over all ranks; all except `own_loss` are the same on all ranks."""

    # The model's figures, each divided by `count`, those of a source of a mixture, such as "loss/NAME", by
    # "count/NAME"; 0 if the count is 0. A "count/NAME" is a sum.
    means: dict[str, float]
    count: float  # number of summed terms; for SAM, masks
    images: int  # of all ranks
    norm: float  # of the gradient before clipping
    own_loss: float  # this rank's sum of the loss
    ranks: dict[str, list[float]]  # further numbers by name, one of each rank


class Control(Requests):
    """Stop requests and failures of all ranks, exchanged together with the figures of each step. `stop` is
    why the run stops, `failed` whether a write has failed; both are the same on all ranks.
    """

    _table = False

    @property
    def stopping(self) -> bool:
        """Whether the run stops and saves a checkpoint; the same on all ranks."""
        return self.stop is not Stop.NONE or self.failed

    def exchange(
        self,
        totals: Mapping[str, Tensor],
        norm: Tensor,
        images: int,
        numbers: Mapping[str, float],
        of_rank: Mapping[str, Tensor] | None = None,
    ) -> StepFigures:
        """The figures of a step over all ranks, once a step: one collective, one wait for the device.

        `totals` are this rank's sums, tensors without dimensions: "loss", "count" and further figures.
        `numbers` are its timings and others, and `of_rank` those that are on the device; NaN: unknown. Names
        and their order are the same on all ranks, as is the norm of the gradient. `images` are those of this
        rank.
        """
        device, of_rank = self._rank_info.device, of_rank or {}
        names = [name for name in totals if name != "count"]
        values = [*(totals[name] for name in names), totals["count"], norm]
        on_device = [
            value.detach().to(device, torch.float64, non_blocking=True)
            for value in (*values, *of_rank.values())
        ]
        rows = self._gather(torch.stack(on_device), [*numbers.values(), images])
        columns = list(zip(*rows, strict=True))
        *sums, count, _ = (sum(column) for column in columns[: len(values)])
        mine = rows[self._rank_info.rank]
        totals_of = dict(zip(names, sums, strict=True))
        return StepFigures(
            means={name: _mean(name, totals_of, count) for name in names},
            count=count,
            images=round(sum(columns[-1])),
            norm=mine[len(names) + 1],
            own_loss=mine[names.index("loss")],
            ranks=dict(zip([*of_rank, *numbers], map(list, columns[len(values) : -1]), strict=True)),
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
        requested, self._table = self._table, False
        return requested

    def _gather(self, values: Tensor, numbers: list[float]) -> list[list[float]]:
        """Gather the values and numbers of each rank, together with requests and failures."""
        device, ranks = self._rank_info.device, self._rank_info.world_size
        table, self.table_asked = self.table_asked, False
        of_host = torch.tensor(
            [*numbers, table, self.own_stop(), self.failure is not None],
            dtype=torch.float64,
            pin_memory=device.type == "cuda",
        )
        values = torch.cat((values, of_host.to(device, non_blocking=True)))
        gathered = torch.zeros((ranks, len(values)), dtype=torch.float64, device=device)
        gathered[self._rank_info.rank] = values
        if ranks > 1:
            dist.all_reduce(gathered)  # zeros of other ranks do not change the sum
        rows: list[list[float]] = gathered.tolist()  # waits for the device
        self.failed = self.failed or any(row[-1] for row in rows)
        self.stop = Stop(max(self.stop, *(round(row[-2]) for row in rows)))
        self._table = self._table or any(row[-3] for row in rows)
        return [row[:-3] for row in rows]


class HealthError(Sa1bError):
    """Too many consecutive steps were not finite to continue training."""


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """Handling of losses that are not finite, and of ranks that hang.

    If a loss is not finite, all ranks skip the step, and the images are logged.

    Attributes:
        patience: Number of consecutive steps with a loss or gradient that is not finite after which the run
            still continues. With fp16, overflows, after which the scaler lowers its scale, count as well.
        stall: Seconds without progress after which a report names the rank that hangs, where it is and what
            it reads, and each rank writes its stacks to RUN/stacks-<rank>.txt. The run is not ended. By
            default two thirds of --parallel.timeout, or of --parallel.timeout-first in the first
            step. 0: no report.
    """

    patience: Annotated[int, Range(0)] = 20
    stall: Annotated[float | None, Range(0, unit=" seconds")] = None

    def __post_init__(self) -> None:
        check_fields(self, "health")


class Health:
    """Decides, on all ranks alike, whether steps are taken; `control` gets failed writes of its log."""

    def __init__(self, config: HealthConfig, run: Path, rank_info: RankInfo, control: Control) -> None:
        self.path = run / "not-finite.jsonl"
        self.skipped = 0
        self.lost = 0  # last consecutive steps without a finite loss; the weights may be bad
        self._config = config
        self._rank_info = rank_info
        self._control = control
        self._in_row = 0

    def is_good(self, step: int, loss: float, norm: float, own_loss: float, ids: list[Tensor]) -> bool:
        """Decide whether the optimizer may take the step, counted from 1 as in metrics.jsonl.

        Loss and norm are over all ranks. A rank whose own loss is not finite logs its image ids, int64 [B]
        for each micro-batch. HealthError: too many consecutive steps were not finite.
        """
        self.lost = 0 if math.isfinite(loss) else self.lost + 1
        if math.isfinite(loss) and math.isfinite(norm):
            self._in_row = 0
            return True
        self.skipped += 1
        self._in_row += 1
        if not math.isfinite(own_loss):
            line = {
                "step": step,
                "rank": self._rank_info.rank,
                "loss": str(own_loss),
                "image_ids": [image_id for micro in ids for image_id in micro.tolist()],
            }
            self._control.write(self.path, lambda: append_line(self.path, json.dumps(line)))
        if self._in_row > self._config.patience:
            raise self._error(self._in_row, step, f"loss {loss}, gradient norm {norm}")
        return False

    def end(self, step: int) -> None:
        """Check the last steps at the end of a run or of a part; HealthError: they had no finite loss."""
        if self.lost:
            raise self._error(self.lost, step, "loss")

    def _error(self, steps: int, step: int, what: str) -> HealthError:
        replay = command("replay", self.path.parent, "--step", step)
        return HealthError(
            f"step {step}: the last {steps} steps had a loss or gradient that is not finite ({what}); lower "
            "--optim.lr, or pass --parallel.precision bf16 in place of fp16, and start the command again: it "
            "resumes from the newest checkpoint, which is older. If it fails again at once, move the folder "
            f"of that checkpoint away. Images whose loss was not finite are listed in {self.path}; "
            f"`{replay}` lists those of a step with their masks"
        )


def _mean(name: str, totals: Mapping[str, float], count: float) -> float:
    kind, _, source = name.partition("/")
    divisor = totals[f"count/{source}"] if source else count
    if source and kind == "count":
        return totals[name]
    return totals[name] / divisor if divisor else 0.0
