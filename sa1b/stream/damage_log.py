"""Damaged samples of one rank: each is logged, and too many of them stop the run."""

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sa1b.console import command
from sa1b.errors import Sa1bError
from sa1b.limit import ForkLock
from sa1b.storage.atomic import append_line

DAMAGE_LOG = "sa1b-damaged.jsonl"  # the usual file, in the current folder
LEAST = 10  # number of damaged samples that is always tolerated
FRACTION = 0.001  # tolerated fraction of the samples that were read

_LOG = logging.getLogger("sa1b")


class DamageLimitError(Sa1bError):
    """Too many samples are damaged to continue training on this dataset."""


class DamageLog:
    """Lines of JSON in `path`: rank, shard, offset, image id, reason. Shared by a rank's worker processes, as
    each line is one write. Lines before byte `start`, None: before the end of the file, do not count.

    If the file cannot be written, for example in a read-only folder, the entries stay in the memory of the
    process that found them, and are warnings of the logger `sa1b`.
    """

    replay: Callable[[int], str] | None = None  # the command that shows the step of a position

    def __init__(self, path: Path, rank: int, start: int | None = 0) -> None:
        self.path, self.rank = path, rank
        self._file = path.absolute()  # the process may change its folder
        self._start = self._from(0)[1] if start is None else start  # lines before it are not counted
        self._lock, self._said, self._read = ForkLock(), False, 0  # bytes of the file whose lines are known
        self._known: list[tuple[int, dict[str, object]]] = []  # lines of this rank, and where they begin
        self._unwritten: list[dict[str, object]] = []

    def __reduce__(self) -> tuple[type["DamageLog"], tuple[Path, int, int]]:
        return DamageLog, (self._file, self.rank, self._start)

    def damaged(self, *, read: int, once: bool = False, **line: Any) -> None:
        """Write a line, unless this rank has logged the image at this position before, as when a step is
        repeated after a restart. The first line of a process is a warning of the logger `sa1b`; every one,
        if the file cannot be written.

        `line` has shard, offset, image_id, position, reason and, of a mixture, source. `read` are the samples
        that this rank has read, with those before a restart: the file contains their damaged samples too.
        With `once`, an image is logged at one position only.

        Raises:
            DamageLimitError: this rank has more than max(10, 0.1 % of the samples read) damaged samples.
        """
        line = {"rank": self.rank, **line}
        if self.replay is not None:
            line["replay"] = self.replay(line["position"])
        same = ("source", "image_id") if once else ("source", "image_id", "position")
        with self._lock:
            known = self.entries(0 if once else self._start)
            if not any(all(other.get(name) == line.get(name) for name in same) for other in known):
                try:
                    self._append(line)
                except OSError as error:
                    if not self._unwritten:
                        _LOG.warning(
                            f"sa1b: the damage log cannot be written at {self._file} ({error.strerror}); "
                            "damaged samples are listed here instead. Set another path with damage_log="
                        )
                    self._unwritten.append(line)
                    _LOG.warning(f"sa1b: damaged sample {json.dumps(line)}")
            count = len(self.entries(self._start))
        if count > max(LEAST, FRACTION * read):
            raise DamageLimitError(
                f"rank {self.rank}: {count} damaged samples, more than {LEAST} and 0.1 % of what was "
                f"read, listed {'in the log of this process' if self._unwritten else f'in {self.path}'}; "
                f"a dataset directory is checked as `{command('verify', '--help')}` says"
            )

    def entries(self, start: int = 0) -> list[dict[str, object]]:
        """Lines of this rank from byte `start` on, and those that this process could not write."""
        data, size = self._from(self._read)
        if size < self._read:  # another program has truncated it
            self._read, self._known = 0, []
            data, size = self._from(0)
        for raw in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            with suppress(ValueError, RecursionError):  # cut by a full disk, or of another program
                line = json.loads(raw)
                if isinstance(line, dict) and line.get("rank") == self.rank:
                    self._known.append((self._read, line))
            self._read += len(raw)
        counted = start if start <= size else 0
        return [line for begin, line in self._known if begin >= counted] + self._unwritten

    def _from(self, start: int) -> tuple[bytes, int]:
        """The bytes of the file from `start` on, and its size; nothing of what is not readable."""
        with suppress(OSError):
            if self._file.is_file():  # not a pipe or a terminal
                with self._file.open("rb") as file:
                    file.seek(start)
                    return file.read(), file.seek(0, os.SEEK_END)
        return b"", 0

    def _append(self, line: dict[str, object]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        cut = not (b"\n" + self._from(self._read)[0]).endswith(b"\n")  # by another program or a full disk
        append_line(self._file, "\n" * cut + json.dumps(line))
        if not self._said:
            self._said = True
            _LOG.warning(
                f"sa1b: a damaged sample is left out (rank {self.rank}, shard {line['shard']}, image "
                f"{line['image_id']}); all damaged samples are listed in {self.path}"
                + (f"; `{line['replay']}` shows its step" if "replay" in line else "")
            )
