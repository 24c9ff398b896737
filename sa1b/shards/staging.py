"""Staging folders: a process writes shards to `.partial/staging-<process>-<random>/` before it commits them.

`.partial` is in the dataset directory or, if that is at a URL, in the scratch folder; below a folder of
--spill it is `.sa1b-spill`. A process removes its own folder. The next run removes the staging folders and
temporary files of processes that have ended. For processes of this machine, it checks that they no longer
run; files of other machines (the name of a machine changes with each restart) are removed an hour after the
last write.

A folder is removed only if its name and its owner file are those that `make_staging` writes, and a file only
if its name is one of `temporary_path`. All else in these folders is the user's.
"""

import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from sa1b.shards.manifest import LAYERS, PARTIAL, QUARANTINE, TASKS, VIEWS
from sa1b.storage.atomic import (
    flush,
    is_of_dead_process,
    naming_path,
    process_of,
    process_of_temporary,
    temporary_name,
    this_machine,
)
from sa1b.storage.claim import ENDING, Holder, remove_dead
from sa1b.storage.open import open_store
from sa1b.storage.store import FolderStore, Root, Store

_OWNER = "owner"  # file in the folder that proves that this program made it
_SPILL = ".sa1b-spill"  # folder in a folder of --spill
_NAME = re.compile(r"staging-([0-9a-f]{12}|unknown)-[0-9]+-[0-9a-f]{16}")
_TRIES = 100  # attempts to create a folder whose parent another process may remove
_ABANDONED = 3600.0  # seconds; a live process writes every few seconds, and is killed if it stalls


def staging_place(store: Store, spill: Path | None = None) -> Path:
    """The folder for staging folders: below `spill`, or else below the store's scratch folder."""
    return store.scratch / PARTIAL if spill is None else spill / _SPILL


def make_staging(parent: Path) -> Path:
    """Create an empty folder of this process in `parent`."""
    folder = parent / temporary_name("staging-")
    with naming_path(folder):
        # Several tries: a command that ends at this moment removes `parent` if it is empty.
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):
                folder.mkdir(parents=True)
                break
        else:
            folder.mkdir(parents=True)
        try:
            (folder / _OWNER).write_bytes(_owner(folder))
            flush(folder / _OWNER)  # before the contents: without it nobody would remove them
            flush(folder)
        except BaseException:
            _remove(folder)
            raise
    return folder


def remove_staging(folder: Path) -> None:
    """Remove a folder of `make_staging`, and the parent folder if it is empty then."""
    _remove(folder)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def remove_staging_of(process: Holder, root: Root, spill: Path | None = None) -> None:
    """Remove the folders of a process whose claim was taken over, unless it still runs on this machine."""
    if process.process.startswith("unknown-"):
        return
    if process.process.startswith(f"{this_machine()}-") and not is_of_dead_process(process.process):
        return
    store = open_store(root)
    for parent in {staging_place(store), staging_place(store, spill)}:
        for folder in _children(parent):
            if _is_ours(folder) and process_of(folder.name) == process.process:
                _remove(folder)


def remove_leftovers(root: Root, spill: Path | None = None) -> None:
    """Remove the files and claims of ended processes from a dataset directory and from local folders."""
    store = open_store(root)
    remove_local_leftovers(store, spill)
    store.remove_temporary(_is_abandoned)
    for name in store.names(TASKS, ENDING):
        remove_dead(store, f"{TASKS}/{name}", timeout=_ABANDONED)


@contextlib.contextmanager
def clean_scratch(store: Store) -> Iterator[None]:
    """Context of work on copies of objects: removes those of ended processes, before and after."""
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
    for parent in {staging_place(store), staging_place(store, spill)}:
        if not parent.is_dir():
            continue
        # The clock of the folder above: another command may remove this one in between.
        now = FolderStore(parent.parent).now()
        for folder in _children(parent):
            if not _is_named(folder) or not _has_ended(process_of(folder.name), folder, now):
                continue
            if _is_ours(folder):
                _remove(folder)
            else:
                _remove_unfinished(folder)
        with contextlib.suppress(OSError):
            parent.rmdir()
    temporary = temporary_files(store)
    now = FolderStore(store.scratch).now() if temporary else 0.0
    for path, process in temporary.items():
        if not _has_ended(process, path, now):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def temporary_files(store: Store) -> dict[Path, str]:
    """Files that have a name of `temporary_path` in this machine's folders, and their processes."""
    places = [store.scratch, *(store.scratch / folder for folder in (TASKS, QUARANTINE, VIEWS, LAYERS))]
    places += _children(store.scratch / LAYERS)
    processes = {path: process_of_temporary(path) for place in places for path in place.glob(".*.partial")}
    return {path: process for path, process in processes.items() if process is not None}


def _children(folder: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return list(folder.iterdir())
    return []


def _owner(folder: Path) -> bytes:
    return f"This folder was made by sa1b: {folder.name}\n".encode()


def _is_named(folder: Path) -> bool:
    return _NAME.fullmatch(folder.name) is not None and not folder.is_symlink()


def _is_ours(folder: Path) -> bool:
    """Whether `make_staging` made a folder: its name and its owner file fit."""
    if not _is_named(folder):
        return False
    with contextlib.suppress(OSError):
        return (folder / _OWNER).read_bytes() == _owner(folder)
    return False


def _remove(folder: Path) -> None:
    """Remove a folder of `make_staging`; the owner file last, so that a kill leaves a folder that is ours."""
    with contextlib.suppress(OSError):
        for path in _children(folder):
            if path.name != _OWNER:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        if len(_children(folder)) <= 1:
            (folder / _OWNER).unlink(missing_ok=True)
        folder.rmdir()


def _remove_unfinished(folder: Path) -> None:
    """Remove the folder of a process that ended before the owner file was whole, if nothing else is in it."""
    owner = folder / _OWNER
    with contextlib.suppress(OSError):
        if _children(folder) == [owner] and not owner.is_symlink():
            written = owner.read_bytes().strip(b"\0")  # a loss of power leaves zeros
            if _owner(folder).startswith(written):
                owner.unlink()
        folder.rmdir()


def _has_ended(process: str, path: Path, now: float) -> bool:
    """Whether the process that wrote a path has ended; on another machine: whether its last write is old."""
    return _is_abandoned(process, now - _last_write(path))


def _is_abandoned(process: str, age: float) -> bool:
    """Whether a process has ended; on another machine: whether its last write was long ago."""
    if process.startswith(f"{this_machine()}-"):
        return is_of_dead_process(process)
    return age > _ABANDONED


def _last_write(path: Path) -> float:
    newest = 0.0
    # Not rglob, which fails if a process removes its folder in between.
    inside = (Path(folder, name) for folder, *names in os.walk(path) for name in itertools.chain(*names))
    for file in (path, *inside):
        with contextlib.suppress(FileNotFoundError):
            newest = max(newest, file.lstat().st_mtime)
    return newest
