"""A run of ingest: converts many sources to one dataset directory and skips the finished ones.

Any number of runs may write to the same directory at the same time, on one machine or many. A run claims each
source before it processes the source, so that the runs share the sources. The last run to end finishes the
dataset.
"""

import errno
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path

from sa1b.console import show
from sa1b.ingest.finish import finish, read_failed, record_expected, record_failure
from sa1b.ingest.ingest import Outcome, is_unchanged, other_md5, work_on
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.source_pass import Counts
from sa1b.ingest.start_checks import (
    check_names,
    check_reading,
    check_space,
    fix_options,
    release_options,
    start,
)
from sa1b.ingest.summary import ReshardSummary
from sa1b.report import bar
from sa1b.shards.commit import abort_abandoned_uploads
from sa1b.shards.documents import Options
from sa1b.shards.manifest import known_tasks, task_name
from sa1b.shards.staging import remove_leftovers, remove_local_leftovers
from sa1b.sources.remote_sources import remote_sources
from sa1b.sources.source import Source, read_checklist
from sa1b.storage.claim import observe
from sa1b.storage.errors import StorageError
from sa1b.storage.open import open_store
from sa1b.storage.store import Root, Store
from sa1b.workers import Supervise, supervise

_POLL_SECONDS = 1.0  # between two checks of the sources that other runs have claimed
_STOP = {"SystematicError", "RefusedError"}  # these end the run: the other sources would fail alike
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


def reshard(
    paths: Sequence[Path],
    root: Root,
    options: Options,
    policy: Policy,
    run: IngestRun | None = None,
    supervise: Supervise = supervise,
) -> ReshardSummary:
    """Convert every source to shards of the dataset directory `root`, then finish the dataset.

    A folder is created if it is missing. Workers are by default processes of this machine. SourceError or
    UsageError: an argument or a source is not valid. StorageError: the store of the dataset directory is
    unreachable or denies access. No source was processed then; a run that has started ends with `store_error`
    in the summary instead.
    """
    run = run or IngestRun()
    began = time.monotonic()
    store = open_store(root)
    digests = {} if run.checklist is None else read_checklist(run.checklist)
    begun = start(paths, store, options, policy, run)
    tasks, own_names = begun.tasks, begun.own_names
    # A task file that `sa1b index` rebuilt from the shards has no size.
    known = {name: task for name, task in tasks.items() if task.source["size"] is not None}
    finished = (
        {}
        if run.recheck
        else {name: (task.source["size"], task.source["mtime_ns"]) for name, task in known.items()}
    )
    links = {name: begun.remote[name] for name in own_names if name in begun.remote}
    linked, broken = remote_sources(links, finished, formats=run.formats)
    of_links = {source.name: source for source in linked}
    sources = [begun.local.get(name) or of_links[name] for name in own_names if name not in broken]
    md5 = _expected_md5(sources, digests, run)
    check_names(store, tasks, sources)
    summary = ReshardSummary(own_names, run.task, begun.discovered.not_taken, finishes=run.finish)
    for name, why in broken.items():
        summary.failed[name] = why
        record_failure(store, name, "SourceError", why)
    if run.task is not None:
        record_expected(store, begun.names)
    sizes = store.listed_size()
    waiting = []
    for source in sources:
        task, expected = tasks.get(source.name), md5.get(source.name)
        if task is not None and not run.recheck and is_unchanged(task, source, store, sizes):
            summary.skipped.append(source.name)
            if (message := other_md5(task, source, expected, run.quiet)) is not None:
                summary.failed[source.name] = message
        else:
            waiting.append(source)
    checked = waiting if run.redo else sources
    if run.replace:  # a finished source that has not changed is not converted again
        checked = [source for source in checked if source not in waiting]
    check_reading(store, tasks, checked, policy, ", or add --redo {name} --replace to change it")
    if run.space_check:
        check_space(waiting, store, options, policy.spill, run.workers)
    if waiting:
        fix_options(store, tasks, options)
    summary.tasks = tasks
    try:
        work_through(waiting, store, options, policy, md5=md5, run=run, summary=summary, supervise=supervise)
        if not summary.disk_full and not summary.store_error and _finishes(run, store, begun.names):
            summary.end(finish(store, begun.names))
    except KeyboardInterrupt:
        summary.interrupted = True
    except StorageError as error:
        summary.store_error = str(error)
    finally:
        remove_local_leftovers(store, policy.spill)
        if not summary.store_error:  # otherwise every operation would wait until the deadline
            remove_leftovers(store, policy.spill)
            if summary.interrupted:
                abort_abandoned_uploads(store, [source.name for source in waiting])
            release_options(store)
    if not summary.store_error:
        summary.tasks = known_tasks(store)
    _check_accept(policy, summary, run.quiet)
    summary.seconds = time.monotonic() - began
    return summary


def work_through(
    sources: list[Source],
    store: Store,
    options: Options,
    policy: Policy,
    md5: dict[str, str],
    run: IngestRun,
    summary: ReshardSummary,
    supervise: Supervise,
) -> None:
    """Ingest sources, and wait for those that other runs have claimed; results go into the summary."""
    totals, earlier = Counts(), summary.stored_bytes
    announced: set[str] = set()
    total = sum(source.size for source in sources)
    name = "fetch" if any(source.wanted is not None for source in sources) else "reshard"
    with bar(total, name, "B", run.quiet or not sources) as progress:
        while sources:
            held: dict[str, str] = {}
            jobs = [
                (source, store, options, replace(policy, md5=md5.get(source.name)), run) for source in sources
            ]
            seen = [Counts()] * len(sources)
            for event in supervise(work_on, jobs, workers=run.workers, stall_timeout=run.stall_timeout):
                name = sources[event.task].name
                counts = None
                if event.kind == "progress":
                    counts = event.value
                elif event.kind == "done":
                    counts = event.value.counts
                    if event.value.kind == "stopped":
                        summary.store_error = summary.failed[name] = event.value.note
                        sources = []
                        break
                    _take(event.value, name, held, summary, run.quiet)
                elif event.kind == "failed":
                    why, trace = event.value.message, event.value.trace
                    summary.failed[name] = why if event.value.expected else f"{why}\n{trace}"
                    if event.value.kind in _STOP:
                        sources = []
                        break
                    if event.value.errno in _DISK_FULL:
                        summary.disk_full = True
                        sources = []
                        break
                else:  # the worker process ended without a result
                    counts = Counts()
                    summary.retried.setdefault(name, []).append(event.value)
                    if event.kind == "lost":
                        times = len(summary.retried[name])
                        summary.failed[name] = f"the worker process ended {times} times: {event.value}"
                        record_failure(store, name, "lost", summary.failed[name])
                if counts is not None:
                    before, seen[event.task] = seen[event.task], counts
                    all_counts = zip(astuple(totals), astuple(counts), astuple(before), strict=True)
                    totals = Counts(*(total + now - old for total, now, old in all_counts))
                    progress.set_postfix(
                        images=totals.images, masks=totals.masks, refused=totals.refused, refresh=False
                    )
                    if event.kind == "done" and sources[event.task].wanted is not None:
                        progress.total -= sources[event.task].size - counts.stored_bytes
                    progress.update(totals.stored_bytes - progress.n)
            summary.stored_bytes = earlier + totals.stored_bytes
            sources = [source for source in sources if source.name in held]
            for name in sorted(held.keys() - announced):
                _say(f"note: waiting for {name}, which {held[name]}", run.quiet)
            announced |= held.keys()
            if sources:
                _wait_for_change(store, sources)
    summary.done.sort()
    summary.skipped.sort()


def _finishes(run: IngestRun, store: Store, named: Sequence[str]) -> bool:
    """Whether this run finishes the dataset: the only run does, and of several the one that ends last."""
    if run.task is None:
        return True
    return run.finish and not set(named) - known_tasks(store).keys() - read_failed(store).keys()


def _take(outcome: Outcome, name: str, held: dict[str, str], summary: ReshardSummary, quiet: bool) -> None:
    if outcome.kind == "held":
        held[name] = outcome.note
    else:
        (summary.done if outcome.kind == "done" else summary.skipped).append(name)
        if outcome.task is not None:
            summary.tasks[name] = outcome.task
        if outcome.searched is not None:
            summary.searched[name] = outcome.searched
        if outcome.note:
            _say(f"note: {outcome.note}", quiet)


def _wait_for_change(store: Store, sources: list[Source]) -> None:
    """Return when one of the sources has no live claim any more."""
    while True:
        time.sleep(_POLL_SECONDS)
        for source in sources:
            claimed = observe(store, task_name(source.name, "claim"))
            if claimed is None or not claimed.is_live():
                return


def _expected_md5(sources: list[Source], listed: Mapping[str, str], run: IngestRun) -> dict[str, str]:
    """Source name -> md5 that the checklist has for the name of its file."""
    if run.checklist is None:
        return {}
    for source in sources:
        if source.path.name not in listed:
            _say(f"note: {source.path.name} is not in {run.checklist}; its md5 is not checked", run.quiet)
    return {
        source.name: listed[source.path.name]
        for source in sources
        if source.kind == "tar" and source.path.name in listed
    }


def _check_accept(policy: Policy, summary: ReshardSummary, quiet: bool) -> None:
    totals = summary.totals()
    seen = totals["refused"].keys() | totals["warnings"].keys()
    for reason in sorted(policy.accept - seen if not summary.failed else ()):
        _say(f"note: --accept {reason}: no pair has this problem; check the spelling", quiet)


def _say(message: str, quiet: bool) -> None:
    if not quiet:
        show(message, sys.stderr)
