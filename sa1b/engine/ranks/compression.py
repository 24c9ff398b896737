"""Compressed reduction of gradients: communication hooks of DDP, with a state that can be undone.

| --parallel.compress | sent for a gradient of n x m numbers       | error                               |
|---------------------|--------------------------------------------|-------------------------------------|
| fp16, bf16          | 2 bytes for each number                    | rounding                            |
| powersgd:R          | R (n + m) numbers, if less than n m / 2    | added to the next gradient          |

PowerSGD (Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization") keeps these errors of the last two steps, because the last one may be skipped: twice the memory
of the gradient.
"""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from sa1b.engine.model import stored
from sa1b.engine.settings import ParallelConfig
from sa1b.errors import UsageError

_POWERSGD = re.compile(r"powersgd:([1-9]\d*)")


def compression_rank(compress: str) -> int | None:
    """The rank of the low-rank approximation; None for other valid values, UsageError for invalid ones."""
    low_rank = _POWERSGD.fullmatch(compress)
    if low_rank is None and compress not in ("none", "fp16", "bf16"):
        raise UsageError(
            f"--parallel.compress {compress}: no such compression; pass none, fp16, bf16, or a rank such as "
            "powersgd:4"
        )
    return int(low_rank[1]) if low_rank else None


class Compression:
    """The value of --parallel.compress as a GradientHook; UsageError: not valid, or for another precision."""

    def __init__(self, config: ParallelConfig) -> None:
        self._rank, self._config = compression_rank(config.compress), config
        if self._rank is not None and config.precision == "fp16":
            raise UsageError(
                f"--parallel.compress {config.compress}: does not fit --parallel.precision fp16, whose scale "
                "changes between a gradient and its correction; pass --parallel.precision bf16"
            )

    def attach(self, module: DistributedDataParallel) -> None:
        """Let DDP compress the gradients that it sends."""
        if self._rank is not None:
            powersgd = PowerSGD(module, self._rank, self._config.compress_after)
            module.register_comm_hook(powersgd, _reduce)
            object.__setattr__(module, "reduction", powersgd)  # a module takes only tensors and modules
        elif self._config.compress == "fp16":
            module.register_comm_hook(None, default_hooks.fp16_compress_hook)
        else:
            module.register_comm_hook(None, _reduce_bf16)

    def kept(self, module: nn.Module) -> tuple[int, int]:
        """Numbers that PowerSGD keeps of a step on each rank: errors and factors; 0 for the other values."""
        trained = [parameter for parameter in stored(module).parameters() if parameter.requires_grad]
        sizes = [_sizes(parameter, self._rank or 0) for parameter in trained]
        return sum(n * m for n, m, r in sizes if r), sum(m * r for _, m, r in sizes)


@dataclass(frozen=True, slots=True)
class _Kept:
    """The state of a gradient of n x m numbers after a step: its error [n, m], and the factor q [m, r]."""

    error: Tensor
    q: Tensor


class PowerSGD:
    """PowerSGD of one DDP module: see `sa1b.engine.step.gradients.Reduction`.

    Each rank has its own error feedback. The factors are equal on all ranks. The state belongs to parameters,
    so that buckets of another size can continue from it. `paused`: no compression, no change of the state.
    """

    # Torch's hook starts collectives from callbacks, which gloo runs in threads of its own. With several
    # buckets, the order of these collectives then differs between ranks, and gloo aborts. The hook here runs
    # the collectives of a bucket one after the other, and DDP calls it in the order of buckets, which is the
    # same on all ranks. On GPUs the hook only enqueues them, on a stream of its own, beside the rest of the
    # backward pass.

    def __init__(self, module: nn.Module, rank: int, after: int) -> None:
        self.paused = False
        self._rank, self._after = rank, after
        self._names: dict[Tensor, str] = {
            parameter: name for name, parameter in stored(module).named_parameters()
        }
        self._kept: dict[str, _Kept] = {}
        self._before: dict[str, _Kept] = {}
        self._initial: dict[str, Tensor] = {}
        self._steps = self._steps_before = 0
        self._stream: torch.Stream | None = None

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Reduce a bucket, and keep the state that `undo` restores."""
        if self.paused:
            return default_hooks.allreduce_hook(_world(), bucket)
        if bucket.index() == 0:
            self._steps_before, self._before = self._steps, dict(self._kept)
        compressed = self._steps >= self._after
        self._steps += bucket.is_last()
        if not compressed:
            return default_hooks.allreduce_hook(_world(), bucket)
        buffer = bucket.buffer()
        if not buffer.is_cuda:
            done: Future[Tensor] = Future()
            self._reduce(bucket)
            done.set_result(buffer)
            return done
        if self._stream is None:
            self._stream = torch.Stream(buffer.device)
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        done = Future(devices=[buffer.device])
        with self._stream:
            self._reduce(bucket)
            done.set_result(buffer)  # DDP makes the stream of the backward pass wait for this one
        return done

    @torch.no_grad()
    def _reduce(self, bucket: GradBucket) -> None:
        """Replace the gradients of a bucket by the approximation of their mean over the ranks."""
        matrices: list[tuple[str, Tensor, Tensor]] = []  # name, gradient with the last error, q
        others: list[Tensor] = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            n, m, rank = _sizes(gradient, self._rank)
            if not rank:
                others.append(gradient)
                continue
            name, matrix = self._names[parameter], gradient.view(n, m)
            kept, initial = self._kept.get(name), self._start(name, m, rank, gradient.device)
            q = initial
            if kept is not None:
                matrix += kept.error
                # After a step without a gradient, q is zero, and so would be all later approximations.
                q = torch.where(kept.q == 0, initial, kept.q)
            matrices.append((name, matrix, torch.linalg.qr(q).Q))
        _average(others)
        ps = [matrix @ q for _, matrix, q in matrices]
        _average(ps)
        ps = [torch.linalg.qr(p).Q for p in ps]
        qs = [matrix.T @ p for (_, matrix, _), p in zip(matrices, ps, strict=True)]
        _average(qs)
        for (name, matrix, _), p, q in zip(matrices, ps, qs, strict=True):
            approximation = p @ q.T
            self._kept[name] = _Kept(matrix - approximation, q)
            matrix.copy_(approximation)

    def _start(self, name: str, m: int, rank: int, device: torch.device) -> Tensor:
        """The first factor q of a parameter, a function of its name."""
        if name not in self._initial:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            self._initial[name] = torch.randn(m, rank, generator=generator).to(device)
        return self._initial[name]

    def undo(self) -> None:
        """Restore the state before the last step, which is skipped."""
        self._kept, self._steps = dict(self._before), self._steps_before

    def tensors(self) -> dict[str, Tensor]:
        """The state of this rank, not copied: "error.NAME" and "q.NAME" of a parameter."""
        kept = sorted(self._kept.items())
        return {f"error.{name}": state.error for name, state in kept} | {
            f"q.{name}": state.q for name, state in kept
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the state by the result of `tensors` of an earlier run."""
        names = [full.removeprefix("error.") for full in tensors if full.startswith("error.")]
        self._kept = {name: _Kept(tensors[f"error.{name}"], tensors[f"q.{name}"]) for name in names}

    def state_dict(self) -> dict[str, Any]:
        """The part of the state that is not tensors, as JSON values."""
        return {"rank": self._rank, "steps": self._steps}

    def load_state_dict(self, saved: Mapping[str, Any]) -> str:
        """Continue from the `state_dict` of an earlier run, after `load_tensors`. Returns why the error
        feedback is dropped; empty: it is used, or there was none.
        """
        reason = self._dropped(saved)
        return f"the error feedback of PowerSGD is dropped: {reason}" if reason else ""

    def _dropped(self, saved: Mapping[str, Any]) -> str:
        self._steps = int(saved["steps"])
        if saved["rank"] != self._rank:
            self._kept = {}
            return f"it was saved with --parallel.compress powersgd:{saved['rank']}"
        if not self._kept.keys() <= set(self._names.values()):
            self._kept = {}
            return "an earlier version of this program has saved it by bucket"
        expected = any(_sizes(parameter, self._rank)[2] for parameter in self._names)
        lost = expected and not self._kept and self._steps > self._after
        return "it was saved by another number of ranks" if lost else ""


def _reduce_bf16(group: None, bucket: GradBucket) -> Future[Tensor]:
    """Torch's hook. Torch refuses it by its name where NCCL is missing, but gloo sums bf16 too."""
    return default_hooks.bf16_compress_hook(_world(), bucket)


def _reduce(powersgd: PowerSGD, bucket: GradBucket) -> Future[Tensor]:
    return powersgd.reduce(bucket)


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _sizes(tensor: Tensor, rank: int) -> tuple[int, int, int]:
    """Rows and columns of a gradient, and the rank of its approximation; 0: it is sent as it is."""
    n = len(tensor) if tensor.ndim else 1
    m = tensor.numel() // max(n, 1)
    rank = min(n, m, rank)
    fits = 2 * (n + m) * rank < n * m and tensor.is_contiguous()
    return n, m, rank if fits else 0


def _average(tensors: list[Tensor]) -> None:
    if tensors:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=_world())
        flat /= dist.get_world_size()
        for tensor, mean in zip(
            tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True
        ):
            tensor.copy_(mean.view_as(tensor))
