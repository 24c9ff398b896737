"""Results of an interrupted check, rebuild or export, part by part, in a file of JSON lines.

    {"format": "sa1b-resume-1", ...}                       properties common to all lines, such as options
    {"part": "sa1b-000020-0003.tar", "key": ..., "value": ..., "sha256": ...}

`key` identifies the input of the result, such as sizes and times of files, and `sha256` is of the rest of the
line. Of several lines about a part the last one counts. A damaged line and a line with another key are
ignored. A line that was cut by a crash is dropped. Only one process uses the file at a time.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from sa1b.errors import UsageError
from sa1b.storage.atomic import temporary_path, write_whole

FORMAT = "sa1b-resume-1"


class ResumeRecord:
    """Results by part, each on the disk when it is added; a context manager that closes the file.

    The file is created with the first result. A file of another check or rebuild, which has another first
    line, is overwritten then; UsageError if it is of another kind. `of` are properties common to all results,
    such as the options. `known` is part -> key and value of its last line.
    """

    def __init__(self, path: Path, of: Mapping[str, Any]) -> None:
        self.path = path
        self._header = (json.dumps({"format": FORMAT, **of}) + "\n").encode()
        self.known: dict[str, tuple[Any, Any]] = {}
        self._file: BinaryIO | None = None
        self._exists = path.exists()
        found = path.read_bytes() if self._exists else b""
        whole = found[: found.rfind(b"\n") + 1]
        first, *lines = whole.split(b"\n")
        first += b"\n"
        if self._exists and header(first) is None and not (found and self._header.startswith(found)):
            raise UsageError(f"{path}: not a record of an interrupted run; name a file that does not exist")
        self._length = len(whole) if first == self._header else 0
        for line in lines if self._length else ():
            try:
                entry = json.loads(line)
                if entry.pop("sha256") == _digest(entry):
                    self.known[entry["part"]] = (entry["key"], entry["value"])
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue  # damaged: the shard is done again

    def __enter__(self) -> "ResumeRecord":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def get(self, part: str, key: Any) -> Any | None:
        """The result for a part, None if there is none for this key."""
        known, value = self.known.get(part, (None, None))
        return value if known == _plain(key) else None

    def add(self, part: str, key: Any, value: Any) -> None:
        """Record a result; it survives a crash of the machine."""
        self.add_all({part: (key, value)})

    def add_all(self, results: Mapping[str, tuple[Any, Any]]) -> None:
        """Record results, by part; key and value of each."""
        if self._file is None:
            if not self._length:  # there is no file, or that of another run
                write_whole(self.path, self._header, temporary_path(self.path))
                self._exists, self._length = True, len(self._header)
            self._file = self.path.open("r+b")
            self._file.truncate(self._length)  # drops a line that was cut
            self._file.seek(self._length)
        for part, (key, value) in results.items():
            entry = {"part": part, "key": key, "value": value}
            self._file.write((json.dumps(entry | {"sha256": _digest(entry)}) + "\n").encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def remove(self) -> None:
        """Remove the file: nothing is left to be done."""
        self.__exit__()
        if self._exists:
            self.path.unlink(missing_ok=True)


def header(line: bytes) -> dict[str, Any] | None:
    """The common properties in the first line of a record; None: the line is of another file."""
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(line)
        if isinstance(document, dict) and document.pop("format", None) == FORMAT:
            return document
    return None


def _digest(entry: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry).encode()).hexdigest()


def _plain(key: Any) -> Any:
    """The key after a round trip through JSON."""
    return json.loads(json.dumps(key))
