"""Supervised worker processes: one process per task, so that no task hangs or is lost silently.

Every task has its own process and pipe. A process that ends without a result is started again. After
`retries` retries the task is reported as lost, and others continue. A process without progress for
`stall_timeout` seconds is killed, and its task is retried once. With the parent, its workers exit.
"""

import contextlib
import multiprocessing
import os
import pickle
import selectors
import signal
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, Protocol

from sa1b.errors import Sa1bError

_CONTEXT = multiprocessing.get_context("spawn")  # inherits no threads, locks or handles of the parent
STALL_RETRIES = 1
_EXIT_SECONDS = 60.0  # a process that has sent its result and exists for longer is killed
_HEAD = 8  # bytes before the pickle of a message: its length
_KILL_SECONDS = 10.0  # a killed process that exists for longer waits in the kernel for unreachable storage


def available_cpus(root: str | Path = "/") -> int:
    """Number of CPUs that this process may use, at least 1, as a default for threads and processes.

    The number is the smallest of
        the affinity mask: taskset, cpusets, the binding of Slurm or of torchrun's --numa-binding;
        the CPU quota of the process's cgroups, version 1 or 2: Docker, Kubernetes, systemd;
        the CPUs of a Slurm task: SLURM_CPUS_PER_TASK, else an equal part of the node's CPUs.
    Under torchrun, the LOCAL_WORLD_SIZE ranks of a machine share the CPUs of torchrun equally. Without
    torchrun a rank is a Slurm task, and the CPUs of the task are not divided.
    """
    ranks, tasks = _count("LOCAL_WORLD_SIZE"), _count("SLURM_NTASKS_PER_NODE")
    affinity = shared = _affinity(0)
    if ranks > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        with contextlib.suppress(OSError):
            shared = max(affinity, _affinity(os.getppid()))  # a rank may have only a share of the CPUs
    limits = [shared, cpu_quota(root)]
    if per_task := _count("SLURM_CPUS_PER_TASK"):
        limits.append(per_task)
    elif tasks and not ranks:
        limits.append((_count("SLURM_CPUS_ON_NODE") or affinity) // tasks)
    return max(1, min(affinity, int(min(limits) / max(1, ranks))))


def _count(variable: str) -> int:
    """A positive number from the environment; 0 if it is not set."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 0


def _affinity(process: int) -> int:
    if not hasattr(os, "sched_getaffinity"):  # this system has no affinity mask
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(process))


def cpu_quota(root: str | Path = "/") -> float:
    """The smallest CPU quota, in CPUs, of this process's cgroups and of their parents; infinite: none."""
    return min(map(_quota, _cgroups(Path(root), "cpu")), default=float("inf"))


def memory_limit(root: str | Path = "/") -> float:
    """The smallest memory limit, in bytes, of this process's cgroups and of their parents; infinite: none."""
    return min(map(_memory, _cgroups(Path(root), "memory")), default=float("inf"))


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the cgroups of this process with a controller, and of their parents."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controllers
            base = base if base.exists() else root / "sys/fs/cgroup" / controller
        else:
            continue
        # In a container the path may be that of the host and not exist; the mount then is the container's
        # group.
        group = base / path.strip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(base))


def _quota(folder: Path) -> float:
    """The quota of one cgroup in CPUs; infinite if it has none."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        microseconds = int((folder / "cpu.cfs_quota_us").read_text())
        if microseconds > 0:
            return microseconds / int((folder / "cpu.cfs_period_us").read_text())
    return float("inf")


def _memory(folder: Path) -> float:
    """The memory limit of one cgroup in bytes; infinite if it has none."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / name).read_text())
            return limit if limit < 1 << 60 else float("inf")  # version 1 has a large number for no limit
    return float("inf")


@dataclass(frozen=True, slots=True)
class Event:
    """A progress report of a task, or its end.

    "died": the process ended without a result, and the task is retried; "lost": the same, without another
    retry. The value is the report of "progress", the result of "done", a Failure, or a text about the end.
    """

    task: int  # index of the task
    kind: Literal["progress", "done", "failed", "died", "lost"]
    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that ended a task, of the class `kind`."""

    kind: str
    message: str
    trace: str
    expected: bool = False  # an Sa1bError or OSError, for which the message is enough
    errno: int | None = None  # error number of an OSError
    filename: str | None = None  # path that an OSError names


@dataclass(slots=True)
class _Running:
    task: int
    process: BaseProcess
    pipe: Connection
    last: float  # time of the last bytes in seconds of the monotonic clock
    answered: bool = False
    received: bytearray = field(default_factory=bytearray)  # begins with the unfinished message


class Supervise(Protocol):
    """The type of `supervise`, of which other engines have their own."""

    def __call__(
        self,
        function: Callable[..., Any],
        tasks: list[tuple[Any, ...]],
        *,
        workers: int,
        retries: int = 2,
        stall_timeout: float | None = None,
    ) -> Generator[Event, None, None]: ...


def supervise(
    function: Callable[..., Any],
    tasks: list[tuple[Any, ...]],
    *,
    workers: int,
    retries: int = 2,
    stall_timeout: float | None = None,
) -> Generator[Event, None, None]:
    """Run function(*task, report) for every task in its own process, at most `workers` at a time.

    `function` must be importable, and its arguments must be picklable. `report(value)` sends progress and
    must be called by one thread at a time. Yields the events of all tasks, in order of arrival. All processes
    are ended when the iterator is closed, also after an exception in its consumer or Ctrl-C. `retries`: of a
    task whose process died. `stall_timeout`: seconds without a report after which a worker is killed; its
    task is retried once, then lost. None: no limit.
    """
    pool = _Pool(function, tasks, retries, stall_timeout)
    try:
        while pool.waiting or pool.running:
            while pool.waiting and len(pool.running) < workers:
                pool.start()
            for worker in pool.ready():
                yield from pool.receive(worker)
            for worker in pool.stalled():
                yield pool.kill(worker)
            pool.end_answered()
    finally:
        pool.close()


@dataclass(slots=True)
class Tasks:
    """The tasks of one call of `supervise`, and how often each one has died or stalled."""

    function: Callable[..., Any]
    tasks: list[tuple[Any, ...]]
    retries: int
    stall_timeout: float | None
    deaths: Counter[int] = field(default_factory=Counter)
    stalls: Counter[int] = field(default_factory=Counter)
    waiting: deque[int] = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.tasks)))

    def ended(self, task: int, how: str, *, stalled: bool) -> Event:
        """The event for a task that ended without a result; it waits again if a retry is left."""
        counts, most = (self.stalls, STALL_RETRIES) if stalled else (self.deaths, self.retries)
        counts[task] += 1
        again = counts[task] <= most
        if again:
            self.waiting.appendleft(task)
        return Event(task, "died" if again else "lost", how)


class _Pool(Tasks):
    """The processes of one call of `supervise`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.running: dict[int, _Running] = {}  # by task
        self.selector = selectors.DefaultSelector()

    def start(self) -> None:
        """Start a process for the next task, which imports the script of the caller only if it needs it."""
        task = self.waiting.popleft()
        ours, theirs = _CONTEXT.Pipe()
        work = pickle.dumps((self.function, self.tasks[task]))
        process = _CONTEXT.Process(target=_work, args=(theirs, work), daemon=True)
        # Ctrl-C goes to the whole process group. It is blocked in a new process, which is still importing.
        # Starting multiprocessing's resource tracker would unblock the signal, so the tracker starts first.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        script = sys.modules["__main__"]
        if b"__main__" not in work:  # else the worker needs a class or function of the script
            sys.modules["__main__"] = type(sys)("__main__")
        try:
            process.start()
        finally:
            sys.modules["__main__"] = script
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        worker = self.running[task] = _Running(task, process, ours, time.monotonic())
        self.selector.register(ours, selectors.EVENT_READ, worker)

    def ready(self) -> list[_Running]:
        """Wait until processes have sent messages or a process has stalled; return the former."""
        limits = [
            worker.last + (_EXIT_SECONDS if worker.answered else self.stall_timeout or 0.0)
            for worker in self.running.values()
            if worker.answered or self.stall_timeout is not None
        ]
        timeout = max(min(limits) - time.monotonic(), 0) if limits else None
        return [key.data for key, _ in self.selector.select(timeout)]

    def receive(self, worker: _Running) -> list[Event]:
        """The events of messages or of the end of a process; none for an end after the result was sent."""
        # A process may stop within a message, so bytes are taken as they arrive, without waiting for the
        # rest.
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(worker.pipe.fileno(), 1 << 16)
        if not data:
            self._end(worker, _EXIT_SECONDS)
            end = time.monotonic() + _KILL_SECONDS
            while worker.process.exitcode is None and time.monotonic() < end:
                time.sleep(0.001)  # another thread asks for its state at the same time and gets the exit code
            if worker.answered:
                return []
            return [self.ended(worker.task, _describe(worker.process.exitcode), stalled=False)]
        worker.last = time.monotonic()
        events, buffer = [], worker.received
        buffer += data
        while len(buffer) >= (end := _HEAD + int.from_bytes(buffer[:_HEAD])):
            kind, value = pickle.loads(buffer[_HEAD:end])
            del buffer[:end]
            worker.answered = kind != "progress"
            events.append(Event(worker.task, kind, value))
        return events

    def stalled(self) -> list[_Running]:
        if self.stall_timeout is None:
            return []
        limit = time.monotonic() - self.stall_timeout
        silent = [worker for worker in self.running.values() if worker.last <= limit and not worker.answered]
        # A report may have arrived while the caller was busy.
        return [worker for worker in silent if not worker.pipe.poll()]

    def end_answered(self) -> None:
        limit = time.monotonic() - _EXIT_SECONDS
        for worker in [
            worker for worker in self.running.values() if worker.answered and worker.last <= limit
        ]:
            self._end(worker)

    def kill(self, worker: _Running) -> Event:
        self._end(worker)
        reason = f"no progress for {self.stall_timeout:g} s"
        if worker.process.is_alive():
            return Event(worker.task, "lost", f"{reason}, and it cannot be killed; check its storage")
        return self.ended(worker.task, reason, stalled=True)

    def close(self) -> None:
        for worker in self.running.values():
            worker.process.kill()
        for worker in self.running.values():
            worker.process.join(_KILL_SECONDS)
            worker.pipe.close()
        self.selector.close()

    def _end(self, worker: _Running, patience: float = 0.0) -> None:
        self.selector.unregister(worker.pipe)
        worker.pipe.close()
        del self.running[worker.task]
        worker.process.join(patience)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join(_KILL_SECONDS)


def _work(pipe: Connection, work: bytes) -> None:
    # Ctrl-C goes to the whole process group. The parent handles it and ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    answer: tuple[str, Any]
    try:
        function, arguments = pickle.loads(work)  # imports the module, which may fail too
        answer = ("done", function(*arguments, lambda value: _send(pipe, ("progress", value))))
    except Exception as error:
        answer = ("failed", failure_of(error))
    _send(pipe, answer)


def _send(pipe: Connection, message: tuple[str, Any]) -> None:
    data = pickle.dumps(message)
    with open(pipe.fileno(), "wb", closefd=False) as file:
        file.write(len(data).to_bytes(_HEAD) + data)


def failure_of(error: Exception) -> Failure:
    """The failure of a task that ended with an exception."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, MemoryError):
        message = f"out of memory ({error}); use fewer workers, or raise the limit (ulimit -v, or of the job)"
        return Failure(type(error).__name__, message, trace, expected=True)
    kind, message = type(error).__name__, str(error)
    if isinstance(error, OSError):
        path = None if error.filename is None else str(error.filename)
        return Failure(
            kind=kind, message=message, trace=trace, expected=True, errno=error.errno, filename=path
        )
    return Failure(kind=kind, message=message, trace=trace, expected=isinstance(error, Sa1bError))


def _end_with_parent(pipe: Connection) -> None:
    """Exit when the parent ends. Only the end of the parent makes the pipe readable: it sends no data."""
    pipe.poll(None)
    os._exit(1)


def _describe(exitcode: int | None) -> str:
    if exitcode is None:
        return "ended without an answer; another part of this process has taken its exit code"
    if exitcode < 0:
        name = signal.Signals(-exitcode).name
        # The kernel kills a process that uses too much memory; libraries abort if an allocation fails.
        hint = ", perhaps out of memory" if name in ("SIGKILL", "SIGABRT") else ""
        return f"killed by {name}{hint}"
    return f"ended with code {exitcode} without an answer"
