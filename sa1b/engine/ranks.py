"""The ranks of a run: this process, work that succeeds or fails on all ranks, equality of models.

If one rank raises an error while the others continue, they wait for it. So results and errors are exchanged
together, and an error on any rank is raised on all ranks.

Training itself would not detect ranks that initialise their weights from different seeds, read different
checkpoints or build different models. DDP would apply gradients of one model to the weights of another, and
FSDP would assemble a model from shards of several models. `agree` compares the ranks.
"""

import datetime
import hashlib
import secrets
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Generic, TypeVar, cast

import torch
import torch.distributed as dist
from isal import isal_zlib
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sa1b.errors import CheckpointError, Sa1bError, UsageError


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank of a run and its device.

    Attributes:
        rank: rank of this process, from 0 to world_size - 1.
        local_rank: rank on this machine; the index of its GPU.
        device: device of this rank; a GPU has an index.
        mesh: FSDP only: ranks by "shard", or by "replicate" and "shard", in ascending order.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh | None = None

    @property
    def shards(self) -> int:
        """Number of ranks over which one copy of the model is sharded."""
        return self.mesh["shard"].size() if self.mesh else 1


T = TypeVar("T")
# Timeout of collectives outside of training. It is long because a slow disk must not end a run; a lost rank
# is detected at once.
_TIMEOUT = datetime.timedelta(hours=1)
_ELSEWHERE = -1  # in place of the digest of a tensor that another rank has; a crc32 is never negative
_SHOWN_AFTER = 5.0  # seconds within which a host must see a file that another host has created
PEER_LOST = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


def lost_peer(error: Exception) -> bool:
    """Whether an error of a collective means that another rank ended or does not answer."""
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in PEER_LOST)


def explain(error: Exception, rank: int, world_size: int) -> str:
    """The message of a failing rank: its error, or one line if it only lost another rank.

    Errors of this package and of the operating system are printed without a traceback, all others with one.
    """
    lines = [f"rank {rank}: {note}" for note in getattr(error, "__notes__", [])]
    where = "error" if world_size == 1 else f"error on rank {rank}"
    if isinstance(error, Sa1bError | OSError):
        return "\n".join([*lines, f"{where}: {error}\n"])
    text = str(error)
    if lost_peer(error):
        reason = (text.splitlines() or [type(error).__name__])[0]
        lines.insert(0, f"rank {rank} ends because another rank ended or does not answer ({reason})")
        return "\n".join([*lines, ""])
    trace = "".join(traceback.format_exception(error))
    return f"{trace}{where}: {type(error).__name__}: {text}\n"


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    value: T | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a run with a separate gloo group, which a thread may use in parallel with training.

    Attributes:
        group: the gloo group; None for a single process.
    """

    rank: int
    world_size: int
    group: dist.ProcessGroup | None

    def on_all(self, work: Callable[[], T]) -> list[T]:
        """Do `work` on every rank and return the results of all ranks, in the order of ranks.

        Raises:
            CheckpointError: the work failed on any rank; the message contains the errors of all ranks.
        """
        own = _attempt(work)
        outcomes: list[_Outcome[T]] = [own] * self.world_size
        if self.group is not None:
            dist.all_gather_object(outcomes, own, group=self.group)
        return _values(outcomes)

    def on_first(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 and return its result on every rank.

        Raises:
            CheckpointError: the work failed.
        """
        outcomes: list[_Outcome[T] | None] = [_attempt(work) if self.rank == 0 else None]
        if self.group is not None:
            dist.broadcast_object_list(outcomes, src=0, group=self.group)
        return _values([cast(_Outcome[T], outcomes[0])])[0]


def ranks() -> Ranks:
    """Rank and device of this process in the default process group; collective if a group exists."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks(0, 1, None)
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=_TIMEOUT))


def _attempt(work: Callable[[], T]) -> _Outcome[T]:
    try:
        return _Outcome(work(), None)
    except (Exception, CheckpointException) as error:  # KeyboardInterrupt is a BaseException
        return _Outcome(None, _text(error))


def _values(outcomes: list[_Outcome[T]]) -> list[T]:
    # Ranks often fail with the same message.
    if errors := list(dict.fromkeys(outcome.error for outcome in outcomes if outcome.error is not None)):
        raise CheckpointError("; ".join(errors))
    return [cast(T, outcome.value) for outcome in outcomes]


def _text(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(f"{_text(part[0])} (rank {rank})" for rank, part in error.failures.items())
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    return str(error) if isinstance(error, Sa1bError) else f"{type(error).__name__}: {error}"


def check_shared_folder(folder: Path, rank_info: RankInfo) -> None:
    """Create a folder and check that all ranks see the same folder; collective.

    Rank 0 writes a file with a random name. The others look for it for some seconds: a network file system
    may show new files late.

    Raises:
        UsageError: some ranks see another folder: raised on all ranks, with a message that names these ranks
            and their hosts. If this rank cannot create or write the folder, only this rank raises the error.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--out {folder}: cannot be created ({error.strerror}); pass a folder that this user can write"
        ) from None
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"--out {folder}: cannot be written ({error.strerror}); pass a folder that this user can write"
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
    own = (token.exists(), f"{rank_info.rank} (host {socket.gethostname()}, {folder.resolve()})")
    of_all = [own] * rank_info.world_size
    dist.all_gather_object(of_all, own)
    token.unlink(missing_ok=True)
    if others := [where for seen, where in of_all if not seen]:
        raise UsageError(
            f"--out {folder}: the folder of rank {of_all[0][1]} differs on ranks {', '.join(others[:4])}"
            f"{f' and {len(others) - 4} more' if len(others) > 4 else ''}; pass an absolute path on a file "
            "system that all ranks share, since they write one checkpoint together"
        )


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
    ViT-H has 2.5 GB of weights.

    Raises:
        DisagreementError: names the tensors and the ranks that differ.
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
            found = {rank: value for rank, value in values if value != _ELSEWHERE}
            if len(set(found.values())) > 1:
                raise DisagreementError(
                    f"{name}: differs between ranks: {_by_value(found)}; "
                    "build the model from the same seed and load the same checkpoint on every rank"
                )


def _compare_descriptions(described: list[str], digests: Tensor, rank_info: RankInfo) -> None:
    if len(set(digests[:, 0].tolist())) == 1:
        return
    lists: list[list[str]] = [[] for _ in range(rank_info.world_size)]
    dist.all_gather_object(lists, described)
    longest = max(len(one) for one in lists)
    padded = [[*one, *["nothing"] * (longest - len(one))] for one in lists]
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
    """int64 [world_size, len(numbers)] on the CPU."""
    own = torch.tensor(numbers, dtype=torch.int64, device=rank_info.device)
    gathered = [torch.empty_like(own) for _ in range(rank_info.world_size)]
    dist.all_gather(gathered, own)
    return torch.stack(gathered).cpu()
