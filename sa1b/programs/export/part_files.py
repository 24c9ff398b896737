"""The files of one part of an export: written to a temporary folder, then renamed to their final paths."""

import filecmp
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sa1b.storage.atomic import flush, naming_path, process_of_temporary, temporary_path

TEMPORARY = ".export.partial"  # temporary folder in the folder of an export; it is removed at the end


class PartFiles:
    """A temporary folder in the folder of an export. As a context manager it is removed at the end.

    Args:
        out: folder of the export.
        part: name of the part.
        link_from: folder of an earlier export. A file that has the same path and the same bytes there becomes
            a hard link to it, if both folders are on one file system.

    Attributes:
        linked: number of files that are hard links.
    """

    def __init__(self, out: Path, part: str, link_from: Path | None = None) -> None:
        self.out = out
        self.link_from = link_from
        self.linked = 0
        # The folder belongs to this process only, because a lost worker may still write.
        self.folder = temporary_path(out / TEMPORARY / part)

    def __enter__(self) -> "PartFiles":
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, path: str, data: bytes) -> None:
        """Write a file at a path relative to the export."""
        with self.open(path) as file:
            file.write(data)

    @contextmanager
    def open(self, path: str) -> Iterator[Any]:
        """Context of a file that is open for writing, at a path relative to the export."""
        temporary = self.folder / path
        with naming_path(self.out / path):
            temporary.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                yield file

    def commit(self, paths: Sequence[str]) -> int:
        """Flush these files to the disk, rename them to their final paths, and return their size in bytes.

        All files are on the disk before the first one is renamed.
        """
        size = 0
        for path in paths:
            temporary = self.folder / path
            with naming_path(self.out / path):
                size += temporary.stat().st_size
                if not self._link(path):
                    flush(temporary)
        folders = dict.fromkeys((self.out / path).parent for path in paths)
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            (self.folder / path).replace(self.out / path)
        for folder in folders:
            flush(folder)
        return size

    def _link(self, path: str) -> bool:
        """Replace a file by a link to the equal file of the earlier export; False: there is none."""
        if self.link_from is None:
            return False
        earlier, temporary = self.link_from / path, self.folder / path
        try:
            if not filecmp.cmp(earlier, temporary, shallow=False):
                return False
            link = temporary.with_name(f".{temporary.name}.link")
            os.link(earlier, link)
        except OSError:  # no such file, another file system, too many links
            return False
        link.replace(temporary)
        self.linked += 1
        return True


def remove_temporary(out: Path) -> None:
    """Remove the temporary folders of the parts of an export, also those of workers that were killed."""
    for folder in (out / TEMPORARY).glob(".*"):
        if process_of_temporary(folder) is not None:
            shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # there is none, or it holds files of others
        (out / TEMPORARY).rmdir()
