"""Indexes, samples.bin and dataset.json made again from the tars, the same bytes as reshard wrote.

The tars hold everything but what came before them: of a source only its name is known, of the options only
what the shards show (see sa1b.verify.recover, used where task files are lost).
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sa1b.errors import ManifestError, ShardError
from sa1b.progress import Bar, bar
from sa1b.shards import manifest
from sa1b.shards.commit import write_dataset
from sa1b.shards.index_reader import UNREADABLE, IndexReader
from sa1b.shards.manifest import DATASET, ShardInfo, Task
from sa1b.shards.shard import index_path
from sa1b.storage.publish import lock, naming, publish
from sa1b.verify import recover as inference
from sa1b.verify.index_rebuild import RebuiltIndex, rebuild_index


@dataclass(slots=True)
class Summary:
    """What was made.

    Attributes:
        seconds: in all. bytes: of the tars read.
        failed: shard -> why its index was not made.
        notes: what came out other than recorded, or could not be known.
        complete: samples.bin and dataset.json were written.
    """

    seconds: float = 0.0
    shards: int = 0
    images: int = 0
    masks: int = 0
    bytes: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    complete: bool = False

    def exit_code(self) -> int:
        """0: everything asked for is there. 1: an index could not be made."""
        return 1 if self.failed else 0

    def document(self) -> dict[str, Any]:
        """For --json."""
        return {"exit_code": self.exit_code(), **asdict(self)}

    def table(self, root: Path | None) -> str:
        """For people; `root` if a whole root was asked for."""
        lines = [f"note: {note}" for note in self.notes]
        rate = self.bytes / 1e6 / self.seconds if self.seconds else 0.0
        lines += [
            f"  indexes  {self.shards:,}",
            f"  images   {self.images:,}",
            f"  masks    {self.masks:,}",
            f"  bytes    {self.bytes:,} ({rate:,.1f} MB/s, {self.seconds:,.1f} s)",
        ]
        lines += [f"FAILED {why}" for why in self.failed.values()]
        if root is not None and self.complete:
            lines.append(f"Complete: {root / DATASET}")
        elif root is not None:
            lines.append(f"Not complete: {root / DATASET} is written when every index could be made.")
        return "\n".join(lines)


def rebuild_shards(shards: list[Path], *, quiet: bool = False) -> Summary:
    """Make only the indexes of these shards, each beside its tar.

    Whether they hold the decoded masks follows the folder's task files, dataset.json or an index in place;
    without any of them they do.
    """
    began = time.monotonic()
    summary = Summary()
    with _bar(shards, quiet) as progress:
        for shard in shards:
            with lock(shard.parent):
                recorded = _Recorded.read(shard.parent)
                built = _rebuild(shard, recorded, summary, progress.update)
                if built is not None:
                    _publish(shard, built, recorded, summary)
                    if _other_index(built, recorded):
                        summary.notes.append(f"run tools/index.py {shard.parent} to bring {DATASET} in line")
    summary.seconds = time.monotonic() - began
    return summary


def rebuild_root(root: Path, *, quiet: bool = False) -> Summary:
    """Make every index, samples.bin and dataset.json of a root.

    Raises:
        ManifestError: no shards there, or a damaged task file.
        sa1b.sources.tar_reader.SourceError: an image stands in two sources.
        sa1b.storage.LockedError: reshard is at work there.
    """
    began = time.monotonic()
    summary = Summary()
    with lock(root):
        recorded = _Recorded.read(root)
        _check_digests(root, recorded)
        lost = inference.lost_sources(root, recorded.tasks, recorded.dataset)
        named = {name: [shard.name for shard in task.shards] for name, task in recorded.tasks.items()} | lost
        if not named:
            raise ManifestError(f"{root}: holds no shards of tools/reshard.py")
        shards = [root / shard for name in sorted(named) for shard in named[name]]
        built: dict[str, RebuiltIndex] = {}
        with _bar(shards, quiet) as progress:
            for shard in shards:
                one = _rebuild(shard, recorded, summary, progress.update)
                if one is None:
                    continue
                built[shard.name] = one
                if _other_index(one, recorded):  # the root is not complete until dataset.json says so too
                    (root / DATASET).unlink(missing_ok=True)
                _publish(shard, one, recorded, summary)
        if not summary.failed:
            _finish(
                root,
                recorded,
                {name: [built[shard] for shard in lost[name]] for name in lost},
                built,
                summary,
            )
    summary.seconds = time.monotonic() - began
    return summary


def _finish(
    root: Path,
    recorded: "_Recorded",
    lost: dict[str, list[RebuiltIndex]],
    built: dict[str, RebuiltIndex],
    summary: Summary,
) -> None:
    """Bring the task files in line, make those that are lost, write samples.bin and dataset.json."""
    tasks = {}
    for name, task in recorded.tasks.items():
        shards = [built[shard.name].info for shard in task.shards]
        tasks[name] = replace(task, shards=shards)
        if shards != task.shards:
            manifest.write_task(root, tasks[name])
    if lost:
        inferred, notes = inference.infer_tasks(lost, recorded.dataset, index_runs=recorded.index_runs)
        summary.notes += notes
        for task in inferred:
            manifest.write_task(root, task)
            tasks[task.name] = task
    write_dataset(root, dict(sorted(tasks.items())))
    summary.complete = True


@dataclass(slots=True)
class _Recorded:
    """What a folder's files say of its shards.

    Attributes:
        infos: shard -> what its task file or dataset.json says.
        versions: shard -> versions of the libraries that wrote it.
    """

    tasks: dict[str, Task]
    dataset: dict[str, Any] | None
    infos: dict[str, ShardInfo]
    versions: dict[str, dict[str, str]]
    index_runs: bool

    @classmethod
    def read(cls, folder: Path) -> "_Recorded":
        tasks = manifest.read_tasks(folder)
        try:
            dataset = manifest.read_dataset(folder)
            infos = {shard["name"]: ShardInfo(**shard) for shard in dataset["shards"]}
            versions = {name: dict(dataset["versions"]) for name in infos}
            index_runs = bool(dataset["options"]["index_runs"])
        except (ManifestError, KeyError, TypeError, ValueError):
            dataset, infos, versions, index_runs = None, {}, {}, _indexes_hold_runs(folder)
        for task in tasks.values():
            infos |= {shard.name: shard for shard in task.shards}
            versions |= {shard.name: task.versions for shard in task.shards}
            index_runs = task.options.index_runs
        return cls(tasks, dataset, infos, versions, index_runs)


def _check_digests(root: Path, recorded: _Recorded) -> None:
    """Refuse to write a manifest over task files that the present one says are wrong."""
    sources = (recorded.dataset or {}).get("sources", {})
    for name, task in recorded.tasks.items():
        if name in sources and sources[name] != manifest.task_digest(task):
            path = manifest.task_path(root, name)
            raise ManifestError(
                f"{path}: not as {DATASET} vouches for it; restore it from a copy, or remove it and run "
                f"tools/reshard.py again for that source. If {DATASET} is what is damaged, remove that"
            )


def _indexes_hold_runs(folder: Path) -> bool:
    for path in sorted(folder.glob("sa1b-*.parquet")):
        try:
            reader = IndexReader(path)
        except UNREADABLE:
            continue
        reader.close()
        return reader.with_runs
    return True


def _rebuild(
    shard: Path, recorded: _Recorded, summary: Summary, progress: Callable[[int], object]
) -> RebuiltIndex | None:
    """The index of a shard, aside; None if it failed."""

    def read(count: int) -> None:
        summary.bytes += count
        progress(count)

    aside = _aside(shard)
    try:
        with naming(aside):
            built = rebuild_index(shard, aside, with_runs=recorded.index_runs, progress=read)
        said = recorded.infos.get(shard.name)
        if said is not None and built.info.sha256 != said.sha256:
            aside.unlink()
            raise ShardError(
                f"{shard}: sha256 is {built.info.sha256}, {said.sha256} when it was written: the tar has "
                "changed since. tools/verify.py names what is damaged. Restore it from a copy, or remove its "
                "source's task file and run tools/reshard.py again with that source"
            )
    except (ShardError, FileNotFoundError) as error:
        summary.failed[shard.name] = (
            f"{shard}: not there; restore it from a copy, or run tools/reshard.py again with its source"
            if isinstance(error, FileNotFoundError)
            else str(error)
        )
        return None
    summary.shards += 1
    summary.images += built.images
    summary.masks += built.masks
    return built


def _aside(shard: Path) -> Path:
    return shard.with_name(f".{shard.stem}.parquet.partial")


def _other_index(built: RebuiltIndex, recorded: _Recorded) -> bool:
    said = recorded.infos.get(built.info.name)
    return said is not None and built.info.index_sha256 != said.index_sha256


def _publish(shard: Path, built: RebuiltIndex, recorded: _Recorded, summary: Summary) -> None:
    publish(_aside(shard), index_path(shard))
    if _other_index(built, recorded):
        now = manifest.versions()
        then = now | recorded.versions[shard.name]
        changed = [f"{name} {then[name]}, now {now[name]}" for name in now if then[name] != now[name]]
        why = (
            f"it was written with {', '.join(changed)}" if changed else "the task file may have been changed"
        )
        summary.notes.append(
            f"{index_path(shard).name}: not the bytes that were recorded when it was written, {why}"
        )


def _bar(shards: list[Path], quiet: bool) -> Bar:
    total = sum(shard.stat().st_size for shard in shards if shard.exists())
    return bar(total, "index", "B", quiet)
