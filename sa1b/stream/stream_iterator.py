"""One iteration over a stream in one process, with a state that torchdata's StatefulDataLoader saves.

    loader = torchdata.stateful_dataloader.StatefulDataLoader(stream, batch_size=None, num_workers=2)
    for batch in loader:
        ...
        save({"loader": loader.state_dict()})     # has the state of the iteration of each worker

A worker's iteration is where it began and how many of its batches were used. The start of the next batch is
computed from both, so no batch is read to resume.
"""

from collections.abc import Generator, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from sa1b.errors import UsageError
from sa1b.stream.batch import Batch, send_errors
from sa1b.stream.plan import MicroBatch, checked_position
from sa1b.stream.resume import ResumeError

if TYPE_CHECKING:
    from sa1b.stream.dataset import Stream

# Batch i of a rank comes from worker i mod `workers`, and `count` batches are a step of the rank. Where each
# of them begins depends on `micro_batch` and `shares`.
_SAME = ("rank", "world_size", "global_batch", "micro_batch", "shares", "count", "worker", "workers")


class StreamIterator(Iterator[Batch]):
    """The batches of this process from the stream's position on; the iteration begins with the first one."""

    def __init__(self, stream: "Stream") -> None:
        self._stream = stream
        info = get_worker_info()
        self._worker, self._workers = (info.id, info.num_workers) if info else (0, 1)
        self._begun: int | None = None  # position at which the iteration began
        self._used = 0
        self._batches: Generator[Batch] | None = None
        self._ended = False
        if info:
            if stream.decoder.device.type != "cpu":
                raise UsageError(
                    f"decoder={stream.options.decoder!r}: decodes on a GPU, which worker processes of a "
                    "DataLoader cannot share; read with sa1b.Loader(stream, device='cuda')"
                )
            send_errors()
            stream.iterations.ignore_signals()

    def __next__(self) -> Batch:
        if self._batches is None:
            if self._ended:
                raise StopIteration
            self._ended = True  # also if the iteration cannot begin
            self._batches = self._stream.read(self._pieces())
        batch = next(self._batches)
        self._used += 1
        return batch

    def close(self) -> None:
        """End the iteration before its last batch: cancel its reads."""
        self._ended = True
        if self._batches is not None:
            self._batches.close()

    def _pieces(self) -> Iterator[MicroBatch]:
        """This process's micro-batches that are not used yet."""
        plan, begun = self._stream.plan, self._begin()
        steps, rest = divmod(self._worker + self._used * self._workers, plan.count)
        start = begun + steps * plan.global_batch
        if self._stream.epochs is not None and start >= plan.epoch_end(begun):
            return iter(())
        return islice(plan.micro_batches(start), rest, None, self._workers)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch; `following`: position at which the next iteration begins."""
        begun = self._begin()
        return {**self._identity(), "begun": begun, "used": self._used, "following": self._stream.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue an iteration, before the first batch.

        Raises:
            ResumeError: the state has other ranks, workers or batch sizes.
        """
        own = self._identity()
        if state.keys() != {*own, "begun", "used", "following"}:
            raise ResumeError(
                f"load_state_dict({state!r}): not the state of an iteration; pass what state_dict() of the "
                "StatefulDataLoader returned"
            )
        if different := [name for name in _SAME if state[name] != own[name]]:
            changes = ", ".join(f"{name} {state[name]}, now {own[name]}" for name in different)
            raise ResumeError(
                f"load_state_dict(): {changes}; resume with the same ranks, workers and batch sizes, or save "
                "stream.state_dict(batch) or the state of a sa1b.Loader, which fit others"
            )
        try:
            begun, used, following = (
                checked_position(state[name], name) for name in ("begun", "used", "following")
            )
        except ValueError as error:
            raise ResumeError(
                f"load_state_dict(): {error}; the state is damaged, use an earlier one"
            ) from None
        self._begun, self._used, self._stream.position = begun, used, following
        if self._stream.epochs is None and get_worker_info() is not None:
            self._stream.iterations.lose_position()

    def _begin(self) -> int:
        if self._begun is None:
            self._begun = self._stream.begin()
        return self._begun

    def _identity(self) -> dict[str, Any]:
        plan = self._stream.plan
        shares = None if plan.shares is None else list(plan.shares)
        values = (
            *(plan.rank, plan.world_size, plan.global_batch, plan.micro_batch, shares, plan.count),
            *(self._worker, self._workers),
        )
        return dict(zip(_SAME, values, strict=True))
