"""Work that ranks do together and that fails on all of them or on none.

A rank that raises while the others go on leaves them waiting for it. So results and errors travel together,
and whoever asks for the result gets the error of any rank.
"""

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from sa1b.engine.sealed import CheckpointError

T = TypeVar("T")
_PATIENCE = datetime.timedelta(hours=1)  # a slow disk is no reason to end a run; a lost rank is seen at once


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    value: T | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a run, with a gloo group of their own: a thread may use it beside training.

    Attributes:
        group: None: a single process.
    """

    rank: int
    world: int
    group: dist.ProcessGroup | None

    def on_all(self, work: Callable[[], T]) -> list[T]:
        """Do `work` on every rank and return what came out, in the order of ranks.

        Raises:
            CheckpointError: it failed on any rank; the message has the errors of all.
        """
        own = _attempt(work)
        outcomes: list[_Outcome[T]] = [own] * self.world
        if self.group is not None:
            dist.all_gather_object(outcomes, own, group=self.group)
        return _values(outcomes)

    def on_first(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 and return what came out on every rank.

        Raises:
            CheckpointError: it failed.
        """
        outcomes: list[_Outcome[T] | None] = [_attempt(work) if self.rank == 0 else None]
        if self.group is not None:
            dist.broadcast_object_list(outcomes, src=0, group=self.group)
        return _values([cast(_Outcome[T], outcomes[0])])[0]


def ranks() -> Ranks:
    """This process among the ranks of the default process group; collective, where there is one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks(0, 1, None)
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=_PATIENCE))


def _attempt(work: Callable[[], T]) -> _Outcome[T]:
    try:
        return _Outcome(work(), None)
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        return _Outcome(None, _text(error))


def _values(outcomes: list[_Outcome[T]]) -> list[T]:
    # Ranks that work together often fail with the same words.
    if errors := list(dict.fromkeys(outcome.error for outcome in outcomes if outcome.error is not None)):
        raise CheckpointError("; ".join(errors))
    return [cast(T, outcome.value) for outcome in outcomes]


def _text(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {_text(part[0])}" for rank, part in error.failures.items())
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
