"""All checks in order: of this rank alone, comparisons of the ranks, then those that ranks run together.

A rank that cannot reach the others reports its own findings. A check that fails stops no other check; those
that need it are skipped, with the reason.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from sa1b.console import counted
from sa1b.engine.ranks.process_group import fault
from sa1b.programs.doctor import device, environment, machine, storage
from sa1b.programs.doctor.bandwidth import BANDWIDTH, bandwidth
from sa1b.programs.doctor.check import (
    ABORTED,
    Check,
    CheckTogether,
    RankExchange,
    RankProcess,
    missing_need,
    of_rank,
)
from sa1b.programs.doctor.reachability import REACHABILITY, SKEW, clock_skew, reachability
from sa1b.programs.doctor.report import Finding, Report, agreement, named
from sa1b.programs.doctor.ring import RING, ring
from sa1b.programs.doctor.synchronisation import GRADIENTS, GROUP, gradients, process_group, rank_sum

# The quick ones first.
LOCAL = (
    Check("versions", machine.versions),
    Check("packages", machine.packages),
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
    return (*(check.name for check in LOCAL), RENDEZVOUS, *(check.name for check in TOGETHER))


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; `report` has the findings so far."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


def run_checks(
    process: RankProcess,
    chosen: Callable[[str], bool],
    *,
    quiet: bool = False,
    together: Sequence[CheckTogether] = TOGETHER,
) -> Report | None:
    """Run the checks. Every rank calls it; rank 0 returns the findings of all ranks.

    Another rank returns None, or its own findings if it cannot reach the others. `chosen`: whether a check is
    run, by its name. `together`: the same on all ranks.
    """
    progress = _Progress(quiet or process.rank > 0)
    findings: list[Finding] = []
    try:
        for check in LOCAL:
            if chosen(check.name):
                progress.show(check.name, check.measures)
                findings += check.run(process, findings)
        progress.end()
        steps = [check for check in together if chosen(check.name)]
        if process.world_size == 1:
            findings += _of_several(chosen, steps)
            return Report(findings, f"1 process on {process.host}", [process.host])
        return _exchanged(process, of_rank(findings, process), chosen, steps, progress)
    except KeyboardInterrupt:
        progress.end()
        raise Interrupted(Report(findings, f"rank {process.rank} on {process.host}, interrupted")) from None


def _exchanged(
    process: RankProcess,
    findings: list[Finding],
    chosen: Callable[[str], bool],
    together: Sequence[CheckTogether],
    progress: "_Progress",
) -> Report | None:
    try:
        exchange = RankExchange(process)
        exchange.send("local", (process.host, findings))
        if process.rank > 0:
            _follow(process, exchange, together, findings)
            return None
        return _lead(process, exchange, chosen, together, progress)
    except Exception as error:  # torch's store raises several classes
        title = f"rank {process.rank} on {process.host}, alone"
        return Report([*findings, _unreachable(process, error)], title)


def _lead(
    process: RankProcess,
    exchange: RankExchange,
    chosen: Callable[[str], bool],
    together: Sequence[CheckTogether],
    progress: "_Progress",
) -> Report:
    """Rank 0: gather the findings, and decide before each further check whether the ranks run it."""
    answers = exchange.receive("local", timeout=process.wait)
    hosts = [answers[rank][0] if rank in answers else "?" for rank in range(process.world_size)]
    findings = [finding for _, (_, answer) in sorted(answers.items()) for finding in answer]
    findings += [finding for finding in agreement(findings) if chosen(finding.check)]
    missing = _missing(process, answers)
    if chosen(RENDEZVOUS):
        findings.append(_met(process, missing))
    for check in together:
        skipped = (
            _absent(check.name, missing)
            if missing
            else missing_need(check.name, check.needs, findings) or out_of_step(check, together, findings)
        )
        exchange.send(_go(check), skipped is None)
        if skipped is not None:
            findings.append(skipped)
            continue
        progress.show(check.name)
        exchange.send(check.name, check.run(process, exchange))
        answers = exchange.receive(check.name)
        findings += [finding for _, answer in sorted(answers.items()) for finding in answer]
        missing = _missing(process, answers)
        if missing:
            findings.append(_silent(process, check.name, missing, hosts))
    progress.end()
    # The store may be in this process: it must not end before the others have read the last decision.
    answering = [rank for rank in range(1, process.world_size) if rank not in missing]
    exchange.receive("done", answering, min(process.timeout, _LAST))
    where = counted(len({*hosts} - {"?"}), "host")
    return Report(findings, f"{process.world_size} ranks on {where}", hosts)


def _follow(
    process: RankProcess, exchange: RankExchange, together: Sequence[CheckTogether], findings: list[Finding]
) -> None:
    """Another rank: run the checks for which rank 0 decides; RuntimeError if rank 0 has ended or hangs."""
    for check in together:
        # Rank 0 may wait for other ranks before the check and after it.
        decision = exchange.receive(_go(check), [0], 3 * process.timeout)
        if not decision:
            raise RuntimeError(f"rank 0 does not answer before the check {check.name!r}")
        if decision[0]:
            result = check.run(process, exchange)
            findings += result
            exchange.send(check.name, result)
    exchange.send("done", True)


def out_of_step(
    check: CheckTogether, together: Sequence[CheckTogether], findings: Sequence[Finding]
) -> Finding | None:
    """The finding that a check is skipped because an earlier one ended at different collectives."""
    # The next collective would match those of another check; gloo then ends the process.
    if GROUP not in check.needs:
        return None
    members = {finding.name for finding in together if GROUP in finding.needs}
    aborted = next(
        (finding.check for finding in findings if finding.check in members and ABORTED in finding.values),
        None,
    )
    if aborted is None:
        return None
    return Finding(check.name, "skipped", f"the check {aborted!r} did not end on all ranks", "Fix that first")


def _go(check: CheckTogether) -> str:
    return f"go/{check.name}"


def _of_several(chosen: Callable[[str], bool], together: Sequence[CheckTogether]) -> list[Finding]:
    why = "one process; these checks need several ranks"
    remedy = "Start several: torchrun --nproc_per_node=8 -m sa1b doctor ROOT"
    names = [RENDEZVOUS] if chosen(RENDEZVOUS) else [check.name for check in together]
    return [Finding(name, "skipped", why, remedy) for name in names]


def _missing(process: RankProcess, answers: dict[int, Any]) -> list[int]:
    return [rank for rank in range(process.world_size) if rank not in answers]


def _absent(check: str, missing: list[int]) -> Finding:
    what = f"{named(missing)} did not answer"
    return Finding(check, "skipped", what, "Fix that first")


def _silent(process: RankProcess, check: str, missing: list[int], hosts: Sequence[str]) -> Finding:
    return Finding(
        check,
        "failed",
        f"{len(missing)} of {process.world_size} ranks did not end this check within {process.timeout:g} s",
        "Look at the output of these ranks; `py-spy dump --pid` shows where a rank hangs",
        ranks=tuple(missing),
        host=", ".join(dict.fromkeys(hosts[rank] for rank in missing)),
    )


def _met(process: RankProcess, missing: list[int]) -> Finding:
    address = _address(process)
    if not missing:
        return Finding(RENDEZVOUS, "ok", f"{process.world_size} ranks met at {address}")
    return Finding(
        RENDEZVOUS,
        "failed",
        f"{len(missing)} of {process.world_size} ranks did not answer at {address} within {process.wait:g} s",
        "Look at the output of these ranks: they did not start, hang, or print why they cannot reach "
        f"{address}; --timeout waits longer",
        ranks=tuple(missing),
    )


def _unreachable(process: RankProcess, error: Exception) -> Finding:
    if "?" in _address(process):
        reason, remedy = _address(process), "Set MASTER_ADDR and MASTER_PORT on every rank, as torchrun does"
    else:
        reason, remedy = fault(error, serves=process.rank == 0)
    return Finding(
        RENDEZVOUS,
        "failed",
        reason,
        remedy[:1].upper() + remedy[1:],
        ranks=(process.rank,),
        host=process.host,
    )


def _address(process: RankProcess) -> str:
    return ":".join(process.environment.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))


class _Progress:
    """Progress on stderr: on a terminal, a line with the current check; in a log, only long checks."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._is_terminal = sys.stderr.isatty()

    def show(self, check: str, measures: bool = True) -> None:
        if not self._quiet and (self._is_terminal or measures):
            before, after = ("\r\033[K", "") if self._is_terminal else ("", "\n")
            print(f"{before}doctor: {check} ...", end=after, file=sys.stderr, flush=True)

    def end(self) -> None:
        if not self._quiet and self._is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
