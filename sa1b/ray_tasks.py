"""Supervised tasks on a Ray cluster: the events of `sa1b.workers.supervise`, from workers on many machines.

Every task is one Ray task with one CPU. Only arguments, progress reports and small results pass through Ray.
Ray does not retry: a task whose worker or machine dies is started again `retries` times, then reported as
lost. Progress goes to an actor on the driver's machine, so that it survives the task's machine.
"""

import math
import os
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from sa1b.arguments import Range
from sa1b.errors import UsageError
from sa1b.workers import Event, Supervise, Tasks, failure_of
from sa1b.workers import supervise as supervise_processes

MEMORY = 700 << 20  # bytes that a task reserves: ingest of a source takes up to 600 MB
_ANSWER = 120.0  # seconds within which the actor with the progress reports answers
_POLL = 0.2  # seconds between two looks at the progress reports
_CONNECT = 5.0  # seconds; Ray itself tries for 35 s
_IDLE = 30.0  # seconds without a running task until a note is printed


@contextmanager
def cluster(address: str | None, workers: int | None) -> Iterator[int]:
    """Connect to a Ray cluster or start one here; yields its number of workers. UsageError: no answer."""
    os.environ.setdefault("RAY_task_oom_retries", "0")  # by default without limit
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise UsageError("--engine ray: Ray is not installed; run pip install 'sa1b[ray]'") from None
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": True}
    if address is None:
        settings |= {
            "address": "local",  # a new cluster, even if this machine is part of one
            "num_cpus": workers or os.cpu_count(),
            "_node_ip_address": "127.0.0.1",
            "include_dashboard": False,
            "object_store_memory": 100 << 20,
        }
    else:
        _probe(address)
        settings["address"] = address
    with redirect_stdout(sys.stderr):  # Ray prints notes about dead workers to stdout, where --json prints
        try:
            ray.init(**settings)
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            why = " ".join(str(error).split())[:200]
            raise UsageError(
                f"--address {address}: no Ray cluster answers there ({why}); check the address"
            ) from None
        try:
            yield workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        finally:
            ray.shutdown()


def _probe(address: str) -> None:
    """Raise UsageError if nothing listens at HOST:PORT. Other forms of an address are left to Ray."""
    if "://" in address:
        raise UsageError(
            f"--address {address}: is of the Ray client, which is not supported; run the command on a "
            "machine of the cluster with --address auto, or pass HOST:PORT as `ray start --head` printed it"
        )
    host, colon, port = address.rpartition(":")
    if not colon:
        return
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"--address {address}: {port!r} is no port; pass HOST:PORT or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT).close()
    except OSError as error:
        raise UsageError(
            f"--address {address}: no Ray cluster answers there ({error}); check the address"
        ) from None


@dataclass(slots=True)
class _Running:
    task: int
    attempt: int
    reference: Any
    last: float  # time of the last report in seconds of the monotonic clock
    started: bool = False  # the cluster may have no free CPU yet
    stalled: bool = False


def supervise(
    function: Callable[..., Any],
    tasks: list[tuple[Any, ...]],
    *,
    workers: int,
    retries: int = 2,
    stall_timeout: float | None = None,
) -> Generator[Event, None, None]:
    """Run function(*task, report) for every task on the connected cluster; see sa1b.workers.supervise."""
    pool = _Pool(function, tasks, retries, stall_timeout)
    try:
        while pool.waiting or pool.running:
            while pool.waiting and len(pool.running) < workers:
                pool.start()
            ended = pool.wait()
            yield from pool.reports()
            for running in ended:
                yield pool.end(running)
            pool.cancel_stalled()
            pool.note_idle()
    finally:
        pool.close()


class _Pool(Tasks):
    """The Ray tasks of one call of `supervise`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        ray = self.ray = import_module("ray")
        strategies: Any = import_module("ray.util.scheduling_strategies")
        self.running: dict[Any, _Running] = {}  # by reference
        self.attempts: Counter[int] = Counter()
        self.last = time.monotonic()  # when a task was running, or had not waited for long
        self.folder = str(Path.cwd())
        here = strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.board: Any = ray.remote(_Board).options(num_cpus=0, scheduling_strategy=here).remote()
        self.take()
        self.work = ray.remote(_work).options(
            num_cpus=1, memory=MEMORY, max_retries=0, scheduling_strategy="SPREAD"
        )

    def take(self) -> list[tuple[tuple[int, int], Any]]:
        """The reports since the last call."""
        try:
            reports: list[tuple[tuple[int, int], Any]]
            reports = self.ray.get(self.board.take.remote(), timeout=_ANSWER)
            return reports
        except self.ray.exceptions.RayError as error:
            raise UsageError(
                f"--engine ray: the actor with the progress reports, on this machine: {_described(error)}; "
                "see `ray status`, and start the same command again"
            ) from None

    def start(self) -> None:
        task = self.waiting.popleft()
        self.attempts[task] += 1
        name = (task, self.attempts[task])
        reference = self.work.remote(self.board, name, self.folder, self.function, self.tasks[task])
        self.running[reference] = _Running(*name, reference, time.monotonic())

    def wait(self) -> list[_Running]:
        ended, _ = self.ray.wait(list(self.running), num_returns=len(self.running), timeout=_POLL)
        return [self.running[reference] for reference in ended]

    def reports(self) -> Iterator[Event]:
        attempts = {(running.task, running.attempt): running for running in self.running.values()}
        for name, value in self.take():
            running = attempts.get(name)
            if running is None:  # of an attempt that has ended
                continue
            running.last, running.started = time.monotonic(), True
            if value is not None:
                yield Event(running.task, "progress", value)

    def end(self, running: _Running) -> Event:
        del self.running[running.reference]
        try:
            kind, value = self.ray.get(running.reference)
        except self.ray.exceptions.RayError as error:
            how = f"no progress for {self.stall_timeout:g} s" if running.stalled else _described(error)
            return self.ended(running.task, how, stalled=running.stalled)
        return Event(running.task, kind, value)

    def cancel_stalled(self) -> None:
        """Kill the workers of tasks that stalled; `wait` returns these tasks later."""
        if self.stall_timeout is None:
            return
        limit = time.monotonic() - self.stall_timeout
        for running in self.running.values():
            if running.started and running.last <= limit and not running.stalled:
                running.stalled = True
                self.ray.cancel(running.reference, force=True)

    def note_idle(self) -> None:
        """Print once that the cluster has started no task for long."""
        if not self.running or any(running.started for running in self.running.values()):
            self.last = time.monotonic()
        elif time.monotonic() > self.last + _IDLE:
            self.last = math.inf
            sys.stderr.write(
                f"\nnote: no worker has started for {_IDLE:.0f} s; each needs a machine of the cluster with "
                f"a free CPU and {MEMORY / 1e6:.0f} MB of free memory, see `ray status`. Waiting\n"
            )

    def close(self) -> None:
        for reference in self.running:
            with suppress(Exception):
                self.ray.cancel(reference, force=True)
        with suppress(Exception):
            self.ray.kill(self.board)


class _Board:
    """An actor with the progress reports that the driver has not taken yet."""

    def __init__(self) -> None:
        self.reports: list[tuple[tuple[int, int], Any]] = []

    def report(self, name: tuple[int, int], value: Any) -> None:
        self.reports.append((name, value))

    def take(self) -> list[tuple[tuple[int, int], Any]]:
        reports, self.reports = self.reports, []
        return reports


def _work(
    board: Any, name: tuple[int, int], folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[str, Any]:
    """A Ray task: returns ("done", result) or ("failed", Failure)."""
    # Relative paths refer to `folder`, that of the command. Ray starts workers elsewhere.
    ray = import_module("ray")
    last = board.report.remote(name, None)  # the task has started

    def report(value: Any) -> None:
        nonlocal last
        last = board.report.remote(name, value)

    answer: tuple[str, Any]
    try:
        _enter(folder)
        answer = ("done", function(*arguments, report))
    except Exception as error:
        answer = ("failed", failure_of(error))
    with suppress(ray.exceptions.RayError):  # without its reports the work is done all the same
        ray.get(last, timeout=_ANSWER)  # calls of one caller are in order, so all reports have arrived
    return answer


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise UsageError(
            f"{socket.gethostname()}: cannot enter {folder}, the folder of the command ({error.strerror}); "
            "all machines of the cluster must reach the same paths; run the command in a shared folder"
        ) from None


def _described(error: Exception) -> str:
    name, text = type(error).__name__, str(error)
    if missing := re.search(r"No module named '[\w.]+'|cannot import name '\w+'", text):
        return (
            f"a machine of the cluster cannot import this package ({missing[0]}); install the same sa1b on "
            "all machines, and start Ray from that environment"
        )
    known = {
        "OutOfMemoryError": "killed because the machine was out of memory; use fewer workers",
        "WorkerCrashedError": "the worker process died, perhaps out of memory",
        "NodeDiedError": "the machine was lost",
        "GetTimeoutError": f"no answer within {_ANSWER:.0f} s",
    }
    return known.get(name, f"{name}: {' '.join(text.split())[:200]}")


Engine = Annotated[
    Literal["processes", "ray"],
    tyro.conf.arg(
        help="Where the workers run: in processes of this machine, or on a Ray cluster (sa1b[ray]), whose "
        "machines must reach all files under the same paths."
    ),
]
Address = Annotated[
    str | None,
    tyro.conf.arg(
        help="With --engine ray: address of the cluster, or `auto` on one of its machines. By default a "
        "cluster on this machine is started for this run."
    ),
]


@contextmanager
def engine(name: str, address: str | None, workers: int | None) -> Iterator[tuple[int, Supervise]]:
    """The number of workers, by default 1 process or one for each CPU of the Ray cluster, and their function.

    Without `address`, a Ray cluster on this machine ends with the context. UsageError: `workers` is below 1,
    `address` is for processes, or no Ray cluster can be used.
    """
    Range(1).check("--workers", workers)
    if name != "ray":
        if address is not None:
            raise UsageError(f"--address {address}: is for --engine ray; add it, or omit --address")
        yield workers or 1, supervise_processes
        return
    with cluster(address, workers) as count:
        yield count, supervise
