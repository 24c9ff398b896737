"""The findings of the checks, merged over ranks: table, JSON document, exit code."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

from sa1b.console import counted
from sa1b.report import ranges

State = Literal["ok", "warning", "failed", "skipped"]
STATES: tuple[State, ...] = ("failed", "warning", "skipped", "ok")
SHOWN = 8  # lines of one check in the table
LINES = "lines"  # in the values of a finding: text that is printed after the table

# A number that is not part of a name or a version.
_NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?![\w-]|\.\d)")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check on one rank, or on several ranks if all of them have the same one."""

    check: str  # name of the check
    state: State  # skipped: the check could not run; `figure` is the reason
    figure: str  # one line with the measured value and its unit: "64 MiB free of 64 MiB"
    remedy: str = ""  # what to do, imperative; empty only if the state is ok
    ranks: tuple[int, ...] = ()  # that it concerns; empty: all of them, or a single process
    host: str = ""  # that it concerns, or several separated by commas; empty: all
    # measured, for --json, with SI units in their names
    values: Mapping[str, Any] = field(default_factory=dict)

    def where(self) -> str:
        """Ranks and hosts as text: "rank 3 on gpu-07", "ranks 0-7 on gpu-01, gpu-02"; empty: all."""
        ranks = named(self.ranks) if self.ranks else ""
        return " on ".join(part for part in (ranks, _hosts(self.host)) if part)


@dataclass(frozen=True, slots=True)
class Report:
    """The findings of all ranks, in the order of the checks; equal ones need not be merged."""

    findings: Sequence[Finding]
    title: str = "1 process"  # about the checked ranks, one line
    hosts: Sequence[str] = ()  # of each rank

    def exit_code(self) -> int:
        """0: no check failed. 1: a check failed."""
        return int(any(finding.state == "failed" for finding in self.findings))

    def document(self) -> dict[str, Any]:
        """JSON document for --json, with every finding of every rank."""
        return {
            "title": self.title,
            "hosts": list(self.hosts),
            "findings": [asdict(finding) for finding in self.findings],
            "counts": self._counts(merged(self.findings, len(self.hosts))),
            "exit_code": self.exit_code(),
        }

    def table(self) -> str:
        """Text for the terminal: one line for each check, then what to do, the worst last."""
        rows = merged(self.findings, len(self.hosts))
        width = max((len(finding.check) for finding in rows), default=0)
        lines = [self.title]
        for _, same in groupby(rows, key=lambda finding: finding.check):
            of_check = list(same)
            lines += [_row(finding, width) for finding in of_check[:SHOWN]]
            if len(of_check) > SHOWN:
                more = f"and {len(of_check) - SHOWN:,} more; --json lists all"
                lines.append(f"  {'':<7}  {'':<{width}}  {more}")
        for finding in rows:
            if LINES in finding.values:
                lines += [
                    "",
                    f"{finding.check.capitalize()}:",
                    *(f"  {line}" for line in finding.values[LINES]),
                ]
        for state in ("warning", "failed"):
            if advice := _advice([finding for finding in rows if finding.state == state]):
                lines += ["", "Failed:" if state == "failed" else "Warnings:", *advice]
        counts = self._counts(rows)
        summary = [
            counted(counts[state], state, "s" if state == "warning" else "")
            for state in STATES
            if counts[state]
        ]
        return "\n".join([*lines, "", ", ".join(summary) or "no check was run"])

    def _counts(self, rows: Sequence[Finding]) -> dict[str, int]:
        return {state: sum(finding.state == state for finding in rows) for state in STATES}


def _advice(rows: Sequence[Finding]) -> list[str]:
    """The remedies of findings, each once for a check, with all ranks and hosts."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in rows:
        groups.setdefault((finding.check, finding.remedy), []).append(finding)
    lines = []
    for (check, remedy), same in groups.items():
        where = _together(same).where()
        lines.append(f"  {check}{f' ({where})' if where else ''}: {remedy}")
    return lines


def _together(same: Sequence[Finding]) -> Finding:
    ranks = tuple(sorted({rank for finding in same for rank in finding.ranks}))
    hosts = dict.fromkeys(host for finding in same for host in finding.host.split(", ") if host)
    return replace(same[0], ranks=ranks, host=", ".join(hosts))


def _row(finding: Finding, width: int) -> str:
    where = f"  [{finding.where()}]" if finding.where() else ""
    state = finding.state.upper() if finding.state == "failed" else finding.state
    return f"  {state:<7}  {finding.check:<{width}}  {finding.figure}{where}"


def merged(findings: Iterable[Finding], world_size: int) -> list[Finding]:
    """Findings with equal texts merged into one, sorted by check in order of appearance.

    They may differ in numbers, which then become a range: "790 to 812 MB/s". A finding that is ok on all
    ranks names no rank.
    """
    findings = list(findings)
    checks = {finding.check: number for number, finding in reversed(list(enumerate(findings)))}
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: checks[finding.check]):
        figure = _NUMBER.sub("#", finding.figure)
        groups.setdefault((finding.check, finding.state, figure, finding.remedy), []).append(finding)
    rows = []
    for same in groups.values():
        finding = replace(_together(same), figure=_spread([finding.figure for finding in same]))
        # A fault names its ranks and hosts even if all have it.
        of_all = 0 < world_size <= len(finding.ranks) and finding.state in ("ok", "skipped")
        rows.append(replace(finding, ranks=(), host="") if of_all else finding)
    # sorted() is stable: rows of one check are together, the worst first.
    return sorted(rows, key=lambda finding: (checks[finding.check], STATES.index(finding.state)))


def _spread(figures: Sequence[str]) -> str:
    """Texts that differ only in numbers as one text with ranges."""
    columns = zip(*(_NUMBER.findall(figure) for figure in figures), strict=True)
    spread = iter([sorted(set(column), key=lambda text: float(text.replace(",", ""))) for column in columns])

    def shown(_: "re.Match[str]") -> str:
        numbers = next(spread)
        return numbers[0] if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"

    return _NUMBER.sub(shown, figures[0])


def named(ranks: Sequence[int]) -> str:
    """Ranks in ascending order as text: "rank 3", "ranks 0-3, 7"."""
    return f"rank{'' if len(ranks) == 1 else 's'} {ranges(ranks)}"


def _hosts(host: str) -> str:
    names = host.split(", ")
    return host if len(names) <= 4 else f"{', '.join(names[:3])} and {counted(len(names) - 3, 'other host')}"


# Values that end or corrupt a run if they differ; other differences are a warning.
_SAME_VERSIONS = ("sa1b", "code", "torch", "cuda", "nccl")
_ALIKE_VERSIONS = ("python", "driver")


def agreement(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Findings on values that should be the same, or different, on all ranks."""
    for name in _SAME_VERSIONS:
        remedy = f"Install the same {name} on all machines, preferably the same environment or image"
        yield from _same(findings, "versions", name, "failed", remedy)
    for name in _ALIKE_VERSIONS:
        yield from _same(findings, "versions", name, "warning", f"Use the same {name} on all machines")
    yield from _same(
        findings,
        "dataset",
        "digest",
        "failed",
        "Name a directory that all machines share, or copy the same version to each (sa1b copy)",
    )
    yield from _own_names(findings)
    yield from _own_gpus(findings)
    yield from _same_environment(findings)


def _same(findings: Sequence[Finding], check: str, name: str, state: Any, remedy: str) -> Iterator[Finding]:
    """A finding for each group of ranks whose value differs from that of the largest group."""
    values = {
        rank: finding
        for finding in findings
        if finding.check == check and name in finding.values
        for rank in finding.ranks
    }
    value_of = {rank: str(finding.values[name]) for rank, finding in values.items()}
    for value, ranks, most, others in minorities(value_of):
        figure = f"{name} {_short(value)}, and {_short(most)} on {named(others)}"
        hosts = ", ".join(dict.fromkeys(values[rank].host for rank in ranks))
        yield Finding(check, state, figure, remedy=remedy, ranks=ranks, host=hosts, values={name: value})


def minorities(value_of: Mapping[int, str]) -> Iterator[tuple[str, tuple[int, ...], str, list[int]]]:
    """Yield each value that differs from the most frequent one: the value, its ranks, the most frequent
    value and the ranks of that one. `value_of`: rank -> value.
    """
    groups: dict[str, list[int]] = {}
    for rank, value in sorted(value_of.items()):
        groups.setdefault(value, []).append(rank)
    most = max(groups, key=lambda value: len(groups[value]), default="")
    for value, ranks in groups.items():
        if value != most:
            yield value, tuple(ranks), most, groups[most]


def _short(value: str) -> str:
    return value[:12] if len(value) == 64 else value  # a digest


def _own_names(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Machines with the same host name, which tables, claims and messages could not distinguish."""
    machines: dict[str, dict[str, list[int]]] = {}
    for finding in findings:
        if finding.check == "versions" and finding.values.get("machine"):
            machines.setdefault(finding.host, {}).setdefault(finding.values["machine"], []).extend(
                finding.ranks
            )
    for host, ranks in machines.items():
        if len(ranks) > 1:
            yield Finding(
                "versions",
                "warning",
                f"{len(ranks)} machines have this host name: {', and '.join(map(named, ranks.values()))}",
                "Give each machine a name of its own (hostnamectl hostname NAME; docker run --hostname NAME)",
                ranks=tuple(sorted(rank for same in ranks.values() for rank in same)),
                host=host,
            )


def _own_gpus(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Ranks that have the same GPU: NCCL would hang or fail."""
    users: dict[tuple[str, str], list[int]] = {}
    for finding in findings:
        if finding.check == "device" and "uuid" in finding.values:
            users.setdefault((finding.host, finding.values["uuid"]), []).extend(finding.ranks)
    for (host, uuid), ranks in users.items():
        if len(ranks) > 1:
            yield Finding(
                "device",
                "failed",
                f"{len(ranks)} ranks have the same GPU ({uuid})",
                "Start one rank for each GPU, or let each task see its own (srun --gpus-per-task=1)",
                ranks=tuple(sorted(ranks)),
                host=host,
            )


def _same_environment(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Variables of NCCL, gloo and torch that are not set to the same value on all ranks."""
    by_rank: dict[int, dict[str, str]] = {}
    hosts: dict[int, str] = {}
    for finding in findings:
        if finding.check == "environment":
            for rank in finding.ranks:
                by_rank.setdefault(rank, {}).update(finding.values)
                hosts[rank] = finding.host
    for name in sorted({name for values in by_rank.values() for name in values}):
        if name.endswith("SOCKET_IFNAME"):
            continue  # the interface may have another name on another machine
        set_on = {
            rank: f"{name}={values[name]}" if name in values else f"{name} not set"
            for rank, values in by_rank.items()
        }
        for text, ranks, most, others in minorities(set_on):
            figure = f"{text}, and {most} on {named(others)}"
            remedy = f"Set {name} in the job script, so that all ranks have it"
            of_ranks = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
            yield Finding("environment", "warning", figure, remedy=remedy, ranks=ranks, host=of_ranks)
