"""The table of contents of torch.distributed.checkpoint, `.metadata`, read without running code from it.

The file is a pickle, and a pickle can call any function. This module decodes it into plain records that do
not use torch's classes. It checks each record and then builds torch's objects from the checked values. Only
tensors are accepted, because torch unpickles all other objects without a check.
"""

import pickle
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from sa1b.errors import CheckpointError

METADATA = ".metadata"
_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    # The path of the written folder, which is not used. The module of its class depends on Python's version.
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


class _Record:
    """An object of a pickle as a plain record: the name of its class, and its state."""

    kind = ""

    def __init__(self, *arguments: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.kinds: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in _RECORDS.get(module, ()):
            return self.kinds.setdefault(name, type(name, (_Record,), {"kind": name}))
        raise ValueError(f"it names {module}.{name}, which is not allowed in a table of contents")


def read_metadata(folder: Path, sizes: dict[str, int]) -> Metadata:
    """The tensors of a checkpoint and their locations in its files.

    Args:
        sizes: bytes of each file in the folder; all tensors must be within these sizes.

    Raises:
        CheckpointError: the file is not a valid table of tensors.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            record = _Unpickler(file).load()
        return _build(record, sizes)
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path}: not a table of tensors ({error or type(error).__name__}); restore it from a copy, or "
            "use an older checkpoint"
        ) from None


def _build(record: Any, sizes: dict[str, int]) -> Metadata:
    fields = _state(record, "Metadata")
    tensors = {name: _tensor(name, entry) for name, entry in fields["state_dict_metadata"].items()}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for key, value in fields["storage_data"].items():
        index, place = _state(key, "MetadataIndex"), _state(value, "_StorageInfo")
        file, offset, length = place["relative_path"], place["offset"], place["length"]
        if place.get("transform_descriptors"):
            raise ValueError(f"{index['fqn']} is stored transformed; sa1b never writes that")
        _whole((offset, length))
        if file not in sizes or offset + length > sizes[file]:
            raise ValueError(f"{index['fqn']} is outside of {file!r}: bytes {offset} + {length}")
        places[MetadataIndex(index["fqn"], _whole(index["offset"]))] = _StorageInfo(file, offset, length)
    chunks = {MetadataIndex(name, chunk.offsets) for name, entry in tensors.items() for chunk in entry.chunks}
    if chunks != set(places):
        raise ValueError("the parts of tensors and their locations do not match")
    return Metadata(dict(tensors), storage_data=places, storage_meta=StorageMeta())


def _tensor(name: str, record: Any) -> TensorStorageMetadata:
    if getattr(record, "kind", "") == "BytesStorageMetadata":
        raise ValueError(f"{name} is a pickled object, not a tensor")
    fields = _state(record, "TensorStorageMetadata")
    dtype = fields["properties"].state[0]
    if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has no dtype")
    size = _whole(fields["size"])
    chunks = []
    for chunk in fields["chunks"]:
        part = _state(chunk, "ChunkStorageMetadata")
        offsets, extent = _whole(part["offsets"]), _whole(part["sizes"])
        if any(first + more > all_ for first, more, all_ in zip(offsets, extent, size, strict=True)):
            raise ValueError(f"{name} has a part outside of its size")
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(extent)))
    if sum(prod(chunk.sizes) for chunk in chunks) != prod(size):
        raise ValueError(f"{name} is not complete")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), chunks)


def _state(record: Any, kind: str) -> dict[str, Any]:
    if not isinstance(record, _Record) or record.kind != kind or not isinstance(record.state, dict):
        raise ValueError(f"it holds no {kind} where there must be one")
    return record.state


def _whole(numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, tuple) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{numbers!r} are not sizes or offsets")
    return numbers


class MetadataReader(FileSystemReader):
    """Reads tensors with a verified table of contents, never with the pickle in the folder."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self.metadata


class Writer(FileSystemWriter):
    """Reports the original error of a failed write; torch replaces it by an error of its own writer."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from None
