"""The input of a gallery page: without --overwrite, only a page of the same input is replaced."""

import hashlib
import os
from pathlib import Path

from sa1b.errors import UsageError
from sa1b.shards.manifest import dataset_around

_HEAD = 4096  # bytes; the mark is in the first lines of a page


def origin_mark(source: Path | str, out: Path) -> str:
    """The mark in the head of a page: a digest of the path of its input, relative to the page's folder.

    The path itself may contain private names, and pages are sent to others.
    """
    is_url = "://" in str(source)
    relative = str(source) if is_url else os.path.relpath(Path(source).resolve(), out.resolve().parent)
    return f"sa1b gallery {hashlib.sha256(os.fsencode(relative)).hexdigest()[:16]}"


def check_replaceable(source: Path | str, out: Path, *, overwrite: bool) -> None:
    """Refuse to replace a file that is not a gallery page of the same input, unless `overwrite`.

    Raises:
        UsageError: the file is of another kind, or `out` is a folder or the input.
    """
    if out.is_dir():
        raise UsageError(f"--out {out}: is a folder; pass the path of a file")
    if "://" not in str(source) and out.exists() and out.samefile(source):
        raise UsageError(f"--out {out}: is the input; choose another --out")
    try:
        with out.open("rb") as file:
            head = file.read(_HEAD)
    except FileNotFoundError:
        return
    if b'content="sa1b gallery ' not in head and (root := dataset_around(out)) is not None:
        raise UsageError(f"--out {out}: is a file of the dataset directory {root}; choose another --out")
    if overwrite:
        return
    if origin_mark(source, out).encode() not in head:
        what = (
            "a page of another input" if b'content="sa1b gallery ' in head else "not written by this command"
        )
        raise UsageError(
            f"--out {out}: exists and is {what}; choose another --out, or replace it with --overwrite"
        )
