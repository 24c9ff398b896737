"""Start positions of the iterations of a stream, shared by a process and its DataLoader's worker processes.

A DataLoader with workers does not call the stream of the main process. Every worker process iterates over its
own copy: new processes in each iteration or, with persistent_workers, the same processes again. The position
of the next iteration is therefore in memory that all of them share: an anonymous file that forked workers
inherit and spawned workers receive. The first worker of an iteration advances the position to the start of
the next iteration. The other workers join the current iteration at its start. With 100 images and two
workers:

    position 0      worker 0 begins an iteration at 0: the next one begins at 100
    position 100    worker 1 joins it at 0, because it has the same iterator as worker 0
    position 100    worker 1 begins the second iteration at 100
    position 200    worker 0 joins it at 100
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
from itertools import islice
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, BinaryIO, TypeVar

from torch.utils.data import get_worker_info

from sa1b.errors import UsageError
from sa1b.limit import ForkLock
from sa1b.stream.batch import Batch
from sa1b.stream.plan import MicroBatch, Plan, ResumeError, checked_position
from sa1b.stream.worker_memory import prepare_worker

_RUNNING: "weakref.WeakSet[Generator[Any]]" = weakref.WeakSet()  # iterations of this process
T = TypeVar("T")
_BYTES = 4096  # of the state, which a write of one page replaces as a whole
_REMEMBERED = 8  # largest number of iterations that worker processes may start at the same time
_ENDLESS = (
    "an endless stream (epochs=None) cannot be iterated again after a DataLoader with workers has read it: "
    "the workers do not know which of their batches were used. Before the next iteration, call "
    "load_state_dict with the stream's state after the last batch, or set_epoch; or leave epochs at 1"
)
_UNKNOWN = (
    "state_dict(): a DataLoader with workers reads this stream, which does not know which of their batches "
    "were used; pass the last one: state_dict(batch)"
)

# Batch i of a rank comes from worker i mod `workers`, and `count` batches are a step of the rank. Where each
# of them begins depends on `micro_batch`.
_SAME = ("rank", "world_size", "global_batch", "micro_batch", "count", "worker", "workers")


class Iterations:
    """The position at which the next iteration begins, shared with worker processes."""

    # The shared state:
    #   position  at which the next iteration begins
    #   used      position after the last used batch; None if worker processes have read since it was set
    #   begun     by the workers, the last ones: [seed, position, workers]. The seed identifies the iterator,
    #             bit i of `workers` says that worker i has begun. Position None: all workers refuse it

    def __init__(self, position: int = 0) -> None:
        self._open(_anonymous_file())
        self._write({"position": position, "used": position, "begun": []})

    def _open(self, file: BinaryIO) -> None:
        self._file, self._lock = file, ForkLock()
        weakref.finalize(self, file.close).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:  # copied, not pickled for a worker process
            return Iterations, (self.position,)
        return _inherited, (DupFd(self._file.fileno()),)

    @property
    def position(self) -> int:
        """Position of the next iteration."""
        with self._state() as state:
            return int(state["position"])

    @position.setter
    def position(self, position: int) -> None:
        self.resume(position, position)

    def resume(self, position: int | None, used: int | None) -> None:
        """Set the position of the next iteration (None: keep it), and that after the last used batch."""
        with self._state() as state:
            self._write(state | {"used": used} | ({} if position is None else {"position": position}))

    @property
    def used(self) -> int:
        """Position after the last used batch; UsageError if worker processes have read since it was set. In
        such a process, that of the next iteration: a StatefulDataLoader saves its iteration too.
        """
        with self._state() as state:
            used = state["used" if get_worker_info() is None else "position"]
        if used is None:
            raise UsageError(_UNKNOWN)
        return int(used)

    def begin(self, following: Callable[[int], int] | None) -> int:
        """The position at which an iteration of this process begins.

        `following` maps the start of an iteration to that of the next one. None is an endless iteration: the
        position does not change, and the caller sets it when it takes batches. UsageError if worker processes
        have read an endless iteration: the used batches are unknown.
        """
        worker = get_worker_info()
        with self._state() as state:
            position = state["position"]
            if following is None and state["used"] is None:
                position = None
            if worker is None:
                state["used"] = position
            elif (joined := _joined(state["begun"], worker)) is not None:
                position, following = joined[1], None
            else:
                state["used"] = None
                begun = [worker.seed - worker.id, position, 1 << worker.id]
                state["begun"] = [*state["begun"], begun][-_REMEMBERED:]
            if following is not None:
                state["position"] = following(state["position"])
            self._write(state)
        if position is None:
            raise UsageError(_ENDLESS)
        return int(position)

    @contextmanager
    def _state(self) -> Iterator[dict[str, Any]]:
        """The shared state, which no other thread or process changes meanwhile."""
        # The lock of the file belongs to the process, and does not exclude its other threads: the kernel
        # releases it if the process is killed.
        with self._lock:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield json.loads(os.pread(self._file.fileno(), _BYTES, 0))
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _write(self, state: dict[str, Any]) -> None:
        os.pwrite(self._file.fileno(), json.dumps(state).encode().ljust(_BYTES), 0)


def _joined(begun: list[list[int]], worker: Any) -> list[int] | None:
    """The iteration that another worker of this worker's iterator has begun; this worker is added to it."""
    # An iterator is identified by `seed - id`, the random number that the DataLoader takes from torch's
    # generator for its workers. Persistent workers keep this number, and each of them begins the iterations
    # in the same order. If the generator is reset before each iteration, new workers have the same number. A
    # worker id that has joined an iteration already then begins the next one.
    for iteration in reversed(begun):
        if iteration[0] == worker.seed - worker.id and not iteration[2] >> worker.id & 1:
            iteration[2] |= 1 << worker.id
            return iteration
    return None


class StreamIterator(Iterator[Batch]):
    """One iteration over a stream in one process, with a state that torchdata's StatefulDataLoader saves.

        loader = torchdata.stateful_dataloader.StatefulDataLoader(stream, batch_size=None, num_workers=2)
        for batch in loader:
            ...
            save({"loader": loader.state_dict()})     # has the state of the iteration of each worker

    The state of a worker's iteration is the position at which it began and the number of its used batches.
    The start of the next batch is computed from both, so no batch is read to resume. The iteration begins
    with its first batch.
    """

    def __init__(
        self,
        plan: Plan,
        iterations: Iterations,
        read: Callable[[Iterable[MicroBatch]], Generator[Batch]],
        begin: Callable[[], int],
    ) -> None:
        self._plan, self._iterations = plan, iterations
        self._read, self._begin_iteration = read, begin
        info = get_worker_info()
        self._worker, self._workers = (info.id, info.num_workers) if info else (0, 1)
        self._begun: int | None = None  # position at which the iteration began
        self._used = 0
        self._batches: Generator[Batch] | None = None
        self._ended = False
        if info:
            prepare_worker()

    def __next__(self) -> Batch:
        if self._batches is None:
            if self._ended:
                raise StopIteration
            self._ended = True  # also if the iteration cannot begin
            self._batches = self._read(self._pieces())
        batch = next(self._batches)
        self._used += 1
        return batch

    def close(self) -> None:
        """End the iteration before its last batch: cancel its reads."""
        self._ended = True
        if self._batches is not None:
            self._batches.close()

    def _pieces(self) -> Iterator[MicroBatch]:
        """This process's micro-batches that are not used yet."""
        plan = self._plan
        start, rest = self._next_step()
        if not plan.endless and start >= plan.epoch_end(self._begin()):
            return iter(())
        return islice(plan.micro_batches(start), rest, None, self._workers)

    def _next_step(self) -> tuple[int, int]:
        plan, begun = self._plan, self._begin()
        steps, rest = divmod(self._worker + self._used * self._workers, plan.count)
        start = begun + steps * plan.global_batch
        return start if plan.endless else min(start, plan.epoch_end(begun)), rest

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch; `following`: position at which the next iteration begins."""
        begun = self._begin()
        return {
            **self._identity(),
            "begun": begun,
            "used": self._used,
            "following": self._iterations.position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue an iteration before its first batch; ResumeError if ranks, workers or sizes differ."""
        identity = self._identity()
        if state.keys() != {*identity, "begun", "used", "following"}:
            raise ResumeError(
                f"load_state_dict({state!r}): not the state of an iteration; pass what state_dict() of the "
                "StatefulDataLoader returned"
            )
        if different := [name for name in _SAME if state[name] != identity[name]]:
            changes = ", ".join(f"{name} {state[name]}, now {identity[name]}" for name in different)
            raise ResumeError(
                f"load_state_dict(): {changes}; resume with the same ranks, workers and batch sizes, or save "
                "stream.state_dict(batch) or the state of a sa1b.Loader, which fit others"
            )
        try:
            begun, used, following = (
                checked_position(state[name], name) for name in ("begun", "used", "following")
            )
        except ValueError as error:
            raise ResumeError(
                f"load_state_dict(): {error}; the state is damaged, use an earlier one"
            ) from None
        self._begun, self._used = begun, used
        self._iterations.resume(following, None if get_worker_info() else self._next_step()[0])

    def _begin(self) -> int:
        if self._begun is None:
            self._begun = self._begin_iteration()
        return self._begun

    def _identity(self) -> dict[str, Any]:
        plan = self._plan
        values = (
            *(plan.rank, plan.world_size, plan.global_batch, plan.micro_batch, plan.count),
            *(self._worker, self._workers),
        )
        return dict(zip(_SAME, values, strict=True))


def _inherited(descriptor: Any) -> Iterations:
    iterations = Iterations.__new__(Iterations)
    iterations._open(os.fdopen(descriptor.detach(), "r+b", buffering=0))
    return iterations


def _anonymous_file() -> BinaryIO:
    if sys.platform == "linux":  # in memory, so that no temporary folder is needed
        return os.fdopen(os.memfd_create("sa1b-iterations"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def closed_at_exit(batches: Generator[T]) -> Generator[T]:
    """The generator, which is closed when the process exits, while the modules that it needs exist."""
    _RUNNING.add(batches)
    return batches


@atexit.register
def _close_all() -> None:
    for batches in list(_RUNNING):
        with suppress(ValueError):  # another thread is inside of it
            batches.close()
