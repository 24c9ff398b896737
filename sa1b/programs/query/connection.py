"""A connection of DuckDB: interrupted by Ctrl-C at any time, and with the index files of a URL."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from fsspec import AbstractFileSystem

from sa1b.shards.index import RangeFile
from sa1b.storage.errors import StorageError
from sa1b.storage.reader import Reader

_INTERRUPTED = "Query interrupted"  # DuckDB's message
_RETRY_SECONDS = 0.05


@contextmanager
def connected() -> Iterator[Any]:
    """A connection of DuckDB; at the end, a call of it in another thread is interrupted."""
    import duckdb

    connection = duckdb.connect()
    try:
        yield connection
    finally:
        while True:
            connection.interrupt()
            try:
                connection.close()
                break
            except duckdb.Error as error:
                if "busy" not in str(error):
                    raise
                time.sleep(_RETRY_SECONDS)


def divide_to_null(connection: Any) -> None:
    """Make NULL the result of a division by zero, as in the conditions of views."""
    import duckdb

    for name in ("ieee_floating_point_ops", "error_on_division_by_zero"):  # depends on DuckDB's version
        with suppress(duckdb.CatalogException):
            connection.execute(f"SET {name} = false")


@contextmanager
def interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt after Ctrl-C in a call of DuckDB, which itself raises RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        if str(error) != _INTERRUPTED:
            raise
        raise KeyboardInterrupt from None


SCHEME = "sa1b-index"


class IndexFiles(AbstractFileSystem):
    """The index files of a URL, for DuckDB. Errors of the store are appended to `errors`."""

    protocol = SCHEME
    cachable = False

    def __init__(self, reader: Reader, errors: list[StorageError]) -> None:
        super().__init__()
        self._reader, self._errors = reader, errors
        self._sizes: dict[str, int] = {}

    def _open(self, path: str, *_: Any, **__: Any) -> Any:
        file = RangeFile(self._reader, path, self._errors.append)
        self._sizes[path] = file.size
        return file

    def size(self, path: str) -> int:  # of a file that is open
        return self._sizes[self._strip_protocol(path)]

    def glob(self, path: str, **_: Any) -> list[str]:
        return [path]  # the paths are those of dataset.json; a missing file is an error of the first read

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(0, UTC)  # an index is never changed in place
