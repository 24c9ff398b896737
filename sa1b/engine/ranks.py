"""The ranks of a run: this process, work that succeeds or fails on all ranks, equality of models.

A rank that raises while the others go on leaves them waiting for it. So results and errors are exchanged
together, and every caller of a result gets the error of any rank.

Ranks that initialise their weights from different seeds, read different checkpoints or build different models
would not be detected by training itself: DDP would apply gradients of one model to the weights of another,
FSDP would assemble a model from shards of several. `agree` compares them.
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
    """One rank.

    Attributes:
        rank: of `world_size` ranks.
        local_rank: on its machine; the number of its GPU.
        device: with its index, for a GPU.
        mesh: FSDP only: ranks by "shard", or by "replicate" and "shard", in the order of their numbers.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh | None = None

    @property
    def shards(self) -> int:
        """Number of ranks that one copy of the model is spread over."""
        return self.mesh["shard"].size() if self.mesh else 1


T = TypeVar("T")
# Of collectives beside training: a slow disk is no reason to end a run; a lost rank is detected at once.
_TIMEOUT = datetime.timedelta(hours=1)
_SHOWN_AFTER = 5.0  # seconds until each host must see a file that another one has made
_PEER_LOST = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


def explain(error: Exception, rank: int, world_size: int) -> str:
    """What a failing rank prints: its reason, or in one line that it lost a rank that has failed.

    Errors of this package and of the operating system explain themselves; all others come with a traceback.
    """
    lines = [f"rank {rank}: {note}" for note in getattr(error, "__notes__", [])]
    where = "error" if world_size == 1 else f"error on rank {rank}"
    if isinstance(error, Sa1bError | OSError):
        return "\n".join([*lines, f"{where}: {error}\n"])
    text = str(error)
    if isinstance(error, dist.DistError) or any(sign in text for sign in _PEER_LOST):
        reason = (text.splitlines() or [type(error).__name__])[0]
        return f"rank {rank} ends because another rank ended or does not answer ({reason})\n"
    trace = "".join(traceback.format_exception(error))
    return f"{trace}{where}: {type(error).__name__}: {text}\n"


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
    world_size: int
    group: dist.ProcessGroup | None

    def on_all(self, work: Callable[[], T]) -> list[T]:
        """Do `work` on every rank and return what came out, in the order of ranks.

        Raises:
            CheckpointError: it failed on any rank; the message has the errors of all.
        """
        own = _attempt(work)
        outcomes: list[_Outcome[T]] = [own] * self.world_size
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
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=_TIMEOUT))


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
        return "; ".join(f"{_text(part[0])} (rank {rank})" for rank, part in error.failures.items())
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    return str(error) if isinstance(error, Sa1bError) else f"{type(error).__name__}: {error}"


def check_shared_folder(folder: Path, rank_info: RankInfo) -> None:
    """Make a folder and check that it is the same one on all ranks; collective.

    Rank 0 writes a file with a random name. The others look for it for some seconds: a network file system
    may show new files late.

    Raises:
        UsageError: on all ranks; the message names those with another folder, and their hosts. Or, on this
            rank, it cannot be made.
        OSError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--out {folder}: cannot be created ({error.strerror}); pass a folder that this user can write"
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
        list(folder.iterdir())  # makes NFS look at the folder again
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


class DisagreementError(Sa1bError):
    """Ranks hold different models; the message names the first difference and the ranks."""


@torch.no_grad()
def agree(module: nn.Module, rank_info: RankInfo) -> None:
    """Compare all parameters and buffers over all ranks; call it wrapped or not, after every load.

    Names, shapes, dtypes and placements must be the same on all ranks, and so must the bytes of tensors that
    each rank holds whole. Of sharded parameters a rank reads its own shard only, which must be that of the
    other replicas. A shard that exists once cannot be compared: therefore `wrap` compares before it shards.
    Under FSDP what an evaluation left gathered is released.

    One crc32 of each tensor is exchanged, computed at 8.6 GB/s by one thread after a copy from the device;
    ViT-H has 2.5 GB of weights.

    Raises:
        DisagreementError
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
        # Ranks lie in the mesh in the order of their numbers: rank % shards says which shard one holds.
        shards = rank_info.shards if isinstance(tensor, DTensor) else 1
        for shard in range(shards):
            holders = list(range(shard, rank_info.world_size, shards))
            found = digests[holders, column].tolist()
            if len(set(found)) > 1:
                raise DisagreementError(
                    f"{name}: differs between ranks: {_parties(dict(zip(holders, found, strict=True)))}; "
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
        f"ranks 0 to {rank_info.world_size - 1}: their models differ: {_parties(dict(enumerate(first)))}; "
        "pass the same settings to all ranks"
    )


def _parties(values: dict[int, object]) -> str:
    """ "ranks [0, 2] hold A, ranks [1] hold B"."""
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
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    held = held.detach().cpu().contiguous().reshape(-1)
    return int(isal_zlib.crc32(held.view(torch.uint8).numpy()))


def _gather(numbers: list[int], rank_info: RankInfo) -> Tensor:
    """int64 [world_size, len(numbers)] on the CPU."""
    own = torch.tensor(numbers, dtype=torch.int64, device=rank_info.device)
    gathered = [torch.empty_like(own) for _ in range(rank_info.world_size)]
    dist.all_gather(gathered, own)
    return torch.stack(gathered).cpu()
