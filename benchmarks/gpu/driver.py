"""Runs parts, each in a process with a time limit, and collects what they recorded.

A part ends in one of these states:

    ok           all checks passed
    failed       a check did not pass, or the process ended with an error, a signal, or without a record
    timed out    it was killed at its limit
    skipped      it cannot run here; its reason is recorded
    not run      a part that it needs did not end well, or no time was left

The driver imports neither torch nor the package, so that no defect of a part or of the installation can
stop it.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.part import Part, Setting

State = Literal["ok", "failed", "timed out", "skipped", "not run"]
REPOSITORY = Path(__file__).parents[2]
_AT_ONCE = 4  # parts that measure no times
_LEAST = 5.0  # seconds: with less time left, no part is started
_KILLED_WITHIN = 10.0  # seconds: a process in the driver of a broken GPU may not end even then
_LOG = 2500  # characters of the log of a part that did not end well, and of the output of a command


@dataclass(slots=True)
class Outcome:
    """The outcome of a part, and its records.

    Attributes:
        state: see above.
        why: why it did not end well; else "".
        seconds: time that it took.
        checks: name, passed, detail.
        figures: name -> value, unit and perhaps target and met.
        about: facts about the machine.
        texts: name -> text.
        log: the end of its output, if it did not end well.
    """

    state: State
    why: str = ""
    seconds: float = 0.0
    checks: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    log: str = ""

    def document(self) -> dict[str, Any]:
        """The outcome as JSON values."""
        return {name: value for name, value in asdict(self).items() if value or name == "state"}


def run(
    parts: Sequence[Part],
    setting: Setting,
    *,
    seconds: float,
    ended: Callable[[Part, Outcome], None],
) -> dict[str, Outcome]:
    """Run parts in order; neighbours that measure no times at the same time.

    Args:
        seconds: time limit of all parts together.
        ended: called after each part, for one part at a time.

    Raises:
        KeyboardInterrupt: the processes of the parts in progress have been killed.
    """
    end = time.monotonic() + seconds
    found: dict[str, Outcome] = {}
    processes: set[subprocess.Popen[bytes]] = set()  # that may still run
    lock = threading.Lock()

    def work(part: Part) -> None:
        missing = [name for name in part.needs if name not in found or found[name].state != "ok"]
        left = end - time.monotonic()
        if missing:
            outcome = Outcome("not run", f"it needs {' and '.join(missing)}, which did not end well")
        elif left < _LEAST:
            outcome = Outcome("not run", f"the {seconds:.0f} s of the run have passed")
        else:
            outcome = run_part(part, setting, min(part.seconds, left), processes)
        with lock:
            found[part.name] = outcome
            ended(part, outcome)

    try:
        for measures, some in groupby(parts, key=lambda part: part.measures):
            with ThreadPoolExecutor(1 if measures else _AT_ONCE) as pool:
                try:
                    for future in [pool.submit(work, part) for part in some]:
                        future.result()
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    for process in tuple(processes):
                        _kill_all(process)
                    raise
    finally:
        for process in tuple(processes):
            _kill_all(process)
    return {part.name: found[part.name] for part in parts}


def run_part(
    part: Part, setting: Setting, limit: float, processes: "set[subprocess.Popen[bytes]] | None" = None
) -> Outcome:
    """Run one part in a process of its own, which is in `processes` while it runs."""
    processes = set() if processes is None else processes
    setting.folder.mkdir(parents=True, exist_ok=True)
    records, log = (setting.folder / f"{part.name}.{suffix}" for suffix in ("jsonl", "log"))
    records.unlink(missing_ok=True)
    own = setting.folder / "outputs" / part.name
    given = {
        "work": part.work,
        "device": setting.device,
        "tiny": setting.tiny,
        "folder": str(setting.folder),
        "outputs": str(own),
        "records": str(records),
        "seconds": limit,
    }
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    # The package of this clone, wherever another one is installed.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    if setting.device == "cpu" or not part.measures:
        # More threads than cores wait for each other: a step of a small model took 30 s beside other work.
        environment.setdefault("OMP_NUM_THREADS", "1" if setting.device == "cpu" else "4")
    own.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.child", json.dumps(given)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            env=environment,
            start_new_session=True,
        )
        processes.add(process)
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_all(process)  # also what the part has started and left behind
            processes.discard(process)
    outcome = _outcome(records, code, limit)
    outcome.seconds = round(time.monotonic() - began, 1)
    if outcome.state in ("failed", "timed out"):
        outcome.log = log.read_text(errors="replace")[-_LOG:]
    if outcome.state == "timed out":  # commands that have ended are in the log
        for path in sorted(own.glob("*")):
            outcome.log += f"\n--- {path.name}\n{path.read_text(errors='replace')[-_LOG:]}"
    return outcome


def _kill_all(process: "subprocess.Popen[bytes]") -> None:
    """Kill the processes of a part that still run."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_WITHIN)


def _outcome(records: Path, code: int | None, limit: float) -> Outcome:
    """The outcome by the records of a part and its exit code, None if it was killed at its limit."""
    outcome, done, skipped = Outcome("ok"), False, ""
    for line in records.read_text().splitlines() if records.exists() else ():
        try:
            found = json.loads(line)
        except ValueError:
            continue  # the last line of a process that was killed
        if "check" in found:
            outcome.checks.append({"name": found.pop("check"), **found})
        elif "figure" in found:
            outcome.figures[found.pop("figure")] = found
        elif "text" in found:
            outcome.texts[found["text"]] = found["value"]
        outcome.about |= found.get("about", {})
        skipped = found.get("skipped", skipped)
        done = done or "done" in found
    failed = [check["name"] for check in outcome.checks if not check["passed"]]
    if code is None:
        outcome.state, outcome.why = "timed out", f"killed after {limit:.0f} s"
    elif code < 0:
        outcome.state, outcome.why = "failed", f"killed by {signal.Signals(-code).name}"
    elif code or not done:
        outcome.state = "failed"
        outcome.why = f"ended with exit code {code}" if code else "ended without a record of its end"
    elif failed:
        outcome.state, outcome.why = "failed", f"{len(failed)} of {len(outcome.checks)} checks failed"
    elif skipped:
        outcome.state, outcome.why = "skipped", skipped
    elif not outcome.checks and not outcome.figures:
        outcome.state, outcome.why = "failed", "recorded no check and no figure"
    return outcome
