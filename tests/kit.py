"""What tests of all rooms share: commands, directories as folders and URLs, and faults that come from outside.

Of the package only public names are used. A fault comes from the interpreter's audit events or from fsspec, so
that a test names no module that it runs.
"""

import errno
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from sa1b import errors
from sa1b.cli import main
from sa1b.storage.errors import MissingError
from tests.processes import Process

# Commands


@dataclass(frozen=True)
class Done:
    """A command that has ended: exit code, output, and stdout as JSON."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run(*words: object, code: int | None = 0) -> Done:
    """Run `sa1b WORDS` in this process; `code` is the exit code that it must have, None any."""
    out, err = io.StringIO(), io.StringIO()
    ended: Any = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(word) for word in words])
        except SystemExit as end:
            ended = end.code or 0
        except KeyboardInterrupt:
            ended = 130
    done = Done(ended, out.getvalue(), err.getvalue())
    assert code in (None, done.code), f"{words} ended with {done.code}\n{done.out}{done.err}"
    return done


def refused(*words: object, names: str, code: int = 2) -> Done:
    """A command that ends with this code and a message that names the flag, file or image at fault."""
    done = run(*words, code=code)
    assert names in done.err
    assert "Traceback" not in done.err
    return done


class RefusedError(
    errors.UsageError, errors.SourceError, errors.ShardError, errors.ManifestError, MissingError
):
    """A command has ended with code 2: its line on stderr does not say the class of the error."""


def flags(options: Mapping[str, Any]) -> list[object]:
    """The words of options as Python has them: `overwrite=True`, `accept=("a", "b")`, `json_output=True`."""
    words: list[object] = []
    for name, value in options.items():
        flag = f"--{name.removesuffix('_output').replace('_', '-')}"
        for one in value if isinstance(value, list | tuple) else (value,):
            words += [flag] if one is True else [] if one is None or one is False else [flag, one]
    return words


def accepted(verb: str, *words: object, **options: Any) -> Done:
    """`sa1b VERB` with options as Python has them; RefusedError: it has ended with code 2."""
    done = run(verb, *words, *flags(options), code=None)
    if done.code == 2:
        raise RefusedError(done.err.removeprefix("error: ").rstrip())
    return done


def called(verb: str, *words: object, **options: Any) -> int:
    """The exit code of `accepted`, with what it prints."""
    done = accepted(verb, *words, **options)
    print(done.out, end="")
    print(done.err, end="", file=sys.stderr)
    return done.code


def summary(verb: str, *words: object, **options: Any) -> SimpleNamespace:
    """What `sa1b VERB --json` says, as attributes; `table()` is its text without --json."""
    done = accepted(verb, *words, "--json", **options)
    assert done.code in (0, 3), f"{verb} {words} ended with {done.code}\n{done.out}{done.err}"
    methods = {"exit_code": lambda: done.code, "table": lambda: accepted(verb, *words, **options).out}
    return SimpleNamespace(**done.json | methods)


def rows(root: object, sql: str) -> list[tuple[Any, ...]]:
    """What `sa1b query` says."""
    return [tuple(row.values()) for row in run("query", root, sql, "--json").json]


# Directories


def files(root: object) -> dict[str, bytes]:
    """Name -> bytes of all files below a folder or URL, without hidden ones."""
    system, base = fsspec.core.url_to_fs(str(root))
    found = {path.removeprefix(base).lstrip("/"): system.cat_file(path) for path in system.find(base)}
    return {name: data for name, data in found.items() if not name.startswith(".")}


def put(root: object, name: str, data: bytes | None) -> None:
    """Write a file of a folder or URL; None removes it."""
    system, base = fsspec.core.url_to_fs(str(root))
    if data is None:
        system.rm(f"{base}/{name}")
    else:
        system.makedirs(f"{base}/{name}".rpartition("/")[0], exist_ok=True)
        system.pipe_file(f"{base}/{name}", data)


def flip(root: object, name: str, offset: int = 500, bits: int = 0x40) -> None:
    """Change bits of one byte."""
    data = bytearray(files(root)[name])
    data[offset] ^= bits
    put(root, name, bytes(data))


# Faults: WHAT happens at the k-th change below a folder or a bucket in memory


class Changes:
    """The changes below `base`: renames and links in a folder, objects stored in memory.

    Attributes:
        seen: changes so far.
    """

    def __init__(self, base: object, at: int, what: Callable[[str], None], count_claims: bool) -> None:
        self.base, self.at, self.what = str(base).removeprefix("memory:/").rstrip("/"), at, what
        self.count_claims, self.seen, self._lock = count_claims, 0, threading.RLock()
        self.before: Callable[[str, str], None] | None = None  # called with (name, source) of each rename

    def note(self, name: str, source: str = "") -> None:
        if not name.startswith(f"{self.base}/") or (not self.count_claims and ".claim" in name):
            return
        with self._lock:
            self.seen += 1
            now = self.seen == self.at
        if self.before is not None and source:
            self.before(name, source)
        if now:
            self.what(name)


_watched: list[Changes] = []
_expected: list["Expected"] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    for one in _expected.copy() if _expected else ():
        one.note(event, arguments)
    if _watched and event in ("os.rename", "os.link"):
        source, name = (str(Path(os.fsdecode(one)).absolute()) for one in arguments[:2])
        for one in list(_watched):
            one.note(name, source)


sys.addaudithook(_audit)


@contextmanager
def fault(
    base: object, at: int, what: Callable[[str], None], *, count_claims: bool = False
) -> Iterator[Changes]:
    """Do `what(name)` just before the change number `at` (from 1) below `base`; 0 only counts the changes."""
    one, commit, pipe = Changes(base, at, what, count_claims), MemoryFile.commit, MemoryFileSystem.pipe_file

    def committed(file: Any) -> Any:
        one.note(file.path)
        return commit(file)

    def piped(system: Any, path: Any, *arguments: Any, **more: Any) -> Any:
        one.note(system._strip_protocol(path))
        return pipe(system, path, *arguments, **more)

    MemoryFile.commit, MemoryFileSystem.pipe_file = committed, piped
    _watched.append(one)
    try:
        yield one
    finally:
        _watched.remove(one)
        MemoryFile.commit, MemoryFileSystem.pipe_file = commit, pipe


def nothing(_: str) -> None:
    """Only count."""


def interrupt(_: str) -> None:
    """Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


def fail(name: str, number: int) -> None:
    """An error of the disk or the system."""
    raise OSError(number, os.strerror(number), name)


def no_space(name: str) -> None:
    """A full disk."""
    fail(name, errno.ENOSPC)


def stop(_: str) -> None:
    """Stand still until SIGCONT; for `started`."""
    os.kill(os.getpid(), signal.SIGSTOP)


def kill(_: str) -> None:
    """Lose power, except for what the system has in memory; for `started`."""
    os.kill(os.getpid(), signal.SIGKILL)


def started(*words: object, base: object, at: int, what: Callable[[str], None]) -> Process:
    """`sa1b WORDS` in a process of its own that does `what` (stop, kill, no_space, ...) at a change below `base`."""
    code = (
        "from tests import kit\n"
        f"with kit.fault({str(base)!r}, {at}, kit.{what.__name__}):\n"
        f"    kit.main({[str(word) for word in words]!r})"
    )
    return Process([sys.executable, "-c", code], cwd=Path(__file__).parents[1])


def stopped(process: Process) -> bool:
    """Whether a process of `started` stands still; it must not have ended."""
    assert process.poll() is None
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


# Faults: WHAT happens just before an audit event, or before a file is opened


WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass
class Expected:
    """An event whose file or folder has a name of the pattern; each process counts how often it has `seen` it."""

    event: str
    pattern: str
    what: Callable[[str], object]
    at: int
    times: float
    not_in: int  # a process
    seen: int = 0
    inside: threading.local = field(default_factory=threading.local)

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            event = "write" if (arguments[2] or 0) & WRITES else "read"
        if event != self.event or os.getpid() == self.not_in or hasattr(self.inside, "now"):
            return
        if not isinstance(arguments[0], str | bytes | os.PathLike):  # a descriptor
            return
        name = os.fsdecode(arguments[0])
        if fnmatchcase(name, self.pattern):
            self.seen += 1
            if 0 <= self.seen - self.at < self.times:
                self.inside.now = True
                try:
                    self.what(name)
                finally:
                    del self.inside.now


@contextmanager
def when(
    event: str,
    pattern: object,
    what: Callable[..., object],
    *arguments: Any,
    at: int = 1,
    times: float = math.inf,
    in_worker: bool = False,
) -> Iterator[None]:
    """Do `what(name, *arguments)`, which may raise, just before the event `times` times, from the `at`-th one on.

    event: "read" or "write", a file is opened for it; or an audit event, such as "os.scandir". What `what` does is
    no event itself. in_worker: only what forks of this process do.
    """
    not_in = os.getpid() if in_worker else 0
    _expected.append(Expected(event, str(pattern), lambda name: what(name, *arguments), at, times, not_in))
    try:
        yield
    finally:
        _expected.pop()


def started_when(
    words: Sequence[object],
    event: str,
    pattern: object,
    what: Callable[..., object],
    *arguments: Any,
    **options: Any,
) -> Process:
    """`sa1b WORDS` within `when`, in a process of its own, whose workers are its forks; its output is text."""
    code = (
        "from pathlib import PosixPath\n"
        "from tests import kit\n"
        f"from {what.__module__} import {what.__name__} as what\n"
        f"with kit.when({event!r}, {str(pattern)!r}, what, *{arguments!r}, **{options!r}):\n"
        f"    kit.main({[str(word) for word in words]!r})"
    )
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return Process(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1], start_new_session=True, **pipes
    )


def ended(process: Process) -> Done:
    """A command of `started_when` at its end."""
    out, err = process.communicate(timeout=300)
    return Done(process.returncode or 0, out, err)


def run_when(words: Sequence[object], *given: Any, **options: Any) -> Done:
    """Run a command of `started_when` to its end."""
    return ended(started_when(words, *given, **options))


_DOCUMENT = re.compile(r"/(dataset|layer|tasks/[^/]+|views/[^/]+)\.json$")


@contextmanager
def durable(base: object) -> Iterator[set[str]]:
    """What gets a name below the local folder `base` in the context was on the disk before (fsync).

    What this process writes is seen, and what its forks write: workers, in a process of `tests.processes`. At the
    end, at least one file must have got its name, and each folder that got one must be synced after it; when a
    document of a dataset directory gets its name, those that got one before it (call reshard with one worker). The
    set then has the paths of all files and folders that were synced.
    """
    fsync, fdatasync = os.fsync, os.fdatasync
    one = Changes(base, 0, nothing, count_claims=True)
    paths, synced, folders, lost = set[str](), set[tuple[int, ...]](), dict[str, bool](), list[str]()
    with tempfile.TemporaryFile() as log:  # of all processes, in the order of the events

        def note(name: str, source: str, needed: list[Path]) -> None:
            states = [(str(path), path.stat()) for path in needed]  # a later write has another time
            states = [(path, at.st_dev, at.st_ino, at.st_mtime_ns) for path, at in states]
            os.write(log.fileno(), f"{json.dumps([name, source, states])}\n".encode())

        def noting(sync: Callable[[Any], None]) -> Callable[[Any], None]:
            def synced_now(descriptor: Any) -> None:
                sync(descriptor)
                number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
                path = Path(f"/proc/self/fd/{number}")
                note("", str(path.readlink()), [path])

            return synced_now

        def check(name: str, source: str) -> None:
            if not name.endswith(".partial") and "/kernels/" not in name:  # numba's cache may be lost
                paths = [Path(source), *Path(source).rglob("*")]
                note(name, source, [path for path in paths if path.is_dir() or path.stat().st_size])

        os.fsync, os.fdatasync, one.before = noting(fsync), noting(fdatasync), check
        _watched.append(one)
        try:
            yield paths
        finally:
            _watched.remove(one)
            os.fsync, os.fdatasync = fsync, fdatasync
        log.seek(0)
        events = list(map(json.loads, log))

    def late(when: str) -> list[str]:
        return [f"{at}: not synced {when}" for at, done in folders.items() if not done and Path(at).exists()]

    for name, source, needed in events:
        if name:
            lost += [f"{path} -> {name}: not synced" for path, *at in needed if tuple(at) not in synced]
            lost += late(f"before {name}") if _DOCUMENT.search(name) else []
            if ".claim" not in name:  # a claim may be lost with its process
                folders[str(Path(name).parent.resolve())] = False
        else:
            synced |= {tuple(at) for _, *at in needed}
            folders[source] = True
            paths.add(source)
    lost += late("after its last name")
    assert lost == [], "\n".join(lost)
    assert any(name for name, *_ in events), "nothing got a name"
