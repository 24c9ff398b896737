"""The index file of a shard, from disk or a URL: its name, how it is opened, and the texts in all of them."""

import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sa1b.console import command
from sa1b.errors import ShardError
from sa1b.storage.errors import MissingError, StorageError
from sa1b.storage.reader import Reader

TEXTS = "texts"  # column: list of strings of each image; only of shards from images with texts beside them
UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError, IndexError, OverflowError)
_READS = 4  # index files that `stored_texts` reads at a time


def index_path(shard: Path) -> Path:
    return shard.with_suffix(".parquet")


def shard_files(shard: str) -> tuple[str, str]:
    """Names of a shard and of its index."""
    return shard, index_path(Path(shard)).name


def index_file(reader: Reader, name: str) -> Any:
    """What pyarrow opens an index from: its path or, of a URL, a file that reads the ranges it needs.

    The ranges of a URL are not verified, because an index has one digest for the whole file. StorageError,
    also during reads: the URL cannot be read.
    """
    # A relative path such as "run:1/x.parquet" would be taken for a URI.
    if reader.is_local:
        return Path(reader.url(name)).absolute()
    return pa.PythonFile(RangeFile(reader, name), mode="r")


@contextmanager
def naming_index(reader: Reader, name: str) -> Iterator[None]:
    """ShardError for a missing or damaged index, with the way to rebuild it."""
    try:
        yield
    except (*UNREADABLE, MissingError) as error:
        what = "missing" if isinstance(error, FileNotFoundError | MissingError) else error
        raise ShardError(
            f"{reader.url(name)}: {what}; run `{command('index', reader.root)}` to rebuild it from the tar"
        ) from None


def stored_texts(reader: Reader, shards: list[str]) -> pa.Table | None:
    """The texts beside the images in their sources: `image_id`, int64, and `texts`, lists of strings.

    Images without a text have no row; None if no image has one. The indexes of all shards are read.
    ShardError: an index is missing or damaged.
    """
    with ThreadPoolExecutor(_READS) as pool:
        tables = [
            part for part in pool.map(partial(_texts, reader), shards) if part is not None and len(part)
        ]
    return pa.concat_tables(tables) if tables else None


def _texts(reader: Reader, shard: str) -> pa.Table | None:
    name = shard_files(shard)[1]
    with naming_index(reader, name), pq.ParquetFile(index_file(reader, name), pre_buffer=True) as file:
        if TEXTS not in file.schema_arrow.names:
            return None
        table = file.read(["image_id", TEXTS], use_threads=False)
        return table.filter(pc.greater(pc.list_value_length(table[TEXTS]), 0))


class RangeFile(io.RawIOBase):
    """An object of a URL as a file. `report` is called with each error of the store before it is raised, for
    callers that hide its class.
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
