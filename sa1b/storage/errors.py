"""Errors of reads and writes, and the class of a failed attempt.

The class of an error determines the action of the caller. It can be constructed from a message only and keeps
its attributes through pickle, so that a worker process can raise it.

The file systems of fsspec wrap errors: s3fs turns most error responses into an OSError whose `__cause__` is
the client's error, and aiohttp and botocore have their own exception classes. None of these libraries is
imported here. `classify_error` recognises an exception by its attributes, by its base classes, whose names
are the same in all versions of a client, and by the errors of the standard library that caused it. gcsfs
raises two kinds of error responses without their status, so these are recognised by their message.
"""

import errno
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, TypedDict, Unpack

from sa1b.errors import Sa1bError


@dataclass(frozen=True, slots=True)
class Counters:
    """A snapshot of the counters. A failed attempt is counted in exactly one error class."""

    reads: int = 0  # ranges that were read
    attempts: int = 0  # requests for these ranges; attempts - reads is the number of retries
    bytes: int = 0  # returned to the caller
    resets: int = 0  # connections refused, reset or closed early
    timeouts: int = 0  # no complete response within the timeout of one attempt
    throttled: int = 0  # 503 and 429, "slow down"
    server_errors: int = 0  # other 5xx responses
    short: int = 0  # responses with another length than the range, or with another range
    crc: int = 0  # responses of the right length with a wrong crc32c
    device: int = 0  # input/output errors of a local or mounted disk
    expired: int = 0  # responses that the credentials or the signature have expired
    slow: int = 0  # attempts that succeeded, but took longer than `RetryPolicy.slow_after` seconds
    waited: float = 0.0  # seconds between attempts, over all reads

    @property
    def faults(self) -> int:
        """Attempts that failed with an error that a retry may fix."""
        return sum(int(getattr(self, error_class)) for error_class in ErrorClass if error_class.transient)

    def __str__(self) -> str:
        """The counters that are not zero: `reads 3, attempts 5, resets 2`."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ", ".join(f"{name} {value:,.10g}" for name, value in named if value) or "nothing read"


class RequestPlace(TypedDict, total=False):
    """Where a read failed, see StorageError."""

    url: str
    start: int
    length: int


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
        expected: int | str | None = None,
        found: int | str | None = None,
        **place: Unpack[RequestPlace],
    ) -> None:
        super().__init__(message, **place)
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
        last_error: str = "",
        counters: Counters | None = None,
        **place: Unpack[RequestPlace],
    ) -> None:
        super().__init__(message, **place)
        self.last_error = last_error
        self.counters = counters if counters is not None else Counters()


class ErrorClass(StrEnum):
    """Classes of errors. Transient ones have the name of their counter in `Counters`."""

    RESETS = "resets"
    TIMEOUTS = "timeouts"
    THROTTLED = "throttled"
    SERVER_ERRORS = "server_errors"
    SHORT = "short"
    CRC = "crc"
    DEVICE = "device"
    EXPIRED = "expired"
    MISSING = "missing"
    DENIED = "denied"
    REFUSED = "refused"

    @property
    def transient(self) -> bool:
        """Whether a retry may help."""
        return self not in (ErrorClass.MISSING, ErrorClass.DENIED, ErrorClass.REFUSED)


@dataclass(frozen=True, slots=True)
class Fault:
    """One failed attempt: the class of its error, and a message of one line."""

    error_class: ErrorClass
    message: str


class FaultError(Exception):
    """A failed attempt whose error class is known. `status` is of HTTP, 0 if that was not the reason."""

    def __init__(self, fault: Fault, status: int = 0) -> None:
        super().__init__(fault.message)
        self.fault, self.status = fault, status


_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "InvalidToken"}
_THROTTLED = {"SlowDown", "ServiceUnavailable", "Throttling", "ThrottlingException", "TooManyRequests"}
_TIMEOUTS = {"RequestTimeout", "RequestTimeoutException"}
FULL = ("QuotaExceeded", "StorageFull", "InsufficientStorage", "Insufficient Storage")  # within error codes
_DAMAGED = {"BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"}  # a write, in transit
_REFUSED = {
    *("ParamValidationError", "InvalidURL", "InvalidUrlClientError", "SSLCertVerificationError"),
    *("UnsupportedProtocol", "LocalProtocolError", "TooManyRedirects", "HfUriError"),
}
_REFUSALS = ("Invalid endpoint", "encoding with 'idna' codec failed")  # of s3fs; of a host that is no name
_LOOKUPS = {"CredentialRetrievalError", "MetadataRetrievalError"}  # the metadata service is not available
_CLIENTS = {  # base classes
    *("BotoCoreError", "HTTPClientError"),  # botocore
    *("GoogleAuthError", "HttpError", "ChecksumError"),  # google-auth, gcsfs
    "AzureError",
    *("HTTPError", "RequestError", "TransportError"),  # httpx and its successors, urllib3, huggingface_hub
    *("ClientError", "RequestException", "HTTPException"),  # aiohttp, requests, http.client
    "OSError",
}
_GARBLED = "aiohttp.http_exceptions"  # a response that is no HTTP; its status of 400 was not sent
_GCSFS = (("Forbidden: ", 403), ("Bad Request: ", 400))  # first words of the message -> status
_DEVICE = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EREMOTEIO, errno.ENODEV, errno.ENXIO}


def classify_error(error: BaseException) -> Fault | None:
    """The fault of an exception of fsspec; None if no store can cause the exception, so that it is a bug."""
    if isinstance(error, FaultError):
        return error.fault
    chain = list(_chain(error))
    message = _message(chain)
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        # fsspec's http file system raises this for every failed request, also without a response.
        return classify_error(error.__cause__) or Fault(ErrorClass.MISSING, message)
    status, code = response_of(error)
    if status or code:
        return Fault(class_of_response(status, code), message)
    if any(name in _LOOKUPS for name in map(_name, chain)):
        return Fault(ErrorClass.RESETS, message)
    if any("Credential" in name or "Token" in name or "Profile" in name for name in map(_name, chain)):
        return Fault(ErrorClass.DENIED, message)
    for kinds, error_class in _FAMILIES:
        if any(isinstance(link, kinds) for link in chain):
            return Fault(error_class, message)
    bases = {base.__name__ for link in chain for base in type(link).__mro__}
    if any("Timeout" in name for name in bases):
        return Fault(ErrorClass.TIMEOUTS, message)
    if bases & _REFUSED or any(str(link).startswith(_REFUSALS) for link in chain):
        return Fault(ErrorClass.REFUSED, message)
    return Fault(ErrorClass.RESETS, message) if bases & _CLIENTS else None


def response_of(error: BaseException) -> tuple[int, str]:
    """HTTP status and error code of the response that caused an exception; 0 and "" without a response."""
    chain = list(_chain(error))
    if any(type(link).__module__ == _GARBLED for link in chain):
        return 0, ""
    responses = map(_response, chain)
    return next((response for response in responses if any(response)), (0, ""))


def classify_local_error(error: OSError) -> Fault | None:
    """The fault of a failed read of a local file; None if neither a retry nor another sample helps."""
    # An input/output error is retried, because network disks return it while their server restarts. If it
    # persists until the deadline, the file counts as unavailable, not as damaged. Otherwise a failed mount
    # would cause the substitution of every sample.
    message = _message([error])
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return Fault(ErrorClass.MISSING, message)
    if isinstance(error, PermissionError):
        return Fault(ErrorClass.DENIED, message)
    return Fault(ErrorClass.DEVICE, message) if error.errno in _DEVICE else None


_FAMILIES: tuple[tuple[type[BaseException], ErrorClass], ...] = (
    (FileNotFoundError, ErrorClass.MISSING),
    (IsADirectoryError, ErrorClass.MISSING),
    (PermissionError, ErrorClass.DENIED),
    (TimeoutError, ErrorClass.TIMEOUTS),
    (ConnectionError, ErrorClass.RESETS),
    (EOFError, ErrorClass.RESETS),
)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and the chain of its causes, outermost first."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__


def _response(link: BaseException) -> tuple[int, str]:
    """HTTP status and error code of a response; 0 and "" if the exception has no response."""
    response: Any = getattr(link, "response", None)
    if isinstance(response, dict):  # botocore's ClientError
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return int(status or 0), str(response.get("Error", {}).get("Code", ""))
    candidates = (
        getattr(link, "status", None),  # aiohttp's ClientResponseError
        getattr(link, "status_code", None),  # the HttpResponseError of Azure's clients
        getattr(response, "status_code", None),  # of httpx and requests
        getattr(link, "code", None) if _name(link) == "HttpError" else None,  # gcsfs
        next((status for words, status in _GCSFS if str(link).startswith(words)), None),
    )
    return next((status for status in candidates if isinstance(status, int)), 0), ""


def class_of_response(status: int, code: str) -> ErrorClass:
    """The error class of an error response, by its HTTP status and the store's error code."""
    if not status and code.isdecimal():
        status = int(code)
    if code in _EXPIRED:
        return ErrorClass.EXPIRED
    if code in _TIMEOUTS or status == 408:
        return ErrorClass.TIMEOUTS
    if code in _THROTTLED or status in (429, 503):
        return ErrorClass.THROTTLED
    if code in _DAMAGED:
        return ErrorClass.CRC
    if code == "IncompleteBody":
        return ErrorClass.SHORT
    if status in (501, 507) or code.endswith(FULL):
        return ErrorClass.REFUSED
    if status >= 500 or status == 409 or code == "InternalError":
        return ErrorClass.SERVER_ERRORS
    if status in (404, 410) or code.startswith("NoSuch"):
        return ErrorClass.MISSING
    if status in (401, 403):
        return ErrorClass.DENIED
    if status == 416 or code == "InvalidRange":
        return ErrorClass.SHORT
    return ErrorClass.REFUSED


def _name(error: BaseException) -> str:
    return type(error).__name__


def _message(chain: list[BaseException]) -> str:
    inner = chain[-1]
    return f"{_name(inner)}: {' '.join(str(inner).split()) or 'no message'}"[:300]
