"""Where the checkpoints of a run are committed: in a folder that all ranks share, or in a bucket."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from sa1b.engine.checkpoint.files import Found, folder_name
from sa1b.engine.checkpoint.sealed_folder import SealedFile
from sa1b.engine.ranks.rank_info import Ranks


class Location(ABC):
    """The checkpoints of one run.

    The methods `fetch`, `drop` and `prepare` are called by all ranks together, `keep` and `discard` by each
    rank, all others by rank 0 only.

    Attributes:
        root: path or URL of the folder that contains the checkpoints.
        remedy: what the user can do if writes fail, for messages.
        ranks: the ranks of the run.
    """

    root: str
    remedy: str
    ranks: Ranks

    def name(self, step: int) -> str:
        """Path or URL of a committed checkpoint."""
        return f"{self.root}/{folder_name(step)}"

    @abstractmethod
    def begin(self) -> None:
        """Exclude other runs, and remove incomplete checkpoints of killed runs.

        Raises:
            LockedError: another run uses the location.
        """

    @abstractmethod
    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, good or damaged, oldest first."""

    @abstractmethod
    def fetch(self, step: int) -> Found:
        """The checkpoint as a local folder, verified; collective.

        Raises:
            RetrievalError: the checkpoint cannot be read now, and may be good.
            CheckpointError: the checkpoint is damaged.
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
