"""The tensors of a model and its optimizer, with names that do not depend on mode or world size.

The name of a parameter is `model.` and its published name. The name of optimizer state is `optimizer.`, the
published name, and the optimizer's key: `optimizer.decoder.weight.exp_avg`. DDP and FSDP do not change the
names, so a checkpoint of one mode can be loaded in the other, at any world size.
"""

import warnings
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sa1b.arguments import BadType
from sa1b.engine.checkpoint.sealed_folder import MetadataReader, Writer
from sa1b.engine.model import stored
from sa1b.engine.ranks.rank_info import Ranks
from sa1b.errors import CheckpointError
from sa1b.report import first_names

MODEL, OPTIMIZER = "model.", "optimizer."

# The warning is needless: a single process is supported.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class MismatchError(CheckpointError):
    """A good checkpoint of another model, whose state it has; older checkpoints do not fit either."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.state: dict[str, Any] = {}


def gather(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Tensor]:
    """The tensors by name, not copied; under FSDP each rank's shards, as DTensors.

    The model declares its `weights()` or is a plain module, in any mode.
    """
    tensors = _weights(model)
    if optimizer is not None:
        names = _names(model)
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                if not isinstance(value, Tensor):
                    keeper, kind = type(optimizer).__name__, type(value).__name__
                    raise BadType(f"optimizer {keeper}: keeps {key} as {kind}; it must keep tensors")
                tensors[f"{OPTIMIZER}{names[parameter]}.{key}"] = value
    return tensors


def share(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """The tensors that this rank writes: its shards, and an equal share (by bytes) of the unsharded ones."""
    rank_tensors: dict[str, Tensor] = {}
    load = [0] * world_size
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            rank_tensors[name] = tensor
            continue
        owner = load.index(min(load))
        load[owner] += tensor.nbytes
        if owner == rank:
            rank_tensors[name] = tensor
    return rank_tensors


def write(folder: Path, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Write each rank's tensors into `folder`, one file a rank, and the table of contents; collective."""
    state_dict_saver.save(
        dict(tensors),
        # One thread, because torch loses errors of other threads. No prefetching of copies, because every
        # rank would create streams on the first GPU.
        storage_writer=Writer(folder, thread_count=1, per_thread_copy_ahead=0),
        process_group=ranks.group,
        no_dist=ranks.group is None,
    )


def load(
    folder: Path, metadata: Metadata, model: nn.Module, optimizer: Optimizer | None, ranks: Ranks
) -> None:
    """Fill a model, and an optimizer if there is one, in place; collective.

    The hyperparameters of the optimizer's groups do not change: they come from the configuration.
    MismatchError: names or shapes differ. CheckpointError: tensors cannot be read; both may be partly filled.
    """
    targets = _weights(model)
    _compare(folder, metadata, targets)
    states = _empty_states(folder, metadata, model, optimizer) if optimizer is not None else {}
    for name, values in states.items():
        targets |= {f"{OPTIMIZER}{name}.{key}": value for key, value in values.items()}
    ranks.on_all(lambda: _read(folder, metadata, targets, ranks))
    if optimizer is not None:
        names, packed = _names(model), optimizer.state_dict()
        numbered = zip(
            (number for group in packed["param_groups"] for number in group["params"]),
            (parameter for group in optimizer.param_groups for parameter in group["params"]),
            strict=True,
        )
        packed["state"] = {
            number: states[names[parameter]] for number, parameter in numbered if names[parameter] in states
        }
        optimizer.load_state_dict(packed)


def read_weights(folder: Path, metadata: Metadata, *, mean: bool = True) -> dict[str, Tensor]:
    """The weights of a checkpoint by their published names, on the CPU; not collective. If the run has a
    running mean of the weights (--optim.ema), it is read, or with `mean` False the weights that are trained.
    CheckpointError names an unreadable tensor.
    """
    single = Ranks(0, 1, None)
    entries = _entries(metadata)
    sources = {}
    for name in entries:
        if name.startswith(MODEL):
            weight = name.removeprefix(MODEL)
            averaged = f"{OPTIMIZER}{weight}.ema"
            sources[weight] = averaged if mean and averaged in entries else name
    targets = {
        source: torch.empty(entries[source].size, dtype=entries[source].properties.dtype)
        for source in sources.values()
    }
    single.on_all(lambda: _read(folder, metadata, targets, single))
    return {weight: targets[source] for weight, source in sources.items()}


def _read(folder: Path, metadata: Metadata, targets: dict[str, Tensor], ranks: Ranks) -> None:
    # Every payload is loaded with weights_only=True by torch's reader; tensors are filled in place.
    state_dict_loader.load(
        dict(targets),
        storage_reader=MetadataReader(folder, metadata),
        process_group=ranks.group,
        no_dist=ranks.group is None,
    )


def _weights(model: nn.Module) -> dict[str, Tensor]:
    # Under FSDP this call also releases gathered parameters, so that later calls use the shards.
    return {f"{MODEL}{name}": tensor for name, tensor in stored(model).state_dict().items()}


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in stored(model).named_parameters()}


def _entries(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    entries = metadata.state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def _compare(folder: Path, metadata: Metadata, targets: Mapping[str, Tensor]) -> None:
    entries = {name: entry for name, entry in _entries(metadata).items() if name.startswith(MODEL)}
    saved = {name: _described(entry) for name, entry in entries.items()}
    needed = {name: _described(tensor) for name, tensor in targets.items()}
    differing = [
        f"{name.removeprefix(MODEL)} is {saved.get(name, 'absent')}, the model's {needed.get(name, 'absent')}"
        for name in sorted(saved.keys() | needed.keys())
        if saved.get(name) != needed.get(name)
    ]
    if differing:
        raise MismatchError(
            f"{folder}: of another model ({first_names(differing, 3)}); "
            "pass the settings that it was trained with"
        )


def _described(tensor: Tensor | TensorStorageMetadata) -> str:
    if isinstance(tensor, Tensor):
        return f"{tensor.dtype} {list(tensor.shape)}"
    return f"{tensor.properties.dtype} {list(tensor.size)}"


def _empty_states(
    folder: Path, metadata: Metadata, model: nn.Module, optimizer: Optimizer
) -> dict[str, dict[str, Tensor]]:
    # Shapes are those of the checkpoint, placements those of the parameters.
    names = _names(model)
    trained = {
        names[parameter]: parameter for group in optimizer.param_groups for parameter in group["params"]
    }
    states: dict[str, dict[str, Tensor]] = {}
    for full, entry in _entries(metadata).items():
        if not full.startswith(OPTIMIZER):
            continue
        name, _, key = full.removeprefix(OPTIMIZER).rpartition(".")
        if name not in trained:
            raise MismatchError(
                f"{folder}: has optimizer state for {name or full}, which is not trained in this run; pass "
                "the --optim.freeze of that run, or start from its weights with --init"
            )
        like, dtype = trained[name], entry.properties.dtype
        counts = entry.size != like.shape and prod(entry.size) == 1  # a counter of steps
        if entry.size != like.shape and not counts:
            raise MismatchError(
                f"{folder}: {full} is {list(entry.size)}, its parameter {list(like.shape)}; pass the "
                "settings that it was trained with"
            )
        value = (
            torch.zeros(entry.size, dtype=dtype)
            if counts
            else torch.zeros_like(like, dtype=dtype, requires_grad=False)
        )
        states.setdefault(name, {})[key] = value
    return states
