"""Folders whose files are listed in a manifest with their digests, verified before use.

`manifest.json` is written last. It lists every other file with its length and sha256, and ends with its own
sha256. Only one encoding is valid, so every changed byte of the manifest is detected.
"""

import hashlib
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
    """One file of a sealed folder.

    Attributes:
        bytes: length in bytes.
        sha256: sha256 of the bytes, hexadecimal.
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
        CheckpointError: the files of the folder are not exactly `files`; ranks may not share its file system.
    """
    found = {path.name for path in folder.iterdir()}
    if missing := sorted(set(files) - found):
        raise CheckpointError(
            f"{folder / missing[0]}: written by another rank and not visible to rank 0; put --out on a file "
            "system that all ranks share"
        )
    if foreign := sorted(found - set(files)):
        raise CheckpointError(
            f"{folder / foreign[0]}: not written by this run; start one run at a time with this --out; a "
            "file of yours must be moved away"
        )
    write_whole(folder / MANIFEST, encode(step, files))


def check(folder: Path, step: int) -> dict[str, SealedFile]:
    """The files of a sealed folder, each one read and verified against its digest.

    Raises:
        CheckpointError: a file is missing, added, changed or not a plain file; the message names it.
        OSError: a file cannot be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise damaged(path, "missing (it is written last, so the checkpoint may be incomplete)")
    files = manifest_files(path, step)
    found = {entry.name: entry for entry in os.scandir(folder)}
    for name in sorted({*files, MANIFEST} ^ set(found)):
        raise damaged(folder / name, "missing" if name in files else "not named by the manifest")
    for name, file in files.items():
        status = found[name].stat(follow_symlinks=False)
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
    """Read a JSON file.

    Raises:
        CheckpointError: the file is not JSON, or too long.
    """
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
    """The files that the manifest of a checkpoint lists; their names have no folders.

    Raises:
        CheckpointError: it is not the manifest of this step.
        OSError: the manifest cannot be read.
    """
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
