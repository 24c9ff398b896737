"""The checkpoints of a run as they lie in its folder: found, checked, thinned out."""

import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from sa1b.engine.metadata import METADATA, read_metadata
from sa1b.engine.sealed import CheckpointError, check, read_json
from sa1b.storage.atomic import commit

STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A checkpoint whose files have been held against their digests.

    Attributes:
        step: steps that had been done.
        folder: where it lies.
        state: what the caller gave to `save`.
        world: ranks that wrote it.
        metadata: which tensors it holds.
    """

    step: int
    folder: Path
    state: dict[str, Any]
    world: int
    metadata: Metadata


def steps(folder: Path) -> list[int]:
    """Steps of the committed checkpoints in RUN/checkpoints, good or damaged, oldest first."""
    if not folder.is_dir():
        return []
    names = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(name[1]) for name in names if name)


def read(folder: Path) -> Found:
    """Check one checkpoint: all digests, the table of tensors, the state.

    Reads every byte once. Call it in one process of a run.

    Raises:
        CheckpointError: it must not be used; the message names the file.
        OSError: a file cannot be read.
    """
    name = _NAME.fullmatch(folder.name)
    if not name or not folder.is_dir():
        raise CheckpointError(f"{folder} is no checkpoint: those are folders named step-00000100")
    step = int(name[1])
    files = check(folder, step)
    for file in (METADATA, STATE):
        if file not in files:
            raise CheckpointError(f"{folder / file} is not named by the manifest")
    document = read_json(folder / STATE)
    fields = {"step": int, "world_size": int, "state": dict}
    if not isinstance(document, dict) or any(
        type(document.get(key)) is not kind for key, kind in fields.items()
    ):
        raise CheckpointError(f"{folder / STATE} does not hold the state of a run")
    if document["step"] != step:
        raise CheckpointError(f"{folder / STATE} belongs to step {document['step']}")
    metadata = read_metadata(folder, {file: entry.bytes for file, entry in files.items()})
    return Found(step, folder, document["state"], document["world_size"], metadata)


def newest(folder: Path) -> Found | None:
    """The newest checkpoint in RUN/checkpoints that is good; None where there is none at all.

    Each damaged one that is passed over is logged as a warning. Call it in one process of a run.

    Raises:
        CheckpointError: there are checkpoints, and none is good.
    """
    refused = []
    for step in reversed(steps(folder)):
        try:
            return read(folder / folder_name(step))
        except (CheckpointError, OSError) as error:
            refused.append(str(error))
            _LOG.warning("passing over checkpoint %s: %s", folder_name(step), error)
    if refused:
        raise none_good(folder, refused)
    return None


def sweep(folder: Path) -> None:
    """Remove what killed runs have left: checkpoints half written or half deleted. Needs the lock."""
    for path in folder.iterdir():
        if path.suffix in (".partial", ".deleted") and _NAME.fullmatch(path.stem):
            shutil.rmtree(path)


def prune(folder: Path, good: set[int], keep_last: int, keep_every: int) -> None:
    """Remove checkpoints older than the newest `keep_last` of those known to be good.

    Others are not counted: a damaged one must not push out the one that a run has fallen back to.

    Args:
        good: steps; those removed are taken out.
        keep_every: multiples of this stay; 0: none.
    """
    kept = sorted(good)[-keep_last:]
    if len(kept) < keep_last:
        return
    for step in steps(folder):
        if step < kept[0] and not (keep_every and step % keep_every == 0):
            good.discard(step)
            try:
                remove(folder / folder_name(step))
            except OSError as error:
                _LOG.warning("an old checkpoint stays: %s", error)


def remove(path: Path) -> None:
    """Take its name away first: a crash in between leaves no half checkpoint under a good name."""
    aside = path.with_name(f"{path.name}.deleted")
    if aside.exists():
        shutil.rmtree(aside)
    commit(path, aside)
    shutil.rmtree(aside)


def make_empty(folder: Path) -> None:
    """Make a folder, without what was in it."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()


def folder_name(step: int) -> str:
    """Of a committed checkpoint."""
    return f"step-{step:08d}"


def none_good(folder: Path, refused: list[str]) -> CheckpointError:
    """The error when there are checkpoints and none of them can be used."""
    listed = "\n  ".join(refused)
    return CheckpointError(
        f"{folder} has {len(refused)} checkpoints and none can be used:\n  {listed}\n"
        "Restore one from a copy, or move the folder away to start afresh."
    )
