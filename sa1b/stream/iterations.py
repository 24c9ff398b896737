"""Start positions of the iterations of a stream, shared by a process and its DataLoader's worker processes.

Every worker process iterates over its own copy of the stream, so the position of the next iteration is in an
anonymous file that all share. The first worker of an iteration advances it to the start of the next one; the
others join the iteration at its start. With 100 images and two workers:

    position 0      worker 0 begins an iteration at 0: the next one begins at 100
    position 100    worker 1 joins it at 0, because it has the same iterator as worker 0
    position 100    worker 1 begins the second iteration at 100
"""

import atexit
import fcntl
import json
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import islice
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any

from torch.utils.data import get_worker_info

from sa1b.errors import UsageError
from sa1b.limit import ForkLock
from sa1b.stream.batch import Batch
from sa1b.stream.plan import MicroBatch, Plan, ResumeError
from sa1b.stream.worker_memory import prepare_worker

_RUNNING: "weakref.WeakSet[Generator[Any]]" = weakref.WeakSet()  # iterations of this process
_BYTES = 4096  # of the state, which a write of one page replaces as a whole
_REMEMBERED = 8  # largest number of iterations that worker processes may start at the same time
_ENDLESS = (
    "an endless stream (epochs=None) cannot be iterated again after a DataLoader with workers has read it; "
    "call load_state_dict with the state after the last batch, or set_epoch, or leave epochs at 1"
)
_UNKNOWN = "state_dict(): a DataLoader with workers reads this stream; pass the last batch: state_dict(batch)"


class Iterations:
    """The position at which the next iteration begins, shared with worker processes."""

    # The shared state, in JSON: `position` of the next iteration; `used`, the one after the last used batch,
    # None if worker processes have read since; and `begun`, the last iterations of workers: [seed of the
    # iterator, position, workers], where bit i of `workers` says that worker i has begun.

    def __init__(self, position: int = 0, inherited: Any = None) -> None:
        self._lock = ForkLock()
        self._file = _anonymous_file() if inherited is None else inherited.detach()
        weakref.finalize(self, os.close, self._file).atexit = False
        if inherited is None:
            self._write({"position": position, "used": position, "begun": []})

    def __reduce__(self) -> tuple[Any, ...]:
        is_for_worker = get_spawning_popen() is not None  # else this is a copy
        return Iterations, (0, DupFd(self._file)) if is_for_worker else (self.position,)

    @property
    def position(self) -> int:
        """Position of the next iteration."""
        with self._state() as state:
            return int(state["position"])

    @property
    def used(self) -> int:
        """Position after the last used batch; in a worker, for StatefulDataLoader, of the next iteration."""
        with self._state() as state:
            used = state["used" if get_worker_info() is None else "position"]
        if used is None:
            raise UsageError(_UNKNOWN)
        return int(used)

    def resume(self, position: int | None, used: int | None) -> None:
        """Set the position of the next iteration (None: keep it), and that after the last used batch."""
        with self._state() as state:
            state["used"] = used
            if position is not None:
                state["position"] = position

    def begin(self, plan: Plan) -> int:
        """The position at which an iteration of this process begins; the next one is the next epoch."""
        # An endless plan does not change the position: the caller sets it when it takes batches.
        worker = get_worker_info()
        with self._state() as state:
            # An iterator is identified by `seed - id`, the random number of the DataLoader for its workers.
            # Persistent workers keep it, and so do new ones if torch's generator is reset. A worker that has
            # joined an iteration already then begins the next one.
            iterator, bit = (worker.seed - worker.id, 1 << worker.id) if worker else (None, 0)
            joined = [one for one in state["begun"] if one[0] == iterator and not one[2] & bit]
            if joined:
                position = joined[-1][1]
                joined[-1][2] |= bit
            else:
                position = None if plan.endless and state["used"] is None else state["position"]
                state["used"] = None if worker else position
                if worker:
                    state["begun"] = [*state["begun"], [iterator, position, bit]][-_REMEMBERED:]
                if not plan.endless:
                    state["position"] = plan.epoch_end(state["position"])
        if position is None:
            raise UsageError(_ENDLESS)
        return int(position)

    @contextmanager
    def _state(self) -> Iterator[dict[str, Any]]:
        """The shared state, which the caller may change, and no other thread or process meanwhile."""
        # The lock of the file is of the process, not of a thread; the kernel releases it if it is killed.
        with self._lock:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                state = json.loads(os.pread(self._file, _BYTES, 0))
                yield state
                self._write(state)
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _write(self, state: dict[str, Any]) -> None:
        os.pwrite(self._file, json.dumps(state).encode().ljust(_BYTES), 0)


class StreamIterator(Iterator[Batch]):
    """One iteration over a stream in one process, which begins with its first batch. Its state, the start and
    the number of used batches, is what torchdata's StatefulDataLoader saves.
    """

    def __init__(
        self, plan: Plan, iterations: Iterations, read: Callable[[Iterable[MicroBatch]], Generator[Batch]]
    ) -> None:
        self._plan, self._iterations, self._read = plan, iterations, read
        info = get_worker_info()
        self._worker, self._workers = (info.id, info.num_workers) if info else (0, 1)
        # Batch i of a rank comes from worker i mod `workers`, and `count` batches are a step of the rank.
        # Where each of them begins depends on `micro_batch`.
        sizes = ("rank", "world_size", "global_batch", "micro_batch", "count")
        self._identity = {name: getattr(plan, name) for name in sizes}
        self._identity |= {"worker": self._worker, "workers": self._workers}
        self._used = 0
        self._batches: Generator[Batch] | None = None
        if info:
            prepare_worker()

    @cached_property
    def _begun(self) -> int:
        return self._iterations.begin(self._plan)

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._read(())  # a DataLoader asks for more also if the iteration cannot begin
            self._batches = self._read(self._pieces())
        batch = next(self._batches)
        self._used += 1
        return batch

    def close(self) -> None:
        """End the iteration before its last batch: cancel its reads."""
        self._batches = self._batches or self._read(())
        self._batches.close()

    def _pieces(self) -> Iterable[MicroBatch]:
        start, rest = self._next_step()
        return () if rest is None else islice(self._plan.micro_batches(start), rest, None, self._workers)

    def _next_step(self) -> tuple[int, int | None]:
        """The step of the next batch, and the batch's number in it; None: the iteration has ended."""
        steps, rest = divmod(self._worker + self._used * self._workers, self._plan.count)
        start = self._begun + steps * self._plan.global_batch
        if self._plan.endless or start < (end := self._plan.epoch_end(self._begun)):
            return start, rest
        return end, None

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch; `following`: position at which the next iteration begins."""
        state = {**self._identity, "begun": self._begun, "used": self._used}
        return {**state, "following": self._iterations.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue an iteration before its first batch; ResumeError if ranks, workers or sizes differ."""
        now = self._identity
        if changes := [
            f"{key} {state.get(key)}, now {now[key]}" for key in now if state.get(key) != now[key]
        ]:
            raise ResumeError(
                f"load_state_dict(): {', '.join(changes)}; resume with the same ranks, workers and batch "
                "sizes, or save stream.state_dict(batch) or the state of a sa1b.Loader, which fit others"
            )
        self._begun, self._used = state["begun"], state["used"]
        self._iterations.resume(state["following"], None if get_worker_info() else self._next_step()[0])


def _anonymous_file() -> int:
    if sys.platform == "linux":  # in memory, so that no temporary folder is needed
        return os.memfd_create("sa1b-iterations")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def closed_at_exit(batches: Generator[Batch]) -> Generator[Batch]:
    """The generator, which is closed when the process exits, while the modules that it needs exist."""
    _RUNNING.add(batches)
    return batches


@atexit.register
def _close_all() -> None:
    for batches in list(_RUNNING):
        with suppress(ValueError):  # another thread is inside of it
            batches.close()
