"""The work of a worker process on one source: claim the source, check whether it is finished, ingest it."""

import contextlib
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from sa1b.errors import LockedError, SourceError
from sa1b.ingest.finish import record_failure
from sa1b.ingest.ingest import ingest, limit_threads
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.search import Searched, ingest_wanted, known_ids, stored_ids
from sa1b.ingest.source_pass import Counts
from sa1b.report import bar
from sa1b.shards.commit import abort_uploads, shard_files
from sa1b.shards.documents import Options, Task
from sa1b.shards.manifest import read_task, task_name, write_task
from sa1b.shards.staging import remove_staging_of
from sa1b.sources.source import Source, digest_of_source
from sa1b.storage.claim import Claim, holder
from sa1b.storage.errors import StorageError, UnavailableError
from sa1b.storage.open import open_store
from sa1b.storage.store import Root, Store

_REPORT_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a worker: the source is ingested ("done"), was already finished ("skipped"), is claimed
    by another run ("held"), or the dataset directory's store is unreachable or denies access ("stopped").
    """

    kind: Literal["done", "skipped", "held", "stopped"]
    counts: Counts  # of this pass
    note: str = ""  # details, or the error of the store
    task: Task | None = None  # finished source; None: not finished, or its task file was not changed
    searched: Searched | None = None  # of a source of which only some pairs were wanted


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
        return _with_claim(source, store, options, policy, run, report)
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
            return _claimed(source, store, options, policy, run, claim, report)
        except (LockedError, OSError):
            # An OSError concerns this machine or its disk, not the source. A run that takes over the claim
            # removes the staging folder of this process, which may have caused the error.
            if claim.is_held():
                raise
            return Outcome("held", Counts(), _held_by(store, name))
        except Exception as error:
            if isinstance(error, StorageError) and store.contains(error.url):
                # Concerns the store, not the source. The store may be unreachable, or a run that took over
                # the claim has removed an upload of this process.
                if isinstance(error, UnavailableError) or claim.is_held():
                    raise
                return Outcome("held", Counts(), _held_by(store, name))
            record_failure(store, source.name, type(error).__name__, str(error))
            raise


def _held_by(store: Store, name: str) -> str:
    found = holder(store, name)
    path = store.url(name)
    return (
        f"another process works on ({path})" if found is None else f"{found} works on ({found.terms(path)})"
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
        recorded, found = previous.source["sha256"], task.source["sha256"]
        if recorded is not None and found is not None and recorded != found:
            raise _refused(source, previous, root)

    if source.wanted is not None:
        if previous is not None and not is_partial(previous) and missing_file(previous, root) is None:
            return Outcome("skipped", Counts())  # the dataset has all images of this source
        # Without a task file, what is left of an earlier run is read again too.
        stored = known_ids(root, source.name) if previous is None else stored_ids(root, previous)
        task, searched = ingest_wanted(source, root, options, policy, reports, check, stored)
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
                if (found := other_md5(previous, source, policy.md5, run.quiet)) is not None:
                    raise SourceError(found)
                known = {**previous.source, "mtime_ns": source.mtime_ns}
                write_task(root, replace(previous, source=known))
                if previous.source["mtime_ns"] != source.mtime_ns:
                    note = f"{source.path} has a new modification time and the same content"
                return Outcome("skipped", Counts(), note)
            if not run.replace:
                raise _refused(source, previous, root)
    task = ingest(source, root, options, policy, reports, check, replace_images=run.replace)
    return Outcome("done", reports.newest, note, task)


def other_md5(task: Task, source: Source, expected: str | None, quiet: bool) -> str | None:
    """The error of a finished source whose md5 is not the expected one; None: it is, or none is."""
    # The source is read only if its task file has no md5.
    if expected is None:
        return None
    found = task.source["md5"]
    if found is None:
        with bar(source.size, f"md5 of {source.name}", "B", quiet) as progress:
            found = digest_of_source(source, progress.update, "md5")
    if found == expected:
        return None
    return (
        f"{source.label}: already finished, but its md5 is {found} and the checklist has {expected}; "
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
        f"{source.size:,} bytes); to replace the finished source, add --replace; to keep both, add "
        f"--rename {shlex.quote(f'{source.path}=NEW_NAME')}"
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
