"""Compressed reduction of gradients: torch's communication hooks of DDP, with a state that can be undone.

| --parallel.compress | sent for a gradient of n x m numbers       | error                               |
|---------------------|--------------------------------------------|-------------------------------------|
| fp16, bf16          | 2 bytes for each number                    | rounding                            |
| powersgd:R          | R (n + m) numbers, if less than n m / 2    | added to the next gradient          |

PowerSGD (Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization") keeps these errors of the last two steps, because the last one may be skipped: twice the memory
of the gradient.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from sa1b.errors import UsageError

_POWERSGD = re.compile(r"powersgd:([1-9]\d*)")
_KINDS = ("error", "p", "q")


def compression_rank(compress: str) -> int | None:
    """The rank of the low-rank approximation; None for the other values of --parallel.compress.

    Raises:
        UsageError: the value is not valid.
    """
    low_rank = _POWERSGD.fullmatch(compress)
    if low_rank is None and compress not in ("none", "fp16", "bf16"):
        raise UsageError(
            f"--parallel.compress {compress}: no such compression; pass none, fp16, bf16, or a rank such as "
            "powersgd:4"
        )
    return int(low_rank[1]) if low_rank else None


def compress_reduction(module: DistributedDataParallel, compress: str, after: int, bucket: int) -> None:
    """Let DDP compress the gradients that it sends.

    Args:
        compress: --parallel.compress.
        after: for PowerSGD, number of first steps whose gradient is sent without compression.
        bucket: MiB of gradients that are sent together; errors are stored by bucket.

    Raises:
        UsageError: see `compression_rank`.
    """
    rank = compression_rank(compress)
    if rank is not None:
        powersgd = PowerSGD(rank, after, bucket)
        module.register_comm_hook(powersgd, _reduce)
        object.__setattr__(module, "powersgd", powersgd)  # a module takes only tensors and modules
    elif compress == "fp16":
        module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif compress == "bf16":
        module.register_comm_hook(None, _reduce_bf16)


@dataclass(slots=True)
class _Before:
    """The state of a bucket before its last reduction; None: it had no state."""

    error: Tensor | None
    q: Tensor | None


class PowerSGD:
    """PowerSGD of one DDP module, which has it as its attribute `powersgd`.

    Each rank has its own error feedback. The factors p and q are equal on all ranks.

    Attributes:
        paused: gradients are sent without compression, and the state does not change.
    """

    def __init__(self, rank: int, after: int, bucket: int) -> None:
        self.paused = False
        self._rank, self._bucket = rank, bucket
        # The epsilon avoids a division by zero for weights without a gradient.
        # Torch refuses a smaller number, because DDP forms its final buckets after its first reduction. Here
        # the first reduction is that of `sa1b.engine.gradients.warm_up`.
        self._state = powerSGD_hook.PowerSGDState(
            None, rank, start_powerSGD_iter=max(after, 2), orthogonalization_epsilon=1e-8
        )
        self._before: dict[int, _Before] = {}
        self._steps_before = 0

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Reduce a bucket, and keep the state that `undo` restores."""
        if self.paused:
            return default_hooks.allreduce_hook(_world(), bucket)
        state, index = self._state, bucket.index()
        if index == 0:
            self._steps_before = state.iter
        # Torch's hook replaces the error by another tensor, and changes q in place.
        q = state.q_memory_dict.get(index)
        self._before[index] = _Before(state.error_dict.get(index), None if q is None else q.clone())
        if q is not None:
            # After a step without a gradient, q is zero, and so would be all later approximations.
            q.copy_(torch.where(q == 0, torch.arange(len(q), device=q.device, dtype=q.dtype).cos(), q))
        return powerSGD_hook.powerSGD_hook(state, bucket)

    def undo(self) -> None:
        """Restore the state before the last step, which is skipped."""
        state = self._state
        for index, before in self._before.items():
            _restore(state.error_dict, index, before.error)
            _restore(state.q_memory_dict, index, before.q)
            if before.q is None:
                state.p_memory_dict.pop(index, None)
        state.iter = self._steps_before

    def tensors(self) -> dict[str, Tensor]:
        """The state of this rank, not copied: "error.0", "p.0" and "q.0" for bucket 0."""
        state = self._state
        found = zip(_KINDS, (state.error_dict, state.p_memory_dict, state.q_memory_dict), strict=True)
        return {f"{kind}.{index}": tensor for kind, held in found for index, tensor in sorted(held.items())}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the state by the result of `tensors` of an earlier run."""
        state = self._state
        for kind, held in zip(
            _KINDS, (state.error_dict, state.p_memory_dict, state.q_memory_dict), strict=True
        ):
            held.clear()
            held.update(
                {int(name.split(".")[1]): one for name, one in tensors.items() if name.startswith(kind)}
            )

    def state_dict(self) -> dict[str, Any]:
        """The part of the state that is not tensors, as JSON values."""
        return {"rank": self._rank, "bucket": self._bucket, "steps": self._state.iter}

    def load_state_dict(self, saved: Mapping[str, Any]) -> str:
        """Continue from the `state_dict` of an earlier run, after `load_tensors`.

        Returns:
            Why the error feedback is dropped; empty: it is used, or there was none.
        """
        state = self._state
        state.iter = int(saved["steps"])
        if (saved["rank"], saved["bucket"]) != (self._rank, self._bucket):
            self.load_tensors({})
            return (
                f"it was saved with --parallel.compress powersgd:{saved['rank']} --parallel.bucket "
                f"{saved['bucket']}"
            )
        compressed = state.iter > state.start_powerSGD_iter
        return "it was saved by another number of ranks" if compressed and not state.error_dict else ""


def powersgd_of(module: nn.Module) -> PowerSGD | None:
    """The PowerSGD of a wrapped module; None: it has none."""
    found: PowerSGD | None = vars(module).get("powersgd")
    return found


@contextmanager
def uncompressed(module: nn.Module) -> Iterator[None]:
    """Context in which reductions do not change the state of PowerSGD."""
    powersgd = powersgd_of(module)
    if powersgd is not None:
        powersgd.paused = True
    yield
    if powersgd is not None:
        powersgd.paused = False


def undo_reduction(module: nn.Module) -> None:
    """Call this if the step of the last reduction is skipped."""
    if (powersgd := powersgd_of(module)) is not None:
        powersgd.undo()


def _reduce_bf16(group: None, bucket: GradBucket) -> Future[Tensor]:
    """Torch's hook. Torch refuses it by its name where NCCL is missing, but gloo sums bf16 too."""
    return default_hooks.bf16_compress_hook(_world(), bucket)


def _reduce(powersgd: PowerSGD, bucket: GradBucket) -> Future[Tensor]:
    return powersgd.reduce(bucket)


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _restore(held: dict[int, Tensor], index: int, tensor: Tensor | None) -> None:
    if tensor is None:
        held.pop(index, None)
    else:
        held[index] = tensor
