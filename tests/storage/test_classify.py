"""Causes read from the exceptions that s3fs, aiohttp and the operating system raise."""

import errno
from typing import Any

import aiohttp
import botocore.exceptions
import pytest
from s3fs.errors import translate_boto_error

from sa1b.storage.classify import Cause, cause_of, cause_of_local


def answer(status: int, code: str) -> BaseException:
    """As s3fs raises an answer of the store."""
    response: Any = {
        "Error": {"Code": code, "Message": "m"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return translate_boto_error(botocore.exceptions.ClientError(response, "GetObject"))


@pytest.mark.parametrize(
    ("status", "code", "cause"),
    [
        (404, "NoSuchKey", Cause.MISSING),
        (404, "NoSuchBucket", Cause.MISSING),
        (404, "404", Cause.MISSING),
        (403, "AccessDenied", Cause.DENIED),
        (403, "403", Cause.DENIED),
        (403, "SignatureDoesNotMatch", Cause.DENIED),
        (403, "InvalidAccessKeyId", Cause.DENIED),
        (403, "RequestTimeTooSkewed", Cause.DENIED),
        (400, "ExpiredToken", Cause.EXPIRED),
        (403, "ExpiredToken", Cause.EXPIRED),
        (400, "InvalidToken", Cause.EXPIRED),
        (503, "SlowDown", Cause.THROTTLED),
        (503, "ServiceUnavailable", Cause.THROTTLED),
        (503, "503", Cause.THROTTLED),
        (429, "TooManyRequests", Cause.THROTTLED),
        (500, "InternalError", Cause.SERVER_ERRORS),
        (502, "502", Cause.SERVER_ERRORS),
        (504, "GatewayTimeout", Cause.SERVER_ERRORS),
        (400, "RequestTimeout", Cause.TIMEOUTS),
        (416, "InvalidRange", Cause.SHORT),
        (301, "PermanentRedirect", Cause.REFUSED),
        (400, "InvalidArgument", Cause.REFUSED),
    ],
)
def test_answers_of_a_store(status: int, code: str, cause: Cause) -> None:
    fault = cause_of(answer(status, code))
    assert fault is not None
    assert fault.cause is cause


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (botocore.exceptions.EndpointConnectionError(endpoint_url="http://127.0.0.1:1"), Cause.RESETS),
        (botocore.exceptions.ConnectionClosedError(endpoint_url="http://127.0.0.1:1"), Cause.RESETS),
        (botocore.exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2), Cause.RESETS),
        (botocore.exceptions.ReadTimeoutError(endpoint_url="http://127.0.0.1:1"), Cause.TIMEOUTS),
        (botocore.exceptions.ConnectTimeoutError(endpoint_url="http://127.0.0.1:1"), Cause.TIMEOUTS),
        (botocore.exceptions.NoCredentialsError(), Cause.DENIED),
        (botocore.exceptions.ProfileNotFound(profile="p"), Cause.DENIED),
        (botocore.exceptions.CredentialRetrievalError(provider="iam", error_msg="busy"), Cause.RESETS),
        (botocore.exceptions.ParamValidationError(report="bucket"), Cause.REFUSED),
        (aiohttp.ClientPayloadError("cut"), Cause.RESETS),
        (aiohttp.ServerDisconnectedError(), Cause.RESETS),
        (aiohttp.ServerTimeoutError(), Cause.TIMEOUTS),
        (aiohttp.ClientOSError(errno.ECONNRESET, "reset"), Cause.RESETS),
        (ConnectionResetError(), Cause.RESETS),
        (BrokenPipeError(), Cause.RESETS),
        (TimeoutError(), Cause.TIMEOUTS),
        (OSError(errno.ENETUNREACH, "no route"), Cause.RESETS),
        (FileNotFoundError("memory://a"), Cause.MISSING),
        (PermissionError("no"), Cause.DENIED),
    ],
)
def test_errors_of_clients(error: BaseException, cause: Cause) -> None:
    fault = cause_of(error)
    assert fault is not None
    assert fault.cause is cause


def test_what_no_store_can_cause_is_left_to_be_raised() -> None:
    assert cause_of(TypeError("a bug")) is None
    assert cause_of(MemoryError()) is None


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.EIO, Cause.DEVICE),
        (errno.ESTALE, Cause.DEVICE),
        (errno.ENOENT, Cause.MISSING),
        (errno.ENOTDIR, Cause.MISSING),
        (errno.EACCES, Cause.DENIED),
        (errno.EISDIR, None),
        (errno.EMFILE, None),
    ],
)
def test_errors_of_a_disk(number: int, cause: Cause | None) -> None:
    fault = cause_of_local(OSError(number, "words", "path"))
    assert (fault and fault.cause) == cause
