"""Ingest of the wanted pairs of a source; the result is a source of the dataset with only these images.

The task file of such a source has no size and time of the source, like that of a source of which only some
shards were copied. So `sa1b reshard` with this source converts it completely. The digest is recorded if the
source was read to its end.

tasks/<source>.searched records what a source that was read to its end does not contain, so that the next run
does not read it again for the same images. It has the size, the time and a digest of the ends of the source:
another download of it is read again. There is none for a source with damage, which may contain what was not
found.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq

from sa1b.console import command, counted
from sa1b.errors import NoPairError, SourceError, TableError
from sa1b.ingest.ingest import Counts, Policy, ingest
from sa1b.ingest.search import Searched
from sa1b.shards.commit import shard_files, task_rows
from sa1b.shards.index_reader import UNREADABLE
from sa1b.shards.manifest import TASKS, Options, Task, task_name
from sa1b.shards.sample_table import open_table
from sa1b.shards.stored import Ids, no_ids, stored_shards
from sa1b.sources.source import Source
from sa1b.sources.wanted import WantedPairs
from sa1b.storage.atomic import json_bytes
from sa1b.storage.reader import Reader
from sa1b.storage.store import Store

_ENDING = ".searched"
_END = 1 << 16  # bytes at each end of a tar: a gzip stream ends with the CRC-32 of its content


def ingest_wanted(
    source: Source,
    root: Store,
    options: Options,
    policy: Policy,
    report: Callable[[Counts], None],
    check: Callable[[Task], None],
    stored: Ids,
) -> tuple[Task | None, Searched]:
    """Convert the wanted pairs of a source, and those of it that the dataset directory has already.

    What was found is stored also if the source is damaged and lacks others; the error comes after that.

    Args:
        source: with `wanted`.
        stored: ids of the images that the dataset directory has of this source.
        root, options, policy, report, check: see `ingest`.

    Returns:
        The task, or None if the source has none of the pairs, and the ids that were found, read and absent.

    Raises:
        SourceError: the source lacks an image that the dataset directory has from it, or see `ingest`.
    """
    assert source.wanted is not None
    part = WantedPairs(np.union1d(source.wanted.ids, stored), is_block=source.wanted.is_block)

    def check_stored() -> None:
        lost = np.setdiff1d(stored, part.found(), assume_unique=True)
        if len(lost):
            raise SourceError(
                f"{source.label}: {root} has image {int(lost[0])} of a source named {source.name!r}, and "
                "this source lacks it: its content differs; use another --out, or remove the finished source "
                f"with `{command('reshard')} --out {root} --drop {source.name}`"
            )

    def check_all(task: Task) -> None:
        check_stored()
        check(task)

    task: Task | None = None
    try:
        task = ingest(replace(source, wanted=part), root, options, policy, report, check_all)
    except NoPairError:
        check_stored()
        root.remove(task_name(source.name, "failed"))
    searched = Searched(part.first, part.last, part.found(), part.absent())
    name = f"{TASKS}/{source.name}{_ENDING}"
    if part.is_whole and not part.damage:
        record = {**state_of(source), "first": part.first, "last": part.last}
        root.put(name, json_bytes({**record, "absent": searched.absent.tolist()}))
    else:
        root.remove(name)
    if part.damage and (lost := len(part.ids) - len(searched.found)):
        first = part.damage[0]
        raise SourceError(
            f"{source.label}: damaged at byte {first.offset:,} ({first.message}), and the rest lacks "
            f"{counted(lost, 'wanted image')}; download it again, then run the same command"
        )
    return task, searched


def stored_ids(root: Store, task: Task | None) -> Ids:
    """The image ids of a finished source, ascending."""
    return np.empty(0, np.uint64) if task is None else task_rows(root, task)[1].image_id


def known_ids(root: Store, name: str) -> Ids:
    """The image ids of a source whose task file is not used: from its rows or else from its indexes."""
    with contextlib.suppress(OSError, TableError), root.files(task_name(name, "samples")) as (path,):
        return open_table(path, check=True).image_id.copy()
    read = [no_ids()]
    for shard in sorted(stored_shards(root, name)):
        with contextlib.suppress(*UNREADABLE), root.files(shard_files(shard)[1]) as (path,):
            ids = pq.read_table(path.absolute(), columns=["image_id"])["image_id"]
            read.append(ids.to_numpy().astype(np.uint64))
    return np.unique(np.concatenate(read))


def state_of(source: Source) -> dict[str, object]:
    """Size in bytes, time in ns and sha256 of both ends of a source, which differ for another download."""
    digest = hashlib.sha256()
    if source.kind == "tar":
        root, name = (source.path.parent, source.path.name) if source.link is None else source.link.split()
        options = None if source.link is None else source.link.reader_options
        length = min(_END, source.size)
        with Reader(root, options=options) as reader:
            for start in sorted({0, source.size - length}):
                digest.update(reader.read_range(name, start, length))
    return {"size": source.size, "mtime_ns": source.mtime_ns, "ends_sha256": digest.hexdigest()}


def read_searched(root: Store, sources: Callable[[str], Source | None]) -> dict[str, Searched]:
    """The sources that earlier runs have read to the end, by name, if they have not changed since.

    Args:
        sources: name -> source, measured now; None: unknown.
    """
    found = {}
    for name in root.names(TASKS, _ENDING):
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, OSError):
            document = json.loads(root.read(f"{TASKS}/{name}"))
            source = sources(name.removesuffix(_ENDING))
            if source is None or not state_of(source).items() <= document.items():
                continue
            absent = np.array(document["absent"], np.uint64)
            found[name.removesuffix(_ENDING)] = Searched(
                document["first"], document["last"], np.empty(0, np.uint64), absent
            )
    return found
