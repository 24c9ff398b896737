"""Reports a run that makes no progress: which rank hangs, in which phase, with stacks and the pending read.

    with Watchdog(config.health.stall, config.parallel, config.folder, rank_info, phases):
        ...train: phases.begin(step), phases.part("compute"), ...

Each rank has two threads that detect a stall. One publishes where the rank is and reads where the others are
(`rank_states.py`). The other one, which never waits for the network, detects that the phase of this rank
has not changed for `--health.stall` seconds. Training is synchronous, so a rank that hangs soon stops all
others, and every rank detects the stall on its own. Then

    every rank            writes the Python stacks of all its threads to RUN/stacks-<rank>.txt
    the lowest that runs  prints which rank the others wait for, and a table of all ranks, and appends both to
                          RUN/stall.txt; with NCCL also what NCCL knows (RUN/nccl-ras.txt)

Nothing is ended. The timeout of the collectives ends the run, and the message of each rank then has the name
of the rank that it waited for. A rank that is stopped, dead or disconnected publishes nothing, and the others
detect it by that. If a C function holds the interpreter's lock, neither thread runs: a timer of the process
then sends SIGALRM, whose handler writes the main thread's stack without the lock (the others may change).
"""

import faulthandler
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import IO

from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import ParallelConfig
from sa1b.engine.watch.phase import Phases
from sa1b.engine.watch.signals import lost_peer
from sa1b.engine.watch.watchdog.rank_states import (
    Observed,
    StateExchange,
    nccl_status,
    store_address,
    table,
    verdict,
)
from sa1b.storage.atomic import append, write_whole

_SILENT = 3  # intervals that a thread may be late on a busy machine
_ANSWERS_WITHIN = 5.0  # seconds, for the store, when this rank ends


class Watchdog:
    """Watches this rank and, while it makes no progress, the others; a context manager around a run.

    An error that leaves the context gets a note that names the rank that this one waited for. `stall`:
    seconds without a new phase after which the stall is reported; None: two thirds of the timeout of
    collectives; 0: nothing is watched or published.
    """

    def __init__(
        self, stall: float | None, parallel: ParallelConfig, out: Path, rank_info: RankInfo, phases: Phases
    ) -> None:
        self._stall, self._parallel, self._out = stall, parallel, out
        self._rank_info, self._phases = rank_info, phases
        shortest = stall or min(parallel.timeout, parallel.timeout_first) * 2 / 3
        # With many ranks less often, so that the store answers at most 50 of them per second.
        self._interval = min(shortest / 10, max(1.0, rank_info.world_size / 50))
        self._states = StateExchange(rank_info, phases, self._interval)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sa1b-watchdog", daemon=True)
        self._stacks: IO[bytes] | None = None
        self._timer = threading.Lock()
        self._reports = False  # whether this rank prints the stall that lasts
        self._since = 0.0  # since when this rank observes the others without a gap

    def __enter__(self) -> "Watchdog":
        if self._stall != 0:
            self._states.start()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stall == 0:
            return
        self._stop.set()
        is_lost = isinstance(error, Exception) and lost_peer(error)
        self._states.close("lost" if is_lost else "done" if error is None else "failed")
        self._thread.join(self._interval)  # it may be writing to a disk that hangs
        if error is not None and is_lost:
            for line in self._lost_ranks():
                error.add_note(line)
        self._states.stop()
        self._close_stacks()

    @property
    def limit(self) -> float:
        """Seconds without progress after which a stall is reported."""
        first = self._phases.steps <= 1
        return self._stall or (self._parallel.timeout_first if first else self._parallel.timeout) * 2 / 3

    @property
    def _long(self) -> float:
        """Seconds without a publication after which a rank does not answer."""
        return max(_SILENT * self._interval, self.limit / 2)

    def _watch(self) -> None:
        number, stalled, following, last = -1, 0.0, 0.0, time.monotonic()
        while not self._stop.wait(self._interval):
            self._arm()
            phase, now = self._phases.current, time.monotonic()
            idle = time.perf_counter() - phase.began
            if phase.number != number:
                if stalled and self._reports:
                    _say(
                        f"sa1b: rank {self._rank_info.rank} continues after {stalled:.0f} s without progress"
                    )
                number, stalled, following = phase.number, 0.0, self.limit
            observes = idle >= 2 * self._interval
            if not self._states.observing or now - last > _SILENT * self._interval:
                self._since = now  # this rank was stopped itself, or its machine is overloaded
            self._states.observing, last = observes, now
            if idle >= following and now - self._since >= self._long:
                self._report(idle)
                following = 2 * idle
            stalled = idle if following > self.limit else 0.0

    def _arm(self) -> None:
        if self._stacks is None and self._out.is_dir():
            with suppress(OSError):
                self._stacks = self._stacks_path.open("ab", buffering=0)
        with self._timer:
            if self._stacks is not None and not self._stop.is_set():
                faulthandler.register(signal.SIGALRM, file=self._stacks, all_threads=False)
                signal.setitimer(signal.ITIMER_REAL, self.limit)

    @property
    def _stacks_path(self) -> Path:
        return self._out / f"stacks-{self._rank_info.rank}.txt"

    def _write_stacks(self, idle: float) -> None:
        if self._stacks is None:
            self._out.mkdir(parents=True, exist_ok=True)
            self._stacks = self._stacks_path.open("ab", buffering=0)
        self._stacks.write(f"{_now()} no progress for {idle:.0f} s\n".encode())
        faulthandler.dump_traceback(self._stacks, all_threads=True)

    def _close_stacks(self) -> None:
        with self._timer:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.unregister(signal.SIGALRM)
        if self._stacks is not None:
            with suppress(OSError):
                if not self._stacks.tell():
                    self._stacks_path.unlink(missing_ok=True)
            self._stacks.close()

    def _report(self, idle: float) -> None:
        rank_info = self._rank_info
        before = time.monotonic() - self._long
        ranks = self._observed({rank for rank, seen in self._states.seen.items() if seen.at < before})
        if lost := self._states.reached < before and rank_info.world_size > 1:
            self._reports = rank_info.local_rank == 0  # nothing is known about the other ranks
        else:
            self._reports = all(observed.silent for observed in ranks if observed.state.rank < rank_info.rank)
        if self._reports:
            lines = [_lost_store(self._states.error)] if lost else self._verdict(ranks)
            lines += [*table(ranks).splitlines(), *self._advice()]
            text = "\n  ".join([f"sa1b: no progress for {idle:.0f} s", *lines])
            _say(f"\n{text}")  # before using the disk, which may be hanging
        with suppress(OSError):
            self._write_stacks(idle)
            if self._reports:
                append(self._out / "stall.txt", f"{_now()} {text}\n\n".encode())
        if self._reports and rank_info.device.type == "cuda":
            with suppress(OSError, ValueError):
                write_whole(self._out / "nccl-ras.txt", nccl_status().encode())

    def _lost_ranks(self) -> list[str]:
        """Lines about the ranks that this one lost. They are observed for some time: some may still end."""
        if not self._states.read(_ANSWERS_WITHIN):
            return [_lost_store(self._states.error)]
        before = {rank: seen.state.beat for rank, seen in self._states.seen.items()}
        end = time.monotonic() + max(1.0, _SILENT * self._interval)
        quiet = set(before)
        while quiet and time.monotonic() < end:
            time.sleep(self._interval / 2)
            self._states.read(_ANSWERS_WITHIN)
            seen = {rank: observed.state for rank, observed in self._states.seen.items()}
            quiet = {rank for rank in quiet if not seen[rank].ended and seen[rank].beat == before[rank]}
        return self._verdict(self._observed(quiet))

    def _observed(self, silent: set[int]) -> list[Observed]:
        now, state = time.monotonic(), self._states.own()
        by_rank = {
            rank: Observed(seen.state, now - seen.at, rank in silent)
            for rank, seen in self._states.seen.items()
        }
        by_rank[state.rank] = Observed(state, 0.0, False)
        return [by_rank[rank] for rank in sorted(by_rank)]

    def _verdict(self, ranks: list[Observed]) -> list[str]:
        lines = verdict(ranks).splitlines()
        known = {observed.state.rank for observed in ranks}
        if missing := [rank for rank in range(self._rank_info.world_size) if rank not in known]:
            lines.append(f"nothing is known about ranks {missing}: they ended before their first step")
        return lines

    def _advice(self) -> list[str]:
        lines = [f"Python stacks of the ranks that run: {self._out}/stacks-<rank>.txt"]
        if self._rank_info.world_size > 1:
            flag = "timeout-first" if self._phases.steps <= 1 else "timeout"
            seconds = self._parallel.timeout_first if self._phases.steps <= 1 else self._parallel.timeout
            lines.append(
                f"If nothing changes, the run ends after --parallel.{flag} ({seconds:g} s); the same command "
                "resumes it from the newest checkpoint."
            )
        return lines


def _lost_store(error: str) -> str:
    reason = f" ({error})" if error else ""
    return (
        f"the rendezvous store at {store_address()} does not answer{reason}: its host is lost, or its "
        "torchrun or first rank is stopped or dead; nothing newer is known about the other ranks"
    )


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")  # one write, so that lines of several ranks do not mix
    sys.stderr.flush()
