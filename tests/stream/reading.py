"""A process that reads a stream, for tests that interrupt or kill it: `python -m tests.stream.reading`.

    KIND ROOT endings       leaves its loop in three ways; prints the resources that remain after each
    KIND ROOT endless       prints a line for each batch until it is interrupted, then the remaining resources
    METHOD ROOT signalled   leaves an iterator and its stream to the garbage collector; with another iterator
                            continues after SIGUSR1, and prints its state after SIGTERM
    METHOD ROOT abandoned   prints the processes of its workers, then reads large batches slowly until it is killed
    workers ROOT murders    kills one of its workers and continues with new ones, four times; prints the batches

KIND is "loader" for sa1b.Loader, "workers" for a DataLoader with two of them, "loader+workers" for one after the
other. Every line is JSON.
"""

import gc
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from multiprocessing.synchronize import Event
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader

import sa1b
from sa1b.stream.decode import decode
from tests.processes import REPOSITORY, Process
from tests.stream.leftovers import held
from tests.stream.recorded import RECIPE, digest

STEP = {"global_batch": 6, "micro_batch": 2}
PIECES = 3  # micro-batches of a step
KINDS = ("loader", "workers")


class CallerError(Exception):
    """An error of a training loop in the middle of an epoch."""


def start(kind: str, root: Path, what: str, temporary: Path, *, forked: bool = False) -> Process:
    """Start such a process as the leader of its own session, with its own temporary folder.

    Fork it only where the end of its interpreter is not part of the test. The folder's path must be short: sockets
    are made below it.
    """
    temporary.mkdir()
    options = (
        [] if forked else ["-X", "faulthandler"]
    )  # commands with interpreter options start a new interpreter
    return Process(
        [sys.executable, *options, "-m", "tests.stream.reading", kind, str(root), what],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )


def first_lines(process: Process, count: int) -> list[bytes]:
    """Its next lines; AssertionError with what it wrote to stderr if it ends before."""
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(count)]
    assert lines[-1].endswith(b"\n"), process.communicate(timeout=60)[1].decode()
    return lines


def stream_of(root: Path, **options: Any) -> sa1b.Stream:
    """A stream of the dataset; endless unless it is sequential."""
    epochs: Any = 1 if options.get("order") == "sequential" else None
    damage_log = root / "damage_log.jsonl"
    return sa1b.Stream(root, epochs=epochs, damage_log=damage_log, **STEP, **RECIPE, **options)


def batches(kind: str, stream: sa1b.Stream) -> Any:
    if kind == "loader":
        return sa1b.Loader(stream, threads=3, prefetch=3, quiet=True)
    return DataLoader(stream, batch_size=None, num_workers=2, collate_fn=with_folder)


def with_folder(batch: Any) -> Any:
    get_temp_dir()  # as torch does, for the sockets of tensors that are sent outside of a batch
    return batch


def say(**line: Any) -> None:
    os.write(1, (json.dumps(line) + "\n").encode())  # at once: an interrupt would fall between print's two


def settled(expected: dict[str, list[str]]) -> dict[str, list[str]]:
    """The resources of this process, after up to five minutes, because threads of torch's queues end late."""
    end = time.monotonic() + 300
    while (found := held()) != expected and time.monotonic() < end:
        time.sleep(0.02)
    return found


def endings(kind: str, root: Path) -> None:
    """Leave the loop at its end, in the middle, and by an error in its body, with batches in flight."""

    def whole(loader: Any) -> None:
        assert sum(int(batch.valid.sum()) for batch in loader) == len(sa1b.open(root))

    def early(loader: Any) -> None:
        assert len(list(islice(loader, 5))) == 5

    def broken(loader: Any) -> None:
        with suppress(CallerError):
            for i, _ in enumerate(loader):
                if i == 4:
                    raise CallerError

    def slowly(*arguments: Any, **named: Any) -> None:
        time.sleep(0.03)
        decode(*arguments, **named)

    ways: dict[str, Callable[[Any], None]] = {"whole": whole, "early": early, "broken": broken}
    with mock.patch("sa1b.stream.decode.decode", slowly):
        for name, way in ways.items():
            empty = held()
            stream = stream_of(root, order="sequential" if name == "whole" else "shuffle")
            loader = batches(kind, stream)
            before = held()
            way(loader)
            after = settled(before)
            del stream, loader
            say(kind=kind, way=name, before=before, after=after, empty=empty, at_last=held())


def endless(kind: str, root: Path) -> None:
    """Read until the process is interrupted or killed."""
    # Seconds after which an idle worker sees that its process has ended.
    torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.1
    before = held()
    process, printed = os.getpid(), sys.unraisablehook

    def unraisable(lost: Any) -> None:
        # Python drops an interrupt that meets a destructor, where a user presses Ctrl-C again. Raised in this
        # function it would be dropped too.
        if lost.exc_type is KeyboardInterrupt and os.getpid() == process:
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        else:
            printed(lost)

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    sys.unraisablehook = unraisable

    def read() -> None:
        stream = stream_of(root)
        loader = batches(kind, stream)
        for number, batch in enumerate(loader, 1):
            state = loader.state_dict() if kind == "loader" else stream.state_dict(batch)
            say(digest=digest(batch), state=state)
            if kind == "workers" and number == 7:
                time.sleep(600)  # for the interrupt: destructors of torch's own swallow one that meets them

    with suppress(KeyboardInterrupt):
        read()
    say(before=before, after=held())


def signalled(method: str, root: Path) -> None:
    """Read until SIGUSR1, then eight more batches; wait for SIGTERM and the error of the workers that it ends."""
    came: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: came.append(number))
    stream = stream_of(root)
    reading = iter(DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context=method))
    workers: list[Any] = list(reading._workers)
    globals()["kept"] = reading  # until the interpreter ends
    say(digests=[digest(next(reading)) for _ in range(2)])  # both workers ignore SIGUSR1 by now
    while signal.SIGUSR1 not in came:
        time.sleep(0.02)
    rest = [next(reading) for _ in range(8)]
    say(digests=[digest(batch) for batch in rest], alive=[worker.is_alive() for worker in workers])
    error = ""
    try:
        while True:
            batch = next(reading)
            time.sleep(0.02)
            assert len(batch)
    except (RuntimeError, OSError, EOFError) as caught:  # where it is met by the end of the worker
        error = repr(caught)
    _ignore_ended_workers(reading)
    while signal.SIGTERM not in came:
        time.sleep(0.02)
    for worker in workers:
        worker.join(60)
    codes, state = [worker.exitcode for worker in workers], stream.state_dict(rest[6])
    say(error=error, codes=codes, position=state["position"])


def _ignore_ended_workers(reading: Any) -> list[Any]:
    """The workers, whose signals raise no error from now on: those of several may come after the first one."""
    workers: list[Any] = []
    for _ in range(3):
        with suppress(RuntimeError):
            workers = list(reading._workers)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return workers


def abandoned(method: str, root: Path) -> None:
    """Read batches that do not fit into a pipe, more slowly than two workers send them."""
    stream = stream_of(root)
    made = DataLoader(
        stream, batch_size=None, num_workers=2, multiprocessing_context=method, collate_fn=large
    )
    reading: Any = iter(made)
    next(reading)
    say(workers=[worker.pid for worker in reading._workers])
    while True:
        next(reading)
        time.sleep(0.05)


def large(batch: Any) -> bytes:
    return bytes(1 << 20)


def forgotten(root: Path) -> None:
    """Leave an iterator in a cycle of references, as the traceback of an error does."""
    # Seconds that a DataLoader waits for each worker, which did not receive its message, before SIGTERM.
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.1
    reading: Any = iter(
        DataLoader(stream_of(root), batch_size=None, num_workers=2, multiprocessing_context="fork")
    )
    next(reading)
    workers, reading.cycle = reading._workers, reading
    del reading
    gc.collect()
    for worker in workers:
        worker.join(60)
    say(forgotten=[worker.is_alive() for worker in workers])


def murders(root: Path) -> None:
    """Kill one of two workers at four moments, each time resuming after the last batch that was taken."""
    # torch waits forever for the lock of its event if a worker is killed that holds it: here the event needs none.
    Event.is_set = lambda event: bool(event._flag.get_value())
    stream = stream_of(root)
    before = held()
    state = stream.state_dict()
    for life in range(4):
        begun = state["position"]
        stream.load_state_dict(json.loads(json.dumps(state)))
        seen, error, waits = one_life(stream, life)
        digests = [one for one, _ in seen]
        state = seen[-1][1]
        say(begun=begun, digests=digests, error=error, waits=waits, before=before, after=settled(before))
    stream.load_state_dict(state)
    digests = [digest(batch) for batch in islice(batches("workers", stream), 6)]
    say(begun=state["position"], digests=digests, error=None, waits=0, before=before, after=settled(before))


def one_life(stream: sa1b.Stream, life: int) -> tuple[list[tuple[str, dict[str, Any]]], str, int]:
    """Read, kill a worker, and continue until the error.

    Returns each batch's digest with the state after it, the error, and how often the DataLoader waited for a
    batch in vain, 5 seconds each, until the error came.
    """
    reading = iter(batches("workers", stream))
    seen: list[tuple[str, dict[str, Any]]] = []
    waits: list[bool] = []
    killed = False
    look = type(reading)._try_get_data

    def counted(loader: Any) -> tuple[bool, Any]:
        found = look(loader)
        waits.append(killed and not found[0])
        return found

    # On an error the DataLoader opens files, to see whether descriptors are left. If the signal of the dead
    # worker arrives just then, one stays open.
    probes = mock.patch("tempfile.NamedTemporaryFile", io.BytesIO)
    try:
        with probes, mock.patch.object(type(reading), "_try_get_data", counted):
            while True:
                batch = next(reading)
                seen.append((digest(batch), stream.state_dict(batch)))
                if len(seen) == 3 + life:
                    time.sleep(0.004 * life)  # in the middle of work, or when all is read ahead
                    killed = True
                    os.kill(reading._workers[life % 2].pid, signal.SIGKILL)
    except (RuntimeError, OSError, EOFError) as error:
        if not killed:
            raise
        words = repr(error)
    handler = signal.getsignal(signal.SIGCHLD)
    workers = _ignore_ended_workers(reading)
    del reading, batch
    gc.collect()
    for worker in workers:  # the same signal in the DataLoader's destructor may stop it before the last one
        worker.kill()
        worker.join()
    signal.signal(signal.SIGCHLD, handler)
    return seen, words, sum(waits)


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # what is imported is no garbage: see held()
    kind, folder, what = sys.argv[1:]
    if what == "signalled":
        forgotten(Path(folder))
        signalled(kind, Path(folder))
    elif what == "abandoned":
        abandoned(kind, Path(folder))
    elif what == "murders":
        murders(Path(folder))
    else:
        for one in kind.split("+"):
            {"endings": endings, "endless": endless}[what](one, Path(folder))
