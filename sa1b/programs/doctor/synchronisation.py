"""Gradients after a real backward pass of DDP and FSDP on different data, compared with one process.

Equal parameters or gradients on all ranks would prove nothing: DDP copies the parameters of rank 0, and a sum
that is not divided by the number of ranks is equal everywhere. So each rank computes the gradient of the data
of all ranks alone, without communication, and compares its own with it.
"""

import re
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from sa1b.engine.ranks.network import choose
from sa1b.engine.ranks.parallel import wrap
from sa1b.engine.ranks.process_group import start
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import ParallelConfig
from sa1b.programs.doctor.check import RankExchange, RankProcess
from sa1b.programs.doctor.device import small_inputs, small_model
from sa1b.programs.doctor.report import Finding, minorities
from sa1b.report import ranges

GROUP = "process group"
_RANKS = re.compile(r"[Rr]anks? \[?(\d+(?:, *\d+)*)")
_ELEMENTS = 1000
# Largest integer up to which all integers can be represented: the sum of ranks must not be rounded.
_DTYPES = {
    torch.int32: 2**31 - 1,
    torch.int64: 2**63 - 1,
    torch.float32: 2**24,
    torch.float64: 2**53,
    torch.float16: 2**11,
    torch.bfloat16: 2**8,
}


def joined(process: RankProcess, mode: Literal["ddp", "fsdp"] = "ddp") -> RankInfo:
    """This rank in the process group, which starts with the first call. RuntimeError: another rank does not
    answer in time, or cannot be reached. UsageError: two ranks have the same GPU.
    """
    cuda = process.device.type == "cuda"
    if not dist.is_initialized():
        choose("auto", gpus=cuda, out=Path(tempfile.gettempdir())).apply()
    return start(
        ParallelConfig(
            mode=mode,
            device="cuda" if cuda else "cpu",
            timeout_first=process.deadline,
            timeout=process.deadline,
        )
    )


def process_group(process: RankProcess, exchange: RankExchange) -> Iterator[Finding]:
    """Start the group, and wait for all ranks with a barrier that names those that do not reach it."""
    try:
        joined(process)
        # Gloo only: with NCCL, a rank that is missing would hang all others.
        group = dist.new_group(backend="gloo") if process.device.type == "cuda" else None
        dist.monitored_barrier(group, dist.default_pg_timeout.__class__(seconds=process.deadline), True)
    except (RuntimeError, dist.DistError) as error:
        yield _absent(process, error)
        return
    backend = "gloo and NCCL" if process.device.type == "cuda" else "gloo"
    yield Finding(GROUP, "ok", f"{process.world_size} ranks passed the barrier, {backend}")


def _absent(process: RankProcess, error: Exception) -> Finding:
    text = " ".join(str(error).split())
    named = _RANKS.findall(text)
    missing = tuple(int(rank) for rank in named[-1].split(",")) if named else ()
    missing = tuple(rank for rank in missing if rank != process.rank)
    if process.rank > 0 and ("successfully reached" in text or "prefix/" in text):
        return Finding(GROUP, "skipped", "rank 0 waits for other ranks", "Fix that first")
    if missing and process.rank == 0:
        return Finding(
            GROUP,
            "failed",
            f"no answer within {process.deadline:g} s, though they had reached the store",
            "Look at these ranks: `py-spy dump --pid` shows where one hangs, `kill -CONT` continues one that "
            "is stopped; if they wait for rank 0, look at the check 'reachability'",
            ranks=missing,
            values={"error": text},
        )
    return Finding(
        GROUP,
        "failed",
        text[:200],
        "Look at the check 'reachability'; if it is ok, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME must name "
        "the interface to the other machines",
        values={"error": text},
    )


def rank_sum(
    process: RankProcess, exchange: RankExchange, contribution: int | None = None
) -> Iterator[Finding]:
    """Sum of the rank numbers in each format on the device; `contribution` replaces this rank's number."""
    rank_info = joined(process)
    expected = process.world_size * (process.world_size - 1) // 2
    contributed = process.rank if contribution is None else contribution
    dtypes = [dtype for dtype, largest in _DTYPES.items() if expected <= largest]
    wrong = []
    for dtype in dtypes:
        values = torch.full((_ELEMENTS,), contributed, dtype=dtype, device=rank_info.device)
        dist.all_reduce(values)
        sums = values.cpu()
        bad = (sums != expected).nonzero().flatten()
        if len(bad):
            name = str(dtype).removeprefix("torch.")
            where = "" if len(bad) == _ELEMENTS else f" in {len(bad)} of {_ELEMENTS} elements"
            wrong.append(f"{sums[bad[0]].item():g} in {name}{where}")
    gathered = [torch.empty(1, device=rank_info.device) for _ in range(process.world_size)]
    dist.all_gather(gathered, torch.full((1,), float(contributed), device=rank_info.device))
    contributions = [int(element.item()) for element in gathered]
    others = [f"rank {rank} sent {value}" for rank, value in enumerate(contributions) if value != rank]
    name, values_ = "rank sum", {"expected": expected, "received": contributions}
    if wrong or others:
        figure = f"{', '.join(wrong) or 'right'}, expected {expected}"
        figure += f"; {', '.join(others[:4])}" if others else "; each rank sent its number"
        remedy = (
            "Drain the machines of the named ranks and run their GPU diagnostics (dcgmi diag -r 3)"
            if others
            else "Set NCCL_ALGO=Ring, then NCCL_P2P_DISABLE=1: if one of them helps, links of GPUs corrupt "
            "data (dcgmi diag -r 3); else install another NCCL"
        )
        yield Finding(name, "failed", figure, remedy, values=values_)
        return
    yield Finding(name, "ok", f"{expected} in {len(dtypes)} number formats", values=values_)


GRADIENTS = "gradients"
_DATA = 8  # different inputs; rank r has number r % 8, so 8 passes are enough for any number of ranks
_TOLERANCE = 1e-4  # relative to the largest value of a gradient: the ranks are summed in another order

Gradients = Mapping[str, Tensor]


def gradients(
    process: RankProcess,
    exchange: RankExchange,
    alter: Callable[[nn.Module], None] = lambda module: None,
    modes: Sequence[Literal["ddp", "fsdp"]] = ("ddp", "fsdp"),
) -> Iterator[Finding]:
    """Compare gradients with those of other ranks and of one process; `alter` changes the wrapped model."""
    numbers = [rank % _DATA for rank in range(process.world_size)]
    alone = {number: _backward(small_model().to(process.device), number) for number in sorted(set(numbers))}
    of_this_rank = alone[numbers[process.rank]]
    mean = {name: torch.stack([alone[number][name] for number in numbers]).mean(0) for name in of_this_rank}
    for mode in modes:
        rank_info = joined(process, mode)
        module = wrap(small_model(), ParallelConfig(mode=mode), rank_info)
        alter(module)
        computed = _backward(module, numbers[process.rank])
        wrong = [name for name in mean if not _equal(computed.get(name), mean[name])]
        if mode == "ddp":  # ranks of fsdp have different shards
            exchange.send(
                "gradients/digests", None if wrong else {name: _digest(computed[name]) for name in computed}
            )
        if wrong:
            name = wrong[0]
            more = f" and {len(wrong) - 1:,} more of {len(mean):,}" if len(wrong) > 1 else ""
            what = _difference(computed.get(name), mean[name], of_this_rank[name], process.world_size)
            yield Finding(
                GRADIENTS,
                "failed",
                f"{mode}: {name}{more}: {what}",
                _remedy(what),
                values={"mode": mode, "parameters": wrong},
            )
        else:
            yield Finding(GRADIENTS, "ok", f"{mode}: {len(mean)} gradients are those of one process")
        if process.rank == 0 and mode == "ddp":
            yield from differing(
                {
                    rank: digests
                    for rank, digests in exchange.receive("gradients/digests").items()
                    if digests is not None
                }
            )


def _backward(module: nn.Module, number: int) -> dict[str, Tensor]:
    device = next(module.parameters()).device
    loss: Tensor = module(*small_inputs(device, number))["loss"]
    torch.autograd.backward(loss)
    return {
        name.removeprefix("module."): parameter.grad.detach()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def _same_shard(whole: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """A complete tensor and a gradient, both reduced to the part that this rank has."""
    if not isinstance(like, DTensor):
        return whole, like
    part = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return part.to_local(), like.to_local()


def _equal(gradient: Tensor | None, expected: Tensor) -> bool:
    if gradient is None:
        return not expected.any()
    limit = _TOLERANCE * float(expected.abs().max()) + 1e-7
    part, local = _same_shard(expected, gradient)
    return local.shape == part.shape and bool(((local - part).abs() <= limit).all())


def _difference(gradient: Tensor | None, expected: Tensor, alone: Tensor, world_size: int) -> str:
    if gradient is None:
        return "has no gradient"
    if _equal(gradient, alone):
        return "not synchronised, it is the gradient of the data of this rank alone"
    part, local = _same_shard(expected, gradient)
    if not local.numel() or local.shape != part.shape:
        return f"has the shape {list(local.shape)}, expected {list(part.shape)}"
    if not bool(torch.isfinite(local).all()):
        return "is not finite"
    at = int(part.abs().argmax())
    right, wrong = float(part.flatten()[at]), float(local.flatten()[at])
    factor = wrong / right if right else 0.0
    if factor and _equal(gradient, expected * factor):
        what = f"the mean over the ranks times {factor:.4g}"
        return f"{what}, the sum" if abs(factor - world_size) < 1e-3 * world_size else what
    return f"element {at} is {wrong:.6g}, expected {right:.6g}"


def _remedy(what: str) -> str:
    if "synchronised" in what or "no gradient" in what:
        return (
            "Look for no_sync, set_requires_gradient_sync(False), or a hook that leaves out the reduction, "
            "on these ranks"
        )
    if "times" in what:
        return "Look for a communication hook that divides by another number than that of the ranks"
    return (
        "If the check 'rank sum' is ok, look for hooks on these ranks and for versions that differ; else fix "
        "that first"
    )


def _digest(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def differing(answers: Mapping[int, Mapping[str, int]]) -> Iterator[Finding]:
    """Ranks whose gradients differ from those of most; `answers`: rank -> parameter -> digest."""
    for name in next(iter(answers.values()), {}):
        digest_of = {rank: str(digests.get(name)) for rank, digests in answers.items()}
        for _, _, _, most in minorities(digest_of):
            ranks = tuple(rank for rank in digest_of if rank not in most)
            yield Finding(
                GRADIENTS,
                "failed",
                f"ddp: {name}: has other bytes than on ranks {ranges(most)}",
                "Weights drift apart in every step: look for hooks on these ranks and for versions that "
                "differ",
                ranks=ranks,
            )
            return
