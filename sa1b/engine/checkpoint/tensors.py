"""The tensors of a model and its optimizer, by names that do not depend on mode or world size:
`model.decoder.weight`, `optimizer.decoder.weight.exp_avg`.

Only tensors are saved, because torch unpickles everything else without a check; `.metadata` is a pickle too.
"""

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sa1b.engine.model import stored
from sa1b.engine.ranks.rank_info import Ranks
from sa1b.errors import CheckpointError
from sa1b.report import first_names

MODEL, OPTIMIZER = "model.", "optimizer."
METADATA = ".metadata"
ALONE = Ranks(0, 1, None)  # a process without others

# The warning is needless: a single process is supported.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class MismatchError(CheckpointError):
    """A good checkpoint of another model, whose state it has; older checkpoints do not fit either."""

    state: dict[str, Any]


_ALLOWED = {
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex TensorStorageMetadata TensorProperties "
    "ChunkStorageMetadata StorageMeta _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": "Size "
    + " ".join(name for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    "pathlib": "PosixPath",
    "pathlib._local": "PosixPath",
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, "").split():
            return super().find_class(module, name)
        raise ValueError(f"it names {module}.{name}, which is not allowed in a table of contents")


def read_table(folder: Path) -> Metadata:
    """The tensors of a checkpoint and their places in its files; no code from the pickle runs."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            table: Metadata = _Unpickler(file).load()
    except Exception as error:
        why = f"not a table of tensors ({error or type(error).__name__})"
        raise CheckpointError(f"{path}: {why}; use an older checkpoint") from None
    return table


def _entries(folder: Path) -> dict[str, TensorStorageMetadata]:
    entries = read_table(folder).state_dict_metadata.items()
    return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


class _Reader(FileSystemReader):
    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return read_table(Path(self.path))


def gather(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Tensor]:
    """The tensors by name, not copied; under FSDP each rank's shards, as DTensors."""
    # Under FSDP this call also releases gathered parameters, so that later calls use the shards.
    tensors = {f"{MODEL}{name}": tensor for name, tensor in stored(model).state_dict().items()}
    names: dict[Tensor, str] = {one: name for name, one in stored(model).named_parameters()}
    for parameter, values in optimizer.state.items() if optimizer is not None else ():
        tensors |= {f"{OPTIMIZER}{names[parameter]}.{key}": value for key, value in values.items()}
    return tensors


def share(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """The tensors that this rank writes: its shards, and an equal share (by bytes) of the unsharded ones."""
    own: dict[str, Tensor] = {}
    load = [0] * world_size
    for name, tensor in tensors.items():
        owner = rank if isinstance(tensor, DTensor) else load.index(min(load))
        load[owner] += 0 if isinstance(tensor, DTensor) else tensor.nbytes
        if owner == rank:
            own[name] = tensor
    return own


def bytes_of(model: nn.Module, moments: int = 2) -> int:
    """The size of a checkpoint, about."""
    trained = [parameter for parameter in stored(model).parameters() if parameter.requires_grad]
    tensors = [*gather(model).values(), *trained * moments]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def load(folder: Path, model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> None:
    """Fill a model and its optimizer's state in place; collective."""
    entries, targets = _entries(folder), gather(model)
    saved = {name: (entry.properties.dtype, entry.size) for name, entry in entries.items()}
    needed = {name: (tensor.dtype, tensor.shape) for name, tensor in targets.items()}
    model_names = needed.keys() | {name for name in saved if name.startswith(MODEL)}
    if differing := sorted(name for name in model_names if saved.get(name) != needed.get(name)):
        # Torch ignores a tensor that the model does not have, and casts one of another dtype.
        names = first_names(differing, 3)
        raise MismatchError(f"{folder}: of another model, which differs in {names}; pass its settings")
    groups = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    trained = {name: parameter for name, parameter in stored(model).named_parameters() if parameter in groups}
    optimizer.state.clear()
    for full in (name for name in saved if name.startswith(OPTIMIZER)):
        name, _, key = full.removeprefix(OPTIMIZER).rpartition(".")
        if name not in trained:  # `restore` refuses another --optim.freeze
            continue
        like, (dtype, size) = trained[name], saved[full]
        # What has not the shape of its parameter is a count of steps.
        count = torch.zeros(size, dtype=dtype, device=like.device)
        moment = torch.zeros_like(like, dtype=dtype).detach()
        targets[full] = optimizer.state[like][key] = moment if size == like.shape else count
    ranks.on_all(lambda: _read(folder, targets, ranks))


def read_weights(folder: Path, *, mean: bool = True) -> dict[str, Tensor]:
    """The weights of a checkpoint by their published names, on the CPU; `mean`: the running mean, if any."""
    entries = _entries(folder)
    names = [name.removeprefix(MODEL) for name in entries if name.startswith(MODEL)]
    means = {name: f"{OPTIMIZER}{name}.ema" for name in names}
    sources = {name: means[name] if mean and means[name] in entries else f"{MODEL}{name}" for name in names}
    targets = {
        source: torch.empty(entries[source].size, dtype=entries[source].properties.dtype)
        for source in sources.values()
    }
    ALONE.on_all(lambda: _read(folder, targets, ALONE))
    return {name: targets[source] for name, source in sources.items()}


def _read(folder: Path, targets: dict[str, Tensor], ranks: Ranks) -> None:
    # Tensors are filled in place; a dict that torch replaces values in stays as it is.
    reader, group = _Reader(folder), ranks.group
    state_dict_loader.load(dict(targets), storage_reader=reader, process_group=group, no_dist=group is None)
