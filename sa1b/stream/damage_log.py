"""Damaged samples of one rank: each is logged, and too many of them end the run."""

import json
import sys
import threading
from pathlib import Path

from tqdm import tqdm

from sa1b.console import command
from sa1b.errors import Sa1bError
from sa1b.storage.atomic import append_line

LEAST = 10  # as many are tolerated however few samples were read
FRACTION = 0.001  # and this part of those that were read


class DamageLimitError(Sa1bError):
    """So many samples are damaged that training on would not be training on this dataset."""


class DamageLog:
    """Lines of JSON in `path`: rank, shard, offset, image id, reason. Shared by a rank's worker processes.

    A line is one write of less than a page to a file opened for appending: lines of several processes do
    not mix. The file is made with the first line.

    If the file cannot be written, for example in a read-only folder, the entries stay in memory and are
    printed to stderr. They count in the process that found them, and not in other worker processes.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        self._lock = threading.Lock()
        self._unwritten: list[dict[str, object]] = []
        self._said = False

    def __reduce__(self) -> tuple[type["DamageLog"], tuple[Path, int]]:
        return DamageLog, (self.path, self.rank)

    def damaged(
        self,
        *,
        shard: str,
        offset: int,
        image_id: int,
        position: int,
        read: int,
        reason: str,
        once: bool = False,
    ) -> None:
        """Write a line; tell of the first on stderr, and of all of them if the file cannot be written.

        Args:
            read: samples that this rank has read so far in all, also before a restart, whose lines are in the
                file.
            once: neither write nor count an image again that this rank has logged before.

        Raises:
            DamageLimitError: this rank has more than max(10, 0.1 % of the samples read) of them.
        """
        line = {
            "rank": self.rank,
            "shard": shard,
            "offset": offset,
            "image_id": image_id,
            "position": position,
            "reason": reason[:1000],
        }
        with self._lock:
            if once and any(entry["image_id"] == image_id for entry in self.entries()):
                return
            try:
                self._append(line)
                self._say(line)
            except OSError as error:
                self._keep(line, error)
            count = len(self.entries())
        if count > max(LEAST, FRACTION * read):
            raise DamageLimitError(
                f"rank {self.rank}: {count} damaged samples, more than {LEAST} and 0.1 % of what was "
                f"read, listed {'on stderr' if self._unwritten else f'in {self.path}'}; "
                f"`{command('verify')}` checks the whole dataset directory"
            )

    def entries(self) -> list[dict[str, object]]:
        """This rank's lines so far, of all its processes, and those that this process could not write."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except OSError:  # not there, or not readable
            text = ""
        lines = [line for text_line in text.splitlines() if (line := _parsed(text_line)) is not None]
        return [line for line in lines if line["rank"] == self.rank] + self._unwritten

    def _say(self, line: dict[str, object]) -> None:
        """Tell people of the first one, beside the progress bar of a run."""
        if not self._said:
            self._said = True
            tqdm.write(
                f"sa1b: a damaged sample is left out (rank {self.rank}, shard {line['shard']}, image "
                f"{line['image_id']}); this one and any more are listed in {self.path}",
                file=sys.stderr,
            )

    def _append(self, line: dict[str, object]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append_line(self.path, json.dumps(line))

    def _keep(self, line: dict[str, object], error: OSError) -> None:
        if not self._unwritten:
            print(
                f"sa1b: the damage log cannot be written at {self.path.absolute()} ({error.strerror}); "
                "damaged samples are listed here instead. Set another path with damage_log=",
                file=sys.stderr,
            )
        self._unwritten.append(line)
        print(f"sa1b: damaged sample {json.dumps(line)}", file=sys.stderr)


def _parsed(text: str) -> dict[str, object] | None:
    """A line of the log; None for one that a full disk cut off."""
    try:
        line: dict[str, object] = json.loads(text)
    except ValueError:
        return None
    return line
