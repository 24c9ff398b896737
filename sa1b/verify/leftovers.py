"""Files in a dataset directory outside the dataset: work in progress, and remains of interrupted runs."""

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from sa1b.console import command, counted
from sa1b.names import parse_shard_name, shard_order, source_stem
from sa1b.report import first_names
from sa1b.shards.manifest import DATASET, PARTIAL, TASKS, table_name
from sa1b.shards.sample_table import is_table_name
from sa1b.shards.staging import temporary_files
from sa1b.shards.stored import Ids, images_of, is_own, no_ids, shard_of
from sa1b.storage.store import Store
from sa1b.verify.task_check import TaskCheck

INDEX_RECORD = ".index-progress.jsonl"  # `sa1b index` writes it to the dataset directory


def leftover_notes(
    store: Store,
    tasks: TaskCheck,
    others: Collection[str],
    failed: Mapping[str, str],
    *,
    damaged: bool,
) -> list[str]:
    """Notes on files that are not part of the dataset. They are not damage.

    Args:
        tasks: the check of the task files.
        others: names of sources in a newer version, and of those that a process is working on.
        failed: source -> why it is not in the dataset.
        damaged: whether damage was found. Otherwise an interrupted `sa1b index` has nothing left to do.
    """
    notes = [
        f"source {name} is being worked on by {holder}: its task file is not checked"
        for name, holder in sorted(tasks.active.items())
    ]
    unlisted = set(tasks.unlisted).difference(others)
    notes += [
        f"source {name} is finished and not in the dataset: {failed[name]}"
        for name in sorted(unlisted & failed.keys())
    ]
    if waiting := sorted(unlisted - failed.keys()):
        notes.append(
            f"finished sources that {DATASET} does not list yet: {first_names(waiting)}; "
            f"`{command('reshard')} --out {store.root} --finish` adds them"
        )
    beside = _beside_tasks(store, {*tasks.tasks, *tasks.active, *others})
    without = [name.removesuffix(".failed") for name in beside if name.endswith(".failed")]
    if without:
        notes.append(f"sources that failed: {first_names(without)}")
    other = [name for name in beside if not name.endswith(".failed")]
    if other:
        notes.append(f"files in {TASKS}/ without a task file, of an interrupted run: {first_names(other)}")
    if damaged and store.exists(INDEX_RECORD):
        notes.append(f"`{command('index')}` was not finished; `{command('index')} {store.root}` resumes it")
    staging = store.names(PARTIAL)
    if staging:
        notes.append(
            f"{PARTIAL}/ contains files of running or interrupted processes: {first_names(staging)}; "
            "the next reshard removes those of interrupted processes (on another machine: an hour after the "
            "last write)"
        )
    uploads = [one.name for one in store.uploads()]
    if uploads:
        notes.append(
            f"unfinished uploads of running or interrupted processes: {first_names(uploads)}; the next "
            "reshard or copy of these shards removes them"
        )
    table = table_name(store)
    unfinished = [name for name in store.names("", ".bin") if is_table_name(name) and name != table]
    if unfinished:
        notes.append(f"unfinished or outdated files of an interrupted run: {first_names(unfinished)}")
    paths = temporary_files(store) if store.is_local else ()
    if hidden := sorted(path.relative_to(store.root).as_posix() for path in paths):
        notes.append(
            f"temporary files of running or interrupted processes: {first_names(hidden)}; the next "
            "reshard or index removes those of interrupted processes"
        )
    return notes


def files_of_shards(store: Store) -> Iterator[str]:
    """Names of all shards and indexes in a dataset directory, whether or not anything lists them."""
    return filter(_is_stored, store.names(""))


def _is_stored(name: str) -> bool:
    return parse_shard_name(shard_of(name)) is not None


def unlisted_shards(
    names: Sequence[str], tasks: TaskCheck, shards: Collection[str], others: Collection[str]
) -> list[str]:
    """Shards and indexes that nothing lists, of sources that no process is working on.

    Args:
        names: of the files in the directory.
        tasks: the check of the task files.
        shards: names of shards in the dataset, also in a newer version than the one that is checked.
        others: see `leftover_notes`.
    """
    known = {shard.name for task in tasks.tasks.values() for shard in task.shards} | set(shards)
    active = {source_stem(name) for name in (*tasks.active, *others)}
    found = []
    for name in filter(_is_stored, names):
        order = shard_order(shard_of(name))
        if shard_of(name) not in known and order.stem not in active:
            found.append((order, name))
    return [name for _, name in sorted(found)]


def unlisted_notes(
    store: Store, files: Sequence[str], images: Ids | None, sources: Collection[str]
) -> tuple[list[str], int]:
    """Notes on the files of `unlisted_shards`, and the number of images that only these hold.

    Args:
        images: ids of the images of the dataset; None: unknown.
        sources: names of the sources of the dataset.
    """
    kept, stems = no_ids() if images is None else images, set(map(source_stem, sources))
    own = [name for name in files if is_own(store, name)]
    found = {name: np.setdiff1d(images_of(store, name), kept) for name in own if name.endswith(".tar")}
    missing = [name for name, ids in found.items() if len(ids)]
    count = len(np.unique(np.concatenate([no_ids(), *found.values()])))
    notes = []
    if strange := [name for name in files if name not in own]:
        notes.append(
            f"files with the name of a shard or an index that are none: {first_names(strange)}; move "
            "them away"
        )
    if missing:
        again = [name for name in missing if shard_order(name).stem in stems]
        adds = f"`{command('index')} {shlex.quote(store.root)}` adds them"
        if again:
            adds = f"convert the sources of {first_names(again)} again, with --redo"
        notes.append(
            f"{counted(count, 'image')} in {counted(len(missing), 'shard')} that no task file lists are not "
            f"in the dataset: {first_names(missing)}; {adds}"
        )
    if left := [name for name in own if shard_of(name) not in missing]:
        notes.append(
            f"{len(left):,} files that no task file lists, of an interrupted run: {first_names(left)}; "
            f"convert their sources with `{command('reshard')}`, which replaces them"
        )
    return notes, count


def _beside_tasks(store: Store, known: Collection[str]) -> list[str]:
    """Files of tasks/ whose source has no task file and is not being worked on."""
    endings = (".samples", ".claim", ".failed")
    names = store.names(TASKS)
    return [name for name in names if name.endswith(endings) and name.rpartition(".")[0] not in known]
