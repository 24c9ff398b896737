"""The manifest of a dataset directory: one task file per finished source, and dataset.json over all of them.

The task file of a source is written last. Without it, the source is not part of the dataset. dataset.json and
the sample table are made from the files in tasks/ and can be rebuilt from them at any time.

    dataset.json             the only entry point for readers; replaced atomically, never removed
    tasks/<source>.json      a finished source
    tasks/<source>.samples   its rows of the sample table
    tasks/<source>.failed    why a source is not in the dataset, written by the run that failed
    tasks/<source>.claim     the process that works on a source, see sa1b.storage.claim
"""

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from sa1b.console import command, counted
from sa1b.errors import ManifestError, TableError
from sa1b.names import is_shard_of, shard_order, source_stem
from sa1b.shards.documents import FieldError, Options, ShardInfo, Task, check_dataset, check_task
from sa1b.shards.sample_table import TableFacts, is_table_name, open_table
from sa1b.storage.atomic import json_bytes
from sa1b.storage.open import open_store
from sa1b.storage.store import Root, Store
from sa1b.version import __version__

FORMAT = "sa1b-shards-1"
DATASET, TASKS, QUARANTINE, PARTIAL = "dataset.json", "tasks", "quarantine", ".partial"
VIEWS, LAYERS = "views", "layers"
READING = "reading"  # of a source: how it was read, see sa1b.sources.source.Source.reading
LARGEST = ("masks", "runs", "rle_bytes", "jpg_bytes", "masks_bytes")  # per image, in task files
_LIBRARIES = ("numpy", "opencv-python-headless", "pyarrow", "simplejpeg", "zstandard")


def versions() -> dict[str, str]:
    """Versions of the libraries that affect the bytes of a dataset directory."""
    return {"sa1b": __version__, **{name: importlib.metadata.version(name) for name in _LIBRARIES}}


def task_name(source_name: str, ending: str = "json") -> str:
    """Name of a source's task file, or of another file beside it, in the dataset directory."""
    return f"{TASKS}/{source_name}.{ending}"


def write_task(root: Root, task: Task) -> None:
    """Write a task file; from now on its source counts as finished."""
    open_store(root).put(task_name(task.name), json_bytes({"format": FORMAT, **_document(task)}))


def _document(task: Task) -> dict[str, Any]:
    document = asdict(task) | {"options": task.options.document()}
    return {name: value for name, value in document.items() if value is not None}


def read_tasks(root: Root, without: Collection[str] = ()) -> dict[str, Task]:
    """All finished sources by name, but those in `without`; ManifestError: see `read_task`."""
    tasks, damaged = readable_tasks(root, without)
    for error in damaged.values():
        raise error
    return tasks


def readable_tasks(
    root: Root, without: Collection[str] = ()
) -> tuple[dict[str, Task], dict[str, ManifestError]]:
    """The intact task files, and the errors of the others, by source."""
    store = open_store(root)
    names = [name.removesuffix(".json") for name in store.names(TASKS, ".json")]
    names = [name for name in names if name not in without]
    results = dict(zip(names, store.map(partial(_read_task, store), names), strict=True))
    damaged = {name: result for name, result in results.items() if isinstance(result, ManifestError)}
    return {name: result for name, result in results.items() if isinstance(result, Task)}, damaged


def _read_task(store: Store, name: str) -> Task | ManifestError | None:
    try:
        return read_task(store, name)
    except ManifestError as error:
        return error
    except FileNotFoundError:  # removed meanwhile by another process
        return None


def read_task(root: Root, source_name: str) -> Task:
    """The task file of a source; FileNotFoundError: not finished. ManifestError: damaged."""
    store = open_store(root)
    name = task_name(source_name)
    return parse_task(store.read(name), source_name, store.url(name))


def parse_task(data: bytes, source_name: str, path: object) -> Task:
    """A task file from its bytes, which are from `path`; ManifestError: another format, or damaged."""
    document = parse_document(data, path, f"/{task_name(source_name)}")
    try:
        shards, options = check_task(document, source_name)
        return Task(
            source=document["source"],
            options=options,
            versions=document["versions"],
            shards=shards,
            counts=document["counts"],
            damage=document["damage"],
            largest=document["largest"],
            samples=document.get("samples"),
            quarantine=document.get("quarantine"),
        )
    except FieldError as error:
        raise ManifestError(
            f"{path}: damaged ({str(error)[:200]}); restore it from a copy, or run `{command('reshard')}` "
            f"again with that source and --redo {source_name}"
        ) from None


def is_current(root: Root, tasks: dict[str, Task], failed: Mapping[str, str], pending: Sequence[str]) -> bool:
    """Whether dataset.json and its table exist and have exactly this content."""
    store = open_store(root)
    try:
        written = store.read(DATASET)
        samples = dict(json.loads(written)["samples"])
        name = str(samples.pop("name"))
        facts = TableFacts(**samples)
        return bool(
            tasks
            and written == dataset_document(tasks, name, facts, failed, pending)
            and store.size(name) == facts.bytes
            and (not store.is_local or open_table(Path(store.url(name))).digest == facts.columns_sha256)
        )
    except (TableError, OSError, KeyError, TypeError, ValueError):
        return False


def no_dataset(path: Path | str) -> ManifestError:
    """The error for a path that is not a dataset directory."""
    if PurePath(path).name == DATASET and not Path(path).is_dir():
        return ManifestError(f"{path}: a file; pass its folder, {(str(path).rpartition('/')[0] or '.')!r}")
    return ManifestError(f"{path}: no dataset there; pass the --out folder of `sa1b reshard`")


def dataset_around(path: Path) -> Path | None:
    """The dataset directory that a local path is or lies in, also through links; None: there is none."""
    absolute = path.resolve()
    return next((folder for folder in (absolute, *absolute.parents) if (folder / DATASET).exists()), None)


def read_dataset(root: Root) -> dict[str, Any]:
    """dataset.json; ManifestError: missing, damaged or of another format."""
    store = open_store(root)
    path = store.url(DATASET)
    try:
        data = store.read(DATASET)
    except FileNotFoundError:
        finished, root = len(store.names(TASKS, ".json")), path.removesuffix(f"/{DATASET}")
        if not finished:
            raise no_dataset(root) from None
        raise ManifestError(
            f"{path}: not there, and {counted(finished, 'source')} done; run "
            f"`{command('reshard', '--out', root, '--finish')}`"
        ) from None
    return parse_dataset(data, path)


def table_name(root: Root) -> str | None:
    """Name of the sample table: from dataset.json or, if that cannot be read, of a file that exists."""
    store = open_store(root)
    with contextlib.suppress(ManifestError, OSError):
        return str(read_dataset(store)["samples"]["name"])
    return next(filter(is_table_name, store.names("", ".bin")), None)


def task_digest(task: Task) -> str:
    """sha256 of a task file without the source's time and md5, which differ between copies of a source."""
    if task.listed is not None:
        return task.listed
    document = _document(task)
    document["source"] = {
        name: value for name, value in task.source.items() if name not in ("mtime_ns", "md5")
    }
    return hashlib.sha256(json_bytes(document)).hexdigest()


def all_shards(tasks: Iterable[Task]) -> list[ShardInfo]:
    """All shards as dataset.json lists them: by stem, the parts of a source by number."""
    return sorted(
        (shard for task in tasks for shard in task.shards), key=lambda shard: shard_order(shard.name)
    )


def dataset_document(
    tasks: dict[str, Task],
    table_name: str,
    facts: TableFacts,
    failed: Mapping[str, str] | None = None,
    pending: Sequence[str] = (),
    like: Task | None = None,
) -> bytes:
    """The bytes of dataset.json; `table_name` and `facts`: file name and header values of the sample table.

    Args:
        failed: source -> why it is not in the dataset.
        pending: sources that are neither finished nor failed.
        like: where no source is finished: a source that will be, for options and versions.
    """
    shards = all_shards(tasks.values())
    first = next(iter(tasks.values()), like)
    assert first is not None
    counts = [task.counts for task in tasks.values()]
    return json_bytes(
        {
            "format": FORMAT,
            "versions": first.versions,
            "options": first.options.document(),
            "sources": {name: task_digest(task) for name, task in sorted(tasks.items())},
            "totals": {
                "images": sum(shard.images for shard in shards),
                "masks": sum(shard.masks for shard in shards),
                "shard_bytes": sum(shard.bytes for shard in shards),
                "index_bytes": sum(shard.index_bytes for shard in shards),
                "refused": sum(sum(count["refused"].values()) for count in counts),
                "doubtful": sum(sum(task.warnings.values()) for task in tasks.values()),
            },
            "largest": {
                name: max((task.largest[name] for task in tasks.values()), default=0)
                for name in sorted(first.largest)
            },
            **({"failed": dict(sorted(failed.items()))} if failed else {}),
            **({"pending": sorted(pending)} if pending else {}),
            **({READING: readings} if (readings := _readings(tasks)) else {}),
            "samples": {"name": table_name, **asdict(facts)},
            "shards": [asdict(shard) for shard in shards],
        }
    )


def _readings(tasks: Mapping[str, Task]) -> dict[str, dict[str, Any]]:
    """Source -> how it was read; also in dataset.json, because a repair needs it if the task file is lost."""
    return {name: task.source[READING] for name, task in sorted(tasks.items()) if READING in task.source}


def parse_dataset(data: bytes, path: object) -> dict[str, Any]:
    """dataset.json from its bytes, every field with its type; ManifestError: damaged or of another format."""
    document = parse_document(data, path, f"/{DATASET}")
    try:
        check_dataset(document)
    except FieldError as error:
        rebuild = command("index", str(path).removesuffix(f"/{DATASET}"), "--tables")
        raise ManifestError(f"{path}: damaged: {error}; run `{rebuild}` to rebuild it") from None
    return document


def parse_document(data: bytes, path: object, name: str) -> dict[str, Any]:
    """The object in dataset.json or a task file; ManifestError: damaged or of another format.

    `name` is the end of the path, after the dataset directory.
    """
    try:
        document = json.loads(data)
        written_format = document["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        rebuild = command("index", str(path).removesuffix(name))
        raise ManifestError(
            f"{path}: damaged ({str(error)[:200]}); restore it from a copy, or rebuild it with `{rebuild}`; "
            "if it is a file of yours, choose another --out"
        ) from None
    if written_format != FORMAT:
        raise ManifestError(f"{path}: format {written_format!r}; this package reads {FORMAT!r}")
    return dict(document)


def known_tasks(root: Root, without: Collection[str] = ()) -> dict[str, Task]:
    """`read_tasks`, and the sources that dataset.json lists and whose task files are lost or damaged, with
    the values of dataset.json: so a writer of it does not lose them. ManifestError: a damaged task file of a
    source that has shards and is not in dataset.json.
    """
    store = open_store(root)
    tasks, damaged = readable_tasks(store, without)
    strangers: set[str] = set()
    with contextlib.suppress(ManifestError, OSError, KeyError, TypeError):
        document = read_dataset(store)
        lost = document["sources"].keys() - tasks.keys() - set(without)
        tasks |= {name: _listed_task(document, name) for name in lost}
        if damaged.keys() - tasks.keys():
            stems = {shard_order(shard).stem for shard in store.names("", ".tar")}
            strangers = {name for name in damaged if source_stem(name) not in stems}
    for name, error in damaged.items():
        if name not in tasks and name not in strangers:
            raise error
    return dict(sorted(tasks.items()))


def _listed_task(document: Mapping[str, Any], name: str) -> Task:
    shards = [ShardInfo(**shard) for shard in document["shards"] if is_shard_of(shard["name"], name)]
    return rebuilt_task(
        name,
        Options(**document["options"]),
        document["versions"],
        shards,
        document["largest"],
        reading=document.get(READING, {}).get(name),
        listed=document["sources"][name],
    )


def rebuilt_task(
    name: str,
    options: Options,
    versions: dict[str, str],
    shards: list[ShardInfo],
    largest: dict[str, int],
    *,
    reading: Mapping[str, Any] | None,
    jpg_bytes: int | None = None,
    listed: str | None = None,
) -> Task:
    """A task without the values that only its lost task file had: size, time and digest of the source,
    refused members and warnings.
    """
    source = dict.fromkeys(("name", "kind", "size", "mtime_ns", "sha256", "md5")) | {"name": name}
    source |= {READING: reading} if reading else {}
    counts = counts_of(shards, jpg_bytes)
    return Task(source, options, versions, shards, counts, damage=[], largest=largest, listed=listed)


def counts_of(shards: Sequence[ShardInfo], jpg_bytes: int | None) -> dict[str, Any]:
    """The counts of a task of which only shards are known; None: unknown."""
    return {
        "members": None,
        "images": sum(shard.images for shard in shards),
        "masks": sum(shard.masks for shard in shards),
        "jpg_bytes": jpg_bytes,
        "refused_members": None,
        "refused": {},
        "doubtful": {},
    }
