"""Locations of images by id: which shard and source contains an image.

    found = locate(ids, ["shards"])
    found.shard[found.is_stored]

An image is searched in dataset directories (folders and URLs), indexes of shards, and task files. For an
image that none of them contains, the source is estimated: by the range of ids of each known source, or else
by the usual blocks of ids, see sa1b.sources.pairing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.errors import UsageError
from sa1b.names import parse_shard_name, source_name, source_stem
from sa1b.shards.dataset import Dataset
from sa1b.shards.index import IndexReader
from sa1b.shards.index_file import UNREADABLE
from sa1b.shards.manifest import DATASET, read_task, task_name
from sa1b.shards.sample_table import SampleTable, open_table
from sa1b.sources.pairing import TARS, estimated_numbers, estimated_source

STORED, ESTIMATED, UNKNOWN = "stored", "estimated", "unknown"
_NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The images of an input: columns of [N], sorted by id, as in sa1b.shards.sample_table."""

    image_id: npt.NDArray[np.uint64]
    shard: npt.NDArray[np.int64]  # position in `shards`
    offset: npt.NDArray[np.uint64]
    jpg_bytes: npt.NDArray[np.uint32]
    masks_bytes: npt.NDArray[np.uint32]
    shards: list[str]  # path or URL of each shard
    sources: list[str]  # name of each shard's source

    def blocks(self) -> dict[str, tuple[int, int]]:
        """Source -> its first and last image id."""
        spans: dict[str, tuple[int, int]] = {}
        order = np.argsort(self.shard, kind="stable")  # ids stay ascending within a shard
        starts = np.searchsorted(self.shard[order], np.arange(len(self.shards) + 1))
        for number, (start, end) in enumerate(pairwise(starts.tolist())):
            if end > start:
                first, last = int(self.image_id[order[start]]), int(self.image_id[order[end - 1]])
                before = spans.get(self.sources[number], (first, last))
                spans[self.sources[number]] = min(first, before[0]), max(last, before[1])
        return spans


@dataclass(slots=True, eq=False)
class Located:
    """The locations of images, [N]. One read of the shard from `offset` returns an image and its masks."""

    image_id: npt.NDArray[np.uint64]  # ascending
    status: npt.NDArray[np.object_] = field(init=False)  # STORED, ESTIMATED (source only) or UNKNOWN
    source: npt.NDArray[np.object_] = field(init=False)  # name; "" if unknown
    shard: npt.NDArray[np.object_] = field(init=False)  # path; "" if unknown
    offset: npt.NDArray[np.int64] = field(init=False)  # -1 if unknown, as are the sizes
    jpg_bytes: npt.NDArray[np.int64] = field(init=False)
    masks_bytes: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.image_id)
        self.status = np.full(count, UNKNOWN, object)
        self.source, self.shard = np.full(count, "", object), np.full(count, "", object)
        self.offset, self.jpg_bytes, self.masks_bytes = (np.full(count, _NONE, np.int64) for _ in range(3))

    @property
    def is_stored(self) -> npt.NDArray[np.bool_]:
        """[N]: whether the shard is known."""
        return np.asarray(self.status == STORED)

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The columns by name, in the order of tables."""
        names = ("image_id", "status", "source", "shard", "offset", "jpg_bytes", "masks_bytes")
        return {name: getattr(self, name) for name in names}


def locate(ids: npt.NDArray[np.uint64], inputs: Sequence[str], listed: Sequence[str] = ()) -> Located:
    """Search images, ids ascending and each once, in all inputs; the first that has an image counts.

    Inputs are dataset directories (folders or URLs), index files (.parquet), task files (.json, .samples);
    else UsageError. Without them, only the sources `listed` are estimated; empty: all tars of SA-1B.
    """
    located = Located(ids)
    searched = []
    for path in inputs:
        searched.append(read_rows(path))
        _take(located, searched[-1])
    if not located.is_stored.all():
        blocks = {source: block for rows in searched for source, block in rows.blocks().items()}
        _estimate(located, blocks, set(listed))
    return located


def read_rows(text: str) -> Rows:
    """The images of the dataset directory, index or task file at a path or URL. Errors: see `locate`."""
    path = Path(text)
    if path.suffix == ".parquet" and path.is_file():
        return _of_index(path)
    if path.suffix in (".samples", ".json") and path.parent.name == "tasks" and path.is_file():
        return _of_task(path)
    if path.is_file() and not (path.name == DATASET or path.name.startswith("samples")):
        raise UsageError(
            f"{text}: not an index, task file or dataset directory; pass the --out folder of reshard, a "
            "shard's .parquet file, or a file of tasks/"
        )
    dataset = Dataset(str(path.parent) if path.is_file() else text)
    dataset.check_table()
    return _of_table(
        dataset.table, [dataset.reader.url(name) for name in dataset.shards], shard_sources(dataset)
    )


def shard_sources(dataset: Dataset) -> list[str]:
    """The name of the source of each shard of a dataset directory."""
    by_stem = {source_stem(name): name for name in dataset.manifest["sources"]}
    return [_source_of(name, by_stem) for name in dataset.shards]


def _of_index(path: Path) -> Rows:
    try:
        index = IndexReader(path)
    except UNREADABLE as error:
        raise UsageError(f"{path}: not the index of a shard ({error}); pass a dataset directory") from None
    columns = index.columns
    index.close()
    order = np.argsort(columns["image_id"], kind="stable")
    return Rows(
        image_id=columns["image_id"][order].astype(np.uint64),
        shard=np.zeros(len(order), np.int64),
        offset=columns["jpg_offset"][order].astype(np.uint64),
        jpg_bytes=columns["jpg_bytes"][order],
        masks_bytes=columns["masks_bytes"][order],
        shards=[str(path.with_suffix(".tar"))],
        sources=[_source_of(path.with_suffix(".tar").name, {})],
    )


def _of_task(path: Path) -> Rows:
    root, name = path.parent.parent, path.stem
    try:
        task = read_task(root, name)
        table = open_table(root / task_name(name, "samples"), str(root))
    except FileNotFoundError as error:
        raise UsageError(
            f"{path}: {PurePath(str(error.filename)).name} is missing; pass the dataset directory {root}"
        ) from None
    return _of_table(table, [str(root / shard.name) for shard in task.shards], [name] * len(task.shards))


def _of_table(table: SampleTable, shards: list[str], sources: list[str]) -> Rows:
    return Rows(
        image_id=table.image_id,
        shard=table.shard.astype(np.int64),
        offset=table.offset,
        jpg_bytes=table.jpg_bytes,
        masks_bytes=table.masks_bytes,
        shards=shards,
        sources=sources,
    )


def _source_of(shard: str, by_stem: dict[str, str]) -> str:
    parsed = parse_shard_name(shard)
    return "" if parsed is None else by_stem.get(parsed.stem, source_name(parsed.stem))


def _take(located: Located, rows: Rows) -> None:
    if not len(rows.image_id):
        return
    at = np.minimum(np.searchsorted(rows.image_id, located.image_id), len(rows.image_id) - 1)
    new = np.flatnonzero((rows.image_id[at] == located.image_id) & ~located.is_stored)
    at = at[new]
    shard = rows.shard[at]
    located.status[new] = STORED
    located.source[new] = np.array(rows.sources, object)[shard]
    located.shard[new] = np.array(rows.shards, object)[shard]
    for name in ("offset", "jpg_bytes", "masks_bytes"):
        getattr(located, name)[new] = getattr(rows, name)[at].astype(np.int64)


def _estimate(located: Located, blocks: dict[str, tuple[int, int]], listed: set[str]) -> None:
    for name, (first, last) in blocks.items():
        inside = slice(*np.searchsorted(located.image_id, np.array([first, last + 1], np.uint64)))
        new = np.flatnonzero(located.status[inside] == UNKNOWN) + inside.start
        located.status[new], located.source[new] = ESTIMATED, name
    left = np.flatnonzero(located.status == UNKNOWN)
    numbers = estimated_numbers(located.image_id[left])
    for number in np.unique(numbers[numbers < TARS]).tolist():
        name = estimated_source(number)
        if not listed or name in listed:
            new = left[numbers == number]
            located.status[new], located.source[new] = ESTIMATED, name
