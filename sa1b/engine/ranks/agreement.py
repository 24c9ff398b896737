"""Checks that all ranks have the same folder, settings and model, which training would not detect."""

import secrets
import socket
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from isal import isal_zlib
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sa1b.engine.checkpoint.folder import check_files
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.errors import Sa1bError, UsageError
from sa1b.limit import Limited, OverdueError
from sa1b.report import first_names
from sa1b.storage.store import FolderStore

_SHOWN_AFTER = 5.0  # seconds within which a host must see a file that another host has created


def check_shared_folder(folder: Path, rank_info: RankInfo, limit: float) -> None:
    """Create a folder, within `limit` seconds, and check that all ranks see the same one; collective."""

    def check() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        check_files(FolderStore(folder), str(folder))

    try:
        Limited().call(check, limit)
    except OverdueError as error:
        raise UsageError(f"--out {folder}: {error} (--data.deadline); check the disk") from None
    token = folder / rank_info.gather(f".shared-{secrets.token_hex(8)}")[0]
    if rank_info.rank == 0:
        token.touch()
    rank_info.gather(None)
    end = time.monotonic() + _SHOWN_AFTER
    while not token.exists() and time.monotonic() < end and rank_info.rank > 0:
        list(folder.iterdir())  # listing makes NFS refresh the folder
        time.sleep(0.05)
    where = f"{rank_info.rank} (host {socket.gethostname()}, {folder.resolve()})"
    of_all = rank_info.gather((token.exists(), where))
    token.unlink(missing_ok=True)
    if others := [where for seen, where in of_all if not seen]:
        raise UsageError(
            f"--out {folder}: the folder of rank {of_all[0][1]} differs on ranks {first_names(others, 4)}; "
            "pass an absolute path on a file system that all ranks share"
        )


class DisagreementError(Sa1bError):
    """Ranks with different models, settings or images; the message names the difference and the ranks."""


def agree(own: Mapping[str, tuple[int, Any]], rank_info: RankInfo, way: str = "") -> None:
    """DisagreementError, on all ranks, if their values of a name differ: name -> number of a shard, value."""
    of_all = rank_info.gather(own)
    for name in dict.fromkeys(chain(*of_all)):
        first: dict[int, tuple[int, Any]] = {}
        for rank, one in enumerate(of_all):
            shard, value = one.get(name, (0, "missing"))
            known, expected = first.setdefault(shard, (rank, value))
            if value != expected:
                message = f"{name} is {value!r} on rank {rank} and {expected!r} on rank {known}{way}"
                raise DisagreementError(message)


@torch.no_grad()
def agree_on_weights(module: nn.Module, rank_info: RankInfo) -> None:
    """Compare the crc32 of parameters and buffers over all ranks; shards with those of other replicas."""
    if rank_info.world_size == 1:
        return
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # an evaluation may have left parameters gathered
    own = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        held, shard, placed = tensor.detach(), 0, ""
        if isinstance(held, DTensor):
            shard, placed = held.device_mesh.get_local_rank("shard"), f" {held.placements}"
            held = held.to_local()
        values = held.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        described = f"{tuple(tensor.shape)} {tensor.dtype}{placed}, crc32 {isal_zlib.crc32(values):#010x}"
        own[name.removeprefix("module.")] = shard, described  # without DDP's prefix
    way = "build the model from the same seed, and load the same checkpoint on every rank"
    agree(own, rank_info, f"; {way}")
