"""All checks in order: of this rank alone, comparisons of the ranks, then those that ranks run together.

    subject = Subject.of_this_process(root=root, out=out)
    report = examine(subject, chosen=lambda name: True)     # on rank 0: of all ranks
    print(report.table())

A rank that cannot reach the others reports its own findings. A check that fails stops no other check; those
that cannot run after it are skipped, with the reason.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from sa1b.console import counted
from sa1b.doctor import device, environment, machine, software, storage
from sa1b.doctor.agreement import agreement
from sa1b.doctor.bandwidth import BANDWIDTH, bandwidth
from sa1b.doctor.check import ABORTED, Check, Subject, unmet
from sa1b.doctor.exchange import CheckTogether, RankExchange, of_rank
from sa1b.doctor.group import GROUP, process_group, rank_sum
from sa1b.doctor.reachability import REACHABILITY, reachability
from sa1b.doctor.report import Finding, Report, named
from sa1b.doctor.ring import RING, ring
from sa1b.doctor.skew import SKEW, clock_skew
from sa1b.doctor.synchronisation import GRADIENTS, gradients
from sa1b.engine.rank_store import fault

# The quick ones first.
LOCAL = (
    Check("versions", software.versions),
    Check("packages", software.packages),
    Check("device", device.visible_device),
    Check("GPU state", device.gpu_state),
    Check("placement", device.placement, needs=("device",)),
    Check("environment", environment.environment),
    Check("CPUs", machine.cpus),
    Check("memory", machine.memory),
    Check("shared memory", machine.shared_memory),
    Check("locked memory", machine.locked_memory),
    Check("open files", machine.open_files),
    Check("clock", machine.clock),
    Check("space", storage.space),
    Check("dataset", storage.dataset, measures=True),
    Check("host-to-device copy", device.pinned_copy, needs=("device",), measures=True),
    Check("read rate", storage.read_rate, needs=("dataset",), measures=True),
)
RENDEZVOUS = "rendezvous"
_LAST = 5.0  # seconds that rank 0 waits at the end
# Checks that the ranks run together, in this order.
TOGETHER: tuple[CheckTogether, ...] = (
    CheckTogether(REACHABILITY, reachability),
    CheckTogether(SKEW, clock_skew),
    CheckTogether(GROUP, process_group),
    CheckTogether("rank sum", rank_sum, needs=(GROUP,)),
    CheckTogether(GRADIENTS, gradients, needs=(GROUP,)),
    CheckTogether(BANDWIDTH, bandwidth, needs=(GROUP,)),
    CheckTogether(RING, ring, needs=(GROUP,)),
)
ON_DEMAND = (RING,)  # not run unless chosen


def names() -> tuple[str, ...]:
    """The names of all checks, in order."""
    return (*(one.name for one in LOCAL), RENDEZVOUS, *(one.name for one in TOGETHER))


class Interrupted(KeyboardInterrupt):
    """Ctrl-C.

    Attributes:
        report: the findings so far.
    """

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


def examine(
    subject: Subject,
    chosen: Callable[[str], bool],
    *,
    quiet: bool = False,
    together: Sequence[CheckTogether] = TOGETHER,
) -> Report | None:
    """Run the checks. Every rank calls it; rank 0 returns the findings of all ranks.

    Another rank returns None, or its own findings if it cannot reach the others.

    Args:
        subject: this process.
        chosen: whether a check is run, by its name.
        quiet: print no progress on stderr.
        together: the checks that the ranks run together, the same on all ranks.

    Raises:
        Interrupted: Ctrl-C.
    """
    progress = _Progress(quiet or subject.rank > 0)
    found: list[Finding] = []
    try:
        for check in LOCAL:
            if chosen(check.name):
                progress.show(check.name, check.measures)
                found += check.run(subject, found)
        progress.end()
        steps = [check for check in together if chosen(check.name)]
        if subject.world_size == 1:
            found += _of_several(chosen, steps)
            return Report(found, f"1 process on {subject.host}", [subject.host])
        return _exchanged(subject, of_rank(found, subject), chosen, steps, progress)
    except KeyboardInterrupt:
        progress.end()
        raise Interrupted(Report(found, f"rank {subject.rank} on {subject.host}, interrupted")) from None


def _exchanged(
    subject: Subject,
    found: list[Finding],
    chosen: Callable[[str], bool],
    together: Sequence[CheckTogether],
    progress: "_Progress",
) -> Report | None:
    """The findings of all ranks, on rank 0; those of this rank, if it cannot reach the others."""
    try:
        exchange = RankExchange(subject)
        exchange.send("local", (subject.host, found))
        if subject.rank > 0:
            _follow(subject, exchange, together, found)
            return None
        return _lead(subject, exchange, chosen, together, progress)
    except Exception as error:  # torch's store raises several classes
        title = f"rank {subject.rank} on {subject.host}, alone"
        return Report([*found, _unreachable(subject, error)], title)


def _lead(
    subject: Subject,
    exchange: RankExchange,
    chosen: Callable[[str], bool],
    together: Sequence[CheckTogether],
    progress: "_Progress",
) -> Report:
    """Rank 0: gather the findings, and decide before each further check whether the ranks run it."""
    answers = exchange.receive("local", timeout=subject.wait)
    hosts = [answers[rank][0] if rank in answers else "?" for rank in range(subject.world_size)]
    found = [one for _, (_, findings) in sorted(answers.items()) for one in findings]
    found += [one for one in agreement(found) if chosen(one.check)]
    missing = _missing(subject, answers)
    if chosen(RENDEZVOUS):
        found.append(_met(subject, missing))
    for check in together:
        skipped = (
            _absent(check.name, missing)
            if missing
            else unmet(check.name, check.needs, found) or out_of_step(check, together, found)
        )
        exchange.send(_go(check), skipped is None)
        if skipped is not None:
            found.append(skipped)
            continue
        progress.show(check.name)
        exchange.send(check.name, check.run(subject, exchange))
        answers = exchange.receive(check.name)
        found += [one for _, findings in sorted(answers.items()) for one in findings]
        missing = _missing(subject, answers)
        if missing:
            found.append(_silent(subject, check.name, missing, hosts))
    progress.end()
    # The store may be in this process: it must not end before the others have read the last decision.
    answering = [rank for rank in range(1, subject.world_size) if rank not in missing]
    exchange.receive("done", answering, min(subject.timeout, _LAST))
    where = counted(len({*hosts} - {"?"}), "host")
    return Report(found, f"{subject.world_size} ranks on {where}", hosts)


def _follow(
    subject: Subject, exchange: RankExchange, together: Sequence[CheckTogether], found: list[Finding]
) -> None:
    """Another rank: run the checks for which rank 0 decides.

    Raises:
        RuntimeError: rank 0 has ended, or hangs.
    """
    for check in together:
        # Rank 0 may wait for other ranks before the check and after it.
        decision = exchange.receive(_go(check), [0], 3 * subject.timeout)
        if not decision:
            raise RuntimeError(f"rank 0 does not answer before the check {check.name!r}")
        if decision[0]:
            own = check.run(subject, exchange)
            found += own
            exchange.send(check.name, own)
    exchange.send("done", True)


def out_of_step(
    check: CheckTogether, together: Sequence[CheckTogether], found: Sequence[Finding]
) -> Finding | None:
    """The finding that a check is skipped because the ranks ended an earlier check at different collectives.

    The next collective would match those of another check; gloo then ends the process.
    """
    if GROUP not in check.needs:
        return None
    members = {one.name for one in together if GROUP in one.needs}
    aborted = next((one.check for one in found if one.check in members and ABORTED in one.values), None)
    if aborted is None:
        return None
    return Finding(check.name, "skipped", f"the check {aborted!r} did not end on all ranks", "Fix that first")


def _go(check: CheckTogether) -> str:
    return f"go/{check.name}"


def _of_several(chosen: Callable[[str], bool], together: Sequence[CheckTogether]) -> list[Finding]:
    """The checks of several ranks, skipped for a single process: one line for all, if all were chosen."""
    why = "one process; these checks need several ranks"
    remedy = "Start several: torchrun --nproc_per_node=8 -m sa1b doctor ROOT"
    names = [RENDEZVOUS] if chosen(RENDEZVOUS) else [check.name for check in together]
    return [Finding(name, "skipped", why, remedy) for name in names]


def _missing(subject: Subject, answers: dict[int, Any]) -> list[int]:
    return [rank for rank in range(subject.world_size) if rank not in answers]


def _absent(check: str, missing: list[int]) -> Finding:
    what = f"{named(missing)} did not answer"
    return Finding(check, "skipped", what, "Fix that first")


def _silent(subject: Subject, check: str, missing: list[int], hosts: Sequence[str]) -> Finding:
    return Finding(
        check,
        "failed",
        f"{len(missing)} of {subject.world_size} ranks did not end this check within {subject.timeout:g} s",
        "Look at the output of these ranks; `py-spy dump --pid` shows where a rank hangs",
        ranks=tuple(missing),
        host=", ".join(dict.fromkeys(hosts[rank] for rank in missing)),
    )


def _met(subject: Subject, missing: list[int]) -> Finding:
    address = _address(subject)
    if not missing:
        return Finding(RENDEZVOUS, "ok", f"{subject.world_size} ranks met at {address}")
    return Finding(
        RENDEZVOUS,
        "failed",
        f"{len(missing)} of {subject.world_size} ranks did not answer at {address} within {subject.wait:g} s",
        "Look at the output of these ranks: they did not start, hang, or print why they cannot reach "
        f"{address}; --timeout waits longer",
        ranks=tuple(missing),
    )


def _unreachable(subject: Subject, error: Exception) -> Finding:
    if "?" in _address(subject):
        reason, remedy = _address(subject), "Set MASTER_ADDR and MASTER_PORT on every rank, as torchrun does"
    else:
        reason, remedy = fault(error, serves=subject.rank == 0)
    return Finding(
        RENDEZVOUS,
        "failed",
        reason,
        remedy[:1].upper() + remedy[1:],
        ranks=(subject.rank,),
        host=subject.host,
    )


def _address(subject: Subject) -> str:
    return ":".join(subject.environment.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))


class _Progress:
    """Progress on stderr: on a terminal, a line with the current check; in a log, only long checks."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._is_terminal = sys.stderr.isatty()

    def show(self, check: str, measures: bool = True) -> None:
        """Show that a check begins.

        Args:
            measures: it takes several seconds.
        """
        if not self._quiet and (self._is_terminal or measures):
            before, after = ("\r\033[K", "") if self._is_terminal else ("", "\n")
            print(f"{before}doctor: {check} ...", end=after, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Remove the line from the terminal."""
        if not self._quiet and self._is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
