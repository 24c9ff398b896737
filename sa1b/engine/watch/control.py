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

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sa1b.engine.watch.signals import Requests, Stop


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of a step over all ranks; all except `own_loss` are the same on all ranks."""

    means: dict[str, float]  # the model's figures, each divided by `count`; 0 if the count is 0
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
        self, totals: Mapping[str, Tensor], norm: Tensor, images: int, numbers: Mapping[str, float]
    ) -> StepFigures:
        """The figures of a step over all ranks, once a step: one collective, one wait for the device.

        `totals` are this rank's sums, tensors without dimensions: "loss", "count" and further figures.
        `numbers` are its timings and others; NaN: unknown. Names and their order are the same on all ranks,
        as is the norm of the gradient. `images` are those of this rank.
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

    def _gather(self, own: Tensor, numbers: list[float]) -> list[list[float]]:
        """Gather the values and numbers of each rank, together with requests and failures."""
        device, ranks = self._rank_info.device, self._rank_info.world_size
        table, self.table_asked = self.table_asked, False
        of_host = torch.tensor(
            [*numbers, table, self.own_stop(), self.failure is not None],
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
