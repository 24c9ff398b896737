"""A shard index read back, one row group in memory at a time."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sa1b.shards.index import schema
from sa1b.storage.errors import StorageError
from sa1b.storage.reader import Reader

UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError, IndexError, OverflowError)


class IndexFormatError(ValueError):
    """A Parquet file that is not the index of a shard."""


@dataclass(frozen=True, slots=True)
class MemberLocation:
    """Offset, size in bytes and checksum of a member's content."""

    offset: int
    bytes: int
    crc32c: int


def index_file(reader: Reader, name: str) -> Any:
    """What pyarrow opens an index from: its path or, of a URL, a file that reads the ranges it needs.

    The ranges of a URL are not verified, because an index has one digest for the whole file.

    Raises:
        sa1b.storage.errors.StorageError: the URL cannot be read; also during reads.
    """
    # A relative path such as "run:1/x.parquet" would be taken for a URI.
    if reader.is_local:
        return Path(reader.url(name)).absolute()
    return pa.PythonFile(RangeFile(reader, name), mode="r")


class RangeFile(io.RawIOBase):
    """An object of a URL as a file.

    Args:
        reader: reader of the URL.
        name: name of the object.
        report: called with each error of the store before it is raised, for callers that hide its class.
    """

    def __init__(
        self, reader: Reader, name: str, report: Callable[[StorageError], None] | None = None
    ) -> None:
        super().__init__()
        self._reader, self._name, self._report, self._at = reader, name, report, 0
        with self._reported():
            self.size = reader.size(name)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.size - self._at)
        length = left if size is None or size < 0 else min(size, left)
        with self._reported():
            data = self._reader.read_range(self._name, self._at, length)
        self._at += length
        return data

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            if self._report is not None:
                self._report(error)
            raise


class IndexReader:
    """The rows of an index file.

    Attributes:
        with_runs: whether the index contains the decoded masks.
        columns: the columns with one value per image, each [rows].
    """

    def __init__(self, path: Path) -> None:
        self._file = pq.ParquetFile(path.absolute())  # see index_file
        found = self._file.schema_arrow
        self.with_runs = "runs" in found.names
        if not found.equals(schema(with_runs=self.with_runs, with_origin="category" in found.names)):
            raise IndexFormatError("its columns are not those of a shard index")
        groups = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(groups, dtype=np.int64)])
        names = [field.name for field in found if not pa.types.is_list(field.type)]
        plain = self._file.read(names)
        self.columns = {name: plain[name].to_numpy() for name in names}
        self._per_mask = [
            field.name for field in found if pa.types.is_list(field.type) and field.name != "runs"
        ]
        self._group: tuple[int, pa.Table] | None = None

    def __len__(self) -> int:
        return int(self._starts[-1])

    def close(self) -> None:
        self._file.close()

    def location(self, row: int, ending: str) -> MemberLocation:
        """Location of the jpg or the masks of a row."""
        values = (self.columns[f"{ending}_{what}"][row] for what in ("offset", "bytes", "crc32c"))
        return MemberLocation(*map(int, values))

    def numbers(self, row: int) -> dict[str, npt.NDArray[Any]]:
        """The columns with one entry per mask: [N] or, for boxes and points, [N, width].

        Raises:
            one of UNREADABLE: the row group is damaged.
        """
        table, i = self._row(row)
        return {name: _entry(table[name], i) for name in self._per_mask}

    def runs(self, row: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """All masks of a row as runs and offsets, see sa1b.masks.runs.

        Raises:
            one of UNREADABLE: the row group is damaged.
        """
        table, i = self._row(row)
        masks = _single(table["runs"])
        first, last = masks.offsets[i].as_py(), masks.offsets[i + 1].as_py()
        offsets = masks.values.offsets.to_numpy()[first : last + 1].astype(np.int64)
        return masks.values.values.to_numpy()[offsets[0] : offsets[-1]], offsets - offsets[0]

    def _row(self, row: int) -> tuple[pa.Table, int]:
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        if self._group is None or self._group[0] != group:
            self._group = None  # frees the previous row group before the next one is read
            self._group = (group, self._file.read_row_group(group))
        return self._group[1], row - int(self._starts[group])


def _single(column: pa.ChunkedArray) -> pa.ListArray:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def _entry(column: pa.ChunkedArray, i: int) -> npt.NDArray[Any]:
    lists = _single(column)
    first, last = lists.offsets[i].as_py(), lists.offsets[i + 1].as_py()
    values = lists.values
    if not pa.types.is_list(values.type):
        plain: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)[first:last]
        return plain.astype(np.str_) if plain.dtype == object else plain
    offsets = values.offsets.to_numpy()[first : last + 1]
    if len(offsets) < 2:
        return np.empty((0, 0))
    widths = np.diff(offsets)
    if (widths != widths[0]).any():
        raise IndexFormatError("masks of one image have boxes or points of different lengths")
    nested: npt.NDArray[Any] = values.values.to_numpy()[offsets[0] : offsets[-1]]
    return nested.reshape(-1, int(widths[0]))
