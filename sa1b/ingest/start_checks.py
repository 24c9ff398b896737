"""Checks before a run of ingest writes anything: sources, names, options and free space."""

import contextlib
import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sa1b.errors import ManifestError, UsageError
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.names import OPTIONS, is_source_name, parse_shard_name, source_stem
from sa1b.shards import MAX_IMAGE_PIXELS
from sa1b.shards.documents import Options, Task
from sa1b.shards.manifest import (
    DATASET,
    FORMAT,
    PARTIAL,
    QUARANTINE,
    READING,
    TASKS,
    known_tasks,
    read_dataset,
    read_task,
)
from sa1b.shards.staging import remove_leftovers
from sa1b.shards.stored import check_outside
from sa1b.sources.discovery import FORMATS, Discovered, discover
from sa1b.sources.folder import is_pair_name
from sa1b.sources.remote_sources import named_links
from sa1b.sources.source import Source, SourceFormat
from sa1b.sources.stored_file import Link
from sa1b.sources.tar_reader import is_tar_name
from sa1b.storage.atomic import check_free_bytes, json_bytes
from sa1b.storage.claim import ENDING
from sa1b.storage.open import open_store
from sa1b.storage.store import Root, Store

_OWN = (TASKS, QUARANTINE, PARTIAL)  # folders in a dataset directory that reshard writes
_DECISIVE = ("image_ids", "ignore", "max_pixels", "images_only")  # flags that decide how a source is read
_USUAL = {"max_pixels": MAX_IMAGE_PIXELS, "images_only": False}
_OUT_FACTOR = 1.1  # size of the shards / size of the source
_SPILL_FACTOR = 0.3  # size of the spill / size of the source, if the members are in random order
_NAME_LENGTH = 150  # files are named after the source, and a file name has at most 255 bytes
_LONGER_SIDE = 2250  # pixels of most images
_ANNOTATIONS = 0.1  # upper limit of size of annotations / size of source; --image-size does not shrink them
# Sizes of annotations and indexes, and of the texts of annotation files, in parts of the size of the source.
# With synthetic images of full size and 98 masks each, 0.043 and 0.063 were measured.
_ANNOTATIONS_ONLY = 0.06
_TEXTS = 0.08


@dataclass(frozen=True, slots=True)
class Start:
    """What a run starts from."""

    discovered: Discovered  # the local sources, and the files that are not taken
    local: dict[str, Source]  # by name
    remote: dict[str, Link]  # links to sources, by name
    names: list[str]  # of all sources, in order
    own_names: list[str]  # those that this run may process
    tasks: dict[str, Task]  # finished sources of the dataset directory


def start(paths: Sequence[Path], store: Store, options: Options, policy: Policy, run: IngestRun) -> Start:
    """Find the sources, create the dataset directory and remove what ended processes left in it. SourceError
    or UsageError: an argument or a source is not valid, or the directory has other options.
    """
    rename = run.rename or {}
    check_out([*paths, *rename], store)
    folders = (store.scratch, store.scratch / PARTIAL, run.checklist, policy.spill)
    own_folders = [path for path in folders if path is not None]
    discovered = admitted(paths, rename, own_folders, run.ignore, run.formats)
    local, remote = by_name(discovered, run.links)
    names = sorted(local.keys() | remote.keys())
    if strangers := set(run.redo) - set(names):
        listed, name = ", ".join(names[:10]), min(strangers)
        other = "" if run.rename is None else f", or name the source so with --rename PATH={name}"
        raise UsageError(f"--redo {name}: no SOURCE has this name; choose one of {listed}{other}")
    own_names = names if run.task is None else names[run.task[0] :: run.task[1]]
    store.create("--out")
    remove_leftovers(store, policy.spill)
    tasks = known_tasks(store, without=run.redo)
    check_not_foreign(store)
    check_options(store, tasks, options)
    check_listed(store, tasks, own_names)
    return Start(
        discovered=discovered, local=local, remote=remote, names=names, own_names=own_names, tasks=tasks
    )


def admitted(
    paths: Sequence[Path],
    rename: Mapping[Path, str],
    skip: Sequence[Path] = (),
    ignore: Sequence[str] = (),
    formats: Sequence[SourceFormat] = FORMATS,
) -> Discovered:
    """All sources by name, and the files that are not taken; UsageError: a name in `rename` is not valid."""
    for path, name in rename.items():
        if not is_source_name(name):
            raise UsageError(
                f"--rename {path}={name}: the name becomes part of the shards' names; use letters, digits, "
                "'_', '-' and '.'"
            )
        if len(name) > _NAME_LENGTH:
            raise UsageError(
                f"--rename {path}={name}: the name has {len(name)} characters; it must have at most "
                f"{_NAME_LENGTH}"
            )
    return discover([*rename, *paths], ignore, skip=skip, rename=rename, formats=formats)


def source_names(
    paths: Sequence[Path],
    links: Iterable[Link],
    store: Store,
    rename: Mapping[Path, str],
    ignore: Sequence[str],
    formats: Sequence[SourceFormat],
) -> list[str]:
    """The names of all sources; raises the errors of `start`."""
    discovered = admitted(paths, rename, [store.scratch], ignore, formats)
    return [*(source.name for source in discovered.sources), *named_links(links)]


def by_name(discovered: Discovered, links: Iterable[Link]) -> tuple[dict[str, Source], dict[str, Link]]:
    """Local sources and links by name. SourceError: a name is not valid; UsageError: two are the same."""
    local = {source.name: source for source in discovered.sources}
    remote = named_links(links)
    if both := local.keys() & remote.keys():
        raise UsageError(
            f"{local[min(both)].label}: has the name of {remote[min(both)].label}; leave one of them out, or "
            "give the file another name with --rename"
        )
    return local, remote


def check_out(paths: Sequence[Path], store: Store) -> None:
    """UsageError for an output folder that

    - is one of the paths, or has one in a subfolder that reshard writes: shards and sources would mix;
    - lies in one of the paths and contains files of a source, which would not be converted;
    - lies in another dataset directory.

    A dataset directory inside a SOURCE folder is not searched (`discover`); it may be there without sources.
    """
    if str(store).startswith("memory:"):
        raise UsageError(f"--out {store}: workers do not share this memory; name a folder or a bucket")
    if not store.is_local:
        return
    root = store.scratch
    check_outside(root)
    out = root.resolve()
    for path in paths:
        source = path.resolve()
        if source == out:
            raise UsageError(
                f"--out {root}: is SOURCE too, and shards must not be mixed with sources; pass another --out"
            )
        if source.is_relative_to(out) and source.relative_to(out).parts[0] in _OWN:
            raise UsageError(
                f"{path}: is in a folder that reshard writes; move it, or pass another --out than {root}"
            )
        if out.is_relative_to(source) and (file := _source_file(out)) is not None:
            raise UsageError(
                f"--out {root}: is inside SOURCE {path} and contains {file}, which would not be converted; "
                "pass another --out"
            )


def _source_file(folder: Path) -> Path | None:
    """The path, relative to a folder, of one file below it whose name may be that of a part of a source."""
    for parent, folders, names in os.walk(folder):
        inside = Path(parent).relative_to(folder)
        if not inside.parts:
            folders[:] = [name for name in folders if name not in _OWN]
        for name in sorted(names):
            if (is_tar_name(name) and parse_shard_name(name) is None) or is_pair_name(name):
                return inside / name
    return None


def check_options(root: Root, tasks: Mapping[str, Task], options: Options) -> None:
    """Raise UsageError if a finished source was made with other options."""
    for task in tasks.values():
        if (differs := task.options.difference(options)) is not None:
            raise UsageError(
                f"{root}: was made with {differs[0]}, this run has {differs[1]}; all shards of a dataset "
                "need the same options: use the same flags or another --out"
            )


def check_listed(root: Root, tasks: dict[str, Task], names: Iterable[str]) -> None:
    """The tasks without those of the run whose file is lost; ManifestError: one is damaged, see --redo."""
    for name in [name for name in names if name in tasks and tasks[name].listed is not None]:
        with contextlib.suppress(FileNotFoundError):
            read_task(root, name)
        del tasks[name]


def fix_options(root: Root, tasks: Mapping[str, Task], options: Options) -> None:
    """Record the options of the first run in a new dataset directory, before any source is processed.

    If several runs start at the same time, the first one determines the options; UsageError for the others.
    If a source is finished, its task file determines them, see `check_options`.
    """
    store = open_store(root)
    data = json_bytes({"format": FORMAT, "options": options.document()})
    if tasks and store.is_local:
        return
    if store.put_if_absent(OPTIONS, data) or tasks:  # in a bucket, also to check that writing is allowed
        return
    path = store.url(OPTIONS)
    try:
        recorded = Options(**json.loads(store.read(OPTIONS))["options"])
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path}: damaged; remove it if no other run writes to {root}") from None
    if (differs := recorded.difference(options)) is not None:
        raise UsageError(
            f"{root}: an earlier run has {differs[0]}, this run has {differs[1]}; all shards of a dataset "
            f"need the same options: use the same flags or another --out, or remove {path} if no other run "
            "writes there"
        )


def release_options(root: Root) -> None:
    """Remove the recorded options if no source is finished and no run is active, so that they may change."""
    store = open_store(root)
    if not store.names(TASKS, ".json") and not store.names(TASKS, ENDING):
        store.remove(OPTIONS)


def check_not_foreign(root: Root) -> None:
    """UsageError for a directory without source or shard whose dataset.json may be another program's."""
    store = open_store(root)
    if store.names(TASKS, ".json") or any(map(parse_shard_name, store.names("", ".tar"))):
        return  # a damaged dataset.json of this directory is written again
    try:
        read_dataset(store)
    except ManifestError:
        if store.exists(DATASET):
            raise UsageError(
                f"{store.url(DATASET)}: another program wrote it, or it is damaged; name another --out, or "
                "move this file away"
            ) from None


def check_reading(
    root: Root, tasks: Mapping[str, Task], sources: list[Source], policy: Policy, way_out: str
) -> None:
    """Raise UsageError if a source of the dataset would be read in another way than before."""
    known: dict[str, Mapping[str, Any]] = {}
    with contextlib.suppress(ManifestError, OSError):
        document = read_dataset(root)
        known = {name: {} for name in document["sources"]} | document.get(READING, {})
    known |= {name: task.source.get(READING, {}) for name, task in tasks.items()}
    for source in sources:
        if source.name not in known:
            continue
        recorded, current = {**_USUAL, **known[source.name]}, {**_USUAL, **policy.reading(source)}
        for what in _DECISIVE:
            flag = f"--{what.replace('_', '-')}"
            if what in recorded and recorded[what] != (now := current.get(what, [])):
                raise UsageError(
                    f"{source.label}: {root} has {source.name} with {flag} {_typed(recorded[what])}, this "
                    f"run has {flag} {_typed(now)}; pass it as before{way_out.format(name=source.name)}"
                )


def _typed(value: str | int | list[str]) -> str:
    return ", ".join(value) or "not given" if isinstance(value, list) else str(value)


def check_names(root: Root, tasks: Mapping[str, Task], sources: list[Source]) -> None:
    """Raise UsageError if the shards of two sources would have the same names."""
    taken = {source_stem(name): name for name in tasks}
    for source in sources:
        other = taken.get(source_stem(source.name), source.name)
        if other != source.name:
            raise UsageError(
                f"{source.label}: {root} already contains a source named {other!r}, and the shards of both "
                f"would have the same names; add --rename {shlex.quote(f'{source.path}=NEW_NAME')}, or use "
                "another --out"
            )


def check_space(
    sources: list[Source],
    root: Root,
    options: Options,
    spill: Path | None,
    workers: int,
    fraction: float = 1.0,
) -> None:
    """UsageError if a disk is too small for the shards or the spill; both are estimates.

    A folder receives the shards of all sources, those for a URL need scratch space until their source ends.
    `fraction`: the part of the pairs that is stored.
    """
    if not sources:
        return
    store = open_store(root)
    folder = store.scratch
    for needed in (folder, spill or folder):
        needed.mkdir(parents=True, exist_ok=True)
    needs = needed_space(sources, options, workers)
    out = int(fraction * (needs.shards if store.is_local else needs.staged))
    waits = int(fraction * needs.spill)
    same = spill is None or folder.stat().st_dev == spill.stat().st_dev
    flag, fewer = ("--out", "sources at a time") if store.is_local else ("--scratch", "--workers")
    required = [(folder, out + waits * same, flag, fewer)]
    if spill is not None:
        required.append((spill, waits, "--spill", "sources at a time"))
    for disk, need, option, less in required:
        skip = "or skip this check with --no-space-check"
        check_free_bytes(disk, need, f"name a larger disk with {option}, take fewer {less}, {skip}")


@dataclass(frozen=True, slots=True)
class Space:
    """Estimated bytes that an ingest needs."""

    shards: int  # of all sources
    staged: int  # of the sources that are processed at the same time
    spill: int  # of the members that wait for their partners


def needed_space(sources: Sequence[Source], options: Options, workers: int) -> Space:
    """The estimated space for shards and spill."""
    factor = _OUT_FACTOR
    if options.image_size is not None:
        factor = min(factor, _ANNOTATIONS + (options.image_size / _LONGER_SIDE) ** 2)
    if options.annotations_only:
        factor = _ANNOTATIONS_ONLY + (_TEXTS if options.keep_json else 0)
    sizes = sorted((source.size for source in sources), reverse=True)
    tars = sorted((source.size for source in sources if source.kind == "tar"), reverse=True)
    return Space(
        int(factor * sum(sizes)), int(factor * sum(sizes[:workers])), int(_SPILL_FACTOR * sum(tars[:workers]))
    )
