"""Results of an interrupted check or rebuild, shard by shard, in a file of JSON lines.

    {"format": "sa1b-resume-1", ...}                       properties common to all lines, such as options
    {"shard": "sa1b-000020-0003.tar", "key": ..., "value": ..., "sha256": ...}

`key` identifies the input of the result, such as sizes and times of files, and `sha256` is of the rest of the
line. A damaged line and a line with another key are ignored. A line that was cut by a crash is dropped. Only
one process uses the file at a time.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from sa1b.errors import UsageError
from sa1b.storage.atomic import temporary_path, write_whole

FORMAT = "sa1b-resume-1"
INDEX_RECORD = ".index-progress.jsonl"  # `sa1b index` writes it to the dataset directory


class ResumeRecord:
    """Results by shard, each written to the file when it is added; a context manager that closes the file.

    Args:
        path: the file, created with the first result. A file of another check or rebuild, which has another
            first line, is overwritten then.
        of: properties common to all results, such as the options.

    Raises:
        UsageError: `path` is a file of another kind.
    """

    def __init__(self, path: Path, of: Mapping[str, Any]) -> None:
        self.path = path
        self._header = (json.dumps({"format": FORMAT, **of}) + "\n").encode()
        self._known: dict[str, tuple[Any, Any]] = {}
        self._file: BinaryIO | None = None
        self._exists = path.exists()
        found = path.read_bytes() if self._exists else b""
        whole = found[: found.rfind(b"\n") + 1]
        first, *lines = whole.splitlines(keepends=True) or [b""]
        if self._exists and not _is_record(first) and not (found and self._header.startswith(found)):
            raise UsageError(f"{path}: not a record of an interrupted run; name a file that does not exist")
        self._length = len(whole) if first == self._header else 0
        for line in lines if self._length else ():
            try:
                entry = json.loads(line)
                if entry.pop("sha256") == _digest(entry):
                    self._known[entry["shard"]] = (entry["key"], entry["value"])
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue  # damaged: the shard is done again

    def __enter__(self) -> "ResumeRecord":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def get(self, shard: str, key: Any) -> Any | None:
        """The result for a shard, None if there is none for this key."""
        known, value = self._known.get(shard, (None, None))
        return value if known == _plain(key) else None

    def add(self, shard: str, key: Any, value: Any) -> None:
        """Record a result; it survives a crash of the process."""
        if self._file is None:
            if not self._length:  # there is no file, or that of another run
                write_whole(self.path, self._header, temporary_path(self.path))
                self._exists, self._length = True, len(self._header)
            self._file = self.path.open("r+b")
            self._file.truncate(self._length)  # drops a line that was cut
            self._file.seek(self._length)
        entry = {"shard": shard, "key": key, "value": value}
        self._file.write((json.dumps(entry | {"sha256": _digest(entry)}) + "\n").encode())
        self._file.flush()

    def remove(self) -> None:
        """Remove the file: nothing is left to be done."""
        if self._file is not None:
            self._file.close()
        if self._exists:
            self.path.unlink(missing_ok=True)


def _is_record(line: bytes) -> bool:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("format") == FORMAT


def _digest(entry: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry).encode()).hexdigest()


def _plain(key: Any) -> Any:
    """The key after a round trip through JSON."""
    return json.loads(json.dumps(key))
