"""Damaged samples of one rank: each is written down, and too many of them end the run."""

import json
import os
import threading
from pathlib import Path

from sa1b.errors import Sa1bError

LEAST = 10  # so many are borne however few samples were read, and
FRACTION = 0.001  # this part of those that were


class DamageLimitError(Sa1bError):
    """So many samples are damaged that training on would not be training on this dataset."""


class DamageLog:
    """Lines of JSON in `path`: rank, shard, offset, image id, reason. Shared by a rank's worker processes.

    A line is one write of less than a page to a file opened for appending: lines of several processes do
    not mix. The file is made with the first line.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        self._lock = threading.Lock()

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
        """Write a line.

        Args:
            read: samples that this rank has read up to here in all, those before a restart too, whose lines
                are in the file.
            once: write and count an image that this rank has logged before no second time.

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
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(descriptor, (json.dumps(line) + "\n").encode())
            finally:
                os.close(descriptor)
            count = len(self.entries())
        if count > max(LEAST, FRACTION * read):
            raise DamageLimitError(
                f"{count} damaged samples on rank {self.rank}, more than {LEAST} and 0.1 % of what was read; "
                f"they are listed in {self.path}. tools/verify.py checks the whole root"
            )

    def entries(self) -> list[dict[str, object]]:
        """This rank's lines so far, of all its processes."""
        if not self.path.exists():
            return []
        lines = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
        return [line for line in lines if line["rank"] == self.rank]
