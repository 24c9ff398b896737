"""Where a worker process builds shards before they are committed: `.partial/<host>-<pid>/`, its own folder.

A process removes its own folder. What processes of this machine left behind when they were killed, folders
here and temporary files beside the files they were to become, is removed by the next run.
"""

import contextlib
import os
import shutil
import socket
from pathlib import Path

from sa1b.shards.manifest import PARTIAL, QUARANTINE, TASKS
from sa1b.storage.claim import ENDING, remove_dead
from sa1b.storage.processes import is_of_dead_process, this_process
from sa1b.storage.publish import naming
from sa1b.storage.store import Store

_OWNER = "owner"  # file in the folder: which process it belongs to


def make_staging(parent: Path) -> Path:
    """This process's folder below `parent`, empty."""
    folder = parent / f"{socket.gethostname()}-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    with naming(folder):
        folder.mkdir(parents=True)
        (folder / _OWNER).write_text(this_process(), encoding="utf-8")
    return folder


def remove_staging(folder: Path) -> None:
    """Remove a process's folder, and the folder it is in if that is empty now."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def remove_leftovers(root: Path, spill: Path | None = None) -> None:
    """Remove what ended processes of this machine left in a dataset directory and a folder for spills."""
    for parent in (root / PARTIAL, spill):
        if parent is None or not parent.is_dir():
            continue
        for folder in parent.iterdir():
            if _is_left(folder):
                shutil.rmtree(folder, ignore_errors=True)
        if parent != spill:
            with contextlib.suppress(OSError):
                parent.rmdir()
    store = Store(root)
    for name in store.names(TASKS, ENDING):
        remove_dead(store, f"{TASKS}/{name}")
    for place in (root, root / TASKS, root / QUARANTINE):
        for path in place.glob(".*.partial"):
            if is_of_dead_process(path.name.removesuffix(".partial").rpartition(".")[2]):
                path.unlink(missing_ok=True)


def _is_left(folder: Path) -> bool:
    """Whether the process that made a folder has ended: by its owner file, or where that is missing too."""
    owner = ""
    with contextlib.suppress(OSError):
        owner = (folder / _OWNER).read_text(encoding="utf-8")
    host, _, pid = folder.name.rpartition("-")
    if not owner and host == socket.gethostname() and pid.isdecimal():
        owner = this_process(int(pid))  # killed before it wrote the file, or about to write it
    return is_of_dead_process(owner)
