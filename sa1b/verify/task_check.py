"""Checks of tasks/: every task file alone, compared with dataset.json, and compared with its shards."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sa1b.console import counted
from sa1b.errors import ManifestError
from sa1b.names import parse_shard_name, shard_order, source_stem
from sa1b.shards import manifest
from sa1b.shards.documents import Task
from sa1b.shards.manifest import DATASET, READING, TASKS, task_name
from sa1b.shards.stored import sources_without_task
from sa1b.storage.atomic import json_bytes, sha256_of
from sa1b.storage.store import Store
from sa1b.verify.member_check import ShardResult
from sa1b.verify.report import Findings, Problem, VerifyRemedy

_LOST = ("task_missing", "task_unreadable")  # `sa1b index` rebuilds these from the shards
_ODD = ("area", "bbox", "empty_mask")


@dataclass(slots=True)
class TaskCheck:
    """Check of the task files of a dataset directory; the constructor runs it.

    Attributes:
        store: the dataset directory.
        remedy: for the findings; the check adds the sources that are folders.
        sources: source -> digest of its task file by dataset.json; None: there is no dataset.json to compare.
        active: source -> the process that works on it; its files may change and are not checked.
        tasks: readable task files, also those that differ from dataset.json.
        intact: names of task files without a finding.
        unlisted: names of finished sources that dataset.json does not list yet.
        findings: what was found.
        stems: those of the shards in the directory; None: not listed yet.
    """

    store: Store
    remedy: VerifyRemedy
    sources: Mapping[str, Any] | None
    active: Mapping[str, str]
    tasks: dict[str, Task] = field(default_factory=dict)
    intact: set[str] = field(default_factory=set)
    unlisted: list[str] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)
    stems: set[str] | None = None

    def __post_init__(self) -> None:
        present = {name.removesuffix(".json") for name in self.store.names(TASKS, ".json")}
        sources = self.sources or {}
        if not present and not self.active:
            message = "no task file exists, so the source of each shard is unknown"
            remedy = f"restore {self.store.url(TASKS)} from a copy; or {self.remedy.everything()}"
            self.findings.add(Problem("tasks_missing", TASKS, message, remedy))
            return
        # Without dataset.json a source is known by its shards; their task files are rebuilt from them.
        lost = sources_without_task(self.store, present) if self.sources is None else {}
        for name in sorted(lost.keys() - self.active.keys()):
            message = f"not there, but {counted(len(lost[name]), 'shard')} of the source are"
            self.findings.add(Problem("task_missing", task_name(name), message, self.remedy.everything()))
        names = sorted((present | sources.keys()) - self.active.keys())
        read = {name: self._read(name) for name in names if name in present}
        self.tasks = {name: found[1] for name, found in read.items() if not isinstance(found, str)}
        kinds = {name: str(task.source["kind"]) for name, task in self.tasks.items()}
        readings = {name: task.source[READING] for name, task in self.tasks.items() if READING in task.source}
        self.remedy = replace(
            self.remedy,
            kinds=kinds,
            readings={**self.remedy.readings, **readings},
        )
        for name in names:
            found = read.get(name)
            if found is None:
                self._find("task_missing", name, f"not there, but {DATASET} lists the source")
            elif isinstance(found, str):
                self._find("task_unreadable", name, found)
            else:
                self._file(name, *found)
        self.unlisted = [name for name in self.intact if self.sources is not None and name not in sources]

    @property
    def whole(self) -> bool:
        """Whether all task files that dataset.json lists are intact."""
        return not len(self.findings) and not self.active

    def counts(self, results: Mapping[str, ShardResult], *, deep: bool) -> None:
        """Compare the counts of each task with its shards, unless the shards have findings."""
        for name, task in self.tasks.items():
            parts = [results[shard.name] for shard in task.shards if shard.name in results]
            unusable = [part for part in parts if part.unchecked is not None or len(part.findings)]
            if len(parts) == len(task.shards) and not unusable:
                self._counts(name, task, parts, deep)

    def _read(self, name: str) -> tuple[bytes, Task] | str:
        """A task file, or why it cannot be read."""
        path = self.store.url(task_name(name))
        try:
            raw = self.store.read(task_name(name))
            return raw, manifest.parse_task(raw, name, path)
        except (ManifestError, OSError, ValueError) as error:
            return str(error).removeprefix(f"{path}: ")

    def _file(self, name: str, raw: bytes, task: Task) -> None:
        problem = _problem(raw, task)
        if problem is not None:
            self._find("task_damaged", name, problem)
            return
        listed = (self.sources or {}).get(name)
        if listed is not None and listed != (digest := manifest.task_digest(task)):
            message = f"its digest is {digest}, {DATASET} lists {listed}: one of the two files was changed"
            self._find("task_differs", name, message)
            return
        self.intact.add(name)
        self._rows(name, task)

    def _rows(self, name: str, task: Task) -> None:
        """tasks/<source>.samples, whose size and digest the task file has."""
        if task.samples is None:
            return
        file = task_name(name, "samples")
        try:
            with self.store.files(file) as (path,):
                found = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        except OSError as error:
            message = "not there" if isinstance(error, FileNotFoundError) else str(error)
            self.findings.add(Problem("samples_missing", file, message, self.remedy.tables()))
            return
        if found != task.samples:
            message = (
                f"{found['bytes']:,} bytes, sha256 {found['sha256']}; the task file lists {task.samples}"
            )
            self.findings.add(Problem("samples_damaged", file, message, self.remedy.tables()))

    def _find(self, kind: str, name: str, message: str) -> None:
        file = task_name(name)
        if self.stems is None:
            shards = filter(parse_shard_name, self.store.names("", ".tar"))
            self.stems = {shard_order(shard).stem for shard in shards}
        has_shards = kind in _LOST and source_stem(name) in self.stems
        is_known = self.sources is None or name in self.sources
        source = self.remedy.source(name, has_shards=has_shards, is_known=is_known)
        remedy = f"{self.store.url(file)}: {source}"
        if self.sources is not None and name not in self.sources and source_stem(name) not in self.stems:
            remedy = f"move {self.store.url(file)} to another folder: the directory has no source {name}"
        self.findings.add(Problem(kind, file, message, remedy))

    def _counts(self, name: str, task: Task, parts: list[ShardResult], deep: bool) -> None:
        found: dict[str, int] = {
            "images": sum(part.images for part in parts),
            "masks": sum(part.masks for part in parts),
            "jpg_bytes": sum(part.jpg_bytes for part in parts),
        }
        for part in parts:
            for what, value in part.largest.values.items():
                found[f"largest {what}"] = max(value, found.get(f"largest {what}", 0))
        recorded = {**task.counts, **{f"largest {what}": value for what, value in task.largest.items()}}
        for what, value in found.items():
            if recorded.get(what, value) != value:
                self._find("task_counts", name, f"{what}: {recorded[what]} recorded, {value:,} in the shards")
        if task.source.get("sha256") is None or not deep:
            return  # rebuilt from the shards: the warnings of the source are unknown
        for reason in _ODD:
            count = sum(part.odd.get(reason, 0) for part in parts)
            known = task.warnings.get(reason, 0)
            if count == known:
                continue
            if not count:
                self._find("task_counts", name, f"{known:,} warnings {reason!r} recorded, 0 in the shards")
            for part in parts:
                for offset, image_id in part.odd_images.get(reason, []):
                    message = f"{reason} is not that of the mask; {known} images recorded, {count} found"
                    remedy = f"{self.store.url(task_name(name))}: {self.remedy.source(name)}"
                    self.findings.add(
                        Problem(f"odd_{reason}", part.name, message, remedy, part.name, offset, image_id)
                    )


def _problem(raw: bytes, task: Task) -> str | None:
    """How a readable task file differs from what reshard writes; None if it does not."""
    document = json.loads(raw)
    if raw != json_bytes(document):
        return "not the bytes that are written for its content"
    if document["options"] != (options := task.options.document()):
        return f"options are {', '.join(document['options'])}; expected {', '.join(options)}"
    if not document["versions"].keys() >= manifest.versions().keys():
        return f"versions are those of {', '.join(document['versions'])}"
    sha256 = task.source["sha256"]
    if sha256 is not None and not re.fullmatch("[0-9a-f]{64}", str(sha256)):
        return f"sha256 of the source is {sha256!r}"
    return None
