"""Folders whose files are listed in a manifest with their digests, verified before use.

`manifest.json` is written last. It lists every other file with its length and sha256, and ends with its own
sha256. Only one encoding is valid, so every changed byte of the manifest is detected.
"""

import hashlib
import json
import os
import pickle
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
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
from sa1b.storage.atomic import json_bytes, write_whole


def damaged(path: Path | str, why: str) -> CheckpointError:
    return CheckpointError(f"{path}: {why}; restore it from a copy, or use an older checkpoint")


MANIFEST = "manifest.json"

VERSION = 1

_LONGEST = 64 << 20  # largest JSON file in bytes; no run has enough files for a longer manifest

_THREADS = 4  # hashlib releases the GIL; one thread hashes about 1.5 GB/s


@dataclass(frozen=True, slots=True)
class SealedFile:
    """Length and sha256, in hexadecimal, of one file of a sealed folder."""

    bytes: int
    sha256: str


def measure(path: Path) -> SealedFile:
    """Read a file and describe it."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return SealedFile(os.fstat(file.fileno()).st_size, digest)


def seal(folder: Path, step: int, files: dict[str, SealedFile]) -> None:
    """Write the manifest of a folder of flushed files; CheckpointError: they are not exactly `files`."""
    names = {path.name for path in folder.iterdir()}
    if missing := sorted(set(files) - names):
        raise CheckpointError(
            f"{folder / missing[0]}: written by another rank and not visible to rank 0; put --out on a file "
            "system that all ranks share"
        )
    if foreign := sorted(names - set(files)):
        raise CheckpointError(
            f"{folder / foreign[0]}: not written by this run; start one run at a time with this --out; a "
            "file of yours must be moved away"
        )
    write_whole(folder / MANIFEST, encode(step, files))


def check(folder: Path, step: int) -> dict[str, SealedFile]:
    """The files of a sealed folder, all verified; CheckpointError names a wrong, missing or added one."""
    path = folder / MANIFEST
    if not path.is_file():
        raise damaged(path, "missing (it is written last, so the checkpoint may be incomplete)")
    files = manifest_files(path, step)
    entries = {entry.name: entry for entry in os.scandir(folder)}
    for name in sorted({*files, MANIFEST} ^ set(entries)):
        raise damaged(folder / name, "missing" if name in files else "not named by the manifest")
    for name, file in files.items():
        status = entries[name].stat(follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise damaged(folder / name, "a link or folder, not a plain file")
        if status.st_size != file.bytes:
            raise damaged(folder / name, f"{status.st_size} bytes, {file.bytes} expected")
    with ThreadPoolExecutor(_THREADS) as pool:
        measured = dict(zip(files, pool.map(lambda name: measure(folder / name), files), strict=True))
    for name, file in files.items():
        if measured[name] != file:
            raise damaged(folder / name, "the sha256 differs from the one that was written")
    return files


def read_json(path: Path) -> Any:
    """Read a JSON file; CheckpointError if it is not JSON, or too long."""
    if path.stat().st_size > _LONGEST:
        raise damaged(path, f"longer than {_LONGEST} bytes")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"not JSON ({error})") from None


def encode(step: int, files: dict[str, SealedFile]) -> bytes:
    """The bytes of a manifest."""
    document: dict[str, object] = {
        "version": VERSION,
        "step": step,
        "files": {name: asdict(file) for name, file in sorted(files.items())},
    }
    digest = hashlib.sha256(json.dumps(document).encode()).hexdigest()
    return json_bytes({**document, "sha256": digest})


def manifest_files(path: Path, step: int) -> dict[str, SealedFile]:
    """The files in the manifest of a checkpoint, without folders; CheckpointError: not that of this step."""
    document = read_json(path)
    if isinstance(document, dict) and document.get("version") not in (None, VERSION):
        raise CheckpointError(
            f"{path}: version {document['version']}, this program reads {VERSION}; use the version of sa1b "
            "that wrote it"
        )
    try:
        files = {
            str(name): SealedFile(file["bytes"], file["sha256"]) for name, file in document["files"].items()
        }
        written = encode(document["step"], files)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise damaged(path, "not the manifest of a checkpoint") from None
    if path.read_bytes() != written:
        raise damaged(path, "its own sha256 is wrong")
    if document["step"] != step:
        raise damaged(path, f"of step {document['step']}, not {step}: the folder was renamed or copied")
    for name in files:
        if Path(name).name != name or name in (MANIFEST, ".", ".."):
            raise damaged(path, f"names {name!r}, which is not a file of this folder")
    return files


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
    """The tensors of a checkpoint and their locations in its files, which must be within `sizes`, bytes of
    each file. CheckpointError: not a valid table of tensors.
    """
    # `.metadata` is the table of contents of torch.distributed.checkpoint, read without running code from it.
    # The file is a pickle, and a pickle can call any function. It is decoded into plain records that do not
    # use torch's classes. Each record is checked, and torch's objects are built from the checked values. Only
    # tensors are accepted, because torch unpickles all other objects without a check.
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
