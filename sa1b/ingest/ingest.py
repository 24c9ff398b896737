"""Ingest of one source: writes its shards, indexes, quarantine and task file.

One pass over the source writes all files below `.partial/`. The files are committed after the end of the
source, once every shard has been read back and verified. The task file is committed last. A worker process
claims its source first, and skips one that is finished.
"""

import contextlib
import ctypes
import shlex
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import cv2
import numpy as np
import pyarrow as pa

from sa1b.console import command, counted
from sa1b.errors import LockedError, NoPairError, OutOfMemoryError, SourceError, SystematicError, TableError
from sa1b.ingest.finish import record_failure
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.source_pass import Counts, SourcePass
from sa1b.ingest.tar_search import SEARCHED, Searched, state_of
from sa1b.report import bar
from sa1b.shards.commit import abort_uploads, check_clash, commit_quarantine, commit_task, task_rows
from sa1b.shards.documents import Options, Task
from sa1b.shards.index_file import shard_files
from sa1b.shards.manifest import TASKS, read_task, task_name, write_task
from sa1b.shards.sample_table import open_table
from sa1b.shards.staging import make_staging, remove_staging, remove_staging_of, staging_place
from sa1b.shards.stored import Ids, images_of, no_ids, stored_shards
from sa1b.sources.pairing import WantedPairs
from sa1b.sources.source import Source, digest_of_source
from sa1b.storage.atomic import json_bytes, naming_path
from sa1b.storage.claim import Claim, holder
from sa1b.storage.errors import StorageError, UnavailableError
from sa1b.storage.open import open_store
from sa1b.storage.store import Root, Store

__all__ = ["Counts", "Policy", "ingest", "limit_threads"]


_M_ARENA_MAX = -8  # parameter of mallopt, from glibc's malloc.h


def limit_threads() -> None:
    """Limit the threads of OpenCV and Arrow to one: a worker process uses one or two cores."""
    # All threads share one arena of glibc's malloc, because one thread frees the memory of another one.
    cv2.setNumThreads(1)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def ingest(
    source: Source,
    root: Root,
    options: Options,
    policy: Policy,
    report: Callable[[Counts], None] = lambda counts: None,
    check: Callable[[Task], None] = lambda task: None,
    *,
    replace_images: bool = False,
) -> Task:
    """Convert one source to shards of `root`, write its task file and return the task.

    A second ingest of the same source writes the same bytes. An interruption at any point leaves the dataset
    unchanged, or with files that no task file lists; the next run replaces such files.

    `report` is called with the current counts. `check` is called before the first file is committed; an
    exception from it ends the ingest, and no file is written. `replace_images`: see `commit_task`.

    Raises:
        SourceError: the md5 differs from the one in the checklist, or the source has no usable pair; or an
            image is in another source, or stored and missing now: see `check_clash` and `check_kept`.
        SystematicError: too many pairs have the same problem.
        RefusedError: a pair cannot be used, and the policy is to stop.
        OutOfMemoryError: memory is exhausted; ingest of a source takes up to 600 MB.
        OSError: the disk is full or fails; the message names the path.
    """
    # The upload of a shard to a bucket also starts after the end of the source, not when the shard is sealed.
    # Only then is it known that the source is intact (its md5 or digest), has few bad pairs, has no image of
    # another source, and is still claimed by this process. So a source that fails or is refused uploads
    # nothing, and no finished object has to be replaced or removed. The price is scratch space for all shards
    # of a source. Other workers continue to convert during the upload.
    store = open_store(root)
    parents = dict.fromkeys((staging_place(store), staging_place(store, policy.spill)))
    folders = [make_staging(folder) for folder in parents]
    staged, spill = folders[0] / source.name, folders[-1] / f"{source.name}.spill"
    staged.mkdir()
    try:
        with naming_path(store.scratch), ThreadPoolExecutor(1) as sealer:
            ingestion = SourcePass(source, staged, spill, options, policy, report=report, sealer=sealer)
            task = ingestion.run()
        check(task)
        check_clash(task, staged, store)
        with naming_path(store.scratch):
            task = commit_task(
                task, staged, store, lambda size: report(ingestion.counts), replace_images=replace_images
            )
    except MemoryError:
        raise OutOfMemoryError(
            f"{source.label}: out of memory: ingest of a source takes up to 600 MB; use fewer --workers, or "
            "raise the memory limit (ulimit -v, or the limit of the job)"
        ) from None
    except (SourceError, SystematicError):
        # The quarantine shows the user what was refused, and why. It must not replace the quarantine of an
        # earlier run whose shards are still in the dataset.
        if not store.exists(task_name(source.name)):
            commit_quarantine(source.name, staged, store)
        raise
    finally:
        for folder in folders:
            remove_staging(folder)
    return task


_REPORT_SECONDS = 0.2


def ingest_wanted(
    source: Source,
    root: Store,
    options: Options,
    policy: Policy,
    report: Callable[[Counts], None],
    check: Callable[[Task], None],
    stored: Ids,
) -> tuple[Task | None, Searched]:
    """Convert the wanted pairs of a source, and its pairs that the dataset directory has already, `stored`.

    If the source is damaged and lacks some of them, the others are stored before the error is raised. Returns
    the task, None if the source has none of the pairs, and the ids that were found, read and absent. Raises
    the errors of `ingest`, and SourceError if the source lacks a stored image.
    """
    # `ingest_wanted` makes a source of the dataset with only the wanted images of a source. Its task file has
    # no size and time of the source, so `sa1b reshard` with this source converts it completely. The digest is
    # recorded if the source was read to its end. Then tasks/<source>.searched records what the source does
    # not contain, so that the next run does not read it again for the same images. It has the size, the time
    # and a digest of the ends of the source: another download of it is read again. There is none for a source
    # with damage, which may contain what was not found.
    assert source.wanted is not None
    part = WantedPairs(np.union1d(source.wanted.ids, stored), is_block=source.wanted.is_block)

    def check_stored() -> None:
        lost = np.setdiff1d(stored, part.found(), assume_unique=True)
        if len(lost):
            raise SourceError(
                f"{source.label}: {root} has image {int(lost[0])} of a source named {source.name!r}, and "
                "this source lacks it: its content differs; use another --out, or remove the finished source "
                f"with `{command('reshard', '--out', root, '--drop', source.name)}`"
            )

    def check_all(task: Task) -> None:
        check_stored()
        check(task)

    task: Task | None = None
    try:
        task = ingest(replace(source, wanted=part), root, options, policy, report=report, check=check_all)
    except NoPairError:
        check_stored()
        root.remove(task_name(source.name, "failed"))
    searched = Searched(part.first, part.last, part.found(), part.absent())
    name = f"{TASKS}/{source.name}{SEARCHED}"
    if part.is_whole and not part.damage:
        record = {**state_of(source), "first": part.first, "last": part.last}
        root.put(name, json_bytes({**record, "absent": searched.absent.tolist()}))
    else:
        root.remove(name)
    if part.damage and (lost := len(part.ids) - len(searched.found)):
        first = part.damage[0]
        raise SourceError(
            f"{source.label}: damaged at byte {first.offset:,} ({first.message}), and the rest lacks "
            f"{counted(lost, 'wanted image')}; download it again, then run the same command"
        )
    return task, searched


def stored_ids(root: Store, task: Task | None) -> Ids:
    """The image ids of a finished source, ascending."""
    return np.empty(0, np.uint64) if task is None else task_rows(root, task)[1].image_id


def known_ids(root: Store, name: str) -> Ids:
    """The image ids of a source whose task file is not used: from its rows or else from its shards."""
    with contextlib.suppress(OSError, TableError), root.files(task_name(name, "samples")) as (path,):
        return open_table(path, check=True).image_id.copy()
    return np.unique(np.concatenate([no_ids(), *(images_of(root, tar) for tar in stored_shards(root, name))]))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a worker: the source is ingested ("done"), was already finished ("skipped"), is claimed
    by another run ("held"), or the dataset directory's store is unreachable or denies access ("stopped").
    """

    kind: Literal["done", "skipped", "held", "stopped"]
    counts: Counts  # of this pass
    note: str = ""  # details, or the error of the store
    task: Task | None = None  # finished source; None: not finished, or its task file was not changed
    searched: Searched | None = None  # if only some pairs of the source were wanted


def work_on(
    source: Source,
    root: Root,
    options: Options,
    policy: Policy,
    run: IngestRun,
    report: Callable[[Counts], None],
) -> Outcome:
    """The function of a worker process: claim a source and ingest it into the dataset directory."""
    limit_threads()
    store = open_store(root)
    try:
        return _with_claim(source, store, options, policy, run=run, report=report)
    except StorageError as error:
        if not store.contains(error.url):
            raise
        return Outcome("stopped", Counts(), str(error))


def _with_claim(
    source: Source,
    store: Store,
    options: Options,
    policy: Policy,
    run: IngestRun,
    report: Callable[[Counts], None],
) -> Outcome:
    name = task_name(source.name, "claim")
    claim = Claim.take(store, name, timeout=run.claim_timeout)
    if claim is None:
        return Outcome("held", Counts(), _held_by(store, name))
    with claim:
        if claim.previous is not None:
            remove_staging_of(claim.previous, store, policy.spill)
        abort_uploads(store, source.name)
        try:
            return _claimed(source, store, options, policy, run=run, claim=claim, report=report)
        except (LockedError, OSError):
            # An OSError concerns this machine or its disk, not the source. A run that takes over the claim
            # removes the staging folder of this process, which may have caused the error.
            if claim.is_held():
                raise
            return Outcome("held", Counts(), _held_by(store, name))
        except Exception as error:
            if isinstance(error, StorageError) and store.contains(error.url):
                # The error concerns the store, not the source. The store may be unreachable, or a run that
                # took over the claim has removed an upload of this process.
                if isinstance(error, UnavailableError) or claim.is_held():
                    raise
                return Outcome("held", Counts(), _held_by(store, name))
            record_failure(store, source.name, type(error).__name__, str(error))
            raise


def _held_by(store: Store, name: str) -> str:
    other = holder(store, name)
    path = store.url(name)
    return (
        f"another process works on ({path})" if other is None else f"{other} works on ({other.terms(path)})"
    )


def _claimed(
    source: Source,
    root: Store,
    options: Options,
    policy: Policy,
    run: IngestRun,
    claim: Claim,
    report: Callable[[Counts], None],
) -> Outcome:
    previous = None
    if source.name not in run.redo:
        with contextlib.suppress(FileNotFoundError):
            previous = read_task(root, source.name)
    reports = _Reports(report)

    def check(task: Task) -> None:
        claim.check()
        if previous is None or run.replace:
            return
        recorded, actual = previous.source["sha256"], task.source["sha256"]
        if recorded is not None and actual is not None and recorded != actual:
            raise _refused(source, previous, root)

    if source.wanted is not None:
        if previous is not None and not is_partial(previous) and missing_file(previous, root) is None:
            return Outcome("skipped", Counts())  # the dataset has all images of this source
        # Without a task file, what is left of an earlier run is read again too.
        stored = known_ids(root, source.name) if previous is None else stored_ids(root, previous)
        task, searched = ingest_wanted(source, root, options, policy, reports, check=check, stored=stored)
        return Outcome("done", reports.newest, "", task, searched)
    note = ""
    if previous is not None:
        if (missing := missing_file(previous, root)) is not None:
            note = f"{missing} is missing or truncated; {source.name} is converted again"
        elif not run.recheck and is_unchanged(previous, source, root):
            return Outcome("skipped", Counts())  # another run finished it in the meantime
        elif previous.source["sha256"] is not None and not is_partial(previous):
            if previous.source["size"] != source.size and not run.replace:
                raise _refused(source, previous, root)
            if digest_of_source(source) == previous.source["sha256"]:
                if (message := other_md5(previous, source, policy.md5, run.quiet)) is not None:
                    raise SourceError(message)
                known = {**previous.source, "mtime_ns": source.mtime_ns}
                write_task(root, replace(previous, source=known))
                if previous.source["mtime_ns"] != source.mtime_ns:
                    note = f"{source.path} has a new modification time and the same content"
                return Outcome("skipped", Counts(), note)
            if not run.replace:
                raise _refused(source, previous, root)
    task = ingest(source, root, options, policy, report=reports, check=check, replace_images=run.replace)
    return Outcome("done", reports.newest, note, task)


def other_md5(task: Task, source: Source, expected: str | None, quiet: bool) -> str | None:
    """The error of a finished source whose md5 is not the expected one; None: it is, or none is."""
    # The source is read only if its task file has no md5.
    if expected is None:
        return None
    actual = task.source["md5"]
    if actual is None:
        with bar(source.size, f"md5 of {source.name}", "B", quiet) as progress:
            actual = digest_of_source(source, progress.update, "md5")
    if actual == expected:
        return None
    return (
        f"{source.label}: already finished, but its md5 is {actual} and the checklist has {expected}; "
        "download it again and run the same command with --replace"
    )


class _Reports:
    """Passes on the newest counts, at most every _REPORT_SECONDS."""

    def __init__(self, report: Callable[[Counts], None]) -> None:
        self.newest = Counts()
        self._report, self._last = report, time.monotonic()

    def __call__(self, counts: Counts) -> None:
        self.newest = counts
        if time.monotonic() - self._last >= _REPORT_SECONDS:
            self._last = time.monotonic()
            self._report(counts)


def _refused(source: Source, previous: Task, root: Store) -> SourceError:
    size = "some of its pairs" if is_partial(previous) else f"{previous.source['size']:,} bytes"
    return SourceError(
        f"{source.label}: {root} already has a source named {source.name!r} with other content "
        f"({size}, sha256 {str(previous.source['sha256'])[:12]}…; this source has "
        f"{source.size:,} bytes); to replace the finished source, add --replace, which removes its images "
        f"that this source lacks; to keep both, add --rename {shlex.quote(f'{source.path}=NEW_NAME')}"
    )


def is_partial(task: Task) -> bool:
    """Whether a finished source may lack pairs, because only some pairs or shards of it were taken."""
    # The task file of a source that `sa1b index` has rebuilt from shards looks the same.
    return task.source["size"] is None


def is_unchanged(
    task: Task, source: Source, root: Root, sizes: Callable[[str], int | None] | None = None
) -> bool:
    """Whether a source is finished, by the sizes and modification times of its files."""
    known = (task.source["size"], task.source["mtime_ns"])
    return known == (source.size, source.mtime_ns) and missing_file(task, root, sizes) is None


def missing_file(task: Task, root: Root, sizes: Callable[[str], int | None] | None = None) -> str | None:
    """The first file of a finished source that is missing or of another size; `sizes`: bytes by name."""
    store = open_store(root)
    sizes = sizes or store.size
    for shard in task.shards:
        for name, size in zip(shard_files(shard.name), (shard.bytes, shard.index_bytes), strict=True):
            if sizes(name) != size:
                return store.url(name)
    return None
