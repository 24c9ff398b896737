"""Commits: move a finished source into the dataset directory, and write the dataset over all sources.

The order of writes gives two guarantees. A task file is written after all files that it lists. dataset.json
is replaced after its table is written, and a file that it lists is removed only after dataset.json no longer
lists it. A process that dies at any point leaves a directory that readers can open and the next run repairs.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sa1b.console import command
from sa1b.errors import ManifestError, SourceError, TableError
from sa1b.names import is_quarantine_file, is_shard_of
from sa1b.shards.documents import Task
from sa1b.shards.index_file import index_path, shard_files
from sa1b.shards.manifest import (
    DATASET,
    QUARANTINE,
    all_shards,
    dataset_document,
    known_tasks,
    read_dataset,
    task_digest,
    task_name,
    write_task,
)
from sa1b.shards.sample_table import (
    COLUMNS,
    SampleTable,
    clash_message,
    clashes,
    decode,
    encode,
    is_table_name,
    open_table,
    read_facts,
    write_table,
)
from sa1b.shards.stored import Ids, check_kept, is_own, shard_of, stored_files
from sa1b.storage.atomic import flush, naming_path, temporary_path
from sa1b.storage.claim import Claim, exclusive
from sa1b.storage.open import open_store
from sa1b.storage.store import Root, Store

_DATASET_CLAIM = ".dataset.claim"  # the process that writes dataset.json now
_COLUMNS = ["image_id", "jpg_offset", "jpg_bytes", "masks_bytes", "jpg_crc32c", "masks_crc32c"]


def commit_task(
    task: Task,
    staged: Path,
    root: Root,
    progress: Callable[[int], None] | None = None,
    *,
    replace_images: bool = False,
) -> Task:
    """Move a finished source from `staged` into the dataset directory; its task file is written last.

    An earlier task of the same source is replaced. If its shards differ, dataset.json is first written
    without the source, so that a reader never finds other shards than dataset.json names. Task files change
    within `dataset_claim`, so that no other process lists a source whose files are being replaced.
    SourceError or UsageError, see `check_kept`: nothing was changed.

    Args:
        task: without `samples`.
        staged: folder with the shards and indexes, flushed, and perhaps QUARANTINE; of a local dataset
            directory, on the same file system.
        progress: during an upload to a bucket, called with the number of bytes whenever some are stored.
        replace_images: stored images of the source may be missing in the new shards, if it is intact.
    """
    store = open_store(root)
    rows = rows_of_indexes([index_path(staged / shard.name) for shard in task.shards])
    task = with_rows(task, rows)
    if stored := stored_files(store, task.name):
        ids, damaged = decode(rows).image_id, bool(task.damage)
        check_kept(store, task.name, ids, stored, damaged=damaged, replace=replace_images)
    with dataset_claim(store):
        _withdraw(task, store)
    commit_quarantine(task.name, staged, store)
    files = [staged / name for shard in task.shards for name in shard_files(shard.name)]
    store.commit(files, progress=progress)
    old = {*map(shard_of, stored)} - {shard.name for shard in task.shards}
    store.remove(*(file for name in sorted(old) for file in shard_files(name)))
    store.put(task_name(task.name, "samples"), rows)
    with dataset_claim(store):
        write_task(store, task)
        store.remove(task_name(task.name, "failed"))
        _list_again(task, store)
    return task


def unproven_tables(store: Store, tables: Iterable[SampleTable]) -> dict[str, Ids]:
    """Stored sample tables of the dataset with images that are in none of `tables`, and these images."""
    ids = np.concatenate([np.empty(0, np.uint64), *(table.image_id for table in tables)])
    unproven = {}
    for name in filter(is_table_name, store.names("", ".bin")):
        with contextlib.suppress(TableError, OSError), store.files(name) as (path,):
            if len(left := np.setdiff1d(open_table(path, check=True).image_id, ids)):
                unproven[name] = left
    return unproven


def abort_uploads(store: Store, source: str) -> None:
    """Remove the unfinished uploads of a source; for the holder of its claim."""
    quarantine = f"{QUARANTINE}/{source}/"

    def matches(name: str) -> bool:
        return name.startswith(quarantine) or is_shard_of(shard_of(name), source)

    store.abort_uploads(matches)


def abort_abandoned_uploads(store: Store, sources: Iterable[str]) -> None:
    """Remove the unfinished uploads of sources that no process is writing: those of killed workers."""
    left = [upload.name.replace(".parquet", ".tar") for upload in store.uploads()]
    for source in sources:
        if any(is_shard_of(name, source) or f"/{source}/" in name for name in left):
            claim = Claim.take(store, task_name(source, "claim"))
            if claim is not None:
                abort_uploads(store, source)
                claim.release()


def commit_quarantine(name: str, staged: Path, root: Root) -> None:
    """Commit the quarantine of a source; that of an earlier run is removed."""
    store = open_store(root)
    folder = staged / QUARANTINE
    if folder.exists():
        for path in folder.iterdir():
            flush(path)
        store.commit_folder(folder, f"{QUARANTINE}/{name}", is_quarantine_file)
    else:
        remove_quarantine(store, name)


def remove_quarantine(store: Store, name: str) -> None:
    """Remove the files that this package wrote to the quarantine of a source; other files stay."""
    if store.is_folder(f"{QUARANTINE}/{name}"):
        store.remove_folder(f"{QUARANTINE}/{name}", is_quarantine_file)


def check_clash(task: Task, staged: Path, root: Root) -> None:
    """SourceError if images are already in the dataset under another source. Changes no file."""
    store = open_store(root)
    try:
        document = read_dataset(store)
        with store.files(str(document["samples"]["name"])) as (path,):
            table = open_table(path)
        owners = [str(shard["name"]) for shard in document["shards"]]
    except (ManifestError, TableError, OSError, KeyError, TypeError):
        return  # found when the dataset is written
    if not len(table):
        return
    for shard in task.shards:
        index = index_path(staged / shard.name)
        ids = pq.read_table(index.absolute(), columns=["image_id"])["image_id"].to_numpy().astype(np.uint64)
        rows = np.minimum(np.searchsorted(table.image_id, ids), len(table) - 1)
        for row in rows[table.image_id[rows] == ids]:
            owner = owners[int(table.shard[row])]
            if not is_shard_of(owner, task.name):
                raise SourceError(clash_message(int(table.image_id[row]), task.name, owner))


@contextlib.contextmanager
def dataset_claim(root: Root) -> Iterator[None]:
    """Become the only process that writes dataset.json; wait for another one to end."""
    store = open_store(root)
    with exclusive(store, _DATASET_CLAIM, store.url(DATASET)):
        store.abort_uploads(is_table_name)  # of a process that was killed
        yield


def write_dataset(
    root: Root,
    tasks: Mapping[str, Task],
    failed: Mapping[str, str] | None = None,
    pending: Sequence[str] = (),
    like: Task | None = None,
) -> None:
    """Write the sample table and dataset.json over finished sources. Memory: 24 bytes an image.

    If several processes write to `root`, call it within `dataset_claim`. The sources are made with the same
    options; SourceError if an image is in two of them. `failed`, `pending` and `like`: see
    `dataset_document`. Without any source, dataset.json is removed.
    """
    store = open_store(root)
    rows = tables_of(store, tasks)
    tables = {name: table for name, (_, table) in rows.items()}
    twice = clashes(tables)
    if twice:
        raise SourceError(next(iter(twice.values())))
    join_tables(
        store, {name: task for name, (task, _) in rows.items()}, tables, failed, pending=pending, like=like
    )


def join_tables(
    root: Root,
    tasks: dict[str, Task],
    tables: Mapping[str, SampleTable],
    failed: Mapping[str, str] | None = None,
    pending: Sequence[str] = (),
    like: Task | None = None,
    keep: Collection[str] = (),
) -> None:
    """`write_dataset` for callers that have the rows of every source, and no image in two of them. `tasks`
    and `tables` have the same order; older tables whose names are in `keep` are not removed.
    """
    store = open_store(root)
    if not tasks and like is None:
        _remove_dataset(store)
        return
    shards = all_shards(tasks.values())
    numbers = {shard.name: number for number, shard in enumerate(shards)}
    first = [numbers[task.shards[0].name] for task in tasks.values()]
    folder = temporary_path(store.scratch / "samples")
    try:
        folder.mkdir(parents=True)
        with naming_path(store.scratch):
            facts = write_table(folder / "samples", list(tables.values()), first)
            final = (folder / "samples").replace(folder / facts.name)
        store.commit([final])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    store.put(DATASET, dataset_document(tasks, facts.name, facts, failed, pending=pending, like=like))
    _remove_tables(store, keep={facts.name, *keep})


def tables_of(root: Root, tasks: Mapping[str, Task]) -> dict[str, tuple[Task, SampleTable]]:
    """`task_rows` of several sources, by name in alphabetical order."""
    store = open_store(root)
    names = sorted(tasks)
    return dict(zip(names, store.map(lambda name: task_rows(store, tasks[name]), names), strict=True))


def task_rows(root: Root, task: Task) -> tuple[Task, SampleTable]:
    """The task and the rows of a source, from tasks/<source>.samples or, if that file is missing or damaged,
    from the indexes. OSError or TableError: an index cannot be read.
    """
    store = open_store(root)
    name = task_name(task.name, "samples")
    if task.listed is not None:
        rows_left = _listed_rows(store, task)
        return task, decode(rows_of_task(store, task)) if rows_left is None else rows_left
    if task.samples is not None:
        with contextlib.suppress(OSError, TableError), store.files(name) as (path,):
            with path.open("rb") as file:
                facts = read_facts(file)
            if {"bytes": facts.bytes, "sha256": facts.sha256} == task.samples:
                return task, open_table(path)
    rows = rows_of_task(store, task)
    store.put(name, rows)
    if task != (task := with_rows(task, rows)):
        write_task(store, task)
    with store.files(name) as (path,):
        return task, open_table(path)


def _listed_rows(store: Store, task: Task) -> SampleTable | None:
    """The rows of a source in the table of dataset.json; None: the table is lost or damaged."""
    document = read_dataset(store)
    with contextlib.suppress(OSError, TableError), store.files(str(document["samples"]["name"])) as (path,):
        table = open_table(path, check=True)
        if table.digest == document["samples"]["columns_sha256"]:
            of_task = np.array([is_shard_of(shard["name"], task.name) for shard in document["shards"]], bool)
            columns = {column: getattr(table, column)[of_task[table.shard]] for column in COLUMNS}
            return decode(encode(columns | {"shard": (np.cumsum(of_task) - 1)[columns["shard"]]}))
    return None


def with_rows(task: Task, rows: bytes) -> Task:
    """A task file that lists its rows of the sample table."""
    return replace(task, samples={"bytes": len(rows), "sha256": _sha256(rows)})


def rows_of_task(store: Store, task: Task) -> bytes:
    """Rows from the indexes of a source, which must have the recorded digests."""
    with store.files(*(shard_files(shard.name)[1] for shard in task.shards)) as indexes:
        for shard, path in zip(task.shards, indexes, strict=True):
            if _sha256(path.read_bytes()) != shard.index_sha256:
                raise TableError(
                    f"{store.url(shard_files(shard.name)[1])}: not the index that was written; run "
                    f"`{command('index', store.url(shard.name))}` to rebuild it"
                )
        return rows_of_indexes(indexes)


def _withdraw(task: Task, store: Store) -> None:
    """Remove the task file of a source whose shards are about to be replaced, and list it no more."""
    document = _read_dataset(store)
    listed = {shard["name"]: shard for shard in document["shards"] if is_shard_of(shard["name"], task.name)}
    if listed and listed == {shard.name: asdict(shard) for shard in task.shards}:
        return  # the same files
    if listed:
        left = known_tasks(store, without=[task.name])
        known, pending = {*left, task.name}, {*document.get("pending", []), task.name} - left.keys()
        failed = {name: why for name, why in document.get("failed", {}).items() if name not in known}
        write_dataset(store, left, failed, sorted(pending), like=task)
    store.remove(task_name(task.name))


def _list_again(task: Task, store: Store) -> None:
    """Write dataset.json with the new digest of a task file whose shards it lists."""
    document = _read_dataset(store)
    if document["sources"].get(task.name, task_digest(task)) != task_digest(task):
        known = known_tasks(store)
        tasks = {name: known_task for name, known_task in known.items() if name in document["sources"]}
        write_dataset(store, tasks, document.get("failed", {}), document.get("pending", []))


def _read_dataset(store: Store) -> dict[str, Any]:
    """dataset.json; without a source if it cannot be read."""
    try:
        return read_dataset(store)
    except (ManifestError, OSError):
        return {"sources": {}, "shards": []}


def _remove_dataset(store: Store) -> None:
    """Remove dataset.json after the last source is dropped."""
    store.remove(DATASET)
    _remove_tables(store)


def remove_old_tables(root: Root) -> None:
    """Remove sample tables that dataset.json does not name: left by processes that were killed."""
    store = open_store(root)
    with contextlib.suppress(ManifestError, OSError, KeyError, TypeError):
        _remove_tables(store, keep={str(read_dataset(store)["samples"]["name"])})


def _remove_tables(store: Store, *, keep: Collection[str] = ()) -> None:
    tables = [name for name in store.names("", ".bin") if is_table_name(name) and name not in keep]
    store.remove(*(name for name in tables if is_own(store, name)))


def rows_of_indexes(indexes: Sequence[Path]) -> bytes:
    """The bytes of a source's sample table, from the indexes of its shards in their order."""
    read = [pq.read_table(path.absolute(), columns=_COLUMNS) for path in indexes]
    rows = pa.concat_tables(read)
    columns = {name: rows[name].to_numpy() for name in _COLUMNS}
    columns["offset"] = columns.pop("jpg_offset")
    columns["shard"] = np.repeat(np.arange(len(read)), [len(part) for part in read])
    return encode(columns)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
