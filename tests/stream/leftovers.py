"""The resources of a process, and the resources that ended processes leave."""

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Set
from pathlib import Path


def held() -> dict[str, list[str]]:
    """Threads, open descriptors and child processes of this process."""
    gc.collect()
    descriptors = []
    for link in list(Path("/proc/self/fd").iterdir()):
        try:
            descriptors.append(f"{link.name} {link.readlink()}")
        except FileNotFoundError:
            continue  # the descriptor of the listing
    multiprocessing.active_children()  # collects ended children
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": sorted(descriptors),
        "children": children,
    }


def session(leader: int) -> list[int]:
    """The running processes of the session of `leader`."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                state, _, _, number = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(number) == leader and state != "Z":
                found.append(int(folder.name))
    return sorted(found)


def wait_for_end(leader: int, seconds: float) -> None:
    """Wait until the session is empty; raises AssertionError after some seconds."""
    end = time.monotonic() + seconds
    while left := session(leader):
        assert time.monotonic() < end, f"processes {left} still run after {seconds} s"
        time.sleep(0.02)


def shared_memory(pids: list[int], before: Set[str] = frozenset()) -> list[str]:
    """Names of the segments that these processes made with torch.

    before: all names in /dev/shm before the processes started. A process that was killed while it made a segment
    leaves it, and another process may get its pid later.
    """
    return [name for name in names() - before if any(f"torch_{pid}_" in name for pid in pids)]


def names() -> set[str]:
    """All shared memory of this machine."""
    return {path.name for path in Path("/dev/shm").iterdir()}
