"""Checkpoints in a folder that all ranks share.

A checkpoint is written to `step-00000100.partial` and flushed. Rank 0 renames the folder when all ranks have
written and described their files. So every folder with a final name was complete once.
"""

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from sa1b.engine.checkpoint import files as checkpoint_files
from sa1b.engine.checkpoint.files import Found, folder_name
from sa1b.engine.checkpoint.sealed_folder import SealedFile, seal
from sa1b.engine.ranks.rank_info import Ranks
from sa1b.errors import LockedError
from sa1b.storage.atomic import commit, flush, lock


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
    def drop(self, found: Found) -> None:
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
        checkpoint_files.sweep(self.folder)

    def steps(self) -> list[int]:
        return checkpoint_files.steps(self.folder)

    def fetch(self, step: int) -> Found:
        return self.ranks.on_first(lambda: checkpoint_files.read(self._final(step)))

    def drop(self, found: Found) -> None:
        pass

    def target(self, step: int) -> str:
        return str(self._temporary(step))

    def prepare(self, step: int) -> Path:
        temporary = self._temporary(step)
        self.ranks.on_first(lambda: checkpoint_files.make_empty(temporary))
        return temporary

    def keep(self, temporary: Path, paths: Iterable[Path]) -> None:
        for path in paths:
            flush(path)

    def commit(self, temporary: Path, step: int, files: dict[str, SealedFile]) -> None:
        seal(temporary, step, files)
        flush(temporary)
        final = self._final(step)
        if final.exists():
            checkpoint_files.remove(final)  # removes a damaged or earlier checkpoint of the same step
        commit(temporary, final)

    def discard(self, step: int) -> None:
        if self.ranks.rank == 0:
            with contextlib.suppress(OSError):
                checkpoint_files.clear(self._temporary(step))  # frees space on a full disk

    def remove(self, step: int) -> None:
        checkpoint_files.remove(self._final(step))

    def close(self) -> None:
        self._held.close()

    def _final(self, step: int) -> Path:
        return self.folder / folder_name(step)

    def _temporary(self, step: int) -> Path:
        return self.folder / f"{folder_name(step)}.partial"
