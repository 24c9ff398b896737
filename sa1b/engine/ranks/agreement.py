"""Checks that all ranks have the same folder and the same model. Training itself would not detect that: DDP
would apply gradients of one model to the weights of another, and FSDP would assemble a model from shards of
several.
"""

import secrets
import socket
import time
from pathlib import Path
from tempfile import TemporaryFile

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
    """Create a folder and check that all ranks see the same folder; collective. The others look for a file of
    rank 0 for some seconds: a network file system may show new files late.

    Only this rank raises UsageError if the disk does not answer within `limit` seconds, if the folder cannot
    be written, or if it has files that no run wrote.
    """
    try:
        Limited().call(lambda: _check_files(folder), limit)
    except OverdueError as error:
        raise UsageError(
            f"--out {folder}: {error} (--data.deadline); check the disk or the server of its mount"
        ) from None
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
            "pass an absolute path on a file system that all ranks share, since they write one checkpoint "
            "together"
        )


def _check_files(folder: Path) -> None:
    what = "created"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        what = "written"
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"--out {folder}: cannot be {what} ({error.strerror}); pass a folder that this user can write"
        ) from None
    check_files(FolderStore(folder), str(folder))


class DisagreementError(Sa1bError):
    """Ranks with different models, settings or images; the message names the difference and the ranks."""


@torch.no_grad()
def agree_on_weights(module: nn.Module, rank_info: RankInfo) -> None:
    """Compare all parameters and buffers over all ranks, wrapped or not; call it after every load.

    A shard is compared with the same shard of the other replicas; `wrap` compares before it shards. The ranks
    exchange a crc32 of each tensor, computed at 8.6 GB/s after a copy from the device.
    """
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
        described = f"{tuple(tensor.shape)} {tensor.dtype}{placed}"
        own[name.removeprefix("module.")] = described, shard, isal_zlib.crc32(values)  # without DDP's prefix
    of_all = rank_info.gather(own)
    for name in dict.fromkeys(name for one in of_all for name in one):
        first: dict[int, tuple[int, str]] = {}
        for rank, one in enumerate(of_all):
            described, shard, crc = one.get(name, ("missing", 0, 0))
            value = f"{described}, crc32 {crc:#010x}"
            known, expected = first.setdefault(shard, (rank, value))
            if value != expected:
                raise DisagreementError(
                    f"{name}: is {expected} on rank {known} and {value} on rank {rank}; build the model from "
                    "the same seed and settings, and load the same checkpoint on every rank"
                )
