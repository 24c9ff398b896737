"""What each rank does right now, and which one the others wait for.

    with Watchdog(config.health.stall, config.parallel, config.folder, rank_info, phases):
        ...train: phases.begin(step), phases.part("compute"), ...

    RUN/heartbeat/3.json     rank 3: phase, step, collectives started, line of the thread that trains
    RUN/stacks-3.txt         stacks of all its threads after `stall` seconds without a new phase
    RUN/stall.txt            the tables

A thread of each rank writes the heartbeat and, while its own rank makes no progress, reads the others. After
`stall` seconds the lowest rank that answers prints one table, and again when that time has doubled. If a rank
is in a step or an evaluation, and makes no progress for longer than collectives wait, it exits.

No clocks are compared: a heartbeat has a counter, and a reader measures how long it stands still. Such a rank
is stopped (SIGSTOP, a dead machine) or keeps the interpreter's lock; its phase is that of its last heartbeat.
Stacks are written by faulthandler's own thread, which needs no lock. The table begins with the rank that has
started the fewest collectives: the others wait for it. Of equals, the longest phase comes first.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from torch.distributed.distributed_c10d import _get_default_store, _world

from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import ParallelConfig
from sa1b.engine.watch.phase import Phases
from sa1b.engine.watch.signals import lost_peer
from sa1b.limit import Limited, OverdueError
from sa1b.report import ranges
from sa1b.storage.atomic import append

HEARTBEATS = "heartbeat"
_SHOWN = 16  # ranks in a table
_FILES = 200  # heartbeats of all ranks that are written in a second, at most
_GRACE = 10.0  # seconds in which the collective says itself that it has timed out
_TOLD = 1.0  # seconds to wait for the rank that fails to say so
_ENDS = ("data", "compute", "sync", "update", "evaluation")  # other phases have limits of their own


class Watchdog:
    """A context around a run. `stall`: seconds without a new phase after which the table is printed; None:
    two thirds of the timeout of collectives; 0: nothing is watched or written.
    """

    def __init__(
        self, stall: float | None, parallel: ParallelConfig, run: Path, rank_info: RankInfo, phases: Phases
    ) -> None:
        self._stall, self._parallel, self._run, self._phases = stall, parallel, run, phases
        self._rank, self._ranks, self._trains = rank_info.rank, rank_info.world_size, threading.get_ident()
        shortest = stall or min(parallel.timeout, parallel.timeout_first) * 2 / 3
        self._beat = max(min(1.0, shortest / 10), rank_info.world_size / _FILES)
        self._path = run / HEARTBEATS / f"{self._rank}.json"
        self._stacks_path = run / f"stacks-{self._rank}.txt"
        self._stacks: IO[bytes] | None = None
        self._count, self._began, self._due = 0, 0.0, 0.0
        self._since = self._looked = time.monotonic()  # this rank observes without a gap, and looked last
        self._answers = True  # the disk of the run
        self._seen: dict[int, tuple[float, dict[str, Any]]] = {}  # rank -> since when, its heartbeat
        self._limited, self._end = Limited(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sa1b-watchdog", daemon=True)

    def __enter__(self) -> None:
        if self._stall != 0:
            with suppress(OSError):  # that of an earlier start
                self._path.unlink(missing_ok=True)
            self._thread.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._ranks > 1:
            with suppress(RuntimeError, ValueError, OverdueError):  # the store may be lost, too
                self._limited.call(partial(self._tell, error), 3 * _TOLD)
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
            self._stacks.close()
        with suppress(OSError):
            if not self._stacks_path.stat().st_size:
                self._stacks_path.unlink()

    def _tell(self, error: BaseException) -> None:
        """Tell the others that this rank fails, or note on the error of a lost rank which one it is."""
        store, key = _get_default_store(), "sa1b/failed"
        if not isinstance(error, Exception) or not lost_peer(error):
            phase = self._phases.current
            store.set(key, f"rank {self._rank} (host {socket.gethostname()}) failed in {phase.name}")
        else:
            store.wait([key], timedelta(seconds=_TOLD))
            error.add_note(store.get(key).decode())
            time.sleep(_TOLD)  # torchrun prints the reason of the rank that it finds first

    def _watch(self) -> None:
        # The folder of the run is made late, and a rank may hang in a step soon after.
        while not self._end.wait(self._beat if self._stacks else min(self._beat, 0.05)):
            timeout = self._parallel.timeout_first if self._phases.steps <= 1 else self._parallel.timeout
            limit, own, now = self._stall or timeout * 2 / 3, self._state(), time.monotonic()
            idle, long = own["seconds"], max(3 * self._beat, limit / 2)
            if idle < limit / 4 or now - self._looked > long:  # or this process was stopped itself
                self._seen, self._since, self._due, self._answers = {}, now, limit, True
            if self._answers and (self._run.is_dir() or idle > limit / 4):
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
            if idle >= self._due and not any(rank < self._rank for rank in self._seen.keys() - silent):
                self._due = 2 * idle
                self._print(idle, now, silent)
            if self._ranks > 1 and own["phase"] in _ENDS and idle > timeout + _GRACE:
                sys.stderr.write(f"rank {self._rank} exits: no progress for {idle:.0f} s\n")
                os._exit(1)

    def _state(self) -> dict[str, Any]:
        phase, self._count = self._phases.current, self._count + 1
        state: dict[str, Any] = {"rank": self._rank, "host": socket.gethostname(), "pid": os.getpid()}
        state |= {"count": self._count, "phase": phase.name, "step": phase.step + 1}
        state |= {"micro_batch": phase.micro_batch, "seconds": time.perf_counter() - phase.began}
        state |= {"collectives": _collectives(), "where": ""}
        if frame := sys._current_frames().get(self._trains):
            path = Path(frame.f_code.co_filename)
            state["where"] = f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
        if phase.name in ("data", "evaluation") and (reading := self._phases.reading()):
            state["where"] += f"; it waits for {reading}"
        return state

    def _exchange(self, own: dict[str, Any], limit: float, long: float) -> None:
        """Write the heartbeat, set the timer of the stacks and, while this rank hangs, read the others."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(own))  # who reads half of it waits for the next one
        if self._stacks is None:
            self._stacks = self._stacks_path.open("ab", buffering=0)
        if self._phases.current.began != self._began and not self._end.is_set():
            self._began = self._phases.current.began
            faulthandler.dump_traceback_later(max(limit - own["seconds"], 0.1), file=self._stacks)
        if own["seconds"] < limit / 4:
            return
        now = time.monotonic()
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
    """Collectives that this process has started, in all groups."""
    count = 0
    for group in list(_world.pg_map):
        with suppress(RuntimeError, ValueError):  # it ends
            count += cast(Any, group)._get_sequence_number_for_group()
    return count


def record_collectives(run: Path) -> None:
    """Let torch record the last collectives of NCCL, and write them to the run if one times out."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    prefix = os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", f"{run.absolute()}/collectives-rank-")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", prefix)
