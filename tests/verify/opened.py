"""A command in a process of its own to which something happens when it, or a worker of it, opens a file to read it."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tests.kit import Done, main
from tests.processes import REPOSITORY, Process

SECONDS = 120  # until a command that does not come to its file fails the test
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def start(folder: Path, what: str, pattern: object, *words: object, at: int = 1) -> Process:
    """`sa1b WORDS`; WHAT happens when it opens a file of this pattern for the `at`-th time.

    WHAT is the name of a function below, or "read_only": writing fails. `folder` is for what this module writes.
    """
    folder.mkdir(exist_ok=True)
    settings = [str(folder), what, str(pattern), at, [str(word) for word in words]]
    code = f"from tests.verify import opened; opened.watched(*{settings!r})"
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return Process([sys.executable, "-c", code], cwd=REPOSITORY, start_new_session=True, **pipes)


def ended(process: Process) -> Done:
    out, err = process.communicate(timeout=SECONDS)
    return Done(process.returncode or 0, out, err)


def run(folder: Path, what: str, pattern: object, *words: object, at: int = 1) -> Done:
    return ended(start(folder, what, pattern, *words, at=at))


@contextmanager
def standing(folder: Path, pattern: object, *words: object, at: int = 1) -> Iterator[Process]:
    """`sa1b WORDS --json`, which stands in the context before it opens the file, and goes on at its end."""
    process = start(folder, "stand", pattern, *words, "--json", at=at)
    told, until = folder / "pid", time.monotonic() + SECONDS
    try:
        while not told.exists() or not is_stopped(told.read_text()):
            assert process.poll() is None, ended(process)
            assert time.monotonic() < until
            time.sleep(0.01)
        yield process
        if process.poll() is None:
            os.kill(int(told.read_text()), signal.SIGCONT)
    finally:
        process.send_signal(signal.SIGCONT, session=True) if process.poll() is None else None


def is_stopped(pid: str) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def stand(folder: Path, name: str) -> None:
    (folder / "new").write_text(str(os.getpid()))
    (folder / "new").rename(folder / "pid")
    os.kill(os.getpid(), signal.SIGSTOP)


def flip(folder: Path, name: str) -> None:
    """Change a byte, the first time that any process opens a file of this name."""
    try:
        (folder / Path(name).name).touch(exist_ok=False)
    except FileExistsError:
        return
    data = bytearray(Path(name).read_bytes())
    data[len(data) // 2] ^= 0x40
    Path(name).write_bytes(data)


def killed(folder: Path, name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def no_memory(folder: Path, name: str) -> None:
    raise MemoryError


def no_thread(folder: Path, name: str) -> None:
    raise RuntimeError("can't start new thread")


def denied(folder: Path, name: str) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)


def note(folder: Path, name: str) -> None:
    """Write down what is opened."""
    with (folder / "opened").open("a") as file:
        file.write(f"{json.dumps(name)}\n")


def watched(folder: str, what: str, pattern: str, at: int, words: list[str]) -> None:
    """In the process of the command."""
    seen, inside = 0, False

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen, inside
        if event != "open" or inside or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        name, writes = os.fsdecode(arguments[0]), bool((arguments[2] or 0) & WRITES)
        if what == "read_only" and writes and fnmatch(name, pattern):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)
        if what == "read_only" or writes or not fnmatch(name, pattern):
            return
        seen += 1
        if seen >= at and (seen == at or what != "stand"):
            inside = True
            try:
                globals()[what](Path(folder), name)
            finally:
                inside = False

    sys.addaudithook(audit)
    main(words)
