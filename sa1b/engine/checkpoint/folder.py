"""Checkpoints in a folder that all ranks share: find, read, write and remove them.

A checkpoint is written to `step-00000100.partial` and flushed. Rank 0 renames the folder when all ranks have
written and described their files. So every folder with a final name was complete once.
"""

import contextlib
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from sa1b.engine.checkpoint.sealed_folder import (
    METADATA,
    SealedFile,
    check,
    damaged,
    read_json,
    read_metadata,
    seal,
)
from sa1b.engine.ranks.rank_info import Ranks
from sa1b.errors import CheckpointError, LockedError
from sa1b.report import first_names
from sa1b.storage.atomic import commit, flush, lock

STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"step-\d{8,}(\.\d+)?\.(partial|deleted)")
_OWN = re.compile(  # final and temporary names of the files of a checkpoint
    r"(\.sending-)?(__\d+_\d+\.distcp|\.metadata|state\.json|manifest\.json)"
    r"|\.(state|manifest)\.json\.partial|(__\d+)?\.metadata\.tmp"
)
_INSIDE = re.compile(r"(.+)/checkpoints/step-\d{8,}(?:/.*)?")


class RetrievalError(CheckpointError):
    """A checkpoint that may be good cannot be copied from its bucket: the store or the local disk failed."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A checkpoint whose files are verified against their digests."""

    step: int  # completed steps
    folder: Path
    state: dict[str, Any]  # the caller's, passed to `save`
    world_size: int  # ranks that wrote it
    metadata: Metadata


def run_around(path: str) -> str | None:
    """The run in whose checkpoints an absolute path or URL is; None if it is in no checkpoint."""
    match = _INSIDE.fullmatch(path)
    if match is None and path.endswith("/checkpoints") and steps(Path(path)):
        return path.removesuffix("/checkpoints")
    return match and match[1]


def steps(folder: Path) -> list[int]:
    """Steps of the committed checkpoints in RUN/checkpoints, good or damaged, oldest first."""
    if not folder.is_dir():
        return []
    numbers = (step_of(path.name) for path in folder.iterdir())
    return sorted(step for step in numbers if step is not None)


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint's folder; None for other names."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def read(folder: Path) -> Found:
    """Verify one checkpoint: all digests, the table of tensors, the state. Reads every byte once; call it in
    one process of a run. CheckpointError names the damaged file.
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


def sweep(folder: Path) -> None:
    """Remove partly written or partly deleted checkpoints of killed runs. The caller must hold the lock."""
    for path in list(folder.iterdir()):
        if _UNFINISHED.fullmatch(path.name):
            clear(path)


def outdated(there: Iterable[int], good: set[int], keep_last: int, keep_every: int) -> list[int]:
    """The checkpoints older than the newest `keep_last` of those known to be good.

    Other checkpoints are not counted: a damaged one must not displace the one that a run has fallen back to.
    Steps that are multiples of `keep_every` are kept; 0: none.
    """
    kept = sorted(good)[-keep_last:]
    if len(kept) < keep_last:
        return []
    return [step for step in there if step < kept[0] and not (keep_every and step % keep_every == 0)]


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first: a crash leaves no incomplete checkpoint with a final name."""
    # Files that no run wrote stay, in the renamed folder.
    names = [f"{path.name}.deleted", *(f"{path.name}.{number}.deleted" for number in range(1, 100))]
    temporary = next(
        candidate for candidate in map(path.with_name, names) if not candidate.exists() or clear(candidate)
    )
    commit(path, temporary)
    clear(temporary)


def make_empty(folder: Path) -> None:
    """Create a folder without files of a checkpoint."""
    if folder.exists():
        clear(folder)
    folder.mkdir(exist_ok=True)


def clear(folder: Path) -> bool:
    """Remove the files of a checkpoint, then the folder if it is empty. Return whether it was empty."""
    others = []
    for path in folder.iterdir():
        if is_own(path.name) and not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            others.append(path.name)
    if others:
        _LOG.warning("%s stays: no run wrote %s", folder, first_names(sorted(others)))
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


class Location(ABC):
    """The checkpoints of one run.

    The methods `fetch`, `drop` and `prepare` are called by all ranks together, `keep` and `discard` by each
    rank, all others by rank 0 only.
    """

    root: str  # path or URL of the folder that contains the checkpoints
    remedy: str  # what the user can do if writes fail, for messages
    ranks: Ranks

    def name(self, step: int) -> str:
        """Path or URL of a committed checkpoint."""
        return f"{self.root}/{folder_name(step)}"

    @abstractmethod
    def begin(self) -> None:
        """Exclude other runs, and remove incomplete checkpoints of killed runs. LockedError: another run."""

    @abstractmethod
    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, good or damaged, oldest first."""

    @abstractmethod
    def fetch(self, step: int) -> Found:
        """The checkpoint as a local folder, verified; collective. RetrievalError: it cannot be read now, and
        may be good. CheckpointError: it is damaged.
        """

    @abstractmethod
    def drop(self, checkpoint: Found) -> None:
        """Remove the local copy of a fetched checkpoint, if there is one; collective."""

    @abstractmethod
    def target(self, step: int) -> str:
        """What is written before the commit, for messages."""

    @abstractmethod
    def prepare(self, step: int) -> Path:
        """An empty local folder for the files of a checkpoint; collective."""

    @abstractmethod
    def keep(self, temporary: Path, paths: Iterable[Path]) -> None:
        """Make files that this rank has written to the temporary folder durable."""

    @abstractmethod
    def commit(self, temporary: Path, step: int, files: dict[str, SealedFile]) -> None:
        """Commit a checkpoint whose files of all ranks are durable, and replace one of the same step."""

    @abstractmethod
    def discard(self, step: int) -> None:
        """Remove the temporary folder after a failed write; errors are ignored."""

    @abstractmethod
    def remove(self, step: int) -> None:
        """Remove a committed checkpoint; a crash leaves no incomplete one that counts as committed."""

    @abstractmethod
    def close(self) -> None:
        """Admit other runs."""


_LOCK_PATIENCE = 60.0  # seconds to wait for processes of a killed run to end
_LOG = logging.getLogger(__name__)


class FolderLocation(Location):
    """The checkpoints in RUN/checkpoints, `folder`, which rank 0 locks."""

    remedy = "free space or repair the disk"

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder, self.ranks = folder, ranks
        self.root = str(folder)
        self._held = contextlib.ExitStack()

    def begin(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        deadline, waits = time.monotonic() + _LOCK_PATIENCE, False
        while True:
            try:
                self._held.enter_context(lock(self.folder))
                break
            except LockedError:
                if time.monotonic() > deadline:
                    raise
                if not waits:
                    text = "waiting %.0f s for the end of another run with this --out, which has locked %s"
                    _LOG.warning(text, _LOCK_PATIENCE, self.folder)
                waits = True
                time.sleep(0.5)
        sweep(self.folder)

    def steps(self) -> list[int]:
        return steps(self.folder)

    def fetch(self, step: int) -> Found:
        return self.ranks.on_first(lambda: read(self._final(step)))

    def drop(self, checkpoint: Found) -> None:
        pass

    def target(self, step: int) -> str:
        return str(self._temporary(step))

    def prepare(self, step: int) -> Path:
        temporary = self._temporary(step)
        self.ranks.on_first(lambda: make_empty(temporary))
        return temporary

    def keep(self, temporary: Path, paths: Iterable[Path]) -> None:
        for path in paths:
            flush(path)

    def commit(self, temporary: Path, step: int, files: dict[str, SealedFile]) -> None:
        seal(temporary, step, files)
        flush(temporary)
        final = self._final(step)
        if final.exists():
            remove(final)  # removes a damaged or earlier checkpoint of the same step
        commit(temporary, final)

    def discard(self, step: int) -> None:
        if self.ranks.rank == 0:
            with contextlib.suppress(OSError):
                clear(self._temporary(step))  # frees space on a full disk

    def remove(self, step: int) -> None:
        remove(self._final(step))

    def close(self) -> None:
        self._held.close()

    def _final(self, step: int) -> Path:
        return self.folder / folder_name(step)

    def _temporary(self, step: int) -> Path:
        return self.folder / f"{folder_name(step)}.partial"
