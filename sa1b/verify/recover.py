"""Rebuild of lost task files from the shards and, if it exists, dataset.json; shards with wrong names.

`Recorded` contains the values that the other files of the directory record about shards. Some values cannot
be recovered: size, time and digest of the source, refused members and warnings. So reshard treats such a
source as changed and converts it again.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

from sa1b.console import command
from sa1b.errors import ManifestError, ShardError
from sa1b.names import SHARD_PREFIX, shard_name, shard_order, source_stem
from sa1b.shards import manifest
from sa1b.shards.annotation import PROVENANCE, Annotations
from sa1b.shards.documents import Options, ShardInfo, Task
from sa1b.shards.index import IndexReader, IndexWriter
from sa1b.shards.index_file import UNREADABLE, shard_files
from sa1b.shards.manifest import DATASET, LARGEST, READING, rebuilt_task, task_name
from sa1b.shards.shard import Largest, index_row, walk_shard
from sa1b.shards.stored import images_of, is_own, no_ids, sources_without_task
from sa1b.storage.atomic import flush, naming_path, sha256_of, temporary_path
from sa1b.storage.open import open_store
from sa1b.storage.store import Root, Store


@dataclass(frozen=True, slots=True)
class RebuiltIndex:
    """Result of a pass over a shard."""

    info: ShardInfo  # as in a task file
    jpg_bytes: int  # of all JPEGs
    largest: dict[str, int]  # as in a task file
    keep_json: list[bool]  # whether it has annotation files: [True], [False], or both
    scaled: list[int]  # longer sides, pixels, of images stored smaller than their annotations say
    quality: int | None  # JPEG quality of the first of those images; None: no such image, or unknown
    # whether the shard has no images: [True], [False], or both
    annotations_only: list[bool] = field(default_factory=lambda: [False])
    # by its first image, see sa1b.sources.source.Source.reading
    reading: dict[str, Any] = field(default_factory=dict)
    resumed: bool = False  # an interrupted rebuild built the index

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "RebuiltIndex":
        return cls(**{**document, "info": ShardInfo(**document["info"])})


def rebuild_index(
    shard: Path,
    name: str,
    temporary: Path,
    *,
    with_runs: bool,
    progress: Callable[[int], object] | None = None,
) -> RebuiltIndex:
    """Write the index of a shard to `temporary`, flushed; ShardError: the tar is damaged."""
    digest = hashlib.sha256()
    writer = IndexWriter(temporary, with_runs=with_runs)
    images = masks = jpg_bytes = 0
    largest = Largest()
    keep_json: set[bool] = set()
    annotations_only: set[bool] = set()
    scaled: set[int] = set()
    quality = None
    reading: dict[str, Any] = {}
    try:
        for image in walk_shard(shard, digest, progress):
            row = index_row(shard, image)
            if not images:
                reading = _reading(row.annotations)
            writer.add(row)
            images += 1
            masks += len(row.annotations)
            jpg_bytes += row.jpg_bytes
            largest.see(row)
            keep_json.add(image.json is not None)
            annotations_only.add(not image.jpg.data)
            if image.jpg.data and (row.image_height, row.image_width) != (
                row.annotations.height,
                row.annotations.width,
            ):
                quality = quality if scaled else jpeg_quality(image.jpg.data)
                scaled.add(max(row.image_height, row.image_width))
        writer.close()
        flush(temporary)
        index_sha256 = sha256_of(temporary)
        info = ShardInfo(
            name=name,
            images=images,
            masks=masks,
            bytes=shard.stat().st_size,
            sha256=digest.hexdigest(),
            index_bytes=temporary.stat().st_size,
            index_sha256=index_sha256,
        )
    except BaseException as error:
        writer.abandon()
        temporary.unlink(missing_ok=True)
        if isinstance(error, ShardError):
            raise ShardError(
                f"{error}: a damaged tar gets no index; restore the tar from a copy, or run "
                f"`{command('reshard')}` again with its source"
            ) from None
        raise
    return RebuiltIndex(
        info, jpg_bytes, largest.values, sorted(keep_json), sorted(scaled), quality=quality,
        annotations_only=sorted(annotations_only), reading=reading,
    )  # fmt: skip


def _reading(annotations: Annotations) -> dict[str, Any]:
    """How a source of annotations in COCO's format, or of images alone, was read; empty for other sources."""
    origin = annotations.to_json().get(PROVENANCE)
    kind = origin.get("format") if isinstance(origin, dict) else None
    if kind in ("images", "parquet"):
        return {"kind": None, "images_only": True} if kind == "images" else {"kind": kind}
    if kind != "coco":
        return {}
    kept = str(origin.get("image", {}).get("id")) == str(annotations.image_id)
    return {"kind": "coco", "image_ids": "keep" if kept else "hash", "images": True}


def jpeg_quality(data: bytes) -> int | None:
    """The quality that a JPEG was encoded with, from its quantisation tables; None if it is unknown."""
    tables = _quantisation_tables(data)
    blank = np.zeros((16, 16, 3), np.uint8)
    for quality in range(1, 101):
        encoded = simplejpeg.encode_jpeg(blank, quality, "RGB", "420", fastdct=False)
        if _quantisation_tables(encoded) == tables:
            return quality
    return None


def _quantisation_tables(data: bytes) -> list[bytes]:
    """The DQT segments before the first scan (ITU-T T.81, B.2.4.1)."""
    tables = []
    position = 2
    while data[position + 1] != 0xDA:
        end = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        if data[position + 1] == 0xDB:
            tables.append(data[position:end])
        position = end
    return tables


@dataclass(slots=True)
class Recorded:
    """Records about shards in the files of a folder."""

    tasks: dict[str, Task]
    dataset: dict[str, Any] | None
    infos: dict[str, ShardInfo]  # shard -> its entry in the task file or dataset.json
    versions: dict[str, dict[str, str]]  # shard -> versions of the libraries that wrote it
    index_runs: bool  # indexes contain the decoded masks

    @classmethod
    def read(cls, root: Root) -> "Recorded":
        """Read the records. A damaged task file counts as lost."""
        store = open_store(root)
        tasks = manifest.readable_tasks(store)[0]  # the others are rebuilt from the shards
        try:
            dataset = manifest.read_dataset(store)
            infos = {shard["name"]: ShardInfo(**shard) for shard in dataset["shards"]}
            versions = {name: dict(dataset["versions"]) for name in infos}
            index_runs = Options(**dataset["options"]).index_runs
        except (ManifestError, OSError, TypeError):
            dataset, infos, versions, index_runs = None, {}, {}, _indexes_hold_runs(store)
        for task in tasks.values():
            infos = {shard.name: shard for shard in task.shards} | infos  # dataset.json is written last
            versions |= {shard.name: task.versions for shard in task.shards}
            index_runs = task.options.index_runs
        return cls(tasks, dataset, infos, versions, index_runs)


def lost_sources(root: Root, tasks: dict[str, Task], dataset: dict[str, Any] | None) -> dict[str, list[str]]:
    """Sources whose task file is lost, and the names of their shards: of dataset.json, else of the directory.
    ManifestError: a shard that is not the last one of its source is missing.
    """
    store = open_store(root)
    if dataset is not None:
        stems = {source_stem(name): name for name in dataset["sources"]}
        lost: dict[str, list[str]] = {}
        for shard in dataset["shards"]:
            source = stems[shard_order(shard["name"]).stem]
            if source not in tasks:
                lost.setdefault(source, []).append(shard["name"])
    else:
        lost = sources_without_task(store, tasks.keys())
    for source, shards in lost.items():
        expected = [shard_name(source, part) for part in range(len(shards))]
        if shards != expected:
            missing = sorted(set(expected) - set(shards))
            raise ManifestError(
                f"{store.url(task_name(source))}: missing, and so is {', '.join(missing)}; run "
                f"`{command('reshard')}` again with {source}, or restore either from a copy"
            )
    return lost


def unlisted_sources(store: Store, recorded: Recorded) -> tuple[dict[str, list[str]], list[str]]:
    """Sources without task file or entry in dataset.json: their shards without images of the dataset."""
    by_source, notes = dict[str, list[str]](), list[str]()
    if recorded.dataset is None:
        return by_source, notes  # all of them are lost
    sources = sources_without_task(store, {*recorded.tasks, *recorded.dataset["sources"]})
    seen = np.concatenate([no_ids(), *(images_of(store, listed) for listed in recorded.infos if sources)])
    for name, shards in sorted(sources.items()):
        for shard in shards:
            ids = images_of(store, shard)
            if not is_own(store, shard):
                notes.append(f"{shard} has the name but not the form of a shard")
            elif len(twice := np.intersect1d(ids, seen)):
                notes.append(_not_added(shard, f"image {int(twice[0])} is in the dataset already"))
            else:
                by_source.setdefault(name, []).append(shard)
                seen = np.concatenate([seen, ids])
    return by_source, notes


def addable(
    unlisted: Mapping[str, list[str]],
    built: Mapping[str, RebuiltIndex],
    recorded: Recorded,
    failed: dict[str, str],
) -> tuple[dict[str, list[RebuiltIndex]], list[str]]:
    """The shards of `unlisted_sources` that fit into the dataset, with their rebuilt indexes, and notes on
    the others. `failed` is shard -> why it has no index; unlisted shards are removed from it.
    """
    by_source, notes = dict[str, list[RebuiltIndex]](), list[str]()
    options = Options(**(recorded.dataset or {})["options"]) if unlisted else Options()
    wanted = ([options.keep_json], [options.annotations_only], set[int]())
    for name, shard in ((name, shard) for name, shards in unlisted.items() for shard in shards):
        if (why := failed.pop(shard, None)) is not None:
            notes.append(_not_added(shard, why))
            continue
        rebuilt = built[shard]
        if (rebuilt.keep_json, rebuilt.annotations_only, {*rebuilt.scaled} - {options.image_size}) == wanted:
            by_source.setdefault(name, []).append(rebuilt)
        else:
            notes.append(_not_added(shard, "it was made with other options than the dataset"))
    return by_source, notes


def _not_added(shard: str, why: str) -> str:
    return f"{shard}, which no task file lists, is not added: {why}"


def infer_tasks(
    lost: dict[str, list[RebuiltIndex]],
    tasks: dict[str, Task],
    dataset: dict[str, Any] | None,
    *,
    index_runs: bool,
) -> tuple[list[Task], list[str]]:
    """Task files for sources that have none, and notes on them; ManifestError if shards contradict each
    other.

    Options and versions are those of dataset.json or of `tasks`, the task files that are left; without
    either, those that shards show.
    """
    known = next(iter(tasks.values()), None)
    if dataset is not None:
        options, versions = Options(**dataset["options"]), dict(dataset["versions"])
    elif known is not None:
        options, versions = known.options, known.versions
    else:
        options, versions = _options(lost, index_runs), manifest.versions()
    inferred = []
    for name, shards in sorted(lost.items()):
        reading = (dataset or {}).get(READING, {}).get(name) or shards[0].reading
        largest = {what: max(shard.largest[what] for shard in shards) for what in LARGEST}
        infos, jpg_bytes = [shard.info for shard in shards], sum(shard.jpg_bytes for shard in shards)
        inferred.append(
            rebuilt_task(name, options, versions, infos, largest, reading=reading, jpg_bytes=jpg_bytes)
        )
    names = ", ".join(sorted(lost))
    notes = [
        f"no task file of {names}: rebuilt from the shards. Size, time and digest of the source and the "
        "refused members are unknown, so reshard will treat the source as changed and convert it again"
    ]
    if dataset is None:
        notes.append(
            "no dataset.json either: missing shards at the end of a source cannot be detected, and the "
            f"options are those that {'the shards show' if known is None else 'the other task files have'}: "
            f"{', '.join(options.flags().values())}"
        )
    return inferred, notes


def _options(lost: dict[str, list[RebuiltIndex]], index_runs: bool) -> Options:
    shards = [shard for source in lost.values() for shard in source]
    full = {shard.info.images for source in lost.values() for shard in source[:-1]}
    scaled = set[int]().union(*(shard.scaled for shard in shards))
    keep_json = set[bool]().union(*(shard.keep_json for shard in shards))
    only = set[bool]().union(*(shard.annotations_only for shard in shards))
    for what, values in (
        ("images in full shards", full),
        ("image sizes", scaled),
        ("keep_json", keep_json),
        ("annotations_only", only),
    ):
        if len(values) > 1:
            shown = ", ".join(map(str, sorted(values)))
            raise ManifestError(
                f"shards of {', '.join(sorted(lost))}: they differ in {what} ({shown}), so runs of reshard "
                "with different options wrote them; move the shards of each run into a separate folder"
            )
    quality = next((shard.quality for shard in shards if shard.scaled), None)
    most = max(shard.info.images for shard in shards)
    return Options(
        images_per_shard=full.pop() if full else max(most, Options().images_per_shard),
        image_size=scaled.pop() if scaled else None,
        quality=quality,
        keep_json=keep_json == {True},
        index_runs=index_runs,
        annotations_only=only == {True},
    )


@dataclass(frozen=True, slots=True)
class Changed:
    """A readable shard with another digest than recorded, and the message that says so."""

    sha256: str
    why: str


def restore_names(store: Store, misplaced: Mapping[str, str], recorded: Recorded) -> list[str]:
    """Copy shards with the content of `misplaced` others to their names; the restored ones."""
    folder = temporary_path(store.scratch / "shards")
    try:
        folder.mkdir(parents=True)
        for stored_name, name in misplaced.items():
            if not (folder / name).exists() and digest_of(store, name) != recorded.infos[name].sha256:
                with naming_path(folder), store.files(stored_name) as (path,):
                    shutil.copyfile(path, folder / name)
                    flush(folder / name)
        restored = sorted(path.name for path in folder.iterdir())
        store.commit([folder / name for name in restored])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return restored


def digest_of(store: Store, name: str) -> str | None:
    """The sha256 of a file; None: it is not there."""
    with contextlib.suppress(FileNotFoundError), store.files(name) as (path,):
        return sha256_of(path)
    return None


def check_digests(root: Root, recorded: Recorded, rewritten: Mapping[str, str]) -> None:
    """ManifestError if dataset.json lists another digest of a task file, also of `rewritten`."""
    sources = (recorded.dataset or {}).get("sources", {})
    for name, task in recorded.tasks.items():
        digest = manifest.task_digest(task)
        if name in sources and digest not in (sources[name], rewritten.get(name)):
            path = open_store(root).url(manifest.task_name(name))
            raise ManifestError(
                f"{path}: not the one that {DATASET} lists; restore it from a copy, or run "
                f"`{command('reshard')}` again with that source and --redo {name}; if {DATASET} is damaged "
                "instead, remove it"
            )


def _indexes_hold_runs(store: Store) -> bool:
    for name in store.names("", ".parquet"):
        if name.startswith(SHARD_PREFIX):
            with contextlib.suppress(*UNREADABLE), store.files(name) as (path,):
                reader = IndexReader(path)
                reader.close()
                return reader.with_runs
    return True


def differs(built: RebuiltIndex, recorded: Recorded) -> bool:
    """Whether an index has other bytes than recorded."""
    info = recorded.infos.get(built.info.name)
    return info is not None and built.info.index_sha256 != info.index_sha256


def why_differs(shard: str, recorded: Recorded) -> str:
    """A note on a shard whose index has other bytes than recorded."""
    now = manifest.versions()
    then = now | recorded.versions[shard]
    changed = [f"{name} {then[name]}, now {now[name]}" for name in now if then[name] != now[name]]
    why = f"it was written with {', '.join(changed)}" if changed else "the task file may have been changed"
    return f"{shard_files(shard)[1]}: its bytes differ from the recorded ones: {why}"
