"""Summary of a run of ingest, as a table, as JSON and as an exit code."""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sa1b.console import command, counted
from sa1b.ingest.finish import Finished
from sa1b.ingest.tar_search import Searched
from sa1b.report import fact_lines, first_lines, first_names
from sa1b.shards.documents import Task
from sa1b.shards.manifest import DATASET, QUARANTINE, READING
from sa1b.shards.quarantine import REFUSED, WARNINGS, read_lines
from sa1b.sources.discovery import NotTaken
from sa1b.storage.errors import StorageError
from sa1b.storage.open import open_store
from sa1b.storage.store import Root, Store

AGAIN = "run the same command again to resume"
_LISTED = 20  # files in the table that were not taken


@dataclass(slots=True)
class ReshardSummary:
    """The results of a run, and the contents of the dataset directory after it. Sources are names."""

    sources: list[str] = field(default_factory=list)  # of this run
    task: tuple[int, int] | None = None  # (I, N) of a run with --task
    # files and folders that are not sources, with the reason
    not_taken: list[NotTaken] = field(default_factory=list)
    seconds: float = 0.0
    stored_bytes: int = 0  # read from source files in this run
    done: list[str] = field(default_factory=list)  # finished in this run
    skipped: list[str] = field(default_factory=list)  # already finished
    failed: dict[str, str] = field(default_factory=dict)  # source -> the error
    # source -> how its workers ended, also if a later one finished it
    retried: dict[str, list[str]] = field(default_factory=dict)
    tasks: dict[str, Task] = field(default_factory=dict)  # all finished sources of the directory
    finished: Finished | None = None  # the contents of dataset.json; None: it was not written
    interrupted: bool = False  # by Ctrl-C
    disk_full: bool = False  # it stopped because the disk was full or cannot be written to
    store_error: str = ""  # why it stopped: the store was unreachable or denied access
    # the sources of which only some pairs were wanted
    searched: dict[str, Searched] = field(default_factory=dict)
    finishes: bool = False  # with `task`: the run finishes the dataset if it is the last one

    @property
    def complete(self) -> bool:
        """Whether dataset.json exists and includes every known source."""
        finished = self.finished
        return (
            not self.failed
            and not self.store_error
            and finished is not None
            and bool(finished.tasks)
            and not finished.is_partial
        )

    def end(self, finished: Finished) -> None:
        """Add the result of finishing the dataset."""
        self.finished = finished
        for name in set(self.sources) & finished.failed.keys():
            self.failed.setdefault(name, finished.failed[name])
            self.done = [other for other in self.done if other != name]
            self.skipped = [other for other in self.skipped if other != name]

    def _chosen(self) -> list[Task]:
        return [self.tasks[name] for name in self.done + self.skipped if name in self.tasks]

    def totals(self) -> dict[str, Any]:
        """Totals over the finished sources of this run, also those finished before it."""
        tasks = self._chosen()
        refused: Counter[str] = Counter()
        warnings: Counter[str] = Counter()
        left_out: Counter[str] = Counter()
        for task in tasks:
            left_out.update(task.source.get(READING, {}).get("left_out", {}))
            refused.update(task.counts["refused"])
            warnings.update(task.warnings)
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
            "warnings": dict(sorted(warnings.items())),
            **({"left_out": dict(sorted(left_out.items()))} if left_out else {}),
            "damaged_sources": {task.name: task.damage for task in tasks if task.damage},
        }

    def exit_code(self) -> int:
        """0: all sources are complete. 1: a source is missing, or the store failed. 3: a pair was refused, a
        source is damaged or a file was not taken. 130: interrupted.
        """
        if self.interrupted:
            return 130
        missing = self.finished is not None and {*self.sources} - self.finished.tasks.keys()
        if self.failed or missing or self.store_error:
            return 1
        totals = self.totals()
        return 3 if totals["refused"] or totals["damaged_sources"] or self.not_taken else 0

    def document(self) -> dict[str, Any]:
        return {
            "exit_code": self.exit_code(),
            "complete": self.complete,
            "dataset": None
            if self.finished is None
            else {
                "sources": len(self.finished.tasks),
                "failed": self.finished.failed,
                "pending": self.finished.pending,
            },
            "seconds": round(self.seconds, 3),
            "megabytes_per_second": round(self._rate(), 1),
            "done": self.done,
            "skipped": self.skipped,
            "failed": self.failed,
            "retried": self.retried,
            **({"store_error": self.store_error} if self.store_error else {}),
            "not_taken": [{"path": str(entry.path), "reason": entry.reason} for entry in self.not_taken],
            **self.totals(),
        }

    def _rate(self) -> float:
        return self.stored_bytes / 1e6 / self.seconds if self.seconds else 0.0

    def table(self, root: Root) -> str:
        store = open_store(root)
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
        rows += [(f"refused: {reason}", f"{count:,}") for reason, count in totals["refused"].items()]
        warned = [task.name for task in self._chosen() if task.warnings]
        masks = self._warned_masks(store, warned)
        for reason, count in totals["warnings"].items():
            with_masks = f" with {counted(masks[reason], 'mask')}" if masks[reason] else ""
            rows.append((f"warning: {reason}", f"{counted(count, 'image')}{with_masks}, kept"))
        rows += [(f"left out: {what}", f"{count:,}") for what, count in totals.get("left_out", {}).items()]
        for name, damages in totals["damaged_sources"].items():
            found = [f"at offset {damage['offset']:,}: {damage['message']}" for damage in damages]
            rows += [(f"damage in {name}", line) for line in first_lines(found, 5, "and {:,} more")]
        for name, ends in self.retried.items():
            rows.append((f"retried {name}", "; ".join(ends)))
        lines = fact_lines(rows)
        used, kept = 2 * totals["images"], totals["refused_members"]
        lines.append(f"{totals['members']:,} members in = {used:,} in shards + {kept:,} in quarantine")
        refused = [task.name for task in self._chosen() if task.counts["refused"] or task.damage]
        for what, names, file in (("quarantine", refused, REFUSED), ("warnings", warned, WARNINGS)):
            paths = first_names([store.url(f"{QUARANTINE}/{name}/{file}") for name in names])
            lines += [f"{what}: {paths}"] if names else []
        for name, why in self.failed.items():
            lines.append(f"FAILED {name}: {why}")
            if store.is_folder(folder := f"{QUARANTINE}/{name}"):
                lines.append(f"  refused members: {store.url(folder)}")
        lines += self._not_taken()
        lines.append(self._ending(root))
        return "\n".join(lines)

    def _warned_masks(self, store: Store, warned: list[str]) -> Counter[str]:
        """Masks of each warning, which only the lists in quarantine have; of a run that wrote all of them."""
        masks: Counter[str] = Counter()
        with suppress(StorageError, OSError, TypeError):
            for name in warned if {*warned} <= {*self.done} else ():
                with store.files(f"{QUARANTINE}/{name}/{WARNINGS}") as (path,):
                    for entry in (entry for _, entry in read_lines(path) if entry is not None):
                        masks[entry["reason"]] += entry.get("mask_count", 0)
        return masks

    def _not_taken(self) -> list[str]:
        count = len(self.not_taken)
        if not count:
            return []
        paths = [f"{ascii(str(entry.path))[1:-1]}: {entry.reason}" for entry in self.not_taken]
        lines = (f"  {line}" for line in first_lines(paths, _LISTED))
        return [f"not taken: {counted(count, 'path')}; exclude with --ignore PATTERN", *lines]

    def stopped(self) -> str:
        """Why the run stopped early; an empty string if it did not."""
        if self.interrupted:
            return f"Interrupted. Nothing is damaged; {AGAIN}."
        if self.disk_full:
            return f"Stopped: the disk is full or not writable. Free some space, then {AGAIN}."
        return f"Stopped: {self.store_error}. Nothing is damaged; {AGAIN}." if self.store_error else ""

    def _ending(self, root: Root) -> str:
        dataset = open_store(root).url(DATASET)
        if stopped := self.stopped():
            return stopped
        if self.task is not None and self.finished is None:
            done = f"Task {self.task[0]} of {self.task[1]} is done."
            if self.finishes:
                return f"{done} Other tasks have sources left; the last one writes {dataset}."
            return (
                f"{done} When all tasks have ended, write "
                f"{dataset} with: `{command('reshard', '--out', root, '--finish')}`"
            )
        if self.finished is None:
            return f"This run did not change {dataset}."
        line = self.finished.line(root)
        if self.failed and not self.finished.is_partial:
            return f"{counted(len(self.failed), 'source')} of this run failed, see above. {line}"
        return line
