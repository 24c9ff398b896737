"""The table of a run, and its file in benchmarks/results."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.driver import REPOSITORY, Outcome

RESULTS = REPOSITORY / "benchmarks" / "results"
_WORDS = 110  # characters of a line of the table


def lines(name: str, outcome: Outcome) -> Iterator[str]:
    """A part as lines of text: its state, failed checks, figures, the end of its log."""
    passed = sum(check["passed"] for check in outcome.checks)
    checks = f"{passed} of {len(outcome.checks)} checks" if outcome.checks else ""
    yield f"{name:<13} {outcome.state:<10} {outcome.seconds:6.1f} s  {checks:<16} {outcome.why}".rstrip()
    for check in outcome.checks:
        if not check["passed"]:
            yield f"    FAILED {check['name']}: {check['detail']}"[:400]
    for figure, found in outcome.figures.items():
        target = ""
        if "target" in found:
            target = f"   {found['target']}: {'met' if found['met'] else 'MISSED'}"
        value = "unknown" if found["value"] is None else f"{found['value']:,.4g}"
        yield f"    {figure:<58} {value:>12} {found['unit']}{target}".rstrip()
    if outcome.log:
        yield from (f"    | {line[:_WORDS]}" for line in outcome.log.splitlines()[-12:])


def summary(outcomes: Mapping[str, Outcome], seconds: float) -> str:
    """One line: how many parts ended in which state, and how many checks passed."""
    states: dict[str, int] = {}
    for outcome in outcomes.values():
        states[outcome.state] = states.get(outcome.state, 0) + 1
    checks = [check["passed"] for outcome in outcomes.values() for check in outcome.checks]
    missed = sum(not found.get("met", True) for one in outcomes.values() for found in one.figures.values())
    parts = ", ".join(f"{count} {state}" for state, count in states.items())
    targets = f", {missed} targets missed" if missed else ""
    return f"{parts}; {sum(checks)} of {len(checks)} checks passed{targets}; {seconds:.0f} s"


def gpu_name(device: str) -> str:
    """The name of the first GPU, such as "NVIDIA H200", without torch; "cpu" for a stand-in."""
    if device == "cpu":
        return "cpu"
    program = shutil.which("nvidia-smi")
    if program is not None:
        query = [program, "--query-gpu=name", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return "unknown GPU"
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.splitlines()[0].strip()
    return "unknown GPU"


def path_of(name: str) -> Path:
    """The results file of a GPU."""
    return RESULTS / f"{re.sub(r'[^a-z0-9.]+', '-', name.lower()).strip('-')}.json"


def write(path: Path, gpu: str, outcomes: Mapping[str, Outcome]) -> None:
    """Write the results file; the results of parts that this run did not start stay in it."""
    document: dict[str, Any] = {"gpu": gpu, "machine": {}, "parts": {}}
    with suppress(OSError, ValueError):  # none yet, or one that cannot be read
        document |= json.loads(path.read_bytes())
    now, commit = datetime.now(UTC).strftime("%Y-%m-%d"), _commit()
    for name, outcome in outcomes.items():
        document["machine"] |= outcome.about
        one = outcome.document()
        one.pop("about", None)
        document["parts"][name] = {"date": now, "commit": commit, **one}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(path)


def _commit() -> str | None:
    """The commit of the clone, if it is one."""
    try:
        command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short=12", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
