"""Where the members of a shard lie: what its index and samples.bin say, each read on its own."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sa1b.errors import TableError
from sa1b.shards.index_reader import UNREADABLE, IndexReader, Place
from sa1b.shards.manifest import ShardInfo, table_name
from sa1b.shards.sample_table import open_table
from sa1b.shards.shard import index_path
from sa1b.verify.report import Find, ShardResult, short


@dataclass(frozen=True, slots=True)
class Claim:
    """What is said of a shard, to be checked.

    Attributes:
        info: by its task file or dataset.json.
        source: name of its source, None: unknown.
        number: its number in samples.bin, None where samples.bin cannot be held against it.
        keep_json, index_runs: options of the root, None: unknown.
    """

    info: ShardInfo
    source: str | None = None
    number: int | None = None
    keep_json: bool | None = None
    index_runs: bool | None = None


class Places:
    """The two lists of places; damage of the index is told to `find_index`, its bytes added to `result`.

    Attributes:
        index_file: name of the index. samples: of the sample table.
        index: the index, None if it cannot be read.
        rows: image id -> row of the index.
        table: image id -> ending -> place, by samples.bin; None if it cannot be read.
    """

    def __init__(self, root: Path, claim: Claim, result: ShardResult, find_index: Find) -> None:
        path = index_path(root / claim.info.name)
        self.samples = table_name(root)
        self.index_file = path.name
        self.index: IndexReader | None = None
        self.rows: dict[int, int] = {}
        self._open_index(path, claim, result, find_index)
        self.table = self._table_rows(root, claim)

    def _open_index(self, path: Path, claim: Claim, result: ShardResult, find: Find) -> None:
        info = claim.info
        try:
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                find("index_missing", "not there")
            else:
                find("index_unreadable", short(error))
            return
        result.bytes += size
        if size != info.index_bytes:
            find("index_bytes", f"{size:,} bytes, {info.index_bytes:,} written")
        elif sha256 != info.index_sha256:
            find("index_sha256", f"sha256 is {sha256}, written {info.index_sha256}")
        try:
            self.index = IndexReader(path)
        except UNREADABLE as error:
            find("index_unreadable", short(error))
            return
        ids = self.index.columns["image_id"].tolist()
        self.rows.update((image_id, row) for row, image_id in enumerate(ids))
        if len(self.rows) != len(ids):
            find("index_duplicate", "an image id stands in two rows")
        if len(ids) != info.images:
            find("index_rows", f"{len(ids):,} rows, {info.images:,} images written")
        offsets = self.index.columns["jpg_offset"]
        for row in np.flatnonzero(offsets[1:] <= offsets[:-1])[:1].tolist():
            message = "the rows are not in the order of the tar"
            find("index_order", message, int(offsets[row + 1]), ids[row + 1])
        if claim.index_runs is not None and self.index.with_runs != claim.index_runs:
            message = "with" if self.index.with_runs else "without"
            find("index_columns", f"{message} the decoded masks, against the options")

    def _table_rows(self, root: Path, claim: Claim) -> dict[int, dict[str, Place]] | None:
        """image id -> ending -> place, by samples.bin; None where it cannot be read."""
        if claim.number is None:
            return None
        try:
            table = open_table(root / self.samples)
        except (TableError, OSError):
            return None  # found and named once, not by every shard
        rows = {}
        for row in np.flatnonzero(table.shard == claim.number).tolist():
            masks_offset = table.masks_offset(row)
            rows[int(table.image_id[row])] = {
                "jpg": Place(int(table.offset[row]), int(table.jpg_bytes[row]), int(table.jpg_crc32c[row])),
                "masks": Place(masks_offset, int(table.masks_bytes[row]), int(table.masks_crc32c[row])),
            }
        return rows

    def find(self, image_id: int, ending: str) -> dict[str, Place]:
        """File name -> where it says the jpg or the masks lie."""
        found = {}
        if self.index is not None and image_id in self.rows:
            found[self.index_file] = self.index.place(self.rows[image_id], ending)
        if self.table is not None and image_id in self.table:
            found[self.samples] = self.table[image_id][ending]
        return found

    def image_ids(self) -> list[int]:
        """Image ids that index or samples.bin know, in their order."""
        return list(dict.fromkeys([*self.rows, *(self.table or ())]))
