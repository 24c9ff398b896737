"""Worker processes that start as forks of a process with ingest's modules and compiled kernels.

The package starts a new interpreter for each worker, which takes 0.8 s of processor time: tests/test_workers.py
and the commands that tests start with `subprocess` do so. Import this module before the package: what the
package then asks multiprocessing for is the context that `use_server` or `use_fork` has chosen. The first is for
a process that runs tests and has threads, the second for a command that was forked itself.
"""

import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any
from weakref import WeakSet


class _Chosen:
    """The context of the package's workers."""

    def __init__(self) -> None:
        self.context: Any = _get_context("spawn")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.context, name)


def _chosen_by_the_package(method: str | None = None) -> Any:
    asks = sys._getframe(1).f_globals.get("__name__", "")
    return _chosen if method == "spawn" and asks.startswith("sa1b.") else _get_context(method)


_get_context = multiprocessing.get_context
_chosen = _Chosen()
multiprocessing.get_context = _chosen_by_the_package


def use_server() -> None:
    """From now on, workers of this process are children of a server, which starts with the first worker."""
    context = _get_context("forkserver")
    context.set_forkserver_preload(["pytest", "tests.warm_up"])
    _chosen.context = context


def use_fork() -> None:
    """From now on, workers of this process are forks of it."""
    _chosen.context = _Fork()


class _Fork:
    """A context of multiprocessing whose processes close all of the parent's ends of pipes.

    A worker ends when its parent's end of the pipe is closed; a copy of that end in a worker would prevent
    this.
    """

    def __init__(self) -> None:
        self.context = _get_context("fork")
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
