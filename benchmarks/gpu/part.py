"""A part of the run on a GPU, and what it records.

    def work(setting: Setting, record: Record) -> None:
        record.check("masks equal those of the CPU", torch.equal(one, other), "16 x 64 masks")
        record.figure("raster", 0.41, "ms", at_most=0.5)

Each record is a line of JSON, written at once, so that a part that crashes keeps what it has recorded.
"""

import json
import math
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the run.

    Attributes:
        name: its name in the table and on the command line.
        work: MODULE:FUNCTION, called with a `Setting` and a `Record`.
        seconds: time limit, after which the process and its children are killed.
        what: what it checks and measures, one line.
        needs: earlier parts that must have ended well.
        measures: whether it measures times, and so runs alone; others run at the same time as their
            neighbours of this kind.
    """

    name: str
    work: str
    seconds: float
    what: str
    needs: tuple[str, ...] = ()
    measures: bool = True


@dataclass(frozen=True, slots=True)
class Setting:
    """How a part runs.

    Attributes:
        device: cuda, or cpu as a stand-in.
        tiny: smallest sizes, which show that the code runs; figures mean nothing then.
        folder: folder that all parts of a run share, for the datasets of the part "material".
        start: runs a command, with the interface of `subprocess.run`.
        outputs: folder of the files into which commands in progress write; by default `folder`.
    """

    device: str
    tiny: bool
    folder: Path
    start: Callable[..., "subprocess.CompletedProcess[str]"] = subprocess.run
    outputs: Path | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def run(self, name: str, *command: object, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run a command of this Python, with both outputs in one file, which is printed at the end.

        Args:
            name: of the file.
            command: arguments of Python.

        Returns:
            Its exit code, and its outputs together as `stdout`.
        """
        path = (self.outputs or self.folder) / f"{name}.output"
        words = [sys.executable, *map(str, command)]
        with path.open("w") as file:
            done = self.start(words, stdout=file, stderr=subprocess.STDOUT, **options)
        done.stdout = path.read_text(errors="replace")
        print(f"{name}: exit code {done.returncode}\n{done.stdout[-4000:]}", flush=True)
        path.unlink()
        return done

    def pick(self, full: Any, tiny: Any) -> Any:
        """One of two sizes."""
        return tiny if self.tiny else full


class Skipped(Exception):
    """A part cannot run here; the message says why."""


class Record:
    """Records of one part: checks, figures, descriptions.

    Args:
        path: file of the records, one JSON object per line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, name: str, passed: Any, detail: object = "") -> bool:
        """Record whether something holds; a check that does not hold fails the run."""
        self._write({"check": name, "passed": bool(passed), "detail": str(detail)})
        return bool(passed)

    def figure(
        self,
        name: str,
        value: float,
        unit: str = "",
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """Record a measurement. A target that is missed is shown, but does not fail the run."""
        line: dict[str, Any] = {"figure": name, "value": float(value), "unit": unit}
        if at_least is not None:
            line |= {"target": f"at least {at_least:g}", "met": bool(value >= at_least)}
        if at_most is not None:
            line |= {"target": f"at most {at_most:g}", "met": bool(value <= at_most)}
        if not math.isfinite(value):
            line["value"] = None  # JSON has no NaN
        self._write(line)

    def text(self, name: str, text: str) -> None:
        """Record a text, such as a table; it is in the results file only."""
        self._write({"text": name, "value": text})

    def about(self, **facts: object) -> None:
        """Record facts about the machine."""
        self._write(
            {"about": {name: value if value is None else str(value) for name, value in facts.items()}}
        )

    def skipped(self, reason: str) -> None:
        """Record that the part cannot run here."""
        self._write({"skipped": reason})

    def done(self) -> None:
        """Record that the part has come to its end."""
        self._write({"done": True})

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Context whose errors become a failed check, so that the rest of the part runs."""
        try:
            yield
        except Skipped:
            raise
        except Exception as error:
            traceback.print_exc()
            text = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.check(name, False, f"{type(error).__name__}: {text}")

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:  # one write per line, which is complete or missing
            file.write(f"{json.dumps(line)}\n")
