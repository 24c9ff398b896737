"""Checks of machine, ranks and storage before a run: `sa1b doctor`; `check` is for a model of your own."""

import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sa1b.console import counted
from sa1b.report import ranges

if TYPE_CHECKING:
    import torch

State = Literal["ok", "warning", "failed", "skipped"]
STATES: tuple[State, ...] = ("failed", "warning", "skipped", "ok")
# A number that is not part of a name or a version.
_NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?![\w-]|\.\d)")
_SHOWN = 8  # lines of one check in the table


def __getattr__(name: str) -> Any:
    if name != "check":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("sa1b.programs.doctor.checks"), name)  # loads torch


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found on one rank, or on several if all have found the same."""

    state: State  # skipped: the check could not run; `figure` is the reason
    figure: str  # one line with the measured value and its unit: "64 MiB free of 64 MiB"
    remedy: str = ""  # what to do, imperative; empty only if the state is ok
    values: Mapping[str, Any] = field(default_factory=dict)  # measured, for --json, in SI units
    check: str = ""
    ranks: tuple[int, ...] = ()  # that it concerns; empty: all of them, or a single process
    host: str = ""  # that it concerns, or several separated by commas; empty: all

    def where(self) -> str:
        """Ranks and hosts as text: "rank 3 on gpu-07", "ranks 0-7 on gpu-01, gpu-02"; empty: all."""
        return " on ".join(part for part in (named(self.ranks), self.host) if part)


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A process, its rank, and the settings of the user."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int  # ranks of this machine
    device: "torch.device"  # a GPU has an index
    host: str
    root: str | None = None
    out: Path | None = None
    seconds: float = 5.0  # of the measurement of a rate
    timeout: float = 30.0  # seconds that a rank waits for the others; half of them, for storage
    rate: float | None = None  # images per second that a rank trains; None: estimated from its device
    preset: str | None = None

    @classmethod
    def of_this_process(cls, **settings: Any) -> "RankProcess":
        """This process, by the variables of torchrun; ValueError if they contradict each other."""
        import torch

        from sa1b.stream.plan import process_rank

        rank, world_size = process_rank()
        local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
        # A launcher may show each task its own GPU only, as number 0 (srun --gpus-per-task=1).
        index = 0 if visible == 1 else local[0]
        device = torch.device("cuda", index) if index < visible else torch.device("cpu")
        return cls(rank, world_size, *local, device, socket.gethostname(), **settings)

    def own(self, finding: Finding, check: str) -> Finding:
        """A finding of a check on this rank; one that is ok needs no remedy."""
        remedy = "" if finding.state == "ok" else finding.remedy
        ranks, host = ((self.rank,), self.host) if self.world_size > 1 else ((), "")
        return replace(finding, check=check, remedy=remedy, ranks=ranks, host=host)


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
        findings = [asdict(finding) for finding in self.findings]
        counts = {state: sum(row.state == state for row in self.rows()) for state in STATES}
        document = {"title": self.title, "hosts": list(self.hosts), "findings": findings, "counts": counts}
        return document | {"exit_code": self.exit_code()}

    def table(self) -> str:
        """Text for the terminal: one line for each check, then what to do, the worst last."""
        rows, lines = self.rows(), [self.title]
        width = max((len(row.check) for row in rows), default=0)
        for _, same in groupby(rows, key=lambda row: row.check):
            for number, row in enumerate(same):
                where, state = row.where(), row.state.upper() if row.state == "failed" else row.state
                line = f"  {state:<7}  {row.check:<{width}}  {row.figure}{f'  [{where}]' if where else ''}"
                lines += [line] if number < _SHOWN else []
            if number >= _SHOWN:
                lines.append(f"  {'':<{width + 7}}  and {number + 1 - _SHOWN:,} more; --json lists all")
        for heading, worst in (("Warnings:", "warning"), ("Failed:", "failed")):
            advice: dict[tuple[str, str], list[Finding]] = {}
            for row in rows:
                if row.state == worst:
                    advice.setdefault((row.check, row.remedy), []).append(row)
            lines += ["", heading] if advice else []
            for (check, remedy), of_remedy in advice.items():
                where = _together(of_remedy).where()
                lines.append(f"  {check}{f' ({where})' if where else ''}: {remedy}")
        counts = [(state, sum(row.state == state for row in rows)) for state in STATES]
        words = [counted(n, state, "s" if state == "warning" else "") for state, n in counts if n]
        return "\n".join([*lines, "", ", ".join(words) or "no check was run"])

    def rows(self) -> list[Finding]:
        """Findings with equal texts merged into one, sorted by check in order of appearance.

        They may differ in numbers, which then become a range: "790 to 812 MB/s". A finding that is ok on all
        ranks names no rank.
        """
        groups: dict[tuple[str, ...], list[Finding]] = {}
        order: dict[str, int] = {}
        for finding in self.findings:
            order.setdefault(finding.check, len(order))
            figure = _NUMBER.sub("#", finding.figure)
            groups.setdefault((finding.check, finding.state, figure, finding.remedy), []).append(finding)
        rows = []
        for same in groups.values():
            row = replace(_together(same), figure=_spread([finding.figure for finding in same]))
            # A fault names its ranks and hosts even if all have it.
            of_all = 0 < len(self.hosts) <= len(row.ranks) and row.state in ("ok", "skipped")
            rows.append(replace(row, ranks=(), host="") if of_all else row)
        return sorted(rows, key=lambda row: (order[row.check], STATES.index(row.state)))


def _together(same: Sequence[Finding]) -> Finding:
    """The first finding, with the ranks and hosts of all."""
    ranks = tuple(sorted({rank for finding in same for rank in finding.ranks}))
    hosts = dict.fromkeys(host for finding in same for host in finding.host.split(", ") if host)
    return replace(same[0], ranks=ranks, host=", ".join(hosts))


def _spread(figures: Sequence[str]) -> str:
    """Texts that differ only in numbers as one text with ranges."""
    columns = zip(*(_NUMBER.findall(figure) for figure in figures), strict=True)
    spread = iter([sorted(set(column), key=lambda text: float(text.replace(",", ""))) for column in columns])

    def shown(_: "re.Match[str]") -> str:
        numbers = next(spread)
        return numbers[0] if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"

    return _NUMBER.sub(shown, figures[0])


def level(amount: float, least: float, advised: float) -> State:
    return "failed" if amount < least else "warning" if amount < advised else "ok"


def named(ranks: Sequence[int]) -> str:
    """Ranks in ascending order as text: "rank 3", "ranks 0-3, 7"; none: ""."""
    return f"rank{'' if len(ranks) == 1 else 's'} {ranges(ranks)}" if ranks else ""


# Values that should be the same on all ranks; empty: each that a rank has.
_SAME: tuple[tuple[str, str, State, str], ...] = (
    ("versions", "sa1b code torch cuda nccl", "failed", "Use the same environment or image on all machines"),
    ("versions", "python driver", "warning", "Use the same {name} on all machines"),
    ("dataset", "digest", "failed", "Name a directory that all machines share, or copy one (sa1b copy)"),
    ("environment", "", "warning", "Set {name} in the job script, so that all ranks have it"),
)


def differences(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Findings about values that should be the same on all ranks, and about GPUs that ranks share."""
    for check, names, state, remedy in _SAME:
        # The first finding of a rank has all values; a dataset that cannot be read has none.
        of_ranks = {one.ranks[0]: one for one in reversed(findings) if one.check == check}
        of_ranks = {rank: one for rank, one in of_ranks.items() if one.state != "failed"}
        for name in names.split() or sorted({name for one in of_ranks.values() for name in one.values}):
            groups: dict[str, list[Finding]] = {}
            for rank in sorted(of_ranks) if not name.endswith("SOCKET_IFNAME") else ():
                value = str(of_ranks[rank].values.get(name, "not set"))
                groups.setdefault(value[:12] if len(value) == 64 else value, []).append(of_ranks[rank])
            most = max(groups, key=lambda value: len(groups[value]), default="")
            for value in [value for value in groups if value != most]:
                others = f"{most} on {named(_together(groups[most]).ranks)}"
                figure, advice = f"{name} {value}, and {others}", remedy.format(name=name)
                yield replace(_together(groups[value]), state=state, figure=figure, remedy=advice, values={})
    users: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.check == "device" and "uuid" in finding.values:
            users.setdefault(finding.values["uuid"], []).append(finding)
    for uuid, same in users.items():
        if len(same) > 1:
            remedy = "Start one rank for each GPU, or let each task see its own (srun --gpus-per-task=1)"
            figure = f"{len(same)} ranks have the same GPU ({uuid})"
            yield replace(_together(same), state="failed", figure=figure, remedy=remedy)
