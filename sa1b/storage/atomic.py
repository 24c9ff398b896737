"""Atomic writes: a file is written to a temporary path, flushed to the disk, then renamed.

The name of a temporary path contains a name of its process that is unique in all machines. It shows whether
that process still runs.

Results of an interrupted check, rebuild or export are JSON lines, part by part, in a ResumeRecord:

    {"format": "sa1b-resume-1", ...}                       properties common to all lines, such as options
    {"part": "sa1b-000020-0003.tar", "key": ..., "value": ..., "sha256": ...}

`key` identifies the input of the result, such as sizes and times of files, and `sha256` is of the rest of the
line. Of several lines about a part the last one counts. A damaged line and a line with another key are
ignored. A line that was cut by a crash is dropped. Only one process uses the file at a time.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from sa1b.errors import LockedError, UsageError


def flush(path: Path) -> None:
    """Flush the bytes of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(temporary: Path, final: Path) -> None:
    """Rename a flushed file or folder to its final path on the same file system, and replace a file there.
    UsageError: a device, pipe or socket is there, such as /dev/null.
    """
    check_not_special(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary.replace(final)
    flush(final.parent)


def check_not_special(path: Path, flag: str = "") -> None:
    """UsageError: a device, pipe or socket is at this path, which a rename would remove; `flag` names it."""
    if path.exists() and not path.is_file() and not path.is_dir():
        what = f"{flag} {path}".lstrip()
        raise UsageError(f"{what}: a device, pipe or socket, not a file; name another file")


@contextlib.contextmanager
def naming_path(path: Path) -> Iterator[None]:
    """Add `path` to errors of the operating system without a path, such as failed writes and flushes."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


@contextlib.contextmanager
def naming_final(path: Path) -> Iterator[None]:
    """Replace the temporary path in errors of the operating system by the final path."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def write_whole(path: Path, data: bytes, temporary: Path | None = None) -> None:
    """Write a small file atomically: a reader sees the old content or the new content.

    `temporary` is a path in the same folder that no other process uses. By default it is a fixed path: then
    only one process may write the file at a time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary or path.with_name(f".{path.name}.partial")
    try:
        with naming_final(path):
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            commit(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def append_line(path: Path, line: str) -> None:
    """Append a line to a file in one write; see `append`."""
    append(path, line.encode() + b"\n")


def append(path: Path, data: bytes) -> None:
    """Append bytes in one write, not interleaved with those of others; OSError: not all were written."""
    with naming_path(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if os.write(descriptor, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal; FileNotFoundError: it is missing."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """The bytes of a JSON file. The same document gives the same bytes, so that digests are reproducible."""
    return (json.dumps(document, indent=1) + "\n").encode()


@contextlib.contextmanager
def lock(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on a folder while the process lives; LockedError unless `wait`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise LockedError(f"{folder}: in use by another process; wait for it or stop it") from None
        yield
    finally:
        os.close(descriptor)


_TEMPORARY = re.compile(r"\..+\.((?:[0-9a-f]{12}|unknown)-[0-9]+)-[0-9a-f]{8}\.partial")


def this_process(pid: int | None = None) -> str:
    """The name `<machine>-<pid>` of this process, or of another process of this machine."""
    return f"{this_machine()}-{os.getpid() if pid is None else pid}"


def this_machine() -> str:
    """A name that is unique for the boot and the pid namespace of this machine; "unknown" without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return "unknown"
    return hashlib.sha256(boot + str(namespace).encode()).hexdigest()[:12]


def temporary_name(start: str) -> str:
    """`start`, which ends with "-", the name of this process and a random number."""
    return f"{start}{this_process()}-{secrets.token_hex(8)}"


def temporary_path(final: Path) -> Path:
    """A hidden path in the folder of `final` that no other process uses; it contains the process's name."""
    return final.with_name(f".{final.name}.{this_process()}-{secrets.token_hex(4)}.partial")


def process_of(name: str) -> str:
    """The process in a name of `temporary_name`."""
    return name.partition("-")[2].rpartition("-")[0]


def process_of_temporary(path: Path) -> str | None:
    """The process in a path of `temporary_path`; None: the path has another form."""
    match = _TEMPORARY.fullmatch(path.name)
    return None if match is None else match[1]


def start_of(pid: int) -> int | None:
    """Start time of a process of this machine, in clock ticks since boot; None: the process has ended."""
    # The start time distinguishes a process from a later process with the same id.
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def is_of_dead_process(process: str, started: int | None = None) -> bool:
    """Whether the process of a name, see `this_process`, and a start ran on this machine and has ended."""
    machine, pid = [*process.split("-"), ""][:2]
    if machine != this_machine() or machine == "unknown" or not pid.isdecimal():
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return True
    return state in ("Z", "X") or started not in (None, start_of(int(pid)))


def nearest_existing(path: Path) -> Path:
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def check_free_bytes(folder: Path, need: int, way_out: str, what: str = "") -> None:
    """Raise UsageError if the disk of a folder, which may not exist yet, has fewer free bytes than `need`."""
    if (free := shutil.disk_usage(nearest_existing(folder)).free) < need:
        few = f"{free / 1e6:,.0f} MB free, about {need / 1e6:,.1f} MB needed{what}"
        raise UsageError(f"{folder}: {few}; {way_out}")


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
        written = path.read_bytes() if self._exists else b""
        whole = written[: written.rfind(b"\n") + 1]
        first, *lines = whole.split(b"\n")
        first += b"\n"
        if self._exists and header(first) is None and not (written and self._header.startswith(written)):
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
