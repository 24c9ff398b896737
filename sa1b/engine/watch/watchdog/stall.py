"""The report of a run that makes no progress: which rank the others wait for, and where every rank is.

NCCL's own report on a job that hangs, requested from its RAS subsystem.

NCCL 2.24 and later answer a text protocol at localhost:28028, or at the address in NCCL_RAS_ADDR, in one
process of each machine. See
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html and NVIDIA's client
`ncclras`, which does the same.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from sa1b.engine.watch.watchdog.states import RankState
from sa1b.report import aligned

_SHOWN = 16  # ranks with a separate row


@dataclass(frozen=True, slots=True)
class Observed:
    """The state of a rank, as another rank has observed it.

    Attributes:
        state: its last known state.
        age: seconds since that state was first seen.
        silent: whether it has published nothing for so long that it cannot be running.
    """

    state: RankState
    age: float
    silent: bool

    @property
    def name(self) -> str:
        return f"rank {self.state.rank} (host {self.state.host})"

    def where(self) -> str:
        """Step, counted from 1, phase and micro-batch."""
        state = self.state
        micro_batch = f", micro-batch {state.micro_batch}" if state.micro_batch else ""
        return f"step {state.step + 1}, {state.phase}{micro_batch}"


def culprits(ranks: Sequence[Observed]) -> list[Observed]:
    """The ranks that the others wait for.

    They are the ranks that failed; else those that are silent; else those that have begun the fewest phases
    and, among these, started the fewest collectives. If all ranks have made the same progress, it is all of
    them.
    """
    failed = [one for one in ranks if one.state.ended == "failed"]
    silent = [one for one in ranks if one.silent and not one.state.ended]
    if failed or silent:
        return failed or silent
    running = [one for one in ranks if not one.state.ended] or list(ranks)
    done = [(one.state.number, one.state.collectives) for one in running]
    return [one for one, own in zip(running, done, strict=True) if own == min(done)]


def verdict(ranks: Sequence[Observed]) -> str:
    """Sentences that name the ranks that the others wait for, and their states; one line for each."""
    found = culprits(ranks)
    if len(found) == len(ranks) > 1 and not any(one.silent or one.state.ended for one in found):
        if all(_waits_for_data(one.state) for one in found):
            return "\n".join(
                [
                    f"all {len(ranks)} ranks wait for data, and none for another rank: the storage that they "
                    "share does not answer, or their decoders hang",
                    *(_sentence(one, alone=True) for one in found[:_SHOWN]),
                ]
            )
        return (
            f"all {len(ranks)} ranks are in the same collective operation ({found[0].where()}), so "
            "the network between their hosts is interrupted, or one rank is stuck inside the operation"
        )
    lines = [_sentence(one, alone=len(ranks) == 1) for one in found[:_SHOWN]]
    if len(found) > _SHOWN:
        lines.append(f"{len(found) - _SHOWN} more ranks are in the same state")
    return "\n".join(lines)


def _waits_for_data(state: RankState) -> bool:
    """Whether a rank reads or waits for its loader, by its phase and its stack."""
    reads = state.code.startswith(("storage/", "shards/", "stream/", "sa1b/limit.py"))
    return state.phase == "data" or reads or (bool(state.reading) and "/threading.py:" in state.code)


def _sentence(one: Observed, *, alone: bool) -> str:
    state = one.state
    if state.ended == "failed":
        return f"{one.name} failed in {one.where()}; see its message"
    if one.silent:
        return (
            f"{one.name} does not answer: it is stopped or dead, or its host is lost; last seen at least "
            f"{one.age:.0f} s ago in {one.where()}"
        )
    reads = (
        f"; it waits for {state.reading}" if state.reading and state.phase in ("data", "evaluation") else ""
    )
    code = f", at {state.code}" if state.code else ""
    waits = "" if alone else ", and the others wait for it"
    return f"{one.name} is in {one.where()}, for {state.seconds + one.age:.0f} s{code}{reads}{waits}"


def table(ranks: Sequence[Observed]) -> str:
    """The state of every rank as aligned columns; ranks that the others wait for are marked.

    If there are many ranks, those in the same phase and in the same code share a row.
    """
    marked = {one.state.rank for one in culprits(ranks)}
    header = ("", "rank", "host", "step", "phase", "micro-batch", "for", "collectives", "main thread")
    if len(ranks) <= _SHOWN:
        rows = [_row(one, str(one.state.rank), one.state.host, one.state.rank in marked) for one in ranks]
    else:
        rows = _grouped(ranks, marked)
    return "\n".join(aligned([header, *rows]))


def _row(one: Observed, ranks: str, host: str, marked: bool) -> tuple[str, ...]:
    state = one.state
    code = "does not answer" if one.silent and not state.ended else state.ended or state.code
    return (
        ">" if marked else "", ranks, host, str(state.step + 1), state.phase, str(state.micro_batch or ""),
        f"{state.seconds + one.age:.0f} s", str(state.collectives), code,
    )  # fmt: skip


def _grouped(ranks: Sequence[Observed], marked: set[int]) -> list[tuple[str, ...]]:
    def key(one: Observed) -> tuple[bool, int, str, int, bool, str]:
        state = one.state
        return (
            state.rank not in marked, state.step, state.phase, state.micro_batch, one.silent,
            state.ended or state.code,
        )  # fmt: skip

    rows = []
    for _, members in groupby(sorted(ranks, key=key), key):
        same = list(members)
        hosts = {one.state.host for one in same}
        host = same[0].state.host if len(hosts) == 1 else f"{len(hosts)} hosts"
        numbers = _ranges(sorted(one.state.rank for one in same))
        rows.append(_row(same[0], numbers, host, same[0].state.rank in marked))
    return rows


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text: "0-6, 8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, one)) for one in runs)


_PROTOCOL = 2  # NCCL answers older and newer clients
_TIMEOUT = 5  # seconds for which NCCL waits for its other processes
_LARGEST = 4 << 20  # bytes


def nccl_status(environment: Mapping[str, str] = os.environ) -> str:
    """The status of all communicators of the job on this machine, as text.

    Raises:
        OSError: nothing answers there, or not within some seconds: NCCL is older, or RAS is disabled.
    """
    host, _, port = environment.get("NCCL_RAS_ADDR", "localhost:28028").rpartition(":")
    with socket.create_connection((host.strip("[]") or "localhost", int(port)), timeout=2) as connection:
        connection.settimeout(4 * _TIMEOUT)
        with connection.makefile("rb") as answers:
            for line in (f"CLIENT PROTOCOL {_PROTOCOL}", f"TIMEOUT {_TIMEOUT}"):
                connection.sendall(f"{line}\n".encode())
                if not answers.readline(1024):
                    raise ConnectionResetError(f"{host}:{port}: the connection ended after {line!r}")
            connection.sendall(b"VERBOSE STATUS\n")
            return answers.read(_LARGEST).decode(errors="replace")
