"""What each rank does, for how long, and which one the others wait for.

    RUN/heartbeat/3.json     rank 3: phase, step, collectives started, line of the thread that trains
    RUN/stacks-3.txt         stacks of all its threads after `stall` seconds without a new phase
    RUN/stall.txt            the tables

A thread of each rank writes the heartbeat and, while its own rank makes no progress, reads the others. After
`stall` seconds the lowest rank that answers prints one table, and again when that time has doubled. If a rank
is in a step or an evaluation, and makes no progress for longer than collectives wait, it exits.

A rank whose count of heartbeats stands still is stopped or keeps the interpreter's lock.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from torch.distributed.distributed_c10d import _world

from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import ParallelConfig
from sa1b.limit import Limited, OverdueError
from sa1b.report import ranges
from sa1b.storage.atomic import append

# Parts of a step, whose seconds are recorded. "compute" and "sync" also wait for other ranks; on a GPU,
# kernels of "compute" may end during "sync".
PARTS = ("data", "compute", "sync", "update", "checkpoint")
OTHER = "other"  # the time between them
EVALUATION = "evaluation"
_ENDS = ("data", "compute", "sync", "update", EVALUATION)  # other phases have limits of their own
_SHOWN = 16  # ranks in a table
_FILES = 200  # heartbeats of all ranks that are written in a second, at most
_GRACE = 10.0  # seconds in which the collective says itself that it has timed out


class Phase(NamedTuple):
    name: str  # one of `PARTS`, `OTHER`, or "start", "resume", "warm up", "evaluation", "closing"
    step: int  # counted from 0
    micro_batch: int  # counted from 1; 0 if it concerns none
    began: float  # seconds on the clock of time.perf_counter


class Phases:
    def __init__(self) -> None:
        self.began, self.steps = time.perf_counter(), 0  # steps begun in this process
        self.reading: Callable[[], str | None] = lambda: None  # the sample that this rank waits for
        self.seconds: defaultdict[str, float] = defaultdict(float)  # of the step, without the current phase
        self.current = Phase("start", 0, 0, self.began)

    def begin(self, step: int) -> None:
        self.enter(OTHER, step=step)
        self.steps += 1
        self.began = self.current.began
        self.seconds.clear()

    def enter(self, name: str, micro_batch: int = 0, *, step: int | None = None) -> None:
        now, last = time.perf_counter(), self.current
        self.seconds[last.name] += now - last.began
        self.current = Phase(name, last.step if step is None else step, micro_batch, now)

    def total(self) -> float:
        """Seconds since the step began, without those of an evaluation after it."""
        return time.perf_counter() - self.began - self.seconds[EVALUATION]


class Watchdog:
    def __init__(
        self, stall: float | None, parallel: ParallelConfig, run: Path, rank_info: RankInfo, phases: Phases
    ) -> None:
        self._stall, self._parallel, self._run, self._phases = stall, parallel, run, phases
        self._rank, self._ranks, self._trains = rank_info.rank, rank_info.world_size, threading.get_ident()
        shortest = stall or min(parallel.timeout, parallel.timeout_first) * 2 / 3
        self._beat = max(min(1.0, shortest / 10), self._ranks / _FILES)
        self._path = run / "heartbeat" / f"{self._rank}.json"
        self._stacks: IO[bytes] | None = None
        self._count, self._due = 0, 0.0
        self._since = self._looked = time.monotonic()  # this rank observes without a gap, and looked last
        self._answers = True  # the disk of the run
        self._seen: dict[int, tuple[float, dict[str, Any]]] = {}  # rank -> since when, its heartbeat
        self._limited, self._end = Limited(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sa1b-watchdog", daemon=True)

    def __enter__(self) -> None:
        if self._stall != 0:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        if self._stall == 0:
            return
        self._end.set()
        self._thread.join(5 * self._beat)  # it may be writing to a disk that hangs
        self._limited.close()
        faulthandler.cancel_dump_traceback_later()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()  # unless it has those of other ranks
        if self._stacks is not None:
            path = Path(self._stacks.name)
            self._stacks.close()
            with suppress(OSError):
                if not path.stat().st_size:
                    path.unlink()

    def _watch(self) -> None:
        # The folder of the run is made late, and a rank may hang in a step soon after.
        while not self._end.wait(self._beat if self._stacks else min(self._beat, 0.05)):
            timeout = self._parallel.timeout_first if self._phases.steps <= 1 else self._parallel.timeout
            limit, own, now = self._stall or timeout * 2 / 3, self._state(), time.monotonic()
            idle, long = own["seconds"], max(3 * self._beat, limit / 2)
            if idle < limit / 4 or now - self._looked > long:  # or this process was stopped itself
                self._seen, self._since, self._due, self._answers = {}, now, limit, True
            if self._answers:
                try:
                    self._limited.call(partial(self._exchange, own, limit, long), max(5.0, limit / 4))
                except OverdueError as error:
                    self._answers = False
                    own["where"] += f"; {self._run}: {error}"
                except OSError:  # a full disk; the others then see this rank as silent
                    pass
            self._looked = now = time.monotonic()
            self._seen[self._rank] = now, own
            if now - self._since < long:
                continue
            silent = {rank for rank, (since, _) in self._seen.items() if now - since > long}
            if idle >= self._due and min(self._seen.keys() - silent) == self._rank:
                self._due = 2 * idle
                self._print(idle, now, silent)
            if self._ranks > 1 and own["phase"] in _ENDS and idle > timeout + _GRACE:
                sys.stderr.write(f"rank {self._rank} exits: no progress for {idle:.0f} s\n")
                os._exit(1)

    def _state(self) -> dict[str, Any]:
        phase, self._count = self._phases.current, self._count + 1
        where = ""
        if frame := sys._current_frames().get(self._trains):
            path = Path(frame.f_code.co_filename)
            where = f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
        if phase.name in ("data", EVALUATION) and (reading := self._phases.reading()):
            where += f"; it waits for {reading}"
        return {
            "rank": self._rank, "host": socket.gethostname(), "pid": os.getpid(), "count": self._count,
            "phase": phase.name, "step": phase.step + 1, "micro_batch": phase.micro_batch,
            "seconds": time.perf_counter() - phase.began, "collectives": _collectives(), "where": where,
        }  # fmt: skip

    def _exchange(self, own: dict[str, Any], limit: float, long: float) -> None:
        """Write the heartbeat, set the timer of the stacks and, if this rank hangs, read the others."""
        hangs, now = own["seconds"] >= limit / 4, time.monotonic()
        if not hangs and not self._run.is_dir():
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(own))  # who reads half of it waits for the next one
        if self._stacks is None:
            self._stacks = (self._run / f"stacks-{self._rank}.txt").open("ab", buffering=0)
        if own["seconds"] < limit and not self._end.is_set():  # again at each heartbeat, until it has fired
            faulthandler.dump_traceback_later(limit - own["seconds"], file=self._stacks)
        if not hangs:
            return
        lower = any(rank < self._rank and now - since <= long for rank, (since, _) in self._seen.items())
        for rank in range(min(self._ranks, _SHOWN) if lower else self._ranks):  # a lower rank prints
            with suppress(FileNotFoundError, ValueError):
                state = json.loads(self._path.with_name(f"{rank}.json").read_text())
                if rank not in self._seen or self._seen[rank][1]["count"] != state["count"]:
                    self._seen[rank] = time.monotonic(), state

    def _print(self, idle: float, now: float, silent: set[int]) -> None:
        first = "; the ranks that have started the fewest collectives come first" if self._ranks > 1 else ""
        lines = [f"sa1b: no progress for {idle:.0f} s{first}"]
        if missing := [rank for rank in range(self._ranks) if rank not in self._seen]:
            lines.append(f"rank {ranges(missing)}: no file in {self._path.parent}")
        rows = [(state, now - since) for since, state in self._seen.values()]
        rows.sort(key=lambda row: (row[0]["collectives"], -row[0]["seconds"] - row[1]))
        for state, age in rows[:_SHOWN]:
            line = "rank {rank} (host {host}, pid {pid})".format_map(state)
            if state["rank"] in silent:
                line += f" does not answer for at least {age:.0f} s"
            line += f": {state['seconds'] + age:.0f} s in {state['phase']} of step {state['step']}"
            line += f", micro-batch {state['micro_batch']}" if state["micro_batch"] else ""
            lines.append("{line}; {collectives} collectives; {where}".format(line=line, **state))
        if len(rows) > _SHOWN:
            lines.append(f"{len(rows) - _SHOWN} more ranks: {self._path.parent}")
        if silent:
            lines.append("no answer: the process is stopped or dead, or C code keeps the interpreter's lock")
        text = "\n  ".join([*lines, f"stacks of the ranks: {self._run}/stacks-<rank>.txt"])
        sys.stderr.write(f"\n{text}\n")  # one write, so that lines of several ranks do not mix
        sys.stderr.flush()
        if self._answers:
            with suppress(OSError, OverdueError):
                self._limited.call(lambda: append(self._run / "stall.txt", f"{text}\n\n".encode()), 5.0)


def _collectives() -> int:
    count = 0
    for group in list(_world.pg_map):
        with suppress(RuntimeError, ValueError):  # it ends
            count += cast(Any, group)._get_sequence_number_for_group()
    return count


def record_collectives(run: Path) -> None:
    """Let torch record the last collectives of NCCL, and write them to the run if one times out."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{run.absolute()}/collectives-rank-")
