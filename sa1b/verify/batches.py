"""Processing of shards in worker processes: each takes a batch of shards and returns one result per shard.

Starting a process costs as much as reading 1 GB, so each process takes several shards in a row. If a process
dies, only its current shard is affected; the others of its batch go to a new process. The parent only passes
on results.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sa1b.errors import Sa1bError
from sa1b.workers import Failure, Supervise, supervise

BATCH = 16  # shards
_DEATHS = 2  # attempts at one shard whose process dies
_REPORT_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Died:
    """Result of a shard if every process that worked on it died; `why` describes the last death."""

    why: str


@dataclass(frozen=True, slots=True)
class _Begin:
    name: str


@dataclass(frozen=True, slots=True)
class _Result:
    name: str
    value: Any


def in_batches(
    function: Callable[..., Any],
    tasks: Mapping[str, tuple[Any, ...]],
    *,
    workers: int,
    advance: Callable[[int], object],
    supervise: Supervise = supervise,
) -> Iterator[tuple[str, Any]]:
    """Call function(*tasks[name], progress) for every shard; yield its name with the result or `Died`.

    Args:
        function: importable; `progress` takes a number of bytes.
        tasks: shard -> arguments.
        workers: processes at a time; 0: in this process.
        advance: called with the number of bytes after each read.
        supervise: runs the workers.

    Raises:
        Sa1bError, RuntimeError: what `function` raised, with its message; the other processes are ended.
    """
    if workers == 0:
        for name, arguments in tasks.items():
            yield name, function(*arguments, advance)
        return
    left = dict(tasks)
    deaths: Counter[str] = Counter()
    while left:
        size = max(1, min(BATCH, -(-len(left) // workers)))
        names = list(left)
        batches = [names[i : i + size] for i in range(0, len(names), size)]
        now = {number: batch[0] for number, batch in enumerate(batches)}
        work = [(function, [(name, left[name]) for name in batch]) for batch in batches]
        with contextlib.closing(supervise(_batch, work, workers=workers, retries=0)) as events:
            for event in events:
                value = event.value
                if isinstance(value, _Result):
                    del left[value.name]
                    yield value.name, value.value
                elif isinstance(value, _Begin):
                    now[event.task] = value.name
                elif isinstance(value, int):
                    advance(value)
                elif isinstance(value, Failure):
                    if value.expected or "can't start new thread" in value.message:
                        raise Sa1bError(value.message)
                    raise RuntimeError(f"{now[event.task]}: {value.message}\n{value.trace}")
                elif event.kind != "done":
                    # A process that dies between two shards has not started the next one.
                    rest = [name for name in (now[event.task], *batches[event.task]) if name in left]
                    if not rest:
                        continue
                    name = rest[0]
                    deaths[name] += 1
                    if deaths[name] >= _DEATHS:
                        del left[name]
                        yield name, Died(f"{_DEATHS} processes died while working on it: {value}")


def _batch(
    function: Callable[..., Any], batch: list[tuple[str, tuple[Any, ...]]], report: Callable[[Any], None]
) -> None:
    """The main function of a worker process."""
    for name, arguments in batch:
        report(_Begin(name))
        read, last = 0, time.monotonic()

        def progress(count: int) -> None:
            nonlocal read, last
            read += count
            if time.monotonic() - last >= _REPORT_SECONDS:
                report(read)
                read, last = 0, time.monotonic()

        value = function(*arguments, progress)
        report(read)
        report(_Result(name, value))
