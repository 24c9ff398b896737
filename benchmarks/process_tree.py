"""Processor seconds, bytes read and memory of a process and its descendants, from /proc."""

import os
import threading
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
PERIOD = 0.02  # seconds between two measurements of memory


def below(process: int) -> list[int]:
    """The process and all its running descendants."""
    found, todo = [], [process]
    while todo:
        each = todo.pop()
        found.append(each)
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            todo += map(int, (_text(children) or "").split())
    return found


def processor_seconds(process: int) -> float:
    """User and system time of the tree, including ended processes whose parent has waited for them."""
    total = 0
    for each in below(process):
        stat = _text(Path(f"/proc/{each}/stat"))
        if stat:
            total += sum(map(int, stat.rpartition(")")[2].split()[11:15]))
    return total / _TICK


def bytes_read(process: int) -> dict[int, int]:
    """Bytes that each process has read with read() and similar calls, not through mapped files."""
    found = {}
    for each in below(process):
        fields = dict(line.split(": ") for line in (_text(Path(f"/proc/{each}/io")) or "").splitlines())
        found[each] = int(fields.get("rchar", 0))
    return found


def memory(process: int) -> int:
    """Bytes of the tree, shared pages counted once (PSS)."""
    return sum(fields.get("Pss", 0) for fields in _rollups(process).values())


def _rollups(process: int) -> dict[int, dict[str, int]]:
    """Kinds of memory of each process of the tree, in bytes."""
    found = {}
    for each in below(process):
        lines = (_text(Path(f"/proc/{each}/smaps_rollup")) or "").splitlines()[1:]
        found[each] = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return found


class Watch:
    """The highest memory of a tree while the context is open, in bytes: `peak`, and at that moment `alone`,
    the memory of each process that no other one shares.
    """

    def __init__(self, process: int) -> None:
        self.process = process
        self.peak = 0
        self.alone: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            found = _rollups(self.process)
            peak = sum(fields.get("Pss", 0) for fields in found.values())
            if peak > self.peak:
                self.peak = peak
                self.alone = {
                    each: fields.get("Private_Clean", 0) + fields.get("Private_Dirty", 0)
                    for each, fields in found.items()
                }
            if self._over.wait(PERIOD):
                return


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:  # the process has ended or belongs to another user
        return None
