"""The process group of the ranks, started as training starts it, and the sum of the ranks over it."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from sa1b.engine.ranks.network import choose
from sa1b.engine.ranks.process_group import start
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import ParallelConfig
from sa1b.programs.doctor.check import RankProcess
from sa1b.programs.doctor.exchange import RankExchange
from sa1b.programs.doctor.report import Finding

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
    """This rank in the process group, which starts with the first call.

    Raises:
        RuntimeError: another rank did not answer within the deadline, or cannot be reached.
        UsageError: two ranks have the same GPU.
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
    """Sum of the rank numbers by all-reduce on the device of the ranks, in each number format.

    `contribution`: the value that this rank adds; by default its number.
    """
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
