"""Files in a dataset directory outside the dataset: work in progress, and remains of interrupted runs."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from sa1b.console import command
from sa1b.names import SHARD_PREFIX, shard_order, source_stem
from sa1b.shards.manifest import DATASET, PARTIAL, TASKS, table_name
from sa1b.shards.shard import index_path
from sa1b.verify.resume import INDEX_RECORD
from sa1b.verify.task_check import TaskCheck

_SHOWN = 5  # names in a note


def leftover_notes(root: Path, tasks: TaskCheck, shards: Collection[str], *, damaged: bool) -> list[str]:
    """Notes on files that are not part of the dataset. They are not damage.

    Args:
        tasks: the check of the task files.
        shards: names of shards in the dataset.
        damaged: whether damage was found. Otherwise an interrupted `sa1b index` has nothing left to do.
    """
    notes = [
        f"source {name} is being worked on by {holder}: its task file is not checked"
        for name, holder in sorted(tasks.active.items())
    ]
    if tasks.unlisted:
        notes.append(
            f"finished sources that {DATASET} does not list yet: {_some(sorted(tasks.unlisted))}; "
            f"`{command('reshard')} --out {root} --finish` adds them"
        )
    beside = _beside_tasks(root, tasks.tasks.keys() | tasks.active.keys())
    failed = [name.removesuffix(".failed") for name in beside if name.endswith(".failed")]
    if failed:
        notes.append(f"sources that failed: {_some(failed)}")
    other = [name for name in beside if not name.endswith(".failed")]
    if other:
        notes.append(f"files in {TASKS}/ without a task file, of an interrupted run: {_some(other)}")
    found = _unlisted_shards(root, tasks, shards)
    if found:
        notes.append(
            f"{len(found):,} files that no task file lists, of an interrupted run: {_some(found)}; "
            f"finish that run with `{command('reshard')}`, or remove them"
        )
    if damaged and (root / INDEX_RECORD).exists():
        notes.append(f"`{command('index')}` was not finished; `{command('index')} {root}` resumes it")
    staging = sorted(path.name for path in (root / PARTIAL).glob("*"))
    if staging:
        notes.append(
            f"{PARTIAL}/ contains files of running or interrupted processes: {_some(staging)}; "
            "the next reshard removes those of interrupted processes (on another machine: an hour after the "
            "last write)"
        )
    table = table_name(root)
    unfinished = sorted(
        name
        for name in (path.name for path in root.iterdir())
        if (name.startswith(".") and name.endswith(".partial") and name != PARTIAL)
        or (name.startswith("samples") and name.endswith(".bin") and name != table)
    )
    if unfinished:
        notes.append(f"unfinished or outdated files of an interrupted run: {_some(unfinished)}")
    return notes


def shards_on_disk(root: Path) -> Iterator[str]:
    """Names of all shards and indexes in a folder, whether or not anything lists them."""
    return (path.name for path in root.glob(f"{SHARD_PREFIX}*") if path.suffix in (".tar", ".parquet"))


def _unlisted_shards(root: Path, tasks: TaskCheck, shards: Collection[str]) -> list[str]:
    known = {shard.name for task in tasks.tasks.values() for shard in task.shards} | set(shards)
    known |= {index_path(Path(name)).name for name in known}
    active = {source_stem(name) for name in tasks.active}
    found = []
    for name in shards_on_disk(root):
        order = shard_order(f"{Path(name).stem}.tar")
        if name not in known and order.stem not in active:
            found.append((order, name))
    return [name for _, name in sorted(found)]


def _beside_tasks(root: Path, known: Collection[str]) -> list[str]:
    """Files of tasks/ whose source has no task file and is not being worked on."""
    endings = (".samples", ".claim", ".failed")
    return sorted(
        path.name for path in (root / TASKS).glob("*") if path.suffix in endings and path.stem not in known
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else "")
