"""Checks that all ranks have the same folder and the same model.

Training itself would not detect ranks that initialise their weights from different seeds, read different
checkpoints or build different models. DDP would apply gradients of one model to the weights of another, and
FSDP would assemble a model from shards of several models. `agree` compares the ranks.
"""

import hashlib
import secrets
import socket
import time
from pathlib import Path
from tempfile import TemporaryFile

import torch
import torch.distributed as dist
from isal import isal_zlib
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sa1b.engine.checkpoint.resume import check_files
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.errors import Sa1bError, UsageError
from sa1b.limit import Limited, OverdueError
from sa1b.storage.store import FolderStore

_ELSEWHERE = -1  # in place of the digest of a tensor that another rank has; a crc32 is never negative

_SHOWN_AFTER = 5.0  # seconds within which a host must see a file that another host has created


def check_shared_folder(folder: Path, rank_info: RankInfo, limit: float) -> None:
    """Create a folder and check that all ranks see the same folder; collective.

    Rank 0 writes a file with a random name. The others look for it for some seconds: a network file system
    may show new files late. The disk must answer within `limit` seconds.

    UsageError, on all ranks, names the ranks that see another folder, and their hosts. Only this rank raises
    it if it cannot create or write the folder, or if that has files that no run wrote, see `check_files`.
    """
    try:
        Limited().call(lambda: _check_files(folder), limit)
    except OverdueError as error:
        raise UsageError(
            f"--out {folder}: {error} (--data.deadline); check the disk or the server of its mount"
        ) from None
    if rank_info.world_size == 1:
        return
    names: list[str] = [f".shared-{secrets.token_hex(8)}"]
    dist.broadcast_object_list(names, src=0)
    token = folder / names[0]
    if rank_info.rank == 0:
        token.touch()
    dist.barrier()
    end = time.monotonic() + _SHOWN_AFTER
    while not token.exists() and time.monotonic() < end and rank_info.rank > 0:
        list(folder.iterdir())  # listing makes NFS refresh the folder
        time.sleep(0.05)
    observation = (token.exists(), f"{rank_info.rank} (host {socket.gethostname()}, {folder.resolve()})")
    of_all = [observation] * rank_info.world_size
    dist.all_gather_object(of_all, observation)
    token.unlink(missing_ok=True)
    if others := [where for seen, where in of_all if not seen]:
        raise UsageError(
            f"--out {folder}: the folder of rank {of_all[0][1]} differs on ranks {', '.join(others[:4])}"
            f"{f' and {len(others) - 4} more' if len(others) > 4 else ''}; pass an absolute path on a file "
            "system that all ranks share, since they write one checkpoint together"
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


def hosts(rank_info: RankInfo) -> list[str]:
    """The machine of each rank; collective."""
    names = [socket.gethostname()] * rank_info.world_size
    if rank_info.world_size > 1:
        dist.all_gather_object(names, names[0])
    return names


class DisagreementError(Sa1bError):
    """Ranks with different models, settings or images; the message names the difference and the ranks."""


@torch.no_grad()
def agree(module: nn.Module, rank_info: RankInfo) -> None:
    """Compare all parameters and buffers over all ranks, wrapped or not; call it after every load.

    Names, shapes, dtypes and placements must be the same on all ranks, and so must the bytes of unsharded
    tensors. For sharded parameters, each rank reads only its own shard, which must equal the same shard of
    the other replicas. A shard without a replica cannot be compared; therefore `wrap` compares before it
    shards. Under FSDP, parameters that an evaluation left gathered are released. A tensor of one stage of a
    pipeline is on the meta device of the other ranks, and is compared by its name, shape and dtype only.

    The ranks exchange one crc32 per tensor, computed at 8.6 GB/s by one thread after a copy from the device.
    ViT-H has 2.5 GB of weights. DisagreementError names the tensors and the ranks that differ.
    """
    if rank_info.world_size == 1:
        return
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    named = [*module.named_parameters(), *module.named_buffers()]
    tensors = {name.removeprefix("module."): tensor for name, tensor in sorted(named)}  # DDP's prefix
    described = [f"{name}: {_description(tensor)}" for name, tensor in tensors.items()]
    of_all = hashlib.sha256("\n".join(described).encode()).digest()[:8]
    _compare_descriptions(
        described, _gather([int.from_bytes(of_all, "little", signed=True)], rank_info), rank_info
    )

    digests = _gather([_digest(tensor) for tensor in tensors.values()], rank_info)
    for column, (name, tensor) in enumerate(tensors.items()):
        # The mesh has ranks in ascending order: rank % shards is the index of a rank's shard.
        shards = rank_info.shards if isinstance(tensor, DTensor) else 1
        for shard in range(shards):
            holders = list(range(shard, rank_info.world_size, shards))
            values = zip(holders, digests[holders, column].tolist(), strict=True)
            by_rank = {rank: value for rank, value in values if value != _ELSEWHERE}
            if len(set(by_rank.values())) > 1:
                raise DisagreementError(
                    f"{name}: differs between ranks: {_by_value(by_rank)}; "
                    "build the model from the same seed and load the same checkpoint on every rank"
                )


def _compare_descriptions(described: list[str], digests: Tensor, rank_info: RankInfo) -> None:
    if len(set(digests[:, 0].tolist())) == 1:
        return
    lists: list[list[str]] = [[] for _ in range(rank_info.world_size)]
    dist.all_gather_object(lists, described)
    longest = max(len(parts) for parts in lists)
    padded = [[*parts, *["nothing"] * (longest - len(parts))] for parts in lists]
    first = next(column for column in zip(*padded, strict=True) if len(set(column)) > 1)
    raise DisagreementError(
        f"ranks 0 to {rank_info.world_size - 1}: their models differ: {_by_value(dict(enumerate(first)))}; "
        "pass the same settings to all ranks"
    )


def _by_value(values: dict[int, object]) -> str:
    """Values and their ranks as text: "ranks [0, 2] hold A, ranks [1] hold B"."""
    parties: dict[object, list[int]] = {}
    for rank, value in values.items():
        parties.setdefault(value, []).append(rank)
    return ", ".join(
        f"ranks {members} hold {value:#010x}" if isinstance(value, int) else f"ranks {members} hold {value}"
        for value, members in parties.items()
    )


def _description(tensor: Tensor) -> str:
    placed = str(tensor.placements) if isinstance(tensor, DTensor) else ""
    return f"{tuple(tensor.shape)} {tensor.dtype} {placed}"


def _digest(tensor: Tensor) -> int:
    if tensor.is_meta:
        return _ELSEWHERE
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    held = held.detach().cpu().contiguous().reshape(-1)
    return int(isal_zlib.crc32(held.view(torch.uint8).numpy()))


def _gather(numbers: list[int], rank_info: RankInfo) -> Tensor:
    values = torch.tensor(numbers, dtype=torch.int64, device=rank_info.device)
    gathered = [torch.empty_like(values) for _ in range(rank_info.world_size)]
    dist.all_gather(gathered, values)
    return torch.stack(gathered).cpu()
