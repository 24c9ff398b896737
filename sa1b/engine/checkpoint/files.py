"""Files of checkpoints: find checkpoints, verify their digests, remove old ones.

`manifest.json` is written last. It lists every other file with its length and sha256, and ends with its own
sha256. Only one encoding is valid, so every changed byte of the manifest is detected.
"""

import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from sa1b.engine.checkpoint.torch_metadata import METADATA, read_metadata
from sa1b.errors import CheckpointError
from sa1b.storage.atomic import commit, json_bytes, write_whole

STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"step-\d{8,}(\.\d+)?\.(partial|deleted)")
_OWN = re.compile(  # final and temporary names of the files of a checkpoint
    r"(\.sending-)?(__\d+_\d+\.distcp|\.metadata|state\.json|manifest\.json)"
    r"|\.(state|manifest)\.json\.partial|(__\d+)?\.metadata\.tmp"
)
_INSIDE = re.compile(r"(.+)/checkpoints/step-\d{8,}(?:/.*)?")
_LOG = logging.getLogger(__name__)


class RetrievalError(CheckpointError):
    """A checkpoint that may be good cannot be copied from its bucket: the store or the local disk failed."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A checkpoint whose files are verified against their digests.

    Attributes:
        step: number of completed steps.
        folder: folder of the checkpoint.
        state: the caller's state, passed to `save`.
        world_size: number of ranks that wrote it.
        metadata: table of its tensors.
    """

    step: int
    folder: Path
    state: dict[str, Any]
    world_size: int
    metadata: Metadata


def run_around(path: str) -> str | None:
    """The run in whose checkpoints an absolute path or URL is; None if it is in no checkpoint."""
    found = _INSIDE.fullmatch(path)
    if found is None and path.endswith("/checkpoints") and steps(Path(path)):
        return path.removesuffix("/checkpoints")
    return found and found[1]


def steps(folder: Path) -> list[int]:
    """Steps of the committed checkpoints in RUN/checkpoints, good or damaged, oldest first."""
    if not folder.is_dir():
        return []
    numbers = (step_of(path.name) for path in folder.iterdir())
    return sorted(step for step in numbers if step is not None)


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint's folder; None for other names."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def is_checkpoint(folder: Path) -> bool:
    """Whether a path is a folder with the name of a committed checkpoint, good or damaged."""
    return folder.is_dir() and step_of(folder.name) is not None


def read(folder: Path) -> Found:
    """Verify one checkpoint: all digests, the table of tensors, the state.

    Reads every byte once. Call it in one process of a run.

    Raises:
        CheckpointError: the checkpoint is damaged; the message names the file.
        OSError: a file cannot be read.
    """
    step = step_of(folder.name)
    if step is None or not folder.is_dir():
        raise CheckpointError(f"{folder}: not a checkpoint; pass a folder with a name such as step-00000100")
    files = check(folder, step)
    for file in (METADATA, STATE):
        if file not in files:
            raise damaged(folder / file, "not named by the manifest")
    document = read_json(folder / STATE)
    fields = {"step": int, "world_size": int, "state": dict}
    if not isinstance(document, dict) or any(
        type(document.get(key)) is not kind for key, kind in fields.items()
    ):
        raise damaged(folder / STATE, "not the state of a run")
    if document["step"] != step:
        raise damaged(folder / STATE, f"of step {document['step']}, not {step}")
    metadata = read_metadata(folder, {file: entry.bytes for file, entry in files.items()})
    return Found(step, folder, document["state"], document["world_size"], metadata)


def newest(folder: Path) -> Found | None:
    """The newest good checkpoint in RUN/checkpoints; None if there are no checkpoints.

    Each damaged checkpoint is skipped with a logged warning. Call it in one process of a run.

    Raises:
        CheckpointError: there are checkpoints, but none is good.
    """
    refused = []
    for step in reversed(steps(folder)):
        try:
            return read(folder / folder_name(step))
        except (CheckpointError, OSError) as error:
            refused.append(str(error))
            _LOG.warning("skipping checkpoint %s: %s", folder_name(step), error)
    if refused:
        raise none_good(folder, refused)
    return None


def sweep(folder: Path) -> None:
    """Remove partly written or partly deleted checkpoints of killed runs. The caller must hold the lock."""
    for path in list(folder.iterdir()):
        if _UNFINISHED.fullmatch(path.name):
            clear(path)


def outdated(there: Iterable[int], good: set[int], keep_last: int, keep_every: int) -> list[int]:
    """The checkpoints older than the newest `keep_last` of those known to be good.

    Other checkpoints are not counted: a damaged one must not displace the one that a run has fallen back to.

    Args:
        there: steps of all checkpoints.
        good: steps of good checkpoints.
        keep_every: checkpoints whose step is a multiple of this are kept; 0: none.
    """
    kept = sorted(good)[-keep_last:]
    if len(kept) < keep_last:
        return []
    return [step for step in there if step < kept[0] and not (keep_every and step % keep_every == 0)]


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first: a crash leaves no incomplete checkpoint with a final name.

    Files that no run wrote stay, in the renamed folder.
    """
    names = [f"{path.name}.deleted", *(f"{path.name}.{number}.deleted" for number in range(1, 100))]
    temporary = next(one for one in map(path.with_name, names) if not one.exists() or clear(one))
    commit(path, temporary)
    clear(temporary)


def make_empty(folder: Path) -> None:
    """Create a folder without files of a checkpoint."""
    if folder.exists():
        clear(folder)
    folder.mkdir(exist_ok=True)


def clear(folder: Path) -> bool:
    """Remove the files of a checkpoint, and the folder if it is empty then; whether it was."""
    others = []
    for path in folder.iterdir():
        if is_own(path.name) and not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            others.append(path.name)
    if others:
        _LOG.warning("%s stays: no run wrote %s", folder, ", ".join(sorted(others)[:5]))
    else:
        folder.rmdir()
    return not others


def is_own(name: str) -> bool:
    """Whether a file in the folder of a checkpoint has a name that a run gives."""
    return _OWN.fullmatch(name) is not None


def folder_name(step: int) -> str:
    """Name of the folder of a committed checkpoint."""
    return f"step-{step:08d}"


def none_good(folder: Path | str, refused: list[str]) -> CheckpointError:
    """The error if there are checkpoints but none can be used."""
    listed = "\n  ".join(refused)
    return CheckpointError(
        f"{folder}: none of its {len(refused)} checkpoints can be used; restore one from a copy, or move the "
        f"folder away to start again from step 0:\n  {listed}"
    )


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
            f"{folder / foreign[0]}: not written by this run; start one run at a time with this --out"
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
