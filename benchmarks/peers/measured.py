"""Measures contenders in interleaved rounds, each in a separate process, and compares them round by round."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import process_tree
from benchmarks.peers.contenders import Contender
from benchmarks.peers.task import Place, Task

REPOSITORY = Path(__file__).parents[2]


class Running:
    """A contender's process; use as a context."""

    def __init__(self, contender: Contender, place: Place, task: Task, workers: int) -> None:
        command = [contender.name, str(place.root), str(place.folder), json.dumps(asdict(task)), str(workers)]
        self._errors = (place.folder / f"errors-{workers}.txt").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.program", *command, str(time.monotonic())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=REPOSITORY,
            env=os.environ
            | {"TMPDIR": str(place.folder.parent)},  # removed at the end of the run with its contents
        )

    def first(self) -> float:
        """Wait for the first batch; returns the seconds since the start of the process."""
        seconds: float = self._line()["first"]
        return seconds

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()
        return self._line()

    def end(self) -> None:
        """Let the process end; `stop` waits for that."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def stop(self) -> None:
        assert self.process.stdout is not None
        self.end()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self._errors.close()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(10)
            self._errors.seek(0)
            raise RuntimeError(f"{' '.join(self.process.args[3:5])}: {self._errors.read()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(slots=True)
class Row:
    """The measurements of a contender with a number of workers.

    Attributes:
        first: seconds from the start of its process to its first batch; None: not measured alone.
        resume: seconds to the first batch in a running process, by part of the epoch.
        peak: largest memory of the process tree in bytes (PSS).
        delivered: contents of one epoch, see program.once.
        rounds: times of each round, see program.timed.
    """

    name: str
    kind: str
    workers: int
    first: float | None = None
    resume: dict[str, float] = field(default_factory=dict)
    peak: int = 0
    delivered: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)

    def seconds(self) -> list[float]:
        """Per image, of each round."""
        return [one["seconds"] / one["images"] for one in self.rounds]

    def document(self) -> dict[str, Any]:
        """The results document: medians of the rounds, per image."""
        each = {name: median(one[name] / one["images"] for one in self.rounds) for name in ("seconds", "cpu")}
        per_second = [1 / second for second in self.seconds()]
        return {
            "name": self.name,
            "kind": self.kind,
            "workers": self.workers,
            "images_per_second": median(per_second),
            "images_per_second_range": [min(per_second), max(per_second)],
            "seconds_of_rounds": self.seconds(),
            "images_per_cpu_second": 1 / each["cpu"] if each["cpu"] else None,
            "cpu_seconds": each["cpu"],
            "bytes_read": self.delivered.get("read", 0.0),
            "bytes_to_device": self.delivered.get("device_bytes", 0),
            "peak_bytes": self.peak,
            "first_batch_cold_seconds": self.first,
            "first_batch_seconds": self.resume,
        }


def compare(
    entries: list[tuple[Contender, Place, int]],
    task: Task,
    rounds: int,
    images: dict[str, int],
    *,
    quick: bool = False,
    resume: bool = False,
) -> list[Row]:
    """Start all contenders, let each deliver an epoch, then measure interleaved rounds.

    Args:
        entries: contender, its files and its number of workers.
        images: number of images of a round, by kind of contender; fast contenders need more for a precise
            time.
        quick: only the rounds, no epoch with its memory before them.
        resume: also measure the first batches: of a new process, one process starting at a time, and when
            going on within an epoch.
    """
    rows, running = [], []
    try:
        for contender, place, workers in entries:
            one = Running(contender, place, task, workers)
            running.append(one)
            rows.append(Row(contender.name, contender.kind, workers, one.first() if resume else None))
        for one in () if resume else running:
            one.first()
        for row, one in zip(rows, running, strict=True) if not quick else ():
            with process_tree.Watch(one.process.pid) as watch:
                row.delivered = one.ask("pass")
            row.peak = watch.peak
        for number in range(rounds):
            turn = list(zip(rows, running, strict=True))
            for row, one in turn[number % len(turn) :] + turn[: number % len(turn)]:
                row.rounds.append(one.ask("round", images=images[row.kind]))
        for row, one in zip(rows, running, strict=True):
            if row.kind != "limit" and resume:
                times = 5 if row.kind == "ours" else 1  # times of some hundredths of a second need a median
                for start in (0.0, 0.5, 0.9):
                    found = [one.ask("resume", start=start)["seconds"] for _ in range(times)]
                    row.resume[f"{start:g}"] = median(found)
    finally:
        for one in running:
            one.end()
        for one in running:
            one.stop()
    return rows


def ratio(slow: Row, fast: Row) -> dict[str, float]:
    """The speed of one contender relative to another: median and range of the ratios of equal rounds."""
    ratios = [s / f for s, f in zip(slow.seconds(), fast.seconds(), strict=True)]
    return {"median": median(ratios), "least": min(ratios), "most": max(ratios)}


def best(rows: list[Row], kind: str) -> Row:
    """The fastest contender of a kind, by its median."""
    return min((row for row in rows if row.kind == kind), key=lambda row: median(row.seconds()))
