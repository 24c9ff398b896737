"""`sa1b reshard` while something happens to a source that it reads, see tests.kit.when."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.kit import Done, run_when

SHARD = "*/sa1b-*.tar"  # when it begins, the source is open


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


def change(name: str, path: Path, how: str) -> None:
    """Change a file; its time of modification stays, as with `cp -p` and `rsync -t`."""
    state = path.stat()
    CHANGES[how](path)
    if path.exists() and how not in ("read", "added"):
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def reshard_while(how: str, path: Path, event: str, pattern: str, *words: object) -> Done:
    """`sa1b reshard WORDS`; at the first event of this kind, one of CHANGES happens to `path`."""
    return run_when(["reshard", *words], event, pattern, change, path, how, times=1)
