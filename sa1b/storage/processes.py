"""Processes by a name that is unique on one machine, to tell whether one that left something still runs."""

import hashlib
import os
from pathlib import Path


def this_process(pid: int | None = None) -> str:
    """Name of this process, or of another one of this machine: `<start of the machine>-<number>`."""
    return f"{this_machine()}-{os.getpid() if pid is None else pid}"


def this_machine() -> str:
    """Names the start of this machine and the namespace of its process numbers; "unknown" without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return "unknown"
    return hashlib.sha256(boot + str(namespace).encode()).hexdigest()[:12]


def start_of(pid: int) -> int | None:
    """When a process of this machine started, in ticks since the machine did; None: it has ended.

    Tells a process from a later one of the same number.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def is_of_dead_process(process: str) -> bool:
    """Whether `process`, as `this_process` named it, ran on this machine and has ended."""
    machine, _, pid = process.partition("-")
    pid = pid.partition("-")[0]
    if machine != this_machine() or machine == "unknown" or not pid.isdecimal():
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return True
    return state in ("Z", "X")
