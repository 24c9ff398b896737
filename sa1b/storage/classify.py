"""Why an attempt failed, read from the exceptions of fsspec's file systems.

They wrap and rename: s3fs turns most answers into an OSError and keeps the client's error as its cause;
aiohttp and botocore have families of their own. No library is imported for it: an exception is known by its
attributes and by the module its class comes from.
"""

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Cause(StrEnum):
    """Kinds of failure. The transient ones are named as their counter in Counters."""

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
        """Asking again may help."""
        return self not in (Cause.MISSING, Cause.DENIED, Cause.REFUSED)


@dataclass(frozen=True, slots=True)
class Fault:
    """One failed attempt: its kind, and the error in words."""

    cause: Cause
    words: str


_EXPIRED = {
    "ExpiredToken",
    "ExpiredTokenException",
    "TokenRefreshRequired",
    "RequestExpired",
    "InvalidToken",
}
_THROTTLED = {"SlowDown", "ServiceUnavailable", "Throttling", "ThrottlingException", "TooManyRequests"}
_TIMEOUTS = {"RequestTimeout", "RequestTimeoutException"}
_LOOKUPS = {"CredentialRetrievalError", "MetadataRetrievalError"}  # the metadata service is busy, or restarts
_CLIENTS = {"botocore", "aiobotocore", "aiohttp", "urllib3", "requests", "http", "ssl", "gcsfs", "google"}
_DEVICE = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EREMOTEIO, errno.ENODEV, errno.ENXIO}


def cause_of(error: BaseException) -> Fault | None:
    """What a failed request means; None for an error that no store can have caused: a bug, to be raised.

    Args:
        error: as raised by a file system of fsspec.
    """
    chain = list(_chain(error))
    words = _words(chain)
    for link in chain:
        status, code = _answer(link)
        if status or code:
            return Fault(_of_answer(status, code), words)
    if any(name in _LOOKUPS for name in map(_name, chain)):
        return Fault(Cause.RESETS, words)
    if any("Credential" in name or "Token" in name or "Profile" in name for name in map(_name, chain)):
        return Fault(Cause.DENIED, words)
    for kinds, cause in _FAMILIES:
        if any(isinstance(link, kinds) for link in chain):
            return Fault(cause, words)
    if any("Timeout" in name for name in map(_name, chain)):
        return Fault(Cause.TIMEOUTS, words)
    if any(_name(link) in ("ParamValidationError", "InvalidURL", "InvalidUrlClientError") for link in chain):
        return Fault(Cause.REFUSED, words)
    if isinstance(error, OSError) or any(_origin(link) in _CLIENTS for link in chain):
        return Fault(Cause.RESETS, words)
    return None


def cause_of_local(error: OSError) -> Fault | None:
    """What a failed read of a local file means; None for what neither waiting nor another sample helps.

    An input/output error is retried: disks on a network return it while their server restarts. If it stays,
    the deadline passes and the read counts as unavailable, not as damage: a mount that died would otherwise
    have every sample replaced by another.
    """
    words = _words([error])
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return Fault(Cause.MISSING, words)
    if isinstance(error, PermissionError):
        return Fault(Cause.DENIED, words)
    return Fault(Cause.DEVICE, words) if error.errno in _DEVICE else None


_FAMILIES: tuple[tuple[type[BaseException], Cause], ...] = (
    (FileNotFoundError, Cause.MISSING),
    (IsADirectoryError, Cause.MISSING),
    (PermissionError, Cause.DENIED),
    (TimeoutError, Cause.TIMEOUTS),
    (ConnectionError, Cause.RESETS),
    (EOFError, Cause.RESETS),
)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, outermost first."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__


def _answer(link: BaseException) -> tuple[int, str]:
    """HTTP status and error code of an answer, 0 and "" where the exception holds none."""
    response: Any = getattr(link, "response", None)
    if isinstance(response, dict):  # botocore's ClientError
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return int(status or 0), str(response.get("Error", {}).get("Code", ""))
    status = getattr(link, "status", None)  # aiohttp's ClientResponseError
    return (status if isinstance(status, int) else 0), ""


def _of_answer(status: int, code: str) -> Cause:
    if not status and code.isdecimal():
        status = int(code)
    if code in _EXPIRED:
        return Cause.EXPIRED
    if code in _TIMEOUTS or status == 408:
        return Cause.TIMEOUTS
    if code in _THROTTLED or status in (429, 503):
        return Cause.THROTTLED
    if status >= 500 or status == 409 or code == "InternalError":
        return Cause.SERVER_ERRORS
    if status in (404, 410) or code.startswith("NoSuch"):
        return Cause.MISSING
    if status in (401, 403):
        return Cause.DENIED
    if status == 416 or code == "InvalidRange":
        return Cause.SHORT
    return Cause.REFUSED


def _name(error: BaseException) -> str:
    return type(error).__name__


def _origin(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]


def _words(chain: list[BaseException]) -> str:
    """The error nearest to the wire, in one line."""
    inner = chain[-1]
    return f"{_name(inner)}: {' '.join(str(inner).split()) or 'no message'}"[:300]
