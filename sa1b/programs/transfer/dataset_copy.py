"""A verified copy of a dataset directory: folder or bucket to folder or bucket.

A source's shards and indexes are copied first, verified by their digests in dataset.json, then its task file;
the sample table and dataset.json follow all sources. The same call resumes a copy: a source with a task file
is skipped, and an object of the right size and digest is kept.
"""

import contextlib
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from sa1b.console import command
from sa1b.errors import LockedError, ManifestError, UsageError
from sa1b.names import SHARD_PREFIX, is_quarantine_file
from sa1b.programs.transfer.plan import CopyPlan, CopySummary, make_plan, partial_task
from sa1b.report import Bar, bar
from sa1b.shards.commit import (
    abort_uploads,
    dataset_claim,
    remove_old_tables,
    remove_quarantine,
    rows_of_indexes,
    write_dataset,
)
from sa1b.shards.documents import ShardInfo, Task
from sa1b.shards.index_file import shard_files
from sa1b.shards.layer import DOCUMENT, layer_names, read_info
from sa1b.shards.layer_writer import writing
from sa1b.shards.manifest import (
    DATASET,
    LAYERS,
    QUARANTINE,
    TASKS,
    VIEWS,
    is_current,
    no_dataset,
    read_tasks,
    task_name,
    write_task,
)
from sa1b.shards.staging import clean_scratch, make_staging, remove_leftovers, remove_staging, staging_place
from sa1b.shards.stored import check_outside, check_own
from sa1b.storage.atomic import check_free_bytes, naming_path, sha256_of
from sa1b.storage.cache import digest, fetch
from sa1b.storage.claim import ENDING, Claim, holder
from sa1b.storage.errors import DamageError, MissingError
from sa1b.storage.open import open_store
from sa1b.storage.protocols import kind_of, protocol_of
from sa1b.storage.store import Root, Store


class _Stopped(Exception):
    """Another thread failed, or the user interrupted the copy."""


class _Damaged(Exception):
    """A file of the source directory is damaged or missing; the message has the repair."""


def copy_dataset(
    root: Root,
    dest: Root,
    *,
    shards: Sequence[str] = (),
    images: npt.NDArray[np.uint64] | None = None,
    layers: Sequence[str] | None = None,
    workers: int = 1,
    scratch: Path | None = None,
    quiet: bool = False,
) -> CopySummary:
    """Copy a dataset directory, verified; resumes an interrupted copy.

    A source with a damaged shard is skipped and the others are copied. `shards` are patterns of shard names
    (fnmatch), and `images` are ids, uint64 [N], ascending: with either, only shards whose name matches or
    that contain one of the images are copied, and no views. `layers`: names of the layers to copy; None: all.
    Each of the threads copies one source at a time and takes 64 MiB of memory. `scratch`: local folder for
    the objects of a URL that are being copied. UsageError: `dest` contains something other than a part of the
    same dataset, or a disk is too small. OSError: a store fails; finished copies are kept.
    """
    began = time.monotonic()
    source, target = open_store(root, scratch=scratch), open_store(dest, scratch=scratch)
    _check_apart(source, target)
    plan = make_plan(source, target, shards, images)
    summary = CopySummary(source.root, target.root, target.url(DATASET), skipped=sorted(plan.finished))
    _check_content(target)
    _check_space(target, plan, workers)
    target.scratch.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target)
    with naming_path(target.scratch):
        staging = make_staging(staging_place(target))
    total = sum(shard.bytes + shard.index_bytes for name in plan.remaining() for shard in plan.shards[name])
    try:
        with clean_scratch(source), bar(total, "copy", "B", quiet) as progress:
            copy = _Copy(source, target, plan, staging, summary, progress)
            copy.release_claims()
            copy.sources(workers)
            copy.layers(layer_names(source) if layers is None else layers)
            if not shards and images is None:
                copy.views()
            copy.dataset()
    finally:
        remove_staging(staging)
    summary.seconds = time.monotonic() - began
    return summary


class _Copy:
    """The state of one copy, shared by its threads."""

    def __init__(
        self, source: Store, target: Store, plan: CopyPlan, staging: Path, summary: CopySummary, progress: Bar
    ) -> None:
        self.source, self.target, self.plan = source, target, plan
        self.staging, self.summary, self.progress = staging, summary, progress
        self.busy: list[str] = []  # sources that another process writes
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def sources(self, workers: int) -> None:
        with ThreadPoolExecutor(workers, thread_name_prefix="copy") as pool:
            names = [*self.plan.remaining(), *self.plan.failed]
            running = [pool.submit(self._source, name) for name in names]
            try:
                for future in as_completed(running):
                    future.result()
            except BaseException:
                self._stop.set()
                for future in running:
                    future.cancel()
                raise

    def views(self) -> None:
        """Copy the files of views. The document of a view is copied after its other files."""
        names = self.source.names(VIEWS)
        for name in sorted(names, key=lambda name: (Path(name).stem, name.endswith(".json"))):
            with self.source.files(f"{VIEWS}/{name}") as (path,):
                if self._has(f"{VIEWS}/{name}", path):
                    continue
                staged = self._staged(name, path)
            self.target.commit_file(staged, f"{VIEWS}/{name}")
            self.summary.views.append(name)

    def layers(self, names: Iterable[str]) -> None:
        """Copy complete layers; one that the destination has with the same document is skipped."""
        for name in names:
            path = f"{LAYERS}/{name}/{DOCUMENT}"
            if not self.source.exists(path):
                continue  # unfinished
            try:
                info, document = read_info(self.source.reader, name), self.source.read(path)
                if self.target.exists(path) and self.target.read(path) == document:
                    continue
                with writing(self.target, name) as writer:
                    writer.copy(self.source, info, document, self._check_running)
            except (ManifestError, UsageError, LockedError, DamageError, MissingError) as error:
                self.summary.failed_layers[name] = str(error).replace("--name ", "")
            else:
                self.summary.layers.append(name)

    def dataset(self) -> None:
        with dataset_claim(self.target):
            tasks = read_tasks(self.target)
            failed = self.plan.failed | {
                name: why
                for name, why in self.summary.failed.items()
                if name not in tasks and name not in self.busy
            }
            pending = sorted({*self.plan.pending, *self.busy} - tasks.keys() - failed.keys())
            if tasks and not is_current(self.target, tasks, failed, pending):
                write_dataset(self.target, tasks, failed, pending)
            remove_old_tables(self.target)
        shards = [shard for task in tasks.values() for shard in task.shards]
        self.summary.missing = sorted({*self.plan.failed, *self.plan.pending})
        self.summary.sources, self.summary.shards = len(tasks), len(shards)
        self.summary.images = sum(shard.images for shard in shards)
        self.summary.masks = sum(shard.masks for shard in shards)
        self.summary.partial = [name for name in self.plan.shards if not self.plan.is_whole(name)]

    def release_claims(self) -> None:
        """Remove claims of finished sources that a process did not release because it was killed."""
        claimed = {name.removesuffix(ENDING) for name in self.target.names(TASKS, ENDING)}
        for name in claimed & self.plan.finished:
            if (claim := Claim.take(self.target, task_name(name, "claim"))) is not None:
                claim.release()

    def _source(self, name: str) -> None:
        """Copy a source; its task file is written last."""
        self._check_running()
        if (claim := Claim.take(self.target, task_name(name, "claim"))) is None:
            owner = holder(self.target, task_name(name, "claim"))
            with self._lock:
                self.busy.append(name)
                self.summary.failed[name] = (
                    f"{owner or 'another process'} is writing this source to {self.target.root}; run the "
                    "same command again after it has ended"
                )
            return
        with claim:
            abort_uploads(self.target, name)
            damage = [why for shard in self.plan.shards.get(name, ()) for why in self._shard(name, shard)]
            claim.check()
            if damage:
                with self._lock:
                    self.summary.failed[name] = "; ".join(damage)
                return
            self._finish(name)

    def _shard(self, name: str, shard: ShardInfo) -> list[str]:
        """Copy a shard and its index; returns what is damaged in the source directory."""
        tar, index = shard_files(shard.name)
        damage = []
        for file, size, expected in (
            (tar, shard.bytes, shard.sha256),
            (index, shard.index_bytes, shard.index_sha256),
        ):
            try:
                self._object(file, size, expected)
            except _Damaged as error:
                if file == index:
                    repair = f"run `{command('index', self.source.url(tar))}`"
                else:
                    repair = (
                        f"restore it from a copy, or run `{command('reshard')}` again with the source, "
                        f"--out {self.source.root} and --redo {name}"
                    )
                damage.append(f"{error}; {repair}")
        return damage

    def _object(self, name: str, size: int, expected: str) -> None:
        """Copy one object, verified, unless the destination has it."""
        if (stored := self.target.size(name)) is not None:
            if stored == size and digest(self.target.reader, name, self._check_running) == expected:
                self._advance(size)
                with self._lock:
                    self.summary.bytes_kept += size
                return
            check_own(self.target, [name])
        staged = self.staging / name
        # The bar shows the bytes that are read or, for an upload, the bytes that are stored.
        read = self._advance if self.target.is_local else self._check_running
        try:
            with naming_path(staged), staged.open("w+b") as file:
                self._fetch(name, size, expected, file, read)
                file.flush()
                os.fsync(file.fileno())
            self.target.commit_file(staged, name, None if self.target.is_local else self._advance)
        finally:
            staged.unlink(missing_ok=True)
        with self._lock:
            self.summary.bytes_copied += size

    def _fetch(
        self, name: str, size: int, expected: str, file: BinaryIO, progress: Callable[[int], None]
    ) -> None:
        url = self.source.url(name)
        actual = self.source.size(name)
        if actual is None:
            raise _Damaged(f"{url}: missing")
        if actual != size:
            raise _Damaged(f"{url}: {actual:,} bytes, {size:,} recorded")
        try:
            fetch(self.source.reader, name, expected, file, progress)
        except (MissingError, FileNotFoundError):
            raise _Damaged(f"{url}: missing") from None
        except DamageError as error:
            raise _Damaged(f"{url}: sha256 is {error.found}, {expected} recorded") from None

    def _finish(self, name: str) -> None:
        """Write the files of tasks/ and quarantine/ of a source whose shards are copied, or that failed."""
        if name in self.plan.failed:
            self._quarantine(name)
            with contextlib.suppress(FileNotFoundError):
                self.target.put(task_name(name, "failed"), self.source.read(task_name(name, "failed")))
            return
        task = self.plan.tasks[name]
        if self.plan.is_whole(name):
            self._quarantine(name)
            if task.samples is not None:
                with self.source.files(task_name(name, "samples")) as (path,):
                    rows = path.read_bytes() if path.is_file() else b""
                if hashlib.sha256(rows).hexdigest() == task.samples["sha256"]:
                    self.target.put(task_name(name, "samples"), rows)
        else:
            task = self._partial(task, self.plan.shards[name])
        write_task(self.target, task)
        self.target.remove(task_name(name, "failed"))  # of an earlier copy

    def _partial(self, task: Task, shards: list[ShardInfo]) -> Task:
        with self.target.files(*(shard_files(shard.name)[1] for shard in shards)) as indexes:
            task = partial_task(task, shards, indexes, self.target.reader)
            rows = rows_of_indexes(indexes)
        self.target.put(task_name(task.name, "samples"), rows)
        return replace(task, samples={"bytes": len(rows), "sha256": hashlib.sha256(rows).hexdigest()})

    def _quarantine(self, name: str) -> None:
        folder = f"{QUARANTINE}/{name}"
        files = self.source.names(folder)
        same = self.target.names(folder) == files
        staged = self.staging / f"{name}.quarantine"
        staged.mkdir()
        for file in files:
            self._check_running()
            with self.source.files(f"{folder}/{file}") as (path,):
                same = same and self._has(f"{folder}/{file}", path)
                self._staged(f"{staged.name}/{file}", path)
        if not files:
            remove_quarantine(self.target, name)  # of an earlier copy
        elif not same:
            self.target.commit_folder(staged, folder, is_quarantine_file)

    def _has(self, name: str, path: Path) -> bool:
        with self.target.files(name) as (there,):
            return there.is_file() and sha256_of(there) == sha256_of(path)

    def _staged(self, name: str, path: Path) -> Path:
        """A flushed copy of a small local file in the staging folder."""
        staged = self.staging / name
        with naming_path(staged), path.open("rb") as file, staged.open("wb") as copy:
            shutil.copyfileobj(file, copy)
            copy.flush()
            os.fsync(copy.fileno())
        return staged

    def _advance(self, count: int) -> None:
        self._check_running()
        with self._lock:
            self.progress.update(count)

    def _check_running(self, count: int = 0) -> None:
        """End this thread if another one has failed or the user interrupted the copy."""
        if self._stop.is_set():
            raise _Stopped


def _check_apart(source: Store, target: Store) -> None:
    if source.is_local and not Path(source.root).is_dir():
        raise no_dataset(source.root)
    protocol = protocol_of(target.root)
    if kind_of(target.root).is_read_only:
        raise UsageError(
            f"{target.root}: {protocol} can only be read; name a folder, or a URL of s3://, gs:// or az://"
        )
    source_root, target_root = source.identity.rstrip("/"), target.identity.rstrip("/")
    if target.is_local and Path(target.root).exists() and not Path(target.root).is_dir():
        raise UsageError(f"{target.root}: is a file; name a folder or a URL as DEST")
    if target.is_local:
        check_outside(Path(target.root))
    if source_root == target_root or f"{target_root}/".startswith(f"{source_root}/"):
        raise UsageError(f"{target.root}: is {source.root} or a folder in it; name another DEST")


def _check_content(target: Store) -> None:
    """Refuse a destination with files that belong to no dataset directory."""
    if target.exists(DATASET) or target.names(TASKS):
        return
    # An interrupted copy may have shards without a task file.
    names = {*target.names(""), *target.folders("")} - {TASKS, VIEWS, LAYERS, QUARANTINE}
    others = [name for name in names if not name.startswith((SHARD_PREFIX, "samples-"))]
    if others:
        raise UsageError(
            f"{target.root}: contains {min(others)!r}, which is no part of a dataset directory; name an "
            "empty folder as DEST"
        )


def _check_space(target: Store, plan: CopyPlan, workers: int) -> None:
    """Refuse a copy that is too large for the disk of DEST or, at a URL, for the scratch disk."""
    shards = [shard for name in plan.remaining() for shard in plan.shards[name]]
    target.check_scratch([shard.bytes for shard in shards], workers)
    if not target.is_local:
        return
    stored = target.sizes()
    sizes = {shard.name: shard.bytes for shard in shards}
    sizes |= {shard_files(shard.name)[1]: shard.index_bytes for shard in shards}
    need = sum(size for name, size in sizes.items() if stored.get(name) != size)
    check_free_bytes(target.scratch, need, "name a larger disk as DEST, or copy fewer shards with --shards")
