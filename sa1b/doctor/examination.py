"""All checks in order: of this rank alone, comparisons of the ranks, then those that ranks run together.

    subject = Subject.of_this_process(root, out, seconds, timeout)
    report = examine(subject, chosen=lambda name: True)     # on rank 0: of all ranks
    print(report.table())

A rank that cannot reach the others reports its own findings. A check that fails stops no other check; those
that cannot run after it are skipped, with the reason.
"""

import sys
from collections.abc import Callable

from sa1b.console import counted
from sa1b.doctor import machine
from sa1b.doctor.check import Check, Subject
from sa1b.doctor.meeting import Meeting, of_rank
from sa1b.doctor.report import Finding, Report

LOCAL: tuple[Check, ...] = (Check("versions", machine.versions),)
# Checks that the ranks run together, in this order, by `Meeting` and then by a process group.
TOGETHER: tuple[Check, ...] = ()


def names() -> tuple[str, ...]:
    """The names of all checks, in order."""
    return (*(one.name for one in (*LOCAL, *TOGETHER)),)


def examine(subject: Subject, chosen: Callable[[str], bool], *, quiet: bool = False) -> Report | None:
    """Run the checks. Every rank calls it; rank 0 returns the findings of all ranks.

    Another rank returns None, or its own findings if it cannot reach the others.

    Args:
        subject: this process.
        chosen: whether a check is run, by its name.
        quiet: print no progress on stderr.
    """
    quiet = quiet or subject.rank > 0
    found: list[Finding] = []
    for check in LOCAL:
        if chosen(check.name):
            _say(check.name, quiet)
            found += check.run(subject)
    found = of_rank(found, subject)
    if subject.world_size == 1:
        return Report(found, f"1 process on {subject.host}")
    try:
        meeting = Meeting(subject)
    except Exception as error:
        return Report([*found, _unreachable(subject, error)], f"rank {subject.rank} on {subject.host} alone")
    meeting.send("local", (subject.host, found))
    if subject.rank > 0:
        return None
    return _gathered(subject, meeting)


def _gathered(subject: Subject, meeting: Meeting) -> Report:
    answers = meeting.receive("local")
    found: list[Finding] = []
    hosts = ["?"] * subject.world_size
    for rank, (host, findings) in sorted(answers.items()):
        hosts[rank] = host
        found += findings
    missing = tuple(rank for rank in range(subject.world_size) if rank not in answers)
    if missing:
        found.append(
            Finding(
                "ranks",
                "failed",
                f"{len(missing)} of {subject.world_size} did not answer within {subject.timeout:g} s",
                "Look at the output of these ranks and of their launcher",
                ranks=missing,
            )
        )
    places = len({host for host in hosts if host != "?"})
    where = counted(places, "host")
    return Report(found, f"{subject.world_size} ranks on {where}", hosts)


def _unreachable(subject: Subject, error: Exception) -> Finding:
    address = ":".join(subject.environment.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    return Finding(
        "rendezvous",
        "failed",
        f"{address}: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
        f"Check that {address} is reachable from {subject.host}, and that rank 0 runs",
        ranks=(subject.rank,),
        host=subject.host,
    )


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        print(f"doctor: {text} ...", file=sys.stderr, flush=True)
