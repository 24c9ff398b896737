"""Errors of a read. The class determines the action of the caller.

Every class can be constructed from a message only and keeps its attributes through pickle, so that a worker
process can raise it.
"""

from sa1b.errors import Sa1bError
from sa1b.storage.counters import Counters


class StorageError(Sa1bError):
    """A read that failed and is not retried.

    Attributes:
        url: path or URL of the object.
        start: first byte of the range.
        length: bytes of the range.
    """

    def __init__(self, message: str, *, url: str = "", start: int = 0, length: int = 0) -> None:
        super().__init__(message)
        self.url = url
        self.start = start
        self.length = length


class MissingError(StorageError):
    """The object does not exist. Raised at once, without a retry."""


class DeniedError(StorageError):
    """The store rejects the credentials, or no credentials were found. Raised at once, without a retry."""


class ExpiredError(DeniedError):
    """The credentials have expired, even after a second lookup."""


class ReplacedError(StorageError):
    """The object is another one than at its first read. No other sample may be used: the dataset changed."""


class DamageError(StorageError):
    """The stored bytes differ from the written bytes. A retry cannot help; another sample can be used.

    Attributes:
        expected: the recorded crc32c, size in bytes or sha256.
        found: the crc32c, size or sha256 of the stored bytes.
    """

    def __init__(
        self,
        message: str,
        *,
        url: str = "",
        start: int = 0,
        length: int = 0,
        expected: int | str | None = None,
        found: int | str | None = None,
    ) -> None:
        super().__init__(message, url=url, start=start, length=length)
        self.expected = expected
        self.found = found


class UnavailableError(StorageError):
    """The deadline passed before the bytes were received. They may be intact, so no other sample may be used.

    Attributes:
        last_error: message of the last failed attempt.
        counters: counters of the reader in this process at the time of the error.
    """

    def __init__(
        self,
        message: str,
        *,
        url: str = "",
        start: int = 0,
        length: int = 0,
        last_error: str = "",
        counters: Counters | None = None,
    ) -> None:
        super().__init__(message, url=url, start=start, length=length)
        self.last_error = last_error
        self.counters = counters if counters is not None else Counters()
