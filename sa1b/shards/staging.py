"""Staging folders: a worker process writes shards to `.partial/<host>-<pid>/` before they are committed.

`.partial` is in the dataset directory or, if that is at a URL, in the scratch folder. A process removes its
own folder. The next run removes the staging folders and temporary files of processes of this machine that
were killed. The name of a machine changes with each restart. Files of other machines, and of this machine
before a restart, are removed an hour after the last write.
"""

import contextlib
import itertools
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from sa1b.shards.manifest import PARTIAL, QUARANTINE, TASKS
from sa1b.storage.atomic import naming_path
from sa1b.storage.claim import ENDING, Holder, remove_dead
from sa1b.storage.processes import is_of_dead_process, this_machine, this_process
from sa1b.storage.store import FolderStore, Root, Store, open_store

_OWNER = "owner"  # file in the folder that contains the name of the process
_TRIES = 100  # attempts to create a folder that another process may remove
_ABANDONED = 3600.0  # seconds; a live process writes every few seconds, and is killed if it stalls


def make_staging(parent: Path) -> Path:
    """Create an empty folder of this process in `parent`."""
    folder = parent / f"{socket.gethostname()}-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    with naming_path(folder):
        # Again: a command that ends at this moment removes `parent` if it is empty.
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):
                folder.mkdir(parents=True)
                break
        else:
            folder.mkdir(parents=True)
        (folder / _OWNER).write_text(this_process(), encoding="utf-8")
    return folder


def remove_staging(folder: Path) -> None:
    """Remove the folder of a process, and the parent folder if it is empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def remove_staging_of(process: Holder, root: Root, spill: Path | None = None) -> None:
    """Remove the folders of a process whose claim was taken over."""
    name = f"{process.host}-{process.pid}"
    for parent in (open_store(root).scratch / PARTIAL, spill):
        if parent is not None and name == Path(name).name:  # the contents of a claim are not trusted
            shutil.rmtree(parent / name, ignore_errors=True)


def remove_leftovers(root: Root, spill: Path | None = None) -> None:
    """Remove the files and claims of ended processes from a dataset directory and from local folders."""
    store = open_store(root)
    remove_local_leftovers(store, spill)
    store.remove_temporary(_is_abandoned)
    for name in store.names(TASKS, ENDING):
        remove_dead(store, f"{TASKS}/{name}", timeout=_ABANDONED)


@contextlib.contextmanager
def clean_scratch(store: Store) -> Iterator[None]:
    """Context of work on copies of objects of a bucket: removes those of ended processes, before and after.

    A worker process that is killed leaves its copies in the scratch folder.
    """
    if store.is_local:
        yield
        return
    try:
        remove_local_leftovers(store)
        yield
    finally:
        remove_local_leftovers(store)


def remove_local_leftovers(store: Store, spill: Path | None = None) -> None:
    """Remove the files of ended processes from this machine's folders."""
    scratch = FolderStore(store.scratch)
    for parent in (store.scratch / PARTIAL, spill):
        if parent is None or not parent.is_dir():
            continue
        # The clock of the scratch folder: another command may remove .partial in between.
        now = (FolderStore(parent) if parent == spill else scratch).now()
        for folder in _children(parent):
            if _is_left(folder, now):
                shutil.rmtree(folder, ignore_errors=True)
        if parent != spill:
            with contextlib.suppress(OSError):
                parent.rmdir()
    for place in (store.scratch, store.scratch / TASKS, store.scratch / QUARANTINE):
        temporary = list(place.glob(".*.partial"))
        now = scratch.now() if temporary else 0.0
        for path in temporary:
            if not _has_ended(path.name.removesuffix(".partial").rpartition(".")[2], path, now):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _children(folder: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):
        return list(folder.iterdir())
    return []


def _is_left(folder: Path, now: float) -> bool:
    """Whether the process that made a folder has ended, by the owner file or else the folder's name."""
    owner = ""
    with contextlib.suppress(OSError, ValueError):
        owner = (folder / _OWNER).read_text(encoding="utf-8").strip("\0")
    host, _, pid = folder.name.rpartition("-")
    if not owner and host == socket.gethostname() and pid.isdecimal():
        # The process was killed before it wrote the file, or has not written it yet, or a power failure
        # removed the file's contents.
        owner = this_process(int(pid))
    return _has_ended(owner, folder, now)


def _has_ended(process: str, path: Path, now: float) -> bool:
    """Whether the process that wrote a path has ended; on another machine: whether its last write is old."""
    return _is_abandoned(process, now - _last_write(path))


def _is_abandoned(process: str, age: float) -> bool:
    """Whether a process has ended; on another machine: whether its last write was long ago."""
    if process.startswith(f"{this_machine()}-"):
        return is_of_dead_process(process)
    return age > _ABANDONED


def _last_write(path: Path) -> float:
    """Time of the last write to a file, or to any file in a folder: seconds, by the file system's clock."""
    newest = 0.0
    # Not rglob, which fails if a process removes its folder in between.
    inside = (Path(folder, name) for folder, *names in os.walk(path) for name in itertools.chain(*names))
    for one in (path, *inside):
        with contextlib.suppress(FileNotFoundError):
            newest = max(newest, one.lstat().st_mtime)
    return newest
