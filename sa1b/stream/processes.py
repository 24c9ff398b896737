"""Processes that make the batches of a `sa1b.Loader`, see sa1b.stream.maker.

They live as long as the loader and know no epochs: a job is a range of positions. They are started by the
server of multiprocessing's "forkserver", which has imported what they need, has no CUDA and no threads. None
imports the caller's program. A process ends when its pipe closes or the loader's process has ended.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sa1b.errors import Sa1bError
from sa1b.stream.batch import Batch
from sa1b.stream.batch_stream import BatchStream
from sa1b.stream.maker import Job, Made, Maker, Slots
from sa1b.stream.worker_memory import dumps

AHEAD = 2  # jobs of a process: while a batch is decoded, the next one is read
_LOOK = 1.0  # seconds between two looks at processes that send nothing
_STOPPED = 5  # looks, one after the other, that find a process stopped
_ENDING = 5.0  # seconds that the end of a process takes at most


class WorkerError(Sa1bError):
    """A process of a loader has ended, is stopped, or could not begin; the message says why and where."""


def sent(stream: BatchStream) -> tuple[bytes, str]:
    """A stream for processes, or why there can be none."""
    if stream.decoder.device.type != "cpu":
        return b"", "JPEG files are decoded on the GPU"
    if sys.platform != "linux":
        return b"", "more need Linux"
    if multiprocessing.current_process().daemon:
        return b"", "this process is daemonic"
    try:
        data = pickle.dumps(stream)
    except Exception as error:
        return b"", str(error)
    if b"__main__" in data:
        return b"", "the stream has a function or class of the program itself; define it in a module"
    return data, ""


def server() -> Any:
    """The context of the processes. The first call starts their server, which imports for seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sa1b.stream.preload"])
    forkserver.ensure_running()
    return context


@dataclass(slots=True, eq=False)
class _Process:
    process: Any
    pipe: Connection
    jobs: dict[int, Job] = field(default_factory=dict)
    stops: int = 0  # looks that found it stopped, one after the other


class Processes:
    """Makes the batches of a loader with `count` processes of `threads` threads each."""

    def __init__(self, stream: bytes, count: int, threads: int, slots: Slots) -> None:
        self.workers, self._looked = list[_Process](), 0.0  # no process is left after a WorkerError
        self.close = Finalize(self, _end, (self.workers,), exitpriority=10)
        context, script = server(), sys.modules["__main__"]
        sys.modules["__main__"] = type(sys)("__main__")  # else a process would run the caller's program
        try:
            for number in range(count):
                ours, theirs = context.Pipe()
                arguments, name = (theirs, slots, threads, os.getpid()), f"sa1b-loader-{number}"
                process = context.Process(target=_work, args=arguments, name=name, daemon=True)
                process.start()
                theirs.close()
                self.workers.append(_Process(process, ours))
        finally:
            sys.modules["__main__"] = script
        first = pickle.dumps((dict(os.environ), stream))
        for worker in self.workers:
            with suppress(OSError):  # `receive` says how the process ended
                worker.pipe.send_bytes(first)

    @property
    def has_room(self) -> bool:
        return any(len(worker.jobs) < AHEAD for worker in self.workers)

    @property
    def slots(self) -> set[int]:
        """The slots of jobs of any iteration, into which processes may write."""
        return {slot for worker in self.workers for slot in worker.jobs}

    def begin(self, job: Job) -> None:
        worker = min(self.workers, key=lambda one: len(one.jobs))
        worker.jobs[job.slot] = job
        with suppress(OSError):  # `receive` says how the process ended
            worker.pipe.send_bytes(pickle.dumps(job))

    def receive(self, seconds: float) -> list[Made]:
        """What has been made since, as of `Threads`; WorkerError: a process has ended, and so all have."""
        ends: dict[Any, _Process] = {worker.pipe: worker for worker in self.workers}
        ends |= {worker.process.sentinel: worker for worker in self.workers}
        arrived = list[Made]()
        for ready in wait(list(ends), seconds):
            worker = ends[ready]
            try:
                while worker.pipe.poll():
                    made: Made | BaseException = pickle.loads(worker.pipe.recv_bytes())
                    if isinstance(made, BaseException):
                        raise made  # it could not begin
                    del worker.jobs[made.job.slot]
                    arrived.append(made)
            except (EOFError, ConnectionError):
                raise self._ended(worker) from None
            if ready is not worker.pipe:
                raise self._ended(worker)
        if not arrived and seconds and time.monotonic() - self._looked >= _LOOK:
            self._look()
        return arrived

    def _look(self) -> None:
        """WorkerError: a process is stopped. One that continues at once, as after Ctrl-Z, is not an error."""
        self._looked = time.monotonic()
        for worker in self.workers:
            with suppress(OSError):
                state = Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(") ")[2][:1]
                worker.stops = worker.stops + 1 if state in "Tt" else 0
            if worker.stops >= _STOPPED:
                raise self._ended(worker, "is stopped (SIGSTOP)")

    def _ended(self, worker: _Process, how: str | None = None) -> WorkerError:
        """The error for a process that makes no more batches. All processes end with it."""
        process, jobs = worker.process, list(worker.jobs.values())
        if how is None:
            process.join(1.0)
            code = process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        where = ", ".join(f"{job.piece.start} to {job.piece.stop - 1}" for job in jobs) or "of no batch"
        _end(self.workers, kill=True)
        return WorkerError(
            f"{process.name} (pid {process.pid}): {how} while it made positions {where}; resume from the "
            "state of the last batch, with fewer processes if memory ran out"
        )


def _end(workers: list[_Process], *, kill: bool = False) -> None:
    """End processes, which do so by themselves when their pipes close."""
    for worker in workers:
        worker.pipe.close()
        if kill:
            worker.process.kill()
    while workers:
        process = workers.pop().process
        process.join(_ENDING)
        if process.exitcode is None:
            process.kill()
            process.join(_ENDING)


def _work(pipe: Connection, slots: Slots, threads: int, parent: int) -> None:
    # They are sent to the whole group: the parent decides.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):  # the loader has closed the pipe
        ended: Any = os.pidfd_open(parent)  # a forked child of the parent may keep its end of the pipe
        try:
            environment, stream = pickle.loads(pipe.recv_bytes())
            os.environ.update(environment)
            _make_batches(pickle.loads(stream), pipe, slots, threads, ended)
        except Exception as error:
            pipe.send_bytes(pickle.dumps(_sendable(error)))
    os._exit(0)  # threads may still work


def _make_batches(stream: BatchStream, pipe: Connection, slots: Slots, threads: int, ended: Any) -> None:
    lock, cache, counted = threading.Lock(), stream.stats.cache, Counter[str]()

    def deliver(made: Made, memory: Tensor) -> None:
        try:
            if isinstance(made.batch, Batch):
                made.batch = dumps(made.batch, memory)
        except Exception as error:
            made.batch, made.error = None, error
        if made.error is not None:
            made.error = _sendable(made.error)
        with lock, suppress(OSError):  # the loader has closed the pipe
            if cache is not None:
                now = Counter(asdict(cache.counts()))
                made.busy.update({("cache", name): n for name, n in (now - counted).items()})
                counted.update(now - counted)
            pipe.send_bytes(pickle.dumps(made))

    with stream.used():
        maker = Maker(stream, threads, slots, deliver, packs=True)
        while ended not in wait([pipe, ended]):
            maker.begin(pickle.loads(pipe.recv_bytes()))


def _sendable(error: BaseException) -> Any:
    """What arrives as this error. Some errors can be pickled and not be read: their text arrives."""
    wrapped = ExceptionWithTraceback(error, error.__traceback__)
    with suppress(Exception):
        if type(pickle.loads(pickle.dumps(wrapped))) is type(error):
            return wrapped
    return WorkerError("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))
