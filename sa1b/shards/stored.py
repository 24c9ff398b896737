"""Files of a dataset directory with the names of shards: whose they are, and the images that they hold.

Shards are renamed into place when they are complete. So a file with the name of a shard that no task file
lists holds images that may be nowhere else, or it is a user's: neither is replaced or removed silently.
"""

import contextlib
import hashlib
import re
from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from sa1b.console import command, counted
from sa1b.errors import ManifestError, SourceError, TableError, UsageError
from sa1b.names import is_shard_of, parse_member_name, parse_shard_name, shard_order, source_name, source_stem
from sa1b.report import first_names
from sa1b.shards.documents import ShardInfo
from sa1b.shards.index_file import UNREADABLE
from sa1b.shards.manifest import (
    LAYERS,
    PARTIAL,
    QUARANTINE,
    TASKS,
    VIEWS,
    dataset_around,
    read_dataset,
    read_task,
    task_name,
)
from sa1b.shards.sample_table import MAGIC, open_table
from sa1b.sources.tar_stream import BLOCK, parse_header
from sa1b.storage.store import Store

Ids = npt.NDArray[np.uint64]


def no_ids() -> Ids:
    """An empty array of image ids."""
    return np.empty(0, np.uint64)


def shard_of(name: str) -> str:
    """The name of the shard that a file is or is the index of."""
    return re.sub(r"\.parquet$", ".tar", name)


def stored_files(store: Store, source: str) -> list[str]:
    """Names of the shards and indexes of a source in the dataset directory, listed or not."""
    return [name for name in store.names("") if is_shard_of(shard_of(name), source)]


def stored_shards(store: Store, source: str) -> set[str]:
    """Names of a source's shards in the dataset directory, also those with only their index left."""
    return set(map(shard_of, stored_files(store, source)))


def rows_alone(store: Store, known: Collection[str]) -> list[str]:
    """Rows of the sample table of sources that have no shards and are not `known`."""
    names = {name.removesuffix(".samples") for name in store.names(TASKS, ".samples")} - {*known}
    rows = (task_name(name, "samples") for name in names if not stored_shards(store, name))
    return [name for name in rows if store.read(name).startswith(MAGIC)]


def sources_without_task(store: Store, known: Collection[str]) -> dict[str, list[str]]:
    """Sources with shards and no task file in `known`, and the names of these shards in order."""
    rows = (name.removesuffix(".samples") for name in store.names(TASKS, ".samples"))
    names = {source_stem(name): name for name in (*rows, *known)}
    shards: dict[str, list[str]] = {}
    for shard in sorted(filter(parse_shard_name, store.names("", ".tar")), key=shard_order):
        stem = shard_order(shard).stem
        if (name := names.get(stem, source_name(stem))) not in known:
            shards.setdefault(name, []).append(shard)
    return shards


def check_kept(
    store: Store, source: str, ids: Ids, files: Collection[str], *, damaged: bool, replace: bool
) -> None:
    """SourceError, with the images, if a result lacks images of the source's stored shards.

    UsageError: a file is not the package's. `ids` are of the new result. `files` are of `stored_files`; only
    the process that has claimed the source changes them. `damaged`: a part of the source could not be read.
    `replace`: the user asked for the content of another source; a damaged one is refused all the same.
    """
    listed = _listed(store, source)
    check_own(store, [name for name in files if shard_of(name) not in listed])
    if replace and not damaged:
        return
    lost = [no_ids()]
    for shard, images in stored_images(store, source, files).items():
        left = np.setdiff1d(images, ids)
        if len(left) and (shard not in listed or store.size(shard) == listed[shard].bytes):
            lost.append(left)
    left = np.unique(np.concatenate(lost))
    if len(left) and len(left := np.setdiff1d(left, _images_of_others(store, source))):
        drop = f"`{command('reshard', '--out', store, '--drop', source)}`"
        way = "The source is damaged: download it again" if damaged else "Pass the source as before"
        if not listed:
            way += f"; `{command('index', store)}` adds the stored shards to the dataset"
        raise SourceError(
            f"{store}: has {counted(len(left), 'image')} of {source} that the source lacks now "
            f"({first_names(left.tolist())}), and nothing was replaced. {way}; to go on without these "
            f"images, {'' if damaged else 'add --replace, or '}first remove them with {drop}"
        )


def check_drop(store: Store, source: str) -> None:
    """UsageError if unlisted shards hold images that the dataset lacks, or for a user's file."""
    listed, files = _listed(store, source), stored_files(store, source)
    check_own(store, [name for name in files if shard_of(name) not in listed])
    if listed or store.exists(task_name(source, "samples")):  # the rows are removed after the shards
        return
    images = stored_images(store, source, files)
    left = np.setdiff1d(np.concatenate([no_ids(), *images.values()]), _images_of_others(store, source))
    if len(left):
        raise UsageError(
            f"--drop {source}: {first_names(sorted(images))} of {store}: no task file lists them, and they "
            f"hold {counted(len(left), 'image')} that the dataset lacks ({first_names(left.tolist())}); "
            f"first add them with `{command('index', store)}`, or move these files away"
        )


def check_own(store: Store, names: Iterable[str]) -> None:
    """UsageError if a file has a name of the package and not its form."""
    for name in names:
        if not is_own(store, name):
            raise UsageError(
                f"{store.url(name)}: has the name of a shard or an index but not its form; not replaced; "
                "move it away, or choose another folder"
            )


def check_outside(folder: Path) -> None:
    """UsageError for a new dataset directory in a folder that another one has for its own files."""
    path = folder.resolve()
    around = dataset_around(path.parent)
    if around is not None and path.relative_to(around).parts[0] in (
        TASKS,
        QUARANTINE,
        PARTIAL,
        VIEWS,
        LAYERS,
    ):
        raise UsageError(f"{folder}: is inside a folder of the dataset {around}; choose another folder")


def is_own(store: Store, name: str) -> bool:
    """Whether a file begins as a shard, an index or a sample table does."""
    start = _block(store, name, 0)
    if name.endswith(".tar"):
        header = parse_header(start) if len(start) == BLOCK else None
        return header is not None and parse_member_name(header.name) is not None
    return start.startswith(b"PAR1" if name.endswith(".parquet") else MAGIC)


def stored_images(store: Store, source: str, files: Collection[str]) -> dict[str, Ids]:
    """The image ids of each shard that is stored: from the rows of the source, its index, or its headers."""
    ids: dict[str, Ids] = {}
    with contextlib.suppress(ManifestError, TableError, OSError):
        task = read_task(store, source)
        with store.files(task_name(source, "samples")) as (path,):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if task.samples is not None and task.samples["sha256"] == digest:
                rows = open_table(path)
                for number, shard in enumerate(task.shards):
                    ids[shard.name] = rows.image_id[rows.shard == number].copy()
    tars = [name for name in files if name.endswith(".tar")]
    return {shard: ids[shard] if shard in ids else images_of(store, shard) for shard in tars}


def images_of(store: Store, shard: str) -> Ids:
    """The image ids of a shard, from its index, or from the headers of the tar up to the first damage."""
    index = shard.removesuffix(".tar") + ".parquet"
    with contextlib.suppress(*UNREADABLE), store.files(index) as (path,):
        ids = pq.read_table(path.absolute(), columns=["image_id"])["image_id"]
        return np.asarray(ids.to_numpy(), np.uint64)
    image_ids, offset = set(), 0
    while len(block := _block(store, shard, offset)) == BLOCK:
        header = parse_header(block)
        member = None if header is None else parse_member_name(header.name)
        if header is None or member is None or header.size < 0:
            break
        image_ids.add(member.image_id)
        offset += BLOCK + header.size + -header.size % BLOCK
    return np.array(sorted(image_ids), np.uint64)


def _block(store: Store, name: str, start: int) -> bytes:
    """Up to BLOCK bytes of a file; none of a folder."""
    if store.is_local:
        with (
            contextlib.suppress(IsADirectoryError, FileNotFoundError),
            Path(store.url(name)).open("rb") as file,
        ):
            file.seek(start)
            return file.read(BLOCK)
        return b""
    length = min(BLOCK, (store.size(name) or 0) - start)
    if length <= 0:
        return b""
    try:
        return store.reader.read_range(name, start, length)
    finally:
        store.reader.forget(name)  # the object may be replaced now


def _listed(store: Store, source: str) -> dict[str, ShardInfo]:
    """The shards of a source by dataset.json and its task file."""
    infos: dict[str, ShardInfo] = {}
    with contextlib.suppress(ManifestError, OSError, KeyError, TypeError):
        shards = read_dataset(store)["shards"]
        infos = {shard["name"]: ShardInfo(**shard) for shard in shards if is_shard_of(shard["name"], source)}
    with contextlib.suppress(ManifestError, OSError):
        infos |= {shard.name: shard for shard in read_task(store, source).shards}
    return infos


def _images_of_others(store: Store, source: str) -> Ids:
    """The ids of the images of the dataset from other sources; none if it cannot be read."""
    with contextlib.suppress(ManifestError, TableError, OSError, KeyError, TypeError, IndexError):
        document = read_dataset(store)
        others = np.array([not is_shard_of(shard["name"], source) for shard in document["shards"]], bool)
        with store.files(str(document["samples"]["name"])) as (path,):
            table = open_table(path)
            return np.asarray(table.image_id[others[table.shard]], np.uint64)
    return no_ids()
