"""What tests of verify do when a command opens a file: see tests.kit.when. FOLDER is a new one for what they write."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kit import ended, started_when
from tests.processes import Process

SECONDS = 120  # until a command that does not come to its file fails the test


@contextmanager
def standing(folder: Path, pattern: object, *words: object, at: int = 1) -> Iterator[Process]:
    """`sa1b WORDS --json`, which stands in the context before it opens the file, and goes on at its end."""
    folder.mkdir()
    process = started_when((*words, "--json"), "read", pattern, stand, folder, at=at, times=1)
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
        process.send_signal(signal.SIGCONT, session=True)


def is_stopped(pid: str) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def stand(name: str, folder: Path) -> None:
    (folder / "new").write_text(str(os.getpid()))
    (folder / "new").rename(folder / "pid")
    os.kill(os.getpid(), signal.SIGSTOP)


def flip(name: str, folder: Path) -> None:
    """Change a byte, the first time that any process opens a file of this name."""
    folder.mkdir(exist_ok=True)
    try:
        (folder / Path(name).name).touch(exist_ok=False)
    except FileExistsError:
        return
    data = bytearray(Path(name).read_bytes())
    data[len(data) // 2] ^= 0x40
    Path(name).write_bytes(data)


def note(name: str, file: Path) -> None:
    """Write down what is opened."""
    with file.open("a") as opened:
        opened.write(f"{json.dumps(name)}\n")


def no_memory(name: str) -> None:
    raise MemoryError


def no_thread(name: str) -> None:
    raise RuntimeError("can't start new thread")
