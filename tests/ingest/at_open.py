"""A change while a source is read: a worker makes it just before it opens a certain file to read."""

import os
from pathlib import Path

from tests.kit import Done, run_when


def overwrite(opened: str, path: Path | None, data: bytes, at: int) -> None:
    """Write bytes at an offset of a file; a file that is not there is made, and its folder."""
    path = path or Path(opened)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.pwrite(file, data, at)
    os.close(file)


def run_changing(words: list[object], name: str, path: Path | None, data: bytes, at: int = 0) -> Done:
    """`sa1b WORDS`; before its worker opens the file NAME to read, `overwrite` changes `path`; None: this file."""
    return run_when(words, "read", f"*/{name}", overwrite, path, data, at, times=1, in_worker=True)
