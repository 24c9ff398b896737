"""What a read can end in, told apart by what the caller should do.

Every class can be made from a message alone and carries its attributes through pickle: it stays itself on
its way out of a worker process.
"""

from sa1b.errors import Sa1bError
from sa1b.storage.counters import Counters


class StorageError(Sa1bError):
    """A read that failed for good.

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
    """There is no such object. Raised at once, never retried."""


class DeniedError(StorageError):
    """The store refuses these credentials, or none were found. Raised at once, never retried."""


class ExpiredError(DeniedError):
    """The credentials have expired, and looking them up again gave no better ones."""


class DamageError(StorageError):
    """What is stored is not what was written: asking again cannot help, another sample can.

    Attributes:
        expected: the crc32c, the size in bytes or the sha256 that was promised.
        found: the same of what is stored.
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
    """The deadline passed before the bytes came: nothing is known about them, so nothing may replace them.

    Attributes:
        cause: the last thing that went wrong, in words.
        counters: of this reader in this process, at that moment.
    """

    def __init__(
        self,
        message: str,
        *,
        url: str = "",
        start: int = 0,
        length: int = 0,
        cause: str = "",
        counters: Counters | None = None,
    ) -> None:
        super().__init__(message, url=url, start=start, length=length)
        self.cause = cause
        self.counters = counters if counters is not None else Counters()
