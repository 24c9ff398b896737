"""Unique names of the processes of a machine, which show whether the process that wrote a file still runs."""

import hashlib
import os
import re
import secrets
from pathlib import Path

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
    """Start time of a process of this machine, in clock ticks since boot; None: the process has ended.

    The start time distinguishes a process from a later process with the same id.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def is_of_dead_process(process: str) -> bool:
    """Whether the process with the name `process` (see `this_process`) ran on this machine and has ended."""
    machine, _, pid = process.partition("-")
    pid = pid.partition("-")[0]
    if machine != this_machine() or machine == "unknown" or not pid.isdecimal():
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return True
    return state in ("Z", "X")
