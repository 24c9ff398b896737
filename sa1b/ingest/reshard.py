"""A run of ingest: many sources into one root, what is finished left alone, the rest done and counted."""

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from sa1b.errors import SourceError, UsageError
from sa1b.ingest.ingest import Counts, Policy, ingest, limit_threads
from sa1b.ingest.summary import Summary
from sa1b.names import source_stem
from sa1b.progress import bar
from sa1b.shards import manifest
from sa1b.shards.commit import write_dataset
from sa1b.shards.manifest import DATASET, PARTIAL, Options, Task
from sa1b.shards.shard import index_path
from sa1b.sources.discovery import discover
from sa1b.sources.source import Source, digest_of_source, read_checklist
from sa1b.storage.publish import lock
from sa1b.workers import Failure, supervise

_REPORT_SECONDS = 0.2
_STOP = {"SystematicError", "RefusedError"}  # these end the run: every other source would go the same way
_OUT_FACTOR, _SPILL_FACTOR = 1.1, 0.3  # of a source's size: its shards; what waits when the order is random


def reshard(
    paths: Sequence[Path],
    root: Path,
    options: Options,
    policy: Policy,
    *,
    workers: int = 1,
    checklist: Path | None = None,
    recheck: bool = False,
    quiet: bool = False,
) -> Summary:
    """Bring every source into `root`; see tools/reshard.py for the meaning of the parameters.

    Raises:
        SourceError, UsageError: nothing was done; the message says what to change.
        sa1b.storage.LockedError: another run is at work in `root`.
    """
    began = time.monotonic()
    own = [path for path in (root, checklist, policy.spill) if path is not None]
    sources = discover(paths, skip=own).sources
    listed = read_checklist(checklist) if checklist else {}
    md5 = {
        one.name: listed[one.path.name] for one in sources if one.kind == "tar" and one.path.name in listed
    }
    for source in sources:
        if checklist and source.path.name not in listed:
            _say(f"note: {source.path.name} is not in {checklist}: its md5 is not checked", quiet)
    root.mkdir(parents=True, exist_ok=True)
    with lock(root):
        summary = Summary(tasks=manifest.read_tasks(root))
        _check_options(root, summary.tasks, options)
        _check_names(root, summary.tasks, sources)
        shutil.rmtree(root / PARTIAL, ignore_errors=True)
        waiting = []
        for source in sources:
            task = summary.tasks.get(source.name)
            expected = md5.get(source.name)
            if task is not None and _is_finished(task, source, recheck, root, quiet):
                summary.skipped.append(source.name)
                if (found := _other_md5(task, source, expected, quiet)) is not None:
                    summary.failed[source.name] = (
                        f"{source.path}: finished before, but its md5 is {found} and the checklist says "
                        f"{expected}; download it again and run the same command"
                    )
            else:
                waiting.append(source)
        _check_space(waiting, root, policy.spill or root, workers)
        try:
            _run(waiting, root, options, policy, md5, workers, summary, quiet)
            summary.tasks = manifest.read_tasks(root)
            if not summary.failed:
                _finish(root, summary)
        except KeyboardInterrupt:
            summary.interrupted = True
            summary.tasks = manifest.read_tasks(root)
        finally:
            shutil.rmtree(root / PARTIAL, ignore_errors=True)
            if policy.spill is not None:
                for source in waiting:
                    shutil.rmtree(policy.spill / f"{source.name}.spill", ignore_errors=True)
    seen = summary.totals()["refused"].keys() | summary.totals()["doubtful"].keys()
    for reason in sorted(policy.accept - seen if not summary.failed else ()):
        _say(f"note: no pair has the problem {reason!r} that --accept names; is it spelled right?", quiet)
    summary.seconds = time.monotonic() - began
    return summary


def _run(
    sources: list[Source],
    root: Path,
    options: Options,
    policy: Policy,
    md5: dict[str, str],
    workers: int,
    summary: Summary,
    quiet: bool,
) -> None:
    tasks = []
    for source in sources:
        tasks.append((source, root, options, replace(policy, md5=md5.get(source.name))))
    seen = [Counts() for _ in sources]
    total = sum(source.size for source in sources)
    with bar(total, "reshard", "B", quiet or not sources) as progress:
        for event in supervise(_task, tasks, workers=workers):
            name = sources[event.task].name
            if event.kind in ("progress", "done"):
                seen[event.task] = event.value
            if event.kind == "done":
                summary.done.append(name)
            elif event.kind == "failed":
                summary.failed[name] = _why(event.value)
                if event.value.kind in _STOP:
                    break
            elif event.kind in ("died", "lost"):
                seen[event.task] = Counts()
                summary.retried.setdefault(name, []).append(event.value)
                if event.kind == "lost":
                    summary.failed[name] = (
                        f"its process died {len(summary.retried[name])} times: {event.value}"
                    )
            totals = [sum(column) for column in zip(*(asdict(one).values() for one in seen), strict=True)]
            now = Counts(*totals)
            progress.set_postfix(images=now.images, masks=now.masks, refused=now.refused, refresh=False)
            progress.update(now.stored_bytes - progress.n)
            summary.stored_bytes = now.stored_bytes
    summary.done.sort()


def _task(
    source: Source, root: Path, options: Options, policy: Policy, report: Callable[[Counts], None]
) -> Counts:
    """What a worker process runs."""
    limit_threads()
    last = time.monotonic()
    newest = Counts()

    def throttled(counts: Counts) -> None:
        nonlocal last, newest
        newest = counts
        if time.monotonic() - last >= _REPORT_SECONDS:
            last = time.monotonic()
            report(counts)

    ingest(source, root, options, policy, throttled)
    return newest


def _why(failure: Failure) -> str:
    return failure.message if failure.expected else f"{failure.message}\n{failure.trace}"


def _finish(root: Path, summary: Summary) -> None:
    """Write dataset.json and samples.bin unless they are there and nothing changed."""
    try:
        if summary.done or not manifest.is_complete(root, summary.tasks):
            write_dataset(root, summary.tasks)
    except SourceError as error:
        summary.failed[DATASET] = str(error)
    else:
        summary.complete = True


def _check_options(root: Path, tasks: dict[str, Task], options: Options) -> None:
    for task in tasks.values():
        recorded, asked = task.options.flags(), options.flags()
        for name in recorded:
            if recorded[name] != asked[name]:
                raise UsageError(
                    f"{root} was made with {recorded[name]}, this run says {asked[name]}; "
                    "all shards of a root are alike: use the same flags or another --out"
                )


def _check_names(root: Path, tasks: dict[str, Task], sources: list[Source]) -> None:
    taken = {source_stem(name): name for name in tasks}
    for source in sources:
        other = taken.get(source_stem(source.name), source.name)
        if other != source.name:
            raise UsageError(
                f"{source.path}: {root} holds a source named {other!r} already, and the shards of both would "
                "have the same names; rename it or use another --out"
            )


def _is_finished(task: Task, source: Source, recheck: bool, root: Path, quiet: bool) -> bool:
    recorded = task.source
    for shard in task.shards:
        tar = root / shard.name
        for path, size in ((tar, shard.bytes), (index_path(tar), shard.index_bytes)):
            if not path.exists() or path.stat().st_size != size:
                _say(f"note: {path} is missing or cut off; {source.name} is done again", quiet)
                return False
    if not task.shards:
        return False
    if not recheck:
        return bool(recorded["size"] == source.size and recorded["mtime_ns"] == source.mtime_ns)
    with bar(source.size, f"recheck {source.name}", "B", quiet) as progress:
        return bool(digest_of_source(source, progress.update) == recorded["sha256"])


def _check_space(sources: list[Source], root: Path, spill: Path, workers: int) -> None:
    """Refuse before starting what cannot fit."""
    if not sources:
        return
    spill.mkdir(parents=True, exist_ok=True)
    out = int(_OUT_FACTOR * sum(source.size for source in sources))
    waits = int(
        _SPILL_FACTOR
        * sum(sorted((one.size for one in sources if one.kind == "tar"), reverse=True)[:workers])
    )
    same = root.stat().st_dev == spill.stat().st_dev
    for folder, need, flag in ((root, out + waits * same, "--out"), (spill, waits, "--spill")):
        free = shutil.disk_usage(folder).free
        if free < need:
            raise UsageError(
                f"{folder}: {free / 1e6:,.0f} MB free, about {need / 1e6:,.1f} MB needed; "
                f"name a larger disk with {flag}, or fewer sources at a time"
            )


def _other_md5(task: Task, source: Source, expected: str | None, quiet: bool) -> str | None:
    """The md5 of a finished source if it is not the expected one; read again only if it was not recorded."""
    if expected is None:
        return None
    found = task.source["md5"]
    if found is None:
        with bar(source.size, f"md5 of {source.name}", "B", quiet) as progress:
            found = digest_of_source(source, progress.update, "md5")
    return None if found == expected else str(found)


def _say(message: str, quiet: bool) -> None:
    if not quiet:
        print(message, file=sys.stderr)
