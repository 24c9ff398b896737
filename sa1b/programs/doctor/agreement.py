"""Comparison of the findings of each rank: versions, GPUs, datasets, environment variables."""

from collections.abc import Iterator, Sequence
from typing import Any

from sa1b.programs.doctor.report import Finding, named

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
    groups: dict[str, list[int]] = {}
    for rank, finding in sorted(values.items()):
        groups.setdefault(str(finding.values[name]), []).append(rank)
    if len(groups) < 2:
        return
    most = max(groups, key=lambda value: len(groups[value]))
    for value, ranks in groups.items():
        if value != most:
            hosts = dict.fromkeys(values[rank].host for rank in ranks)
            yield Finding(
                check,
                state,
                f"{name} {_short(value)}, and {_short(most)} on {named(groups[most])}",
                remedy,
                ranks=tuple(ranks),
                host=", ".join(hosts),
                values={name: value},
            )


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
        groups: dict[str, list[int]] = {}
        for rank, values in sorted(by_rank.items()):
            groups.setdefault(f"{name}={values[name]}" if name in values else f"{name} not set", []).append(
                rank
            )
        most = max(groups, key=lambda text: len(groups[text]))
        for text, ranks in groups.items():
            # The interface may have another name on another machine.
            if text != most and not name.endswith("SOCKET_IFNAME"):
                yield Finding(
                    "environment",
                    "warning",
                    f"{text}, and {most} on {named(groups[most])}",
                    f"Set {name} in the job script, so that all ranks have it",
                    ranks=tuple(ranks),
                    host=", ".join(dict.fromkeys(hosts[rank] for rank in ranks)),
                )
