"""The index files of a dataset directory at a URL as a file system of fsspec for DuckDB."""

from datetime import UTC, datetime
from typing import Any

from fsspec import AbstractFileSystem

from sa1b.shards.index_reader import RangeFile
from sa1b.storage.errors import StorageError
from sa1b.storage.reader import Reader

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
