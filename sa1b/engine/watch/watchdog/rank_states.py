"""The state of each rank, exchanged while the ranks may be blocked elsewhere, and the report of a stall.

states = StateExchange(rank_info, phases, interval=1.0)
states.start()
states.observing = True               # reads the other ranks' states too
states.seen[3].state.phase            # the last known state of rank 3
states.seen[3].at                     # when it was published, on this rank's clock
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store

from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.watch.phase import Phases
from sa1b.report import aligned, ranges

Ended = Literal["", "failed", "lost", "done"]
_ANSWERS_WITHIN = timedelta(seconds=20)  # for one call of the store


class RankState(NamedTuple):
    """The state that a rank publishes; phase, step, micro-batch and number are those of its `Phase`."""

    rank: int
    host: str
    beat: int  # states that it has published before
    phase: str
    step: int
    micro_batch: int
    number: int
    seconds: float  # for how long it has been in this phase
    collectives: int  # that it has started in the group of all ranks
    code: str  # where the thread that trains is: file, line and function
    reading: str  # image and shard that it waits for; empty if none
    ended: Ended  # failed: it raised an error; lost: it lost another rank; done


@dataclass(frozen=True, slots=True)
class Seen:
    """The last known state of a rank, and when it was first seen on the observer's clock (time.monotonic)."""

    state: RankState
    at: float


class StateExchange:
    """Publishes this rank's state and reads those of the others, in a thread, each `interval` seconds.

    Attributes:
        observing: whether the states of other ranks are read at each interval.
        ended: how this rank has ended; see `RankState`.
        seen: last known state of each rank, this one included.
        reached: when the last exchange was complete, on the clock of time.monotonic.
        error: why the store cannot be used; empty if it can.
    """

    # A thread of each rank writes the rank's state to the rendezvous store at every interval, with its own
    # connection, because the main thread may be blocked in another call of the store. The clocks of machines
    # differ. So a state has a number instead of a time, and an observer records on its own clock when it saw
    # the number change.
    #
    # Writing states costs one request of about 200 bytes per rank and interval. The states of other ranks are
    # only read while this rank does not progress.

    def __init__(self, rank_info: RankInfo, phases: Phases, interval: float) -> None:
        self.observing = False
        self.ended: Ended = ""
        self.seen: dict[int, Seen] = {}
        self.error = ""
        self.interval = interval
        self._rank_info, self._phases = rank_info, phases
        self._trains = threading.get_ident()  # with Ray, not the main thread
        self.reached = time.monotonic()
        self._beat = 0
        self._wake, self._exchanged, self._stop = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="sa1b-states", daemon=True)

    def start(self) -> None:
        """Start the thread, if there are other ranks."""
        if self._rank_info.world_size > 1 and dist.is_initialized():
            self._thread.start()

    def read(self, wait: float) -> bool:
        """Publish and read the states of all ranks; False if the store does not answer within `seconds`."""
        if not self._thread.is_alive():
            return False
        self.observing = True
        for _ in range(2):  # the thread may be in an exchange that began without observing
            self._exchanged.clear()
            self._wake.set()
            if not self._exchanged.wait(wait):
                return False
        return not self.error

    def close(self, ended: Ended, wait: float = 2.0) -> None:
        """Publish how this rank has ended, and wait up to `seconds` for the store to receive it."""
        self.ended = ended
        self.read(wait)

    def stop(self) -> None:
        """End the thread after its current exchange, because a process such as a worker of Ray may run on."""
        self._stop.set()
        self._wake.set()

    def own(self) -> RankState:
        phase = self._phases.current
        return RankState(
            rank=self._rank_info.rank,
            host=socket.gethostname(),
            beat=self._beat,
            phase=phase.name,
            step=phase.step,
            micro_batch=phase.micro_batch,
            number=phase.number,
            seconds=time.perf_counter() - phase.began,
            collectives=_collectives(),
            code=_line_of(self._trains) if self.observing else "",
            reading=self._phases.reading() or "",
            ended=self.ended,
        )

    def _run(self) -> None:
        world_size = self._rank_info.world_size
        unknown = set(range(world_size))
        store: Any = None
        while not self._stop.is_set():
            try:
                if store is None:
                    default: Any = _get_default_store()
                    store = default.clone()
                    store.set_timeout(_ANSWERS_WITHIN)
                store.set(_key(self._rank_info.rank), json.dumps(self.own()))
                self._beat += 1
                if self.observing or unknown:
                    unknown = {rank for rank in unknown if not store.check([_key(rank)])}
                    self._read(store, [rank for rank in range(world_size) if rank not in unknown])
                self.reached, self.error = time.monotonic(), ""
            except (RuntimeError, ValueError) as error:  # among them DistStoreError
                self.error, store = (str(error).splitlines() or [type(error).__name__])[0], None
            self._exchanged.set()
            if self._wake.wait(self.interval):
                self._wake.clear()

    def _read(self, store: Any, ranks: list[int]) -> None:
        texts = store.multi_get([_key(rank) for rank in ranks])
        now = time.monotonic()
        for rank, text in zip(ranks, texts, strict=True):
            state = RankState(*json.loads(text))
            if rank not in self.seen or self.seen[rank].state.beat != state.beat:
                self.seen[rank] = Seen(state, now)


def store_address() -> str:
    """Host and port of the rendezvous store."""
    return f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"


def _key(rank: int) -> str:
    return f"sa1b/state/{rank}"


def _collectives() -> int:
    """Collectives that this process has started in the group of all ranks; 0 if torch does not count them."""
    try:
        group: Any = _get_default_group()
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, ValueError):
        return 0


def _line_of(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}"


_SHOWN = 16  # ranks with a separate row


@dataclass(frozen=True, slots=True)
class Observed:
    """The last known state of a rank, as another rank has observed it."""

    state: RankState
    age: float  # seconds since that state was first seen
    silent: bool  # it has published nothing for so long that it cannot be running

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
    failed = [rank for rank in ranks if rank.state.ended == "failed"]
    silent = [rank for rank in ranks if rank.silent and not rank.state.ended]
    if failed or silent:
        return failed or silent
    running = [rank for rank in ranks if not rank.state.ended] or list(ranks)
    done = [(rank.state.number, rank.state.collectives) for rank in running]
    return [rank for rank, progress in zip(running, done, strict=True) if progress == min(done)]


def verdict(ranks: Sequence[Observed]) -> str:
    """Sentences that name the ranks that the others wait for, and their states; one line for each."""
    suspects = culprits(ranks)
    if len(suspects) == len(ranks) > 1 and not any(
        suspect.silent or suspect.state.ended for suspect in suspects
    ):
        if all(_waits_for_data(suspect.state) for suspect in suspects):
            return "\n".join(
                [
                    f"all {len(ranks)} ranks wait for data, and none for another rank: the storage that they "
                    "share does not answer, or their decoders hang",
                    *(_sentence(suspect, alone=True) for suspect in suspects[:_SHOWN]),
                ]
            )
        return (
            f"all {len(ranks)} ranks are in the same collective operation ({suspects[0].where()}), so "
            "the network between their hosts is interrupted, or one rank is stuck inside the operation"
        )
    lines = [_sentence(suspect, alone=len(ranks) == 1) for suspect in suspects[:_SHOWN]]
    if len(suspects) > _SHOWN:
        lines.append(f"{len(suspects) - _SHOWN} more ranks are in the same state")
    return "\n".join(lines)


def _waits_for_data(state: RankState) -> bool:
    reads = state.code.startswith(("storage/", "shards/", "stream/", "sa1b/limit.py"))
    return state.phase == "data" or reads or (bool(state.reading) and "/threading.py:" in state.code)


def _sentence(rank: Observed, *, alone: bool) -> str:
    state = rank.state
    if state.ended == "failed":
        return f"{rank.name} failed in {rank.where()}; see its message"
    if rank.silent:
        return (
            f"{rank.name} does not answer: it is stopped or dead, or its host is lost; last seen at least "
            f"{rank.age:.0f} s ago in {rank.where()}"
        )
    reads = (
        f"; it waits for {state.reading}" if state.reading and state.phase in ("data", "evaluation") else ""
    )
    code = f", at {state.code}" if state.code else ""
    waits = "" if alone else ", and the others wait for it"
    return f"{rank.name} is in {rank.where()}, for {state.seconds + rank.age:.0f} s{code}{reads}{waits}"


def table(ranks: Sequence[Observed]) -> str:
    """The state of every rank as aligned columns; ranks that the others wait for are marked.

    If there are many ranks, those in the same phase and in the same code share a row.
    """
    marked = {rank.state.rank for rank in culprits(ranks)}
    header = ("", "rank", "host", "step", "phase", "micro-batch", "for", "collectives", "main thread")
    if len(ranks) <= _SHOWN:
        rows = [
            _row(rank, str(rank.state.rank), rank.state.host, rank.state.rank in marked) for rank in ranks
        ]
    else:
        rows = _grouped(ranks, marked)
    return "\n".join(aligned([header, *rows]))


def _row(rank: Observed, ranks: str, host: str, marked: bool) -> tuple[str, ...]:
    state = rank.state
    code = "does not answer" if rank.silent and not state.ended else state.ended or state.code
    return (
        ">" if marked else "", ranks, host, str(state.step + 1), state.phase, str(state.micro_batch or ""),
        f"{state.seconds + rank.age:.0f} s", str(state.collectives), code,
    )  # fmt: skip


def _grouped(ranks: Sequence[Observed], marked: set[int]) -> list[tuple[str, ...]]:
    def key(rank: Observed) -> tuple[bool, int, str, int, bool, str]:
        state = rank.state
        return (
            state.rank not in marked, state.step, state.phase, state.micro_batch, rank.silent,
            state.ended or state.code,
        )  # fmt: skip

    rows = []
    for _, members in groupby(sorted(ranks, key=key), key):
        same = list(members)
        hosts = {rank.state.host for rank in same}
        host = same[0].state.host if len(hosts) == 1 else f"{len(hosts)} hosts"
        numbers = ranges(sorted(rank.state.rank for rank in same))
        rows.append(_row(same[0], numbers, host, same[0].state.rank in marked))
    return rows


_PROTOCOL = 2  # NCCL answers older and newer clients
_TIMEOUT = 5  # seconds for which NCCL waits for its other processes
_LARGEST = 4 << 20  # bytes


def nccl_status(environment: Mapping[str, str] = os.environ) -> str:
    """The status of all communicators of the job on this machine, as text. OSError: there is no response
    within some seconds, because NCCL is too old for RAS or RAS is disabled.
    """
    # The report of a run that makes no progress says which rank the others wait for, and where every rank is.
    # NCCL adds its own, from its RAS subsystem: NCCL 2.24 and later answer a text protocol at
    # localhost:28028, or at the address in NCCL_RAS_ADDR, in one process of each machine. See
    # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html and NVIDIA's client
    # `ncclras`, which does the same.
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
