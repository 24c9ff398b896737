"""A dataset directory of the wanted images only: the sources that contain them are found and read.

Which tar contains an image is not known, see sa1b.ingest.tar_search. The sources are read in passes: each
pass reads the sources that may contain a missing image, several at a time, each only as far as needed, see
sa1b.sources.pairing. The next pass looks for the images that are still missing.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sa1b.console import counted
from sa1b.ingest.finish import finish, record_failure
from sa1b.ingest.ingest import is_partial, known_ids, missing_file, stored_ids
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.reshard import work_through
from sa1b.ingest.start_checks import (
    check_names,
    check_reading,
    check_space,
    fix_options,
    release_options,
    start,
)
from sa1b.ingest.summary import AGAIN, ReshardSummary
from sa1b.ingest.tar_search import Search, Searched, homes_of, read_searched
from sa1b.report import failed_lines, first_names, rate_text
from sa1b.shards.documents import Options
from sa1b.shards.file_names import SoughtNames
from sa1b.shards.locate import read_rows
from sa1b.shards.manifest import DATASET, known_tasks
from sa1b.shards.staging import remove_leftovers, remove_local_leftovers
from sa1b.shards.stored import Ids, no_ids
from sa1b.sources.pairing import IDS_PER_TAR, WantedPairs, tar_number
from sa1b.sources.remote_sources import remote_sources
from sa1b.sources.source import Source
from sa1b.sources.stored_file import Link
from sa1b.storage.errors import StorageError
from sa1b.storage.open import open_store
from sa1b.storage.store import Root, Store
from sa1b.workers import supervise


@dataclass(slots=True, eq=False)
class FetchSummary:
    """The results of a run; counts are of wanted images."""

    root: str
    wanted: int
    sources: int  # number that could be read
    before: int = 0  # stored before the run
    stored: int = 0  # stored now
    refused: Ids = field(default_factory=no_ids)  # found, and cannot be used
    missing: Ids = field(default_factory=no_ids)  # in no source that was read, or their source failed
    names: dict[int, str] = field(default_factory=dict)  # of images that were named by their files
    # sources read and failed, and the end of the run
    work: ReshardSummary = field(default_factory=ReshardSummary)

    def exit_code(self) -> int:
        """0: every wanted image is stored; 1: a source or the store failed; 3: an image is missing or
        refused; 130: interrupted.
        """
        if self.work.interrupted:
            return 130
        if self.work.failed or self.work.store_error or self.work.disk_full:
            return 1
        return 3 if len(self.missing) or len(self.refused) else 0

    def document(self) -> dict[str, Any]:
        return {
            "exit_code": self.exit_code(),
            "wanted": self.wanted,
            "stored_before": self.before,
            "stored": self.stored,
            "refused": self._named(self.refused),
            "missing": self._named(self.missing),
            "sources": self.sources,
            "read": self.work.done,
            "bytes_read": self.work.stored_bytes,
            "failed": self.work.failed,
            "store_error": self.work.store_error,
            "seconds": round(self.work.seconds, 3),
        }

    def _named(self, ids: Ids) -> list[int | str]:
        return [self.names.get(image_id, image_id) for image_id in ids.tolist()]

    def table(self) -> str:
        lines = [
            f"  wanted   {counted(self.wanted, 'image')}",
            f"  stored   {self.stored:,} ({self.stored - self.before:,} now, {self.before:,} before)",
            f"  sources  {len(self.work.done):,} of {self.sources:,} read",
            f"  bytes    {self.work.stored_bytes:,} ({rate_text(self.work.stored_bytes, self.work.seconds)})",
        ]
        if len(self.refused):
            names = [name for name, task in self.work.tasks.items() if task.counts["refused"]]
            paths = [f"{self.root}/quarantine/{name}/refused.jsonl" for name in (*names, *self.work.failed)]
            lines.append(f"refused: {first_names(self._named(self.refused), 5)}; see {first_names(paths)}")
        if len(self.missing):
            what = "not found so far" if self.work.interrupted else "missing"
            lines.append(f"{what}: {first_names(self._named(self.missing), 5)}; --json prints all of them")
        return "\n".join([*lines, *failed_lines(self.work.failed), self._ending()])

    def _ending(self) -> str:
        if stopped := self.work.stopped():
            return stopped
        if not self.stored:
            return f"None of the images is stored: {self.root}/{DATASET} was not written."
        if self.work.failed:
            return f"Not all sources were read: {self.root}/{DATASET} can be read; {AGAIN}."
        return f"Complete: {self.root}/{DATASET}"


def fetch(
    ids: Ids,
    paths: Sequence[Path],
    root: Root,
    options: Options,
    policy: Policy,
    run: IngestRun,
    *,
    index: str | None = None,
    everywhere: bool = False,
    names: SoughtNames | None = None,
) -> FetchSummary:
    """Store the wanted pairs in the dataset directory `root`; the pairs that it already has are kept.

    A source whose task file has a size is complete, and is not read. `ids` are ascending, each once. `index`
    is a dataset directory, index or task file of the same sources, which determines the source of each image
    that it contains. `everywhere`: read sources to their end, and for images that are not found, read all
    sources. `names`: file names that some of the ids represent. Raises the errors of
    `sa1b.ingest.reshard.reshard`.
    """
    began = time.monotonic()
    store = open_store(root)
    rows = None if index is None else read_rows(index)
    begun = start(paths, store, options, policy, run)
    local, remote, tasks = begun.local, begun.remote, begun.tasks
    homes = None
    if rows is not None:
        homes = homes_of(begun.names, rows.image_id, np.array(rows.sources, object)[rows.shard])
    sought = names or SoughtNames(frozenset())
    summary = FetchSummary(store.root, len(ids), len(begun.names), names=sought.names)
    work = summary.work = ReshardSummary(sources=[], tasks=tasks)
    search = Search(begun.names, homes, everywhere=everywhere)
    if not everywhere:
        search.learn(read_searched(store, partial(_source_now, local, remote)))
    sizes = store.listed_size()
    gone = {name: path for name, task in tasks.items() if (path := missing_file(task, store, sizes))}
    stored = {name: stored_ids(store, task) for name, task in tasks.items()}
    search.learn(
        {
            name: Searched(int(own_ids[0]), int(own_ids[-1]), has_all=True)
            for name, own_ids in stored.items()
            if not is_partial(tasks[name]) and name not in gone
        }
    )
    again = sorted({*run.redo, *gone.keys() & set(begun.names)})
    for name in run.redo:
        stored[name] = known_ids(store, name)
    for name in gone.keys() - set(begun.names):
        work.failed[name] = f"{gone[name]} is missing or truncated; add the tar of {name} to read it again"
    wanted = sought.all_ids(ids)
    missing = np.setdiff1d(wanted, _joined(own_ids for name, own_ids in stored.items() if name not in again))
    summary.before = len(np.intersect1d(ids, sought.representatives(_joined(stored.values()))))
    missing = np.union1d(missing, _joined(stored[name] for name in again))
    if len(missing):
        fix_options(store, tasks, options)
    checked = not run.space_check
    try:
        while names_now := again or search.next_sources(missing):
            again = []
            sources = _sources(
                names_now, local, remote, missing, store, work, run, sought, everywhere=everywhere
            )
            check_names(store, tasks, sources)
            check_reading(store, tasks, sources, policy, "")
            if not checked and sources:
                checked = True
                share = min(1.0, len(missing) / (IDS_PER_TAR * len(sources)))
                check_space(sources, store, options, spill=policy.spill, workers=run.workers, fraction=share)
            work_through(sources, store, options, policy, md5={}, run=run, summary=work, supervise=supervise)
            for name in names_now:
                searched = work.searched.pop(name, None)
                search.record(name, searched)
                if searched is not None:
                    missing = np.setdiff1d(missing, searched.found, assume_unique=True)
            ended = {*work.done, *work.skipped, *work.failed}
            if work.disk_full or work.store_error or not set(names_now) <= ended:
                break  # the other sources would fail alike
        if not work.disk_full and not work.store_error:
            work.finished = finish(store)
    except KeyboardInterrupt:
        work.interrupted = True
    except StorageError as error:
        if not store.contains(error.url):
            raise
        work.store_error = str(error)
    finally:
        remove_local_leftovers(store, policy.spill)
        if not work.store_error:  # otherwise every operation would wait until the deadline
            remove_leftovers(store, policy.spill)
            release_options(store)
    if not work.store_error:
        _count(summary, ids, missing, store, sought)
    work.seconds = time.monotonic() - began
    return summary


def _sources(
    names: Sequence[str],
    local: dict[str, Source],
    remote: dict[str, Link],
    missing: Ids,
    store: Store,
    work: ReshardSummary,
    run: IngestRun,
    sought: SoughtNames,
    *,
    everywhere: bool,
) -> list[Source]:
    """The sources of these names, which are read for the missing images; broken links count as failed."""
    linked, broken = remote_sources(
        {name: remote[name] for name in names if name in remote}, formats=run.formats
    )
    for name, why in broken.items():
        work.failed[name] = why
        record_failure(store, name, "SourceError", why)
    of_links = {source.name: source for source in linked}
    chosen = [local.get(name) or of_links[name] for name in names if name not in broken]
    limited = []
    for source in chosen:
        is_block = source.kind == "tar" and tar_number(source.name) is not None and not everywhere
        wanted = WantedPairs(sought.of_source(missing, source.name), is_block=is_block)
        limited.append(replace(source, wanted=wanted))
    return limited


def _count(summary: FetchSummary, ids: Ids, missing: Ids, store: Store, sought: SoughtNames) -> None:
    stored = _joined(stored_ids(store, task) for task in known_tasks(store).values())
    left = np.setdiff1d(ids, sought.representatives(stored))
    summary.stored = len(ids) - len(left)
    representatives = sought.representatives(np.setdiff1d(sought.all_ids(left), missing, assume_unique=True))
    summary.refused = np.intersect1d(left, representatives, assume_unique=True)
    summary.missing = np.setdiff1d(left, representatives, assume_unique=True)


def _source_now(local: dict[str, Source], remote: dict[str, Link], name: str) -> Source | None:
    """A source with its size and time now; None: it is not among the sources, or cannot be reached."""
    if name in local or name not in remote:
        return local.get(name)
    return next(iter(remote_sources({name: remote[name]})[0]), None)


def _joined(parts: Any) -> Ids:
    return np.unique(np.concatenate([no_ids(), *parts]))
