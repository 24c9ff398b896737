"""The state of each rank, exchanged over the rendezvous store while the ranks may be blocked elsewhere.

    states = StateExchange(rank_info, phases, interval=1.0)
    states.start()
    states.observing = True               # reads the other ranks' states too
    states.seen[3].state.phase            # the last known state of rank 3
    states.seen[3].at                     # when it was published, on this rank's clock

A thread of each rank publishes the rank's state at every interval, with its own connection to the store,
because the main thread may be blocked in another call of the store. The clocks of machines differ. So a
published state has a number instead of a time, and an observer notes on its own clock when it saw the number
change.

Publishing costs one request of about 200 bytes per rank and interval. The states of other ranks are only read
while this rank does not progress.
"""

import json
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store

from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.watch.phase import Phases

Ended = Literal["", "failed", "lost", "done"]
_ANSWERS_WITHIN = timedelta(seconds=20)  # for one call of the store


class RankState(NamedTuple):
    """The state that a rank publishes.

    Attributes:
        rank, host: the rank and its machine.
        beat: states that it has published before.
        phase, step, micro_batch, number: see `sa1b.engine.watch.phase.Phase`.
        seconds: for how long it has been in this phase.
        collectives: collectives that it has started in the group of all ranks.
        code: where the thread that trains is: file, line and function.
        reading: image and shard that it waits for; empty if none.
        ended: failed: it raised an error. lost: it lost another rank. done: it has finished.
    """

    rank: int
    host: str
    beat: int
    phase: str
    step: int
    micro_batch: int
    number: int
    seconds: float
    collectives: int
    code: str
    reading: str
    ended: Ended


@dataclass(frozen=True, slots=True)
class Seen:
    """The last known state of a rank, and when it was first seen on the observer's clock (time.monotonic)."""

    state: RankState
    at: float


class StateExchange:
    """Publishes this rank's state and reads those of the others, in a thread.

    Args:
        interval: seconds between publications.

    Attributes:
        observing: whether the states of other ranks are read at each interval.
        ended: how this rank has ended; see `RankState`.
        seen: last known state of each rank, this one included.
        reached: when the last exchange was complete, on the clock of time.monotonic.
        error: why the store cannot be used; empty if it can.
    """

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
        """End the thread after its current exchange: the process, such as a worker of Ray, may live on."""
        self._stop.set()
        self._wake.set()

    def own(self) -> RankState:
        """The state of this rank at this moment."""
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
    """The code that a thread executes: the end of the file's path, line and function."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
