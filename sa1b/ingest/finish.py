"""Finishing: writes dataset.json and the sample table over the finished sources of a dataset directory.

Finishing may run at any time and any number of times. It reads the task files and the sample rows of each
source, never a shard or an index. A single `reshard` run finishes at its end; after runs with --task the user
runs `reshard --finish`. The sample table of 11 million rows is written in one pass over 400 MB.
"""

import contextlib
import errno
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from sa1b.console import command, counted
from sa1b.errors import LockedError, ManifestError, UsageError
from sa1b.ingest.start_checks import release_options
from sa1b.names import named_source
from sa1b.report import first_names
from sa1b.shards.commit import (
    abort_uploads,
    dataset_claim,
    join_tables,
    remove_old_tables,
    remove_quarantine,
    tables_of,
    unproven_tables,
)
from sa1b.shards.documents import Task
from sa1b.shards.index_file import shard_files
from sa1b.shards.manifest import DATASET, QUARANTINE, TASKS, is_current, known_tasks, read_dataset, task_name
from sa1b.shards.sample_table import clashes
from sa1b.shards.stored import check_drop, rows_alone, sources_without_task, stored_shards
from sa1b.storage.atomic import json_bytes
from sa1b.storage.claim import ENDING, Claim, holder
from sa1b.storage.open import open_store
from sa1b.storage.store import Root, Store

T = TypeVar("T")
_EXPECTED = re.compile(r"[0-9a-f]{16}\.expected")  # the names that `record_expected` gives


@dataclass(frozen=True, slots=True)
class Finished:
    """The contents of dataset.json."""

    tasks: dict[str, Task]  # sources in the dataset, by name
    failed: dict[str, str] = field(default_factory=dict)  # source that is not in the dataset -> the error
    pending: list[str] = field(default_factory=list)  # known sources that are neither finished nor failed

    @property
    def is_partial(self) -> bool:
        """Whether a known source is missing."""
        return bool(self.failed or self.pending or self.lost)

    @property
    def lost(self) -> list[str]:
        """Sources of the dataset whose task files are lost or damaged."""
        return [name for name, task in self.tasks.items() if task.listed is not None]

    def line(self, root: Root) -> str:
        """The state of the dataset and the next command, as one line of text."""
        dataset = open_store(root).url(DATASET)
        if not self.tasks:
            return f"No source is finished: {dataset} was not written."
        damaged = [name for name, task in self.tasks.items() if task.damage]
        if not self.is_partial and not damaged:
            return f"Complete: {dataset}"
        if not self.is_partial:
            return (
                f"Complete except for the damaged parts of {first_names(damaged)}: {dataset}. Download "
                "these sources again and run reshard with --replace."
            )
        parts = [
            f"{len(names):,} {what} ({first_names(names)})"
            for what, names in (("failed", sorted(self.failed)), ("pending", self.pending))
            if names
        ]
        advice = "To try again, run the same command; to remove a source, use --drop NAME." if parts else ""
        if self.lost:
            parts.append(f"{len(self.lost):,} with a lost or damaged task file ({first_names(self.lost)})")
            advice = f"{advice} `{command('verify', root)}` names the repair.".lstrip()
        return (
            f"Partial: {dataset} holds {counted(len(self.tasks), 'source')} and can be read; "
            f"{', '.join(parts)}. {advice}"
        )


def _advice(task: Task) -> str:
    """The way out for a file in COCO's format whose images have the ids of others."""
    if task.source["kind"] != "coco":
        return ""
    return f". For other images with the same numbers, add --image-ids hash --redo {task.name}"


def finish(root: Root, expected: Iterable[str] = (), *, without: str | None = None) -> Finished:
    """Write the sample table and dataset.json over all finished sources, unless they are up to date.

    A source that contains an image of another source, or was made with other options, is left out and counts
    as failed. Of two conflicting sources the first one by name is kept. Of the sources `expected` by this run
    the missing ones are pending. The files in tasks/ of the source `without` are removed. ManifestError: a
    task file is damaged.
    """
    store = open_store(root)
    with dataset_claim(store):
        tasks = known_tasks(store, [] if without is None else [without])
        failed = {name: why for name, why in read_failed(store).items() if name not in {*tasks, without}}
        lists = [name for name in store.names(TASKS, ".expected") if _EXPECTED.fullmatch(name)]
        before = _known_before(store)
        # Without dataset.json, shards without a task file may be all that is left of a finished source.
        lost = sources_without_task(store, tasks.keys()) if before is None else ()
        known = {*expected, *_beside(store, ENDING), *_listed(store, lists), *(before or ()), *lost}
        unproven: Collection[str] = ()
        pending = sorted(known - tasks.keys() - failed.keys() - {without})
        if not is_current(store, tasks, failed, pending) and (tasks or without is not None):
            unlike = _other_options(tasks)
            stored = tables_of(store, {name: task for name, task in tasks.items() if name not in unlike})
            clash = clashes({name: rows for name, (_, rows) in stored.items()})
            left_out = unlike | {name: f"{why}{_advice(tasks[name])}" for name, why in clash.items()}
            tasks = {name: task for name, (task, _) in stored.items() if name not in left_out}
            tables = {name: stored[name][1] for name in tasks}
            failed |= left_out
            if not is_current(store, tasks, failed, pending):
                unproven = unproven_tables(store, tables.values()) if before is None else ()
                join_tables(store, tasks, tables, failed, pending, keep=unproven)
        if without is not None:  # within the claim, so that no other process lists the source again
            store.remove(*(task_name(without, ending) for ending in ("json", "failed", "searched")))
        store.remove(*rows_alone(store, {*known, *tasks, *failed}))  # a drop of each was interrupted
        if not unproven:
            remove_old_tables(store)
        if tasks:  # dataset.json now records the pending sources
            store.remove(*(f"{TASKS}/{name}" for name in lists))
    return Finished(tasks, failed, pending)


def record_expected(root: Root, names: Iterable[str]) -> None:
    """Record the names of all sources of a run with --task, so that `finish` knows the pending ones."""
    data = json_bytes({"sources": sorted(names)})
    open_store(root).put_if_absent(f"{TASKS}/{hashlib.sha256(data).hexdigest()[:16]}.expected", data)


def _listed(store: Store, lists: list[str]) -> set[str]:
    listed: set[str] = set()
    for name in lists:
        with contextlib.suppress(ValueError, KeyError, TypeError, FileNotFoundError):
            listed.update(map(str, json.loads(store.read(f"{TASKS}/{name}"))["sources"]))
    return listed


def _beside(store: Store, ending: str) -> set[str]:
    return {name.removesuffix(ending) for name in store.names(TASKS, ending)}


def _known_before(root: Root) -> set[str] | None:
    """Sources that dataset.json lists, so that none disappears silently; None: it cannot be read."""
    with contextlib.suppress(ManifestError, OSError, KeyError, TypeError):
        document = read_dataset(root)
        return {str(name) for name in (*document["sources"], *document.get("pending", []))}
    return None


def _other_options(tasks: Mapping[str, Task]) -> dict[str, str]:
    """Sources whose options differ from those of the first source: source -> message."""
    options_of = {}
    first = next(iter(tasks.values()), None)
    for name, task in tasks.items():
        if first is not None and (differs := first.options.difference(task.options)):
            options_of[name] = (
                f"{name} was made with {differs[1]}, {first.name} with {differs[0]}; all shards of a dataset "
                f"need the same options: drop one of the two (--drop {name}) and reshard it again"
            )
    return options_of


def record_failure(root: Root, name: str, error: str, message: str) -> None:
    """Record the error of a source, unless an earlier version of the source is in the dataset."""
    store = open_store(root)
    if not store.exists(task_name(name)):
        store.put(task_name(name, "failed"), json_bytes({"error": error, "message": message}))


def read_failed(store: Store) -> dict[str, str]:
    """Source -> recorded error message, for all failed sources."""
    messages = {}
    for name in store.names(TASKS, ".failed"):
        try:
            message = str(json.loads(store.read(f"{TASKS}/{name}"))["message"])
        except (ValueError, KeyError, TypeError, FileNotFoundError):
            message = f"{store.url(f'{TASKS}/{name}')}: damaged; run reshard again for this source"
        messages[name.removesuffix(".failed")] = message
    return messages


def stored_source(root: Root, text: str) -> str:
    """The source that `text` names by name, tar or folder; UsageError: it is none of the directory."""
    store = open_store(root)
    tasks = known_tasks(store)
    beside = {*read_failed(store), *_beside(store, ENDING), *_beside(store, ".samples")}
    known = {*tasks, *beside, *(_known_before(store) or ())}
    name = named_source(text, known)
    listed = first_names([*tasks], 10) or "none"
    if name is None:
        raise UsageError(f"--drop {text!r}: not the name of a source; {root} has {listed}")
    if name not in known and not stored_shards(store, name) and not store.is_folder(f"{QUARANTINE}/{name}"):
        raise UsageError(f"--drop {text}: {root} has no such source; it has {listed}")
    return name


def drop_source(root: Root, name: str) -> Finished:
    """Remove a source from a dataset directory: write dataset.json without it, then delete its files.

    Readers that have the dataset open lose the shards of this source. On a full disk its files are deleted
    first; if the command is then interrupted, the same command completes it. UsageError: no such source, or
    see `check_drop`. LockedError: another process is writing the source.
    """
    store = open_store(root)
    name = stored_source(store, name)
    own_claim = task_name(name, "claim")

    def remove_rows() -> None:  # they can be rebuilt, so no process that takes the claim now loses by it
        if (current := holder(store, own_claim)) is None or not current.is_live():
            store.remove(task_name(name, "samples"))

    def remove_shards() -> None:
        shards = sorted(stored_shards(store, name))
        store.remove(*(file for shard in shards for file in shard_files(shard)))

    claim = _freeing(lambda: Claim.take(store, own_claim), remove_rows)
    if claim is None:
        current, path = holder(store, own_claim), store.url(own_claim)
        terms = path if current is None else current.terms(path)
        raise LockedError(
            f"--drop {name}: {current or 'another process'} is writing this source; wait for it ({terms})"
        )
    with claim:
        check_drop(store, name)
        abort_uploads(store, name)
        finished = _freeing(lambda: finish(store, without=name), remove_shards)
        remove_shards()
        store.remove(task_name(name, "samples"))  # until now it tells that a drop was interrupted
        remove_quarantine(store, name)
    release_options(store)
    store.remove_folder(TASKS, lambda name: False)  # removes it if this was the last source
    return finished


def _freeing(work: Callable[[], T], free: Callable[[], None]) -> T:
    """Work that writes to a disk; if the disk is full, once more after `free` has removed something."""
    try:
        return work()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
    free()
    return work()
