"""The plan and the result of a copy: the shards of each source that the copy will have, and what was copied.

A copy may have some of the sources, and some of the shards of a source. It never loses one: the plan has the
selected shards and those that the destination already has. A destination with anything else is refused.

The task file of a source of which only some shards were copied has no size, time or digest of the source and
no counts of its members, because they would be those of all shards. So reshard considers the source changed,
and verify does not compare it with a quarantine. The quarantine and the warnings of the source are not
copied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from sa1b.console import command, counted
from sa1b.errors import ManifestError, UsageError
from sa1b.report import first_names, rate_text
from sa1b.shards import record
from sa1b.shards.documents import ShardInfo, Task
from sa1b.shards.index_file import shard_files
from sa1b.shards.manifest import (
    DATASET,
    LARGEST,
    READING,
    counts_of,
    parse_task,
    read_dataset,
    read_tasks,
    task_digest,
    task_name,
)
from sa1b.shards.sample_table import open_table
from sa1b.storage.reader import Range, Reader
from sa1b.storage.store import Store


@dataclass(frozen=True, slots=True)
class CopyPlan:
    tasks: dict[str, Task]  # task files of the source directory, by source
    shards: dict[str, list[ShardInfo]]  # source -> its shards in the copy, in order
    finished: set[str]  # sources that the destination has with exactly these shards
    # of the source's dataset.json, like `pending`; empty for a selection
    failed: dict[str, str] = field(default_factory=dict)
    pending: list[str] = field(default_factory=list)

    def remaining(self) -> list[str]:
        """Sources to copy, in order."""
        return [name for name in self.shards if name not in self.finished]

    def is_whole(self, source: str) -> bool:
        """Whether the copy has all shards of a source."""
        return self.shards[source] == self.tasks[source].shards


def make_plan(
    source: Store, target: Store, patterns: Sequence[str], images: npt.NDArray[np.uint64] | None
) -> CopyPlan:
    """Read both directories and decide what to copy: shards that match a pattern (if there are any) and that
    contain one of the ascending ids. UsageError: a pattern matches nothing, or the destination is another
    dataset.
    """
    document = read_dataset(source)
    tasks = {name: _task(source, name, digest) for name, digest in document["sources"].items()}
    names = [str(shard["name"]) for shard in document["shards"]]
    chosen = _matching(source, names, patterns)
    if images is not None:
        chosen &= _holding(source, str(document["samples"]["name"]), names, images)
    present = _present(source, target, tasks)
    chosen_shards = {}
    for name, task in tasks.items():
        there = {shard.name for shard in present[name].shards} if name in present else set()
        shards = [shard for shard in task.shards if shard.name in chosen or shard.name in there]
        if shards:
            chosen_shards[name] = shards
    stored = set(target.names("")) if present else set()
    finished = {
        name
        for name, task in present.items()
        if task.shards == chosen_shards[name]
        and (task.shards != tasks[name].shards or _same_but_rows(task, tasks[name]))
        and all(file in stored for shard in task.shards for file in shard_files(shard.name))
    }
    if patterns or images is not None:
        return CopyPlan(tasks, chosen_shards, finished)
    failed = {str(name): str(why) for name, why in document.get("failed", {}).items()}
    return CopyPlan(
        tasks, chosen_shards, finished, failed, [str(name) for name in document.get("pending", [])]
    )


def _task(source: Store, name: str, digest: str) -> Task:
    path = source.url(task_name(name))
    try:
        task = parse_task(source.read(task_name(name)), name, path)
    except FileNotFoundError:
        raise ManifestError(
            f"{path}: not there, but {DATASET} lists the source; `{command('index', source.root)}` "
            "rebuilds it"
        ) from None
    if task_digest(task) != digest:
        raise ManifestError(
            f"{path}: not the one that {DATASET} lists; `{command('verify', source.root)}` names the repair"
        )
    return task


def _matching(source: Store, names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    if not patterns:
        return set(names)
    matches = set()
    for pattern in patterns:
        matching = {
            name for name in names if fnmatchcase(name, pattern) or fnmatchcase(Path(name).stem, pattern)
        }
        if not matching:
            raise UsageError(
                f"--shards {pattern}: no shard of {source.root} matches; its shards: {first_names(names, 3)}"
            )
        matches |= matching
    return matches


def _holding(
    source: Store, table_name: str, names: Sequence[str], images: npt.NDArray[np.uint64]
) -> set[str]:
    with source.files(table_name) as (path,):
        table = open_table(path, source.root)
    numbers = np.unique(table.shard[np.isin(table.image_id, images, assume_unique=True)])
    return {names[number] for number in numbers.tolist()}


def _present(source: Store, target: Store, tasks: Mapping[str, Task]) -> dict[str, Task]:
    """The finished sources of the destination; refuses any other than those of the source directory."""
    tasks_of_target = read_tasks(target)
    listed = set(tasks_of_target)
    if target.exists(DATASET):
        listed |= read_dataset(target)["sources"].keys()
    other = sorted(listed - tasks.keys())
    advice = "choose another DEST"
    if other:
        raise UsageError(
            f"{target.root}: is another dataset: {source.root} has no {first_names(other, 3)}; {advice}"
        )
    for name, task in tasks_of_target.items():
        known = {shard.name: shard for shard in tasks[name].shards}
        drop = (
            f"{advice}, or remove it there with `{command('reshard', '--out', target.root, '--drop', name)}`"
        )
        if (differs := tasks[name].options.difference(task.options)) is not None:
            raise UsageError(
                f"{target.root}: has {name} with {differs[1]}, {source.root} has it with {differs[0]}; {drop}"
            )
        strange = [shard.name for shard in task.shards if known.get(shard.name) != shard]
        if strange:
            raise UsageError(
                f"{target.root}: has {name} with another {strange[0]} than {source.root}; {drop}"
            )
    return tasks_of_target


def _same_but_rows(task: Task, other: Task) -> bool:
    """Whether two task files differ at most in the digest of their rows, which may be written later."""
    return replace(task, samples=None) == replace(other, samples=None)


_COLUMNS = ["jpg_bytes", "masks_offset", "masks_bytes", "masks_crc32c", "runs_count"]
_UNKNOWN = ("size", "mtime_ns", "sha256", "md5")  # of the source


def partial_task(task: Task, shards: Sequence[ShardInfo], indexes: Sequence[Path], reader: Reader) -> Task:
    """The task file of a source with some of its shards, in order, without `samples`."""
    # Reads the mask records of the shards, verified by their checksums.
    reading = task.source.get(READING, {"kind": task.source["kind"]})
    largest = dict.fromkeys(LARGEST, 0)
    jpg_bytes = 0
    for shard, index in zip(shards, indexes, strict=True):
        rows = pq.read_table(index.absolute(), columns=_COLUMNS)
        jpg_bytes += int(rows["jpg_bytes"].to_numpy().sum())
        for name, value in _largest(shard.name, rows, reader).items():
            largest[name] = max(largest[name], value)
    return replace(
        task,
        source={**task.source, **dict.fromkeys(_UNKNOWN), READING: {**reading, "part": True}},
        shards=list(shards),
        counts=counts_of(shards, jpg_bytes),
        damage=[],
        largest=largest,
        samples=None,
        quarantine=None,
    )


def _largest(shard: str, rows: Any, reader: Reader) -> dict[str, int]:
    """Per image: masks, runs, and bytes of COCO strings, JPEG and mask record; see sa1b.shards.shard."""
    locations = zip(*(rows[name].to_pylist() for name in _COLUMNS[1:4]), strict=True)
    records = reader.read_ranges(Range(shard, offset, length, crc) for offset, length, crc in locations)
    counts = rows["runs_count"].to_pylist()
    return {
        "masks": max(map(len, counts), default=0),
        "runs": max(map(sum, counts), default=0),
        "rle_bytes": max((len(record.decode(data).rle) for data in records), default=0),
        "jpg_bytes": max(rows["jpg_bytes"].to_pylist(), default=0),
        "masks_bytes": max(rows["masks_bytes"].to_pylist(), default=0),
    }


@dataclass(slots=True)
class CopySummary:
    """The result of a copy; sources, shards, images and masks are those in the copy."""

    root: str
    dest: str
    dataset: str  # path or URL of the dataset.json of the copy
    seconds: float = 0.0
    sources: int = 0
    shards: int = 0
    images: int = 0
    masks: int = 0
    skipped: list[str] = field(default_factory=list)  # sources that an earlier run had copied
    bytes_copied: int = 0  # of the shards and indexes that this run wrote
    bytes_kept: int = 0  # of those that the destination already had, with the right digest
    partial: list[str] = field(default_factory=list)  # sources of which only some shards were copied
    # source that is not in the copy, or not with all its shards -> the reason
    failed: dict[str, str] = field(default_factory=dict)
    failed_layers: dict[str, str] = field(default_factory=dict)  # as `failed`
    # sources that the original directory lists as failed or pending
    missing: list[str] = field(default_factory=list)
    views: list[str] = field(default_factory=list)  # names of the copied files of views
    layers: list[str] = field(default_factory=list)  # names of the layers that this run copied

    def exit_code(self) -> int:
        """0: everything was copied. 1: a source or a layer was not."""
        return 1 if self.failed or self.failed_layers else 0

    def document(self) -> dict[str, Any]:
        return {"exit_code": self.exit_code(), **asdict(self)}

    def table(self) -> str:
        skipped = f" ({len(self.skipped):,} copied before)" if self.skipped else ""
        kept = f"; {self.bytes_kept:,} had been copied before" if self.bytes_kept else ""
        lines = [
            f"  sources  {self.sources:,}{skipped}",
            f"  shards   {self.shards:,}",
            f"  images   {self.images:,}",
            f"  masks    {self.masks:,}",
            f"  bytes    {self.bytes_copied:,} ({rate_text(self.bytes_copied, self.seconds)}){kept}",
        ]
        if self.layers:
            lines.append(f"  layers   {first_names(self.layers)}")
        if self.partial:
            lines.append(f"  partial  {counted(len(self.partial), 'source')}: only some of their shards")
        lines += [f"FAILED {name}: {why}" for name, why in sorted(self.failed.items())]
        lines += [f"FAILED layer {name}: {why}" for name, why in sorted(self.failed_layers.items())]
        if not self.sources:
            lines.append(f"No source was copied: {self.dataset} was not written.")
        elif self.failed or self.failed_layers:
            lines.append(f"Not complete: {self.dataset} lists the sources that were copied.")
        elif self.missing:
            lines.append(
                f"Complete copy: {self.dataset}. As in {self.root}, {counted(len(self.missing), 'source')} "
                f"failed or pending ({first_names(self.missing)})."
            )
        else:
            lines.append(f"Complete: {self.dataset}")
        return "\n".join(lines)
