"""Worker processes that start as forks of a process with ingest's modules and compiled kernels.

The package starts a new interpreter for each worker, which takes 0.8 s of processor time: tests/test_workers.py
and the commands that tests start with `subprocess` do so. `use_server` is for a process that runs tests and
has threads; `use_fork` is for a command that was forked itself.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any
from weakref import WeakSet

from sa1b import workers


def use_server() -> None:
    """From now on, workers of this process are children of a server, which starts with the first worker."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "tests.warm_up"])
    workers._CONTEXT = context  # type: ignore[assignment]


def use_fork() -> None:
    """From now on, workers of this process are forks of it."""
    workers._CONTEXT = _Fork()  # type: ignore[assignment]


class _Fork:
    """A context of multiprocessing whose processes close all of the parent's ends of pipes.

    A worker ends when its parent's end of the pipe is closed; a copy of that end in a worker would prevent
    this.
    """

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("fork")
        self.ends: WeakSet[Connection] = WeakSet()

    def Pipe(self) -> tuple[Connection, Connection]:
        ours, theirs = self.context.Pipe()
        self.ends.add(ours)
        return ours, theirs

    def Process(self, *, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> Any:
        def run() -> None:
            for end in list(self.ends):
                end.close()
            target(*args)

        return self.context.Process(target=run, daemon=daemon)
