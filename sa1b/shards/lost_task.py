"""Sources whose task file is lost or damaged: what dataset.json or the shards show of them.

The images of such a source stay in the dataset. `sa1b verify` reports the task file, and `sa1b index`
rebuilds it from the shards.
"""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from sa1b.errors import ManifestError, TableError
from sa1b.names import is_shard_of, shard_order, source_stem
from sa1b.shards.manifest import READING, Options, ShardInfo, Task, read_dataset, readable_tasks
from sa1b.shards.sample_table import COLUMNS, SampleTable, decode, encode, open_table
from sa1b.storage.open import open_store
from sa1b.storage.store import Root, Store


def known_tasks(root: Root, without: Collection[str] = ()) -> dict[str, Task]:
    """`read_tasks`, and the sources that dataset.json lists and whose task files are lost or damaged, with
    the values of dataset.json. So a writer of dataset.json does not lose them.

    Raises:
        ManifestError: a damaged task file of a source that has shards and is not in dataset.json.
    """
    store = open_store(root)
    found, damaged = readable_tasks(store, without)
    strangers: set[str] = set()
    with contextlib.suppress(ManifestError, OSError, KeyError, TypeError):
        document = read_dataset(store)
        lost = document["sources"].keys() - found.keys() - set(without)
        found |= {name: _listed_task(document, name) for name in lost}
        if damaged.keys() - found.keys():
            stems = {shard_order(shard).stem for shard in store.names("", ".tar")}
            strangers = {name for name in damaged if source_stem(name) not in stems}
    for name, error in damaged.items():
        if name not in found and name not in strangers:
            raise error
    return dict(sorted(found.items()))


def _listed_task(document: Mapping[str, Any], name: str) -> Task:
    shards = [ShardInfo(**one) for one in document["shards"] if is_shard_of(one["name"], name)]
    return rebuilt_task(
        name,
        Options(**document["options"]),
        document["versions"],
        shards,
        document["largest"],
        document.get(READING, {}).get(name),
        listed=document["sources"][name],
    )


def rebuilt_task(
    name: str,
    options: Options,
    versions: dict[str, str],
    shards: list[ShardInfo],
    largest: dict[str, int],
    reading: Mapping[str, Any] | None,
    *,
    jpg_bytes: int | None = None,
    listed: str | None = None,
) -> Task:
    """A task without the values that only its lost task file had: size, time and digest of the source,
    refused members and warnings."""
    source = dict.fromkeys(("name", "kind", "size", "mtime_ns", "sha256", "md5")) | {"name": name}
    source |= {READING: reading} if reading else {}
    counts = counts_of(shards, jpg_bytes)
    return Task(source, options, versions, shards, counts, [], largest, listed=listed)


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


def listed_rows(store: Store, task: Task) -> SampleTable | None:
    """The rows of a source in the table of dataset.json; None: the table is lost or damaged."""
    document = read_dataset(store)
    with contextlib.suppress(OSError, TableError), store.files(str(document["samples"]["name"])) as (path,):
        table = open_table(path, check=True)
        if table.digest == document["samples"]["columns_sha256"]:
            own = np.array([is_shard_of(shard["name"], task.name) for shard in document["shards"]], bool)
            columns = {column: getattr(table, column)[own[table.shard]] for column in COLUMNS}
            return decode(encode(columns | {"shard": (np.cumsum(own) - 1)[columns["shard"]]}))
    return None
