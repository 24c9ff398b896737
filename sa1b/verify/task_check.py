"""Checks of tasks/: every task file alone, compared with dataset.json, and compared with its shards.

Files that no task file lists are noted: work in progress, and remains of interrupted runs.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sa1b.console import command, counted
from sa1b.errors import ManifestError
from sa1b.names import parse_shard_name, shard_order, source_stem
from sa1b.report import first_names
from sa1b.shards import manifest
from sa1b.shards.documents import Task
from sa1b.shards.manifest import DATASET, PARTIAL, READING, TASKS, table_name, task_name
from sa1b.shards.sample_table import is_table_name
from sa1b.shards.staging import temporary_files
from sa1b.shards.stored import Ids, images_of, is_own, no_ids, shard_of, sources_without_task
from sa1b.storage.atomic import json_bytes, sha256_of
from sa1b.storage.store import Store
from sa1b.verify.member_check import ShardResult
from sa1b.verify.report import Findings, Problem, VerifyRemedy

INDEX_RECORD = ".index-progress.jsonl"  # `sa1b index` writes it to the dataset directory
_LOST = ("task_missing", "task_unreadable")  # `sa1b index` rebuilds these from the shards
_ODD = ("area", "bbox", "empty_mask")


@dataclass(slots=True)
class TaskCheck:
    """Check of the task files of a dataset directory; the constructor runs it."""

    store: Store
    remedy: VerifyRemedy  # for the findings; the check adds the sources that are folders
    # source -> digest of its task file by dataset.json; None: no dataset.json to compare
    sources: Mapping[str, Any] | None
    # source -> the process that works on it; its files may change and are not checked
    active: Mapping[str, str]
    # readable ones, also those that differ from dataset.json
    tasks: dict[str, Task] = field(default_factory=dict)
    intact: set[str] = field(default_factory=set)  # names of task files without a finding
    unlisted: list[str] = field(default_factory=list)  # finished sources that dataset.json does not list yet
    findings: Findings = field(default_factory=Findings)
    stems: set[str] | None = None  # those of the shards in the directory; None: not listed yet

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
        self.tasks = {name: result[1] for name, result in read.items() if not isinstance(result, str)}
        kinds = {name: str(task.source["kind"]) for name, task in self.tasks.items()}
        readings = {name: task.source[READING] for name, task in self.tasks.items() if READING in task.source}
        self.remedy = replace(self.remedy, kinds=kinds, readings={**self.remedy.readings, **readings})
        for name in names:
            result = read.get(name)
            if result is None:
                self._find("task_missing", name, f"not there, but {DATASET} lists the source")
            elif isinstance(result, str):
                self._find("task_unreadable", name, result)
            else:
                self._file(name, *result)
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
                actual = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        except OSError as error:
            message = "not there" if isinstance(error, FileNotFoundError) else str(error)
            self.findings.add(Problem("samples_missing", file, message, self.remedy.tables()))
            return
        if actual != task.samples:
            message = (
                f"{actual['bytes']:,} bytes, sha256 {actual['sha256']}; the task file lists {task.samples}"
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
        actual: dict[str, int] = {
            "images": sum(part.images for part in parts),
            "masks": sum(part.masks for part in parts),
            "jpg_bytes": sum(part.jpg_bytes for part in parts),
        }
        for part in parts:
            for what, value in part.largest.values.items():
                actual[f"largest {what}"] = max(value, actual.get(f"largest {what}", 0))
        recorded = {**task.counts, **{f"largest {what}": value for what, value in task.largest.items()}}
        for what, value in actual.items():
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
                        Problem(
                            f"odd_{reason}",
                            part.name,
                            message,
                            remedy,
                            shard=part.name,
                            offset=offset,
                            image_id=image_id,
                        )
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


def leftover_notes(
    store: Store, tasks: TaskCheck, others: Collection[str], failed: Mapping[str, str], *, damaged: bool
) -> list[str]:
    """Notes on files that are not part of the dataset. They are not damage.

    `others` are sources in a newer version, and those that a process is working on; `failed` is source -> why
    it is not in the dataset. Without damage, an interrupted `sa1b index` has nothing left to do.
    """
    notes = [
        f"source {name} is being worked on by {holder}: its task file is not checked"
        for name, holder in sorted(tasks.active.items())
    ]
    unlisted = set(tasks.unlisted).difference(others)
    notes += [
        f"source {name} is finished and not in the dataset: {failed[name]}"
        for name in sorted(unlisted & failed.keys())
    ]
    if waiting := sorted(unlisted - failed.keys()):
        notes.append(
            f"finished sources that {DATASET} does not list yet: {first_names(waiting)}; "
            f"`{command('reshard', '--out', store.root, '--finish')}` adds them"
        )
    beside = _beside_tasks(store, {*tasks.tasks, *tasks.active, *others})
    without = [name.removesuffix(".failed") for name in beside if name.endswith(".failed")]
    if without:
        notes.append(f"sources that failed: {first_names(without)}")
    other = [name for name in beside if not name.endswith(".failed")]
    if other:
        notes.append(f"files in {TASKS}/ without a task file, of an interrupted run: {first_names(other)}")
    if damaged and store.exists(INDEX_RECORD):
        notes.append(f"a rebuild of indexes was not finished; `{command('index', store.root)}` resumes it")
    staging = store.names(PARTIAL)
    if staging:
        notes.append(
            f"{PARTIAL}/ contains files of running or interrupted processes: {first_names(staging)}; "
            "the next reshard removes those of interrupted processes (on another machine: an hour after the "
            "last write)"
        )
    uploads = [upload.name for upload in store.uploads()]
    if uploads:
        notes.append(
            f"unfinished uploads of running or interrupted processes: {first_names(uploads)}; the next "
            "reshard or copy of these shards removes them"
        )
    table = table_name(store)
    unfinished = [name for name in store.names("", ".bin") if is_table_name(name) and name != table]
    if unfinished:
        notes.append(f"unfinished or outdated files of an interrupted run: {first_names(unfinished)}")
    paths = temporary_files(store) if store.is_local else ()
    if hidden := sorted(path.relative_to(store.root).as_posix() for path in paths):
        notes.append(
            f"temporary files of running or interrupted processes: {first_names(hidden)}; the next "
            "reshard or index removes those of interrupted processes"
        )
    return notes


def files_of_shards(store: Store) -> Iterator[str]:
    """Names of all shards and indexes in a dataset directory, whether or not anything lists them."""
    return filter(_is_stored, store.names(""))


def _is_stored(name: str) -> bool:
    return parse_shard_name(shard_of(name)) is not None


def unlisted_shards(
    names: Sequence[str], tasks: TaskCheck, shards: Collection[str], others: Collection[str]
) -> list[str]:
    """Shards and indexes in the directory that nothing lists, of sources without a process."""
    known = {shard.name for task in tasks.tasks.values() for shard in task.shards} | set(shards)
    active = {source_stem(name) for name in (*tasks.active, *others)}
    ordered = []
    for name in filter(_is_stored, names):
        order = shard_order(shard_of(name))
        if shard_of(name) not in known and order.stem not in active:
            ordered.append((order, name))
    return [name for _, name in sorted(ordered)]


def unlisted_notes(
    store: Store, files: Sequence[str], images: Ids | None, sources: Collection[str]
) -> tuple[list[str], int]:
    """Notes on the files of `unlisted_shards`, and the number of images that only these hold."""
    kept, stems = no_ids() if images is None else images, set(map(source_stem, sources))
    own_files = [name for name in files if is_own(store, name)]
    ids_by_shard = {
        name: np.setdiff1d(images_of(store, name), kept) for name in own_files if name.endswith(".tar")
    }
    missing = [name for name, ids in ids_by_shard.items() if len(ids)]
    count = len(np.unique(np.concatenate([no_ids(), *ids_by_shard.values()])))
    notes = []
    if strange := [name for name in files if name not in own_files]:
        notes.append(
            f"files with the name of a shard or an index that are none: {first_names(strange)}; move "
            "them away"
        )
    if missing:
        again = [name for name in missing if shard_order(name).stem in stems]
        adds = f"`{command('index', store.root)}` adds them"
        if again:
            adds = f"convert the sources of {first_names(again)} again, with --redo"
        notes.append(
            f"{counted(count, 'image')} in {counted(len(missing), 'shard')} that no task file lists are not "
            f"in the dataset: {first_names(missing)}; {adds}"
        )
    if left := [name for name in own_files if shard_of(name) not in missing]:
        notes.append(
            f"{len(left):,} files that no task file lists, of an interrupted run: {first_names(left)}; "
            f"convert their sources with `{command('reshard')}`, which replaces them"
        )
    return notes, count


def _beside_tasks(store: Store, known: Collection[str]) -> list[str]:
    """Files of tasks/ whose source has no task file and is not being worked on."""
    endings = (".samples", ".claim", ".failed")
    names = store.names(TASKS)
    return [name for name in names if name.endswith(endings) and name.rpartition(".")[0] not in known]
