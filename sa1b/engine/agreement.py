"""Whether all ranks hold the same model.

What it guards: ranks that draw their initial weights from different seeds, read different checkpoints, or
build different models. DDP would train on without a word, with gradients of one model on the weights of
another; FSDP would put a model together from pieces of several.
"""

import hashlib

import torch
import torch.distributed as dist
from isal import isal_zlib
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sa1b.engine.place import Place
from sa1b.errors import Sa1bError


class DisagreementError(Sa1bError):
    """Ranks hold different models; the message names the first difference and the ranks."""


@torch.no_grad()
def agree(module: nn.Module, place: Place) -> None:
    """Compare all parameters and buffers over all ranks; call it wrapped or not, after every load.

    Names, shapes, dtypes and placements must be the same on all ranks, and so must the bytes of tensors that
    each rank holds whole. Of sharded parameters a rank reads its own shard only, which must be that of the
    other replicas. A shard that exists once has nothing to be held against: therefore `wrap` compares before
    it shards. Under FSDP what an evaluation left gathered is let go.

    One crc32 of each tensor travels, made at 8.6 GB/s by one thread after a copy from the device; ViT-H has
    2.5 GB of weights.

    Raises:
        DisagreementError
    """
    if place.world == 1:
        return
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    named = [*module.named_parameters(), *module.named_buffers()]
    tensors = {name.removeprefix("module."): tensor for name, tensor in sorted(named)}  # DDP's prefix
    described = [f"{name}: {_description(tensor)}" for name, tensor in tensors.items()]
    of_all = hashlib.sha256("\n".join(described).encode()).digest()[:8]
    _compare_descriptions(described, _gather([int.from_bytes(of_all, "little", signed=True)], place), place)

    digests = _gather([_digest(tensor) for tensor in tensors.values()], place)
    for column, (name, tensor) in enumerate(tensors.items()):
        # Ranks lie in the mesh in the order of their numbers: rank % shards says which shard one holds.
        shards = place.shards if isinstance(tensor, DTensor) else 1
        for shard in range(shards):
            holders = list(range(shard, place.world, shards))
            found = digests[holders, column].tolist()
            if len(set(found)) > 1:
                raise DisagreementError(
                    f"{name} differs between ranks: {_parties(dict(zip(holders, found, strict=True)))}; "
                    "build the model from the same seed and load the same checkpoint on every rank"
                )


def _compare_descriptions(described: list[str], digests: Tensor, place: Place) -> None:
    if len(set(digests[:, 0].tolist())) == 1:
        return
    lists: list[list[str]] = [[] for _ in range(place.world)]
    dist.all_gather_object(lists, described)
    longest = max(len(one) for one in lists)
    padded = [[*one, *["nothing"] * (longest - len(one))] for one in lists]
    first = next(column for column in zip(*padded, strict=True) if len(set(column)) > 1)
    raise DisagreementError(f"ranks have built different models: {_parties(dict(enumerate(first)))}")


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


def _gather(numbers: list[int], place: Place) -> Tensor:
    """int64 [world, len(numbers)] on the CPU."""
    own = torch.tensor(numbers, dtype=torch.int64, device=place.device)
    gathered = [torch.empty_like(own) for _ in range(place.world)]
    dist.all_gather(gathered, own)
    return torch.stack(gathered).cpu()
