"""`sa1b reshard` in a process of its own, in which something happens to a source while it is read.

`python -m tests.sources.meanwhile CHANGE PATH EVENT:PATTERN WORD...` changes PATH just before the first audit event of
this name whose first argument matches the pattern; a change that is the name of an error number is raised each time.
The workers of the command are forks of the process.
"""

import errno
import os
import shutil
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from subprocess import CompletedProcess

from sa1b.cli import main
from tests import processes

READING = "open:*/sa1b-*.tar"  # a shard begins, so the source is open


def _overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-9, os.SEEK_END)
        file.write(b"x")


def _replace(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").rename(path)


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


CHANGES: dict[str, Callable[[Path], object]] = {
    "overwritten": _overwrite,
    "replaced": _replace,
    "appended": _append,
    "touched": lambda path: None,
    "added": lambda path: path.with_name("sa_500.jpg").write_bytes(b""),
    "removed": Path.unlink,
    "read": lambda path: path.read_bytes(),
}


def _change(path: Path, change: str) -> None:
    """Change a file; its time of modification stays, as with `cp -p` and `rsync -t`."""
    state = path.stat()
    CHANGES[change](path)
    if path.exists() and change not in ("read", "added"):
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def reshard_while(change: str, path: Path, at: str, *words: object) -> "CompletedProcess[str]":
    """`sa1b reshard WORDS`, with one of CHANGES or an error number."""
    command = [sys.executable, "-m", "tests.sources.meanwhile", change, path, at, "reshard", *words]
    return processes.run([str(word) for word in command], capture_output=True, text=True, check=False)


if __name__ == "__main__":
    change, name, at, *words = sys.argv[1:]
    wanted, _, pattern = at.partition(":")
    done: list[str] = []

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event != wanted or not fnmatchcase(str(arguments[0]), pattern):
            return
        if change not in CHANGES:
            number = getattr(errno, change)
            raise OSError(number, os.strerror(number), name)
        if not done:
            done.append(event)
            _change(Path(name), change)

    sys.addaudithook(hook)
    main(words)
