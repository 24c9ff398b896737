"""The ranks of a run: this process, and work that succeeds or fails on all ranks together."""

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh

from sa1b.errors import CheckpointError, Sa1bError, UsageError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank of a run and its device."""

    rank: int  # from 0 to world_size - 1
    world_size: int
    local_rank: int  # on this machine; the index of its GPU
    device: torch.device  # a GPU has an index
    # FSDP: ranks by "shard", or by "replicate" and "shard", in ascending order
    mesh: DeviceMesh | None = None

    def gather(self, value: T) -> list[T]:
        """A value of each rank, on all ranks; collective."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a run with a separate gloo group, which a thread may use in parallel with training."""

    rank: int
    world_size: int
    group: dist.ProcessGroup | None  # gloo; None for a single process
    # seconds to wait for other ranks and writes of checkpoints; a lost rank is found at once
    limit: float = 1800.0

    def on_all(self, work: Callable[[], T]) -> list[T]:
        """The results of `work` on all ranks; CheckpointError or UsageError: it failed on any."""
        value, failure = cast(T, None), cast(Sa1bError | None, None)
        try:
            value = work()
        except (CheckpointError, UsageError) as error:
            failure = error
        except (Exception, CheckpointException) as error:  # KeyboardInterrupt is a BaseException
            failure = CheckpointError(_text(error))
        outcomes = [(value, failure)] * self.world_size
        if self.group is not None:
            dist.all_gather_object(outcomes, outcomes[0], group=self.group)
        if errors := [error for _, error in outcomes if error is not None]:
            kinds = [type(error) for error in errors if type(error) is not CheckpointError]
            raise (kinds or [CheckpointError])[0]("; ".join(dict.fromkeys(map(str, errors))))
        return [value for value, _ in outcomes]

    def on_first(self, work: Callable[[], T]) -> T:
        """The result of `work` on rank 0, on all ranks."""
        return cast(T, self.on_all(lambda: work() if self.rank == 0 else None)[0])


def ranks(limit: float = 1800.0) -> Ranks:
    """The ranks of the default process group, with a new gloo group; collective if there are several."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks(0, 1, None, limit)
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=limit))
    return Ranks(dist.get_rank(), dist.get_world_size(), group, limit)


def _text(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(f"{_text(part[0])} (rank {rank})" for rank, part in error.failures.items())
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    return str(error) if isinstance(error, Sa1bError) else f"{type(error).__name__}: {error}"
