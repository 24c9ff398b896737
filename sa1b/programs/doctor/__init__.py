"""Checks of machine, ranks and storage before a run: `sa1b doctor`; `check` is for a model of your own.

Equal findings of several ranks are one line of the table.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import groupby
from typing import Any, Literal

from sa1b.console import counted
from sa1b.report import first_lines, ranges

State = Literal["ok", "warning", "failed", "skipped"]
STATES: tuple[State, ...] = ("failed", "warning", "skipped", "ok")
# A number that is not part of a name or a version.
_NUMBER = re.compile(r"((?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w-]|\.\d))")
# Values that should be the same on all ranks; empty: each that a rank has.
_SAME: tuple[tuple[str, str, State, str], ...] = (
    ("versions", "sa1b code torch cuda nccl", "failed", "Use the same environment or image on all machines"),
    ("versions", "python driver", "warning", "Use the same {name} on all machines"),
    ("dataset", "digest", "failed", "Name a directory that all machines share, or copy one (sa1b copy)"),
    ("environment", "", "warning", "Set {name} in the job script, so that all ranks have it"),
)


def __getattr__(name: str) -> Any:
    if name != "check":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("sa1b.programs.doctor.checks"), name)  # loads torch


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found on one rank; a row of the table is that of several ranks."""

    state: State  # skipped: the check could not run; `figure` is the reason
    figure: str  # one line with the measured value and its unit: "64 MiB free of 64 MiB"
    remedy: str = ""  # what to do, imperative; a finding that is ok loses it
    values: Mapping[str, Any] = field(default_factory=dict)  # measured, for --json, in SI units
    check: str = ""
    ranks: tuple[int, ...] = ()  # empty: all of them, or a single process
    host: str = ""


Findings = Iterator[Finding]


@dataclass(frozen=True, slots=True)
class Report:
    """The findings of all ranks, in the order of the checks."""

    findings: Sequence[Finding]
    title: str
    hosts: Sequence[str] = ()  # of each rank

    def exit_code(self) -> int:
        """0: no check failed. 1: a check failed."""
        return int(any(finding.state == "failed" for finding in self.findings))

    def document(self) -> dict[str, Any]:
        """JSON document for --json, with every finding of every rank."""
        counts = Counter(row.state for row in self._rows())
        return {
            "title": self.title,
            "hosts": list(self.hosts),
            "findings": [asdict(finding) for finding in self.findings],
            "counts": {state: counts[state] for state in STATES},
            "exit_code": self.exit_code(),
        }

    def table(self) -> str:
        """Text for the terminal: one line for each check, then what to do, the worst last."""
        rows, lines = self._rows(), [self.title]
        width = max((len(row.check) for row in rows), default=0)
        for _, same in groupby(rows, key=lambda row: row.check):
            texts = [
                f"  {row.state.upper() if row.state == 'failed' else row.state:<7}  {row.check:<{width}}  "
                f"{row.figure}{_where(row, '  [{}]')}"
                for row in same
            ]
            lines += first_lines(texts, 8, f"  {'':<{width + 7}}  and {{:,}} more; --json lists all")
        for heading, state in (("Warnings:", "warning"), ("Failed:", "failed")):
            of_state = [row for row in rows if row.state == state]
            advice = dict.fromkeys(f"  {row.check}{_where(row, ' ({})')}: {row.remedy}" for row in of_state)
            lines += ["", heading, *advice] if advice else []
        counts = Counter(row.state for row in rows)
        words = [counted(counts[one], one, "s" * (one == "warning")) for one in STATES if counts[one]]
        return "\n".join([*lines, "", ", ".join(words) or "no check was run"])

    def _rows(self) -> list[Finding]:
        """Findings with equal texts merged into one, in the order of the checks. They may differ in numbers,
        which then become a range: "790 to 812 MB/s". One that is ok on all ranks names no rank.
        """
        groups: dict[tuple[str, ...], list[Finding]] = {}
        for one in self.findings:
            words = _NUMBER.split(one.figure)[::2]
            groups.setdefault((one.check, one.state, one.remedy, *words), []).append(one)
        rows = []
        for same in groups.values():
            columns = zip(*(_NUMBER.split(one.figure) for one in same), strict=True)
            ranks = tuple(sorted({rank for one in same for rank in one.ranks}))
            host = ", ".join(dict.fromkeys(one.host for one in same if one.host))
            if 0 < len(self.hosts) <= len(ranks) and same[0].state in ("ok", "skipped"):
                ranks, host = (), ""
            rows.append(replace(same[0], figure="".join(map(_span, columns)), ranks=ranks, host=host))
        checks = list(dict.fromkeys(one.check for one in self.findings))
        return sorted(rows, key=lambda row: (checks.index(row.check), STATES.index(row.state)))


def _span(texts: Sequence[str]) -> str:
    if len({*texts}) == 1:
        return texts[0]
    ordered = sorted(texts, key=lambda text: float(text.replace(",", "")))
    return f"{ordered[0]} to {ordered[-1]}"


def _where(row: Finding, form: str) -> str:
    where = " on ".join(part for part in (named(row.ranks), row.host) if part)
    return form.format(where) if where else ""


def named(ranks: Sequence[int]) -> str:
    """Ranks in ascending order as text: "rank 3", "ranks 0-3, 7"; none: ""."""
    return f"rank{'' if len(ranks) == 1 else 's'} {ranges(ranks)}" if ranks else ""


def differences(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Findings about values that should be the same on all ranks, and about GPUs that ranks share."""
    for check, names, state, remedy in _SAME:
        # The first finding of a rank has all values; a dataset that cannot be read has none.
        of_ranks = {one.ranks[0]: one for one in reversed(findings) if one.check == check}
        of_ranks = {rank: one for rank, one in of_ranks.items() if one.state != "failed"}
        for name in names.split() or sorted({name for one in of_ranks.values() for name in one.values}):
            values = {rank: str(one.values.get(name, "not set"))[:40] for rank, one in of_ranks.items()}
            most = max(values.values(), key=[*values.values()].count, default="")
            others = named(sorted(rank for rank in values if values[rank] == most))
            for rank in [] if name.endswith("SOCKET_IFNAME") else sorted(values):
                if values[rank] != most:
                    figure = f"{name} {values[rank]}, and {most} on {others}"
                    advice = remedy.format(name=name)
                    yield replace(of_ranks[rank], state=state, figure=figure, remedy=advice, values={})
    gpus = [one for one in findings if one.check == "device" and "uuid" in one.values]
    for one in gpus:
        same = [other for other in gpus if other.values["uuid"] == one.values["uuid"]]
        if len(same) > 1:
            remedy = "Start one rank for each GPU, or let each task see its own (srun --gpus-per-task=1)"
            figure = f"{len(same)} ranks have the same GPU ({one.values['uuid']})"
            yield replace(one, state="failed", figure=figure, remedy=remedy)


def level(amount: float, least: float, advised: float) -> State:
    return "failed" if amount < least else "warning" if amount < advised else "ok"
