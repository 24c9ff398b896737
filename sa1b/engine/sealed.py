"""A folder whose files are all known by their digests: what makes a checkpoint one that counts.

`manifest.json` is written last. It names every other file with its bytes and sha256, and ends with the sha256
of itself. One way of writing it is valid, so no byte of it can change unseen.
"""

import hashlib
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sa1b.errors import Sa1bError
from sa1b.storage.atomic import json_bytes, write_whole

MANIFEST = "manifest.json"
VERSION = 1
_LONGEST = 64 << 20  # bytes of a manifest or another JSON file: no run has as many files as fit into that
_THREADS = 4  # hashlib lets others run meanwhile; one thread does about 1.5 GB/s


class CheckpointError(Sa1bError):
    """A checkpoint that cannot be written or must not be used; the message names the file."""


@dataclass(frozen=True, slots=True)
class SealedFile:
    """One file of a sealed folder.

    Attributes:
        bytes: its length.
        sha256: of its bytes, hexadecimal.
    """

    bytes: int
    sha256: str


def measure(path: Path) -> SealedFile:
    """Read a file and describe it."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return SealedFile(os.fstat(file.fileno()).st_size, digest)


def seal(folder: Path, step: int, files: dict[str, SealedFile]) -> None:
    """Write the manifest of a folder whose files are complete and flushed.

    Raises:
        CheckpointError: the folder does not hold exactly `files`: ranks do not share its file system.
    """
    found = {path.name for path in folder.iterdir()}
    if missing := sorted(set(files) - found):
        raise CheckpointError(
            f"{folder / missing[0]} was written by another rank and cannot be seen from the first: "
            "checkpoints need a file system that all ranks share"
        )
    if foreign := sorted(found - set(files)):
        raise CheckpointError(f"{folder / foreign[0]} was written by someone else")
    write_whole(folder / MANIFEST, _encode(step, files))


def check(folder: Path, step: int) -> dict[str, SealedFile]:
    """The files of a sealed folder, each of them read and held against its digest.

    Raises:
        CheckpointError: a file is missing, added, not a plain file, or has other bytes; the message names it.
        OSError: a file cannot be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: it is written last, so the rest may not be complete")
    files = _decode(path, read_json(path), step)
    found = {entry.name: entry for entry in os.scandir(folder)}
    for name in sorted({*files, MANIFEST} ^ set(found)):
        state = "is missing" if name in files else "is not named by the manifest"
        raise CheckpointError(f"{folder / name} {state}")
    for name, file in files.items():
        status = found[name].stat(follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{folder / name} is a link or folder, not a plain file")
        if status.st_size != file.bytes:
            raise CheckpointError(f"{folder / name} has {status.st_size} bytes, not {file.bytes}")
    with ThreadPoolExecutor(_THREADS) as pool:
        measured = dict(zip(files, pool.map(lambda name: measure(folder / name), files), strict=True))
    for name, file in files.items():
        if measured[name] != file:
            raise CheckpointError(f"{folder / name} has other bytes than were written: its sha256 is wrong")
    return files


def read_json(path: Path) -> Any:
    """A JSON file.

    Raises:
        CheckpointError: it is none.
    """
    if path.stat().st_size > _LONGEST:
        raise CheckpointError(f"{path} is longer than {_LONGEST} bytes: it is not what a checkpoint holds")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None


def _encode(step: int, files: dict[str, SealedFile]) -> bytes:
    document: dict[str, object] = {
        "version": VERSION,
        "step": step,
        "files": {name: asdict(file) for name, file in sorted(files.items())},
    }
    digest = hashlib.sha256(json.dumps(document).encode()).hexdigest()
    return json_bytes({**document, "sha256": digest})


def _decode(path: Path, document: Any, step: int) -> dict[str, SealedFile]:
    if isinstance(document, dict) and document.get("version") not in (None, VERSION):
        raise CheckpointError(
            f"{path} is of version {document['version']}, this program reads {VERSION}: "
            "use the version of sa1b that wrote it"
        )
    try:
        files = {
            str(name): SealedFile(file["bytes"], file["sha256"]) for name, file in document["files"].items()
        }
        written = _encode(document["step"], files)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path} is not the manifest of a checkpoint") from None
    if path.read_bytes() != written:
        raise CheckpointError(f"{path} has other bytes than were written: its own sha256 is wrong")
    if document["step"] != step:
        raise CheckpointError(f"{path} belongs to step {document['step']}: the folder was renamed or copied")
    for name in files:
        if Path(name).name != name or name in (MANIFEST, ".", ".."):
            raise CheckpointError(f"{path} names {name!r}, which is no file of this folder")
    return files
