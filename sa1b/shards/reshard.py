"""A run of ingest: many sources into one root, what is finished left alone, the rest done and counted."""

import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sa1b.shards import manifest
from sa1b.shards.ingest import Counts, Policy, ingest
from sa1b.shards.manifest import DATASET, PARTIAL, Options, Task
from sa1b.shards.source import Source, digest_of_source, discover, read_checklist
from sa1b.shards.supervisor import Failure, supervise
from sa1b.storage.publish import lock

_REPORT_SECONDS = 0.2
_STOP = {"SystematicError", "RefusedError"}  # these end the run: every other source would go the same way
_EXPECTED = _STOP | {"SourceError", "OSError", "ShardError"}
_OUT_FACTOR, _SPILL_FACTOR = 1.1, 0.3  # of a source's size: its shards; what waits when the order is random


class UsageError(Exception):
    """What was asked for cannot be done as asked; the message names the flag and the way out."""


@dataclass(slots=True)
class Summary:
    """What a run did, and what the root holds now.

    Attributes:
        seconds: of this run.
        stored_bytes: read from sources in this run.
        done, skipped: names of sources finished in this run, and found finished.
        failed: name of a source -> why it is not in the root.
        retried: name of a source -> how its process died, for those that finished later too.
        tasks: all finished sources of the root.
        complete: dataset.json and samples.bin are there and cover all of them.
        interrupted: Ctrl-C.
    """

    seconds: float = 0.0
    stored_bytes: int = 0
    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    retried: dict[str, list[str]] = field(default_factory=dict)
    tasks: dict[str, Task] = field(default_factory=dict)
    complete: bool = False
    interrupted: bool = False

    def _chosen(self) -> list[Task]:
        return [self.tasks[name] for name in self.done + self.skipped if name in self.tasks]

    def totals(self) -> dict[str, Any]:
        """Counts over the sources of this run, finished before or now."""
        tasks = self._chosen()
        refused: Counter[str] = Counter()
        doubtful: Counter[str] = Counter()
        for task in tasks:
            refused.update(task.counts["refused"])
            doubtful.update(task.counts["doubtful"])
        return {
            "sources": len(tasks),
            "members": sum(task.counts["members"] for task in tasks),
            "images": sum(task.counts["images"] for task in tasks),
            "masks": sum(task.counts["masks"] for task in tasks),
            "refused_members": sum(task.counts["refused_members"] for task in tasks),
            "shards": sum(len(task.shards) for task in tasks),
            "bytes_in": sum(task.source["size"] for task in tasks),
            "bytes_out": sum(shard.bytes + shard.index_bytes for task in tasks for shard in task.shards),
            "refused": dict(sorted(refused.items())),
            "doubtful": dict(sorted(doubtful.items())),
            "damaged_sources": {task.name: task.damage for task in tasks if task.damage},
        }

    def exit_code(self) -> int:
        """0: all in. 3: all in but what is in quarantine. 1: a source is missing. 130: interrupted."""
        if self.interrupted:
            return 130
        if self.failed:
            return 1
        totals = self.totals()
        return 3 if totals["refused"] or totals["damaged_sources"] else 0

    def document(self) -> dict[str, Any]:
        """For --json."""
        return {
            "exit_code": self.exit_code(),
            "complete": self.complete,
            "seconds": round(self.seconds, 3),
            "megabytes_per_second": round(self._rate(), 1),
            "done": self.done,
            "skipped": self.skipped,
            "failed": self.failed,
            "retried": self.retried,
            **self.totals(),
        }

    def _rate(self) -> float:
        return self.stored_bytes / 1e6 / self.seconds if self.seconds else 0.0

    def table(self, root: Path) -> str:
        """For people."""
        totals = self.totals()
        rows = [
            ("sources", f"{totals['sources']:,} ({len(self.done)} now, {len(self.skipped)} found finished)"),
            ("images", f"{totals['images']:,}"),
            ("masks", f"{totals['masks']:,}"),
            ("shards", f"{totals['shards']:,}"),
            ("bytes in", f"{totals['bytes_in']:,}"),
            ("bytes out", f"{totals['bytes_out']:,}"),
        ]
        if self.done:
            rows.append(("rate", f"{self._rate():,.1f} MB/s of source, {self.seconds:,.1f} s"))
        rows += [(f"refused: {reason}", f"{count:,} pairs") for reason, count in totals["refused"].items()]
        rows += [
            (f"doubtful: {reason}", f"{count:,} pairs, kept") for reason, count in totals["doubtful"].items()
        ]
        for name, damages in totals["damaged_sources"].items():
            rows += [
                (f"damage in {name}", f"at offset {one['offset']:,}: {one['message']}") for one in damages[:5]
            ]
            if len(damages) > 5:
                rows.append(("", f"and {len(damages) - 5} more"))
        for name, ends in self.retried.items():
            rows.append((f"retried {name}", "; ".join(ends)))
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name:<{width}}  {value}" for name, value in rows]
        used, refused = 2 * totals["images"], totals["refused_members"]
        lines.append(f"{totals['members']:,} members in = {used:,} in shards + {refused:,} in quarantine")
        if totals["refused"] or totals["damaged_sources"]:
            lines.append(f"quarantine: {root / manifest.QUARANTINE}/<source>/refused.jsonl")
        lines += [f"FAILED {name}: {why}" for name, why in self.failed.items()]
        lines.append(self._ending(root))
        return "\n".join(lines)

    def _ending(self, root: Path) -> str:
        if self.interrupted:
            return "Interrupted; nothing is broken. Run the same command again to go on."
        if self.complete:
            return f"Complete: {root / DATASET}"
        return (
            f"Not complete: {root / DATASET} is written when every source named is finished. Run the same "
            "command again to try the failed ones, or without them to finish with the others."
        )


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
        sa1b.storage.publish.LockedError: another run is at work in `root`.
    """
    began = time.monotonic()
    sources = discover(paths)
    md5 = read_checklist(checklist) if checklist else {}
    for source in sources:
        if checklist and source.path.name not in md5:
            _say(f"note: {source.path.name} is not in {checklist}: its md5 is not checked", quiet)
    root.mkdir(parents=True, exist_ok=True)
    with lock(root):
        summary = Summary(tasks=manifest.read_tasks(root))
        _check_options(root, summary.tasks, options)
        shutil.rmtree(root / PARTIAL, ignore_errors=True)
        waiting = []
        for source in sources:
            task = summary.tasks.get(source.name)
            if task is not None and _is_finished(task, source, recheck, root, quiet):
                summary.skipped.append(source.name)
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
        own = Policy(policy.stop, policy.accept, md5.get(source.path.name), policy.spill)
        tasks.append((source, root, options, own))
    seen = [Counts() for _ in sources]
    bar = tqdm(
        total=sum(source.size for source in sources),
        desc="reshard",
        unit="B",
        unit_scale=True,
        disable=quiet or not sources,
        mininterval=0.2 if sys.stderr.isatty() else 10,
        dynamic_ncols=True,
    )
    with bar:
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
            bar.set_postfix(images=now.images, masks=now.masks, refused=now.refused, refresh=False)
            bar.update(now.stored_bytes - bar.n)
            summary.stored_bytes = now.stored_bytes
    summary.done.sort()


def _task(
    source: Source, root: Path, options: Options, policy: Policy, report: Callable[[Counts], None]
) -> Counts:
    """What a worker process runs."""
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
    return failure.message if failure.kind in _EXPECTED else f"{failure.message}\n{failure.trace}"


def _finish(root: Path, summary: Summary) -> None:
    """Write dataset.json and samples.bin unless they are there and nothing changed."""
    if summary.done or not (root / DATASET).exists():
        manifest.write_dataset(root, summary.tasks)
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


def _is_finished(task: Task, source: Source, recheck: bool, root: Path, quiet: bool) -> bool:
    recorded = task.source
    if not all((root / shard.name).exists() for shard in task.shards):
        return False
    if not recheck:
        return bool(recorded["size"] == source.size and recorded["mtime_ns"] == source.mtime_ns)
    with tqdm(
        total=source.size, desc=f"recheck {source.name}", unit="B", unit_scale=True, disable=quiet
    ) as bar:
        return bool(digest_of_source(source, bar.update) == recorded["sha256"])


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
                f"{folder}: {free / 1e9:.1f} GB free, about {need / 1e9:.1f} GB needed; "
                f"name a larger disk with {flag}, or fewer sources at a time"
            )


def _say(message: str, quiet: bool) -> None:
    if not quiet:
        print(message, file=sys.stderr)
