"""Rebuild of indexes from the shards, and of the sample table and dataset.json. The bytes equal those that
reshard wrote if the libraries are the same.

Shards do not contain everything that a task file records: of the source only its name, of the options only
those that the stored data show (see sa1b.verify.recover, used if task files are lost). Readers may have the
directory open: every file is replaced atomically, and none is removed first. An interrupted rebuild resumes
where it stopped.
"""

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sa1b.console import command, counted
from sa1b.errors import LockedError, ManifestError, OutOfMemoryError, ShardError
from sa1b.report import bar, rate_text
from sa1b.shards import manifest
from sa1b.shards.commit import (
    dataset_claim,
    rows_of_task,
    tables_of,
    unproven_tables,
    with_rows,
    write_dataset,
)
from sa1b.shards.documents import ShardInfo, Task
from sa1b.shards.image_ids import listing
from sa1b.shards.index_file import UNREADABLE, shard_files
from sa1b.shards.manifest import DATASET, TASKS
from sa1b.shards.staging import clean_scratch, remove_leftovers
from sa1b.storage.atomic import ResumeRecord, naming_path, temporary_path
from sa1b.storage.claim import Claim, live_holders
from sa1b.storage.open import open_store
from sa1b.storage.store import Root, Store
from sa1b.verify import recover
from sa1b.verify.recover import RebuiltIndex, Recorded, check_digests, differs, rebuild_index, why_differs
from sa1b.verify.task_check import INDEX_RECORD
from sa1b.verify.verify import Died, in_batches

_CLAIM = ".index.claim"


@dataclass(slots=True)
class RebuildSummary:
    """Result of a rebuild; shards, images and masks that an index covers after it."""

    seconds: float = 0.0
    shards: int = 0
    images: int = 0
    masks: int = 0
    bytes: int = 0  # read from shards
    resumed: int = 0  # shards whose index was built before an interruption
    failed: dict[str, str] = field(default_factory=dict)  # shard -> reason why its index could not be built
    # differences from the recorded values, and values that are unknown
    notes: list[str] = field(default_factory=list)
    complete: bool = False  # the sample table and dataset.json were written

    def exit_code(self) -> int:
        """0: everything requested was rebuilt. 1: an index could not be rebuilt."""
        return 1 if self.failed else 0

    def document(self) -> dict[str, Any]:
        return {"exit_code": self.exit_code(), **asdict(self)}

    def table(self, root: Root | None) -> str:
        """Text for the terminal; `root` if a complete dataset directory was rebuilt."""
        dataset = "" if root is None else open_store(root).url(DATASET)
        lines = [f"note: {note}" for note in self.notes]
        before = f" ({self.resumed:,} before the interruption)" if self.resumed else ""
        lines += [
            f"  indexes  {self.shards:,}{before}",
            f"  images   {self.images:,}",
            f"  masks    {self.masks:,}",
            f"  bytes    {self.bytes:,} ({rate_text(self.bytes, self.seconds)})",
        ]
        lines += [f"FAILED {why}" for why in self.failed.values()]
        if root is not None and self.complete:
            lines.append(f"Complete: {dataset}")
        elif root is not None:
            lines.append(f"Not complete: {dataset} is written only if every index can be rebuilt.")
        return "\n".join(lines)


def rebuild_shards(
    shards: Sequence[Path | str], *, workers: int = 1, scratch: Path | None = None, quiet: bool = False
) -> RebuildSummary:
    """Rebuild only the indexes of these shards, each next to its tar. LockedError: see `rebuild_root`.

    The indexes contain decoded masks if the task files, dataset.json or an existing index of the folder
    record that they do, and also if none of these files exists. If an index differs from the recorded one,
    the task files and dataset.json are updated.
    """
    began = time.monotonic()
    summary = RebuildSummary()
    folders: dict[str, list[str]] = {}
    total = 0
    for shard in shards:
        folder, _, name = str(shard).rpartition("/")
        folders.setdefault(folder or ("/" if str(shard).startswith("/") else "."), []).append(name)
    with bar(0, "index", "B", quiet) as progress:
        for folder, names in folders.items():
            store = open_store(folder, scratch=scratch)
            with _exclusive(store) as (recorded, record):
                sizes = _sizes(store, names, recorded)
                store.check_scratch(sizes, workers)
                progress.total = total = total + sum(sizes)
                built = _rebuild_all(store, names, recorded, None, workers, summary, progress.update)
                if recorded.dataset is not None and any(differs(one, recorded) for one in built.values()):
                    _write_tables(store, recorded, built=built, lost={}, record=record, summary=summary)
                    summary.complete = False  # it was before
    summary.seconds = time.monotonic() - began
    return summary


def rebuild_root(
    root: Root, *, workers: int = 1, scratch: Path | None = None, quiet: bool = False
) -> RebuildSummary:
    """Rebuild every index, the sample table and dataset.json of a dataset directory. LockedError: reshard or
    another rebuild is running there.

    ManifestError: no shards in `root`, or the shards of a lost task file are incomplete. SourceError: an
    image is in two sources.
    """
    began = time.monotonic()
    summary = RebuildSummary()
    store = open_store(root, scratch=scratch)
    with _exclusive(store) as (recorded, record):
        check_digests(store, recorded, record.get(TASKS, None) or {})
        lost = recover.lost_sources(store, recorded.tasks, recorded.dataset)
        named = {name: [shard.name for shard in task.shards] for name, task in recorded.tasks.items()} | lost
        unlisted, summary.notes = recover.unlisted_sources(store, recorded)
        named |= unlisted
        if not named:
            raise manifest.no_dataset(store.root)
        shards = [shard for name in sorted(named) for shard in named[name]]
        sizes = _sizes(store, shards, recorded)
        store.check_scratch(sizes, workers)
        with bar(sum(sizes), "index", "B", quiet) as progress:
            built = _rebuild_all(store, shards, recorded, record, workers, summary, progress.update)
        added, notes = recover.addable(unlisted, built, recorded, summary.failed)
        summary.notes += notes
        if not summary.failed:
            of_lost = {name: [built[shard] for shard in lost[name]] for name in lost} | added
            _write_tables(store, recorded, built=built, lost=of_lost, record=record, summary=summary)
            record.remove()
    summary.seconds = time.monotonic() - began
    return summary


def rebuild_tables(root: Root, *, scratch: Path | None = None) -> RebuildSummary:
    """Rebuild the sample table and dataset.json from the task files and the indexes; no shard is read.

    Missing or damaged rows of a source (tasks/<source>.samples) are rebuilt from its indexes. ManifestError:
    a task file is lost or damaged. LockedError: see `rebuild_root`.
    """
    began = time.monotonic()
    summary = RebuildSummary()
    store = open_store(root, scratch=scratch)
    with _exclusive(store) as (recorded, record):
        check_digests(store, recorded, record.get(TASKS, None) or {})
        lost = sorted(recover.lost_sources(store, recorded.tasks, recorded.dataset))
        if not lost and not recorded.tasks:
            raise manifest.no_dataset(store.root)
        if lost:
            raise ManifestError(
                f"{store.url(TASKS)}: no intact task file of {', '.join(lost)}; omit --tables to "
                "rebuild from the shards"
            )
        try:
            _write_tables(store, recorded, built={}, lost={}, record=record, summary=summary)
        except UNREADABLE as error:
            names, rebuilds = command("verify", store.root), command("index", store.root)
            raise ManifestError(
                f"{store.root}: an index cannot be read ({error}); `{names}` names it, and `{rebuilds}`, "
                "without --tables, rebuilds it"
            ) from None
    summary.seconds = time.monotonic() - began
    return summary


def _write_tables(
    store: Store,
    recorded: Recorded,
    built: Mapping[str, RebuiltIndex],
    lost: dict[str, list[RebuiltIndex]],
    record: ResumeRecord,
    summary: RebuildSummary,
) -> None:
    """Update the task files, rebuild the lost ones, and write the sample table and dataset.json."""
    with dataset_claim(store):
        _refuse_activity(store)
        if manifest.readable_tasks(store)[0] != recorded.tasks:
            raise LockedError(
                f"{store.url(TASKS)}: changed meanwhile by another process; run the same command again"
            )
        tasks = {}
        for name, task in recorded.tasks.items():
            shards = [built[shard.name].info if shard.name in built else shard for shard in task.shards]
            tasks[name] = replace(task, shards=shards)
        if lost:
            inferred, notes = recover.infer_tasks(
                lost, recorded.tasks, recorded.dataset, index_runs=recorded.index_runs
            )
            summary.notes += notes
            tasks |= {task.name: with_rows(task, rows_of_task(store, task)) for task in inferred}
        # The task files differ from dataset.json until it is written.
        record.add(TASKS, None, {name: manifest.task_digest(task) for name, task in tasks.items()})
        for name, task in tasks.items():
            if recorded.tasks.get(name) != task:
                manifest.write_task(store, task)
        dataset = recorded.dataset or {}
        # A source with images of another source has a task file, but is not in the dataset.
        failed = {name: str(why) for name, why in dataset.get("failed", {}).items() if name not in lost}
        tasks = {name: task for name, task in sorted(tasks.items()) if name not in failed}
        pending = [str(name) for name in dataset.get("pending", []) if name not in tasks]
        if recorded.dataset is None:
            _refuse_loss(store, tasks)
        write_dataset(store, tasks, failed, pending)
        if record.known.keys() <= {TASKS}:
            record.remove()
        else:  # the shards that a killed rebuild of the directory has done
            record.add(TASKS, None, {})
    summary.complete = True


def _refuse_loss(store: Store, tasks: Mapping[str, Task]) -> None:
    """Without dataset.json an older sample table shows which images the directory had."""
    for name, left in unproven_tables(store, [rows for _, rows in tables_of(store, tasks).values()]).items():
        raise ManifestError(
            f"{store.url(name)}: lists {counted(len(left), 'image')} that no shard of the directory contains "
            f"({listing(left)}); restore their shards from a copy, or convert their source with "
            f"`{command('reshard')}`. To go on without these images, move this file to another folder"
        )


@contextlib.contextmanager
def _exclusive(store: Store) -> Iterator[tuple[Recorded, ResumeRecord]]:
    """Claim a directory for one rebuild, with the record of an earlier one; refuse if reshard runs there."""
    _refuse_activity(store)
    claim = Claim.take(store, _CLAIM)
    if claim is None:
        raise LockedError(f"{store.root}: being indexed by another process; wait for it or stop it")
    with claim, clean_scratch(store):
        remove_leftovers(store)
        recorded = Recorded.read(store)
        # Other versions of the libraries write other bytes: only indexes of the installed ones are kept.
        of = {"rebuild": "index", "with_runs": recorded.index_runs, "versions": manifest.versions()}
        with ResumeRecord(_record_path(store), of) as record:
            yield recorded, record


def _refuse_activity(store: Store) -> None:
    holders = live_holders(store, TASKS)
    if holders:
        listed = ", ".join(f"{name} by {holder}" for name, holder in sorted(holders.items())[:3])
        raise LockedError(
            f"{store.root}: reshard is at work on {listed}; wait for it or stop it, then run this again"
        )


def _rebuild_all(
    store: Store,
    shards: Sequence[str],
    recorded: Recorded,
    record: ResumeRecord | None,
    workers: int,
    summary: RebuildSummary,
    advance: Callable[[int], object],
) -> dict[str, RebuiltIndex]:
    """Build and commit the indexes of shards; failures go to `summary`."""
    tasks, keys = {}, {}
    for name in shards:
        info = recorded.infos.get(name)
        keys[name] = None if record is None else [store.version(name), None if info is None else info.sha256]
        done = None if record is None else record.get(name, keys[name])
        tasks[name] = (store, name, info, recorded.index_runs, done)

    def read(count: int) -> None:
        summary.bytes += count
        advance(count)

    built: dict[str, RebuiltIndex] = {}
    misplaced: dict[str, str] = {}
    by_digest = {info.sha256: name for name, info in recorded.infos.items()}
    for name, value in in_batches(_rebuild, tasks, workers=workers, advance=read):
        if isinstance(value, recover.Changed):
            summary.failed[name] = value.why
            if value.sha256 in by_digest:
                misplaced[name] = by_digest[value.sha256]
            continue
        if not isinstance(value, RebuiltIndex):
            summary.failed[name] = f"{name}: {value.why}" if isinstance(value, Died) else str(value)
            continue
        built[name] = value
        summary.shards += 1
        summary.images += value.info.images
        summary.masks += value.info.masks
        summary.resumed += value.resumed
        if record is not None and not value.resumed:
            record.add(name, keys[name], value.document())
        if differs(value, recorded):
            summary.notes.append(why_differs(name, recorded))
    if misplaced and (restored := recover.restore_names(store, misplaced, recorded)):
        for name in restored:
            summary.notes.append(f"{name} is restored from a file that had the name of another shard")
            summary.failed.pop(name, None)
        built |= _rebuild_all(store, restored, recorded, record, workers, summary, advance)
    return built


def _rebuild(
    store: Store,
    name: str,
    info: ShardInfo | None,
    with_runs: bool,
    done: dict[str, Any] | None,
    progress: Callable[[int], object],
) -> RebuiltIndex | recover.Changed | str:
    """Build and commit the index of one shard, or return why not; runs in a worker process."""
    # `done`: result of an interrupted rebuild, used if the index still has the recorded digest.
    shard, index = store.url(name), shard_files(name)[1]
    if done is not None:
        built = replace(RebuiltIndex.from_document(done), resumed=True)
        if recover.digest_of(store, index) == built.info.index_sha256:
            return built
    temporary = temporary_path(store.scratch / index)
    try:
        with store.files(name) as (tar,), naming_path(temporary):
            try:
                built = rebuild_index(tar, name, temporary, with_runs=with_runs, progress=progress)
            except ShardError as error:
                return str(error).replace(str(tar), shard)
    except MemoryError:
        raise OutOfMemoryError(
            f"{shard}: the process reached its memory limit; run with fewer --workers, or raise the limit"
        ) from None
    except FileNotFoundError:
        return (
            f"{shard}: not there; restore it from a copy, or run `{command('reshard')}` again with its source"
        )
    if info is not None and built.info.sha256 != info.sha256:
        temporary.unlink()
        verify = command("verify", store.root)
        return recover.Changed(
            built.info.sha256,
            f"{shard}: sha256 is {built.info.sha256}, {info.sha256} recorded: the shard has changed since it "
            f"was written; `{verify}` reports the damage. Restore the shard from a copy, or run "
            f"`{command('reshard')}` again with its source and --redo and the source's name",
        )
    store.commit_file(temporary, index)
    return built


def _sizes(store: Store, shards: Sequence[str], recorded: Recorded) -> list[int]:
    infos = recorded.infos
    return [infos[name].bytes if name in infos else store.size(name) or 0 for name in shards]


def _record_path(store: Store) -> Path:
    """The file that records the progress: in a folder, or in the scratch folder of a bucket."""
    if store.is_local:
        return store.scratch / INDEX_RECORD
    store.scratch.mkdir(parents=True, exist_ok=True)
    return store.scratch / f"{INDEX_RECORD}-{hashlib.sha256(store.root.encode()).hexdigest()[:16]}"
