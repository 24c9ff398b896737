"""Error classes of the exceptions that s3fs, aiohttp and the operating system raise."""

import errno
from typing import Any

import aiohttp
import botocore.exceptions
import pytest
from s3fs.errors import translate_boto_error

from sa1b.storage.classify import ErrorClass, classify_error, classify_local_error


def response(status: int, code: str) -> BaseException:
    """As s3fs raises an error response of the store."""
    response: Any = {
        "Error": {"Code": code, "Message": "m"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return translate_boto_error(botocore.exceptions.ClientError(response, "GetObject"))


@pytest.mark.parametrize(
    ("status", "code", "error_class"),
    [
        (404, "NoSuchKey", ErrorClass.MISSING),
        (404, "NoSuchBucket", ErrorClass.MISSING),
        (404, "404", ErrorClass.MISSING),
        (403, "AccessDenied", ErrorClass.DENIED),
        (403, "403", ErrorClass.DENIED),
        (403, "SignatureDoesNotMatch", ErrorClass.DENIED),
        (403, "InvalidAccessKeyId", ErrorClass.DENIED),
        (403, "RequestTimeTooSkewed", ErrorClass.DENIED),
        (400, "ExpiredToken", ErrorClass.EXPIRED),
        (403, "ExpiredToken", ErrorClass.EXPIRED),
        (400, "InvalidToken", ErrorClass.EXPIRED),
        (503, "SlowDown", ErrorClass.THROTTLED),
        (503, "ServiceUnavailable", ErrorClass.THROTTLED),
        (503, "503", ErrorClass.THROTTLED),
        (429, "TooManyRequests", ErrorClass.THROTTLED),
        (500, "InternalError", ErrorClass.SERVER_ERRORS),
        (502, "502", ErrorClass.SERVER_ERRORS),
        (504, "GatewayTimeout", ErrorClass.SERVER_ERRORS),
        (400, "RequestTimeout", ErrorClass.TIMEOUTS),
        (416, "InvalidRange", ErrorClass.SHORT),
        (301, "PermanentRedirect", ErrorClass.REFUSED),
        (400, "InvalidArgument", ErrorClass.REFUSED),
        (400, "BadDigest", ErrorClass.CRC),
        (400, "XAmzContentSHA256Mismatch", ErrorClass.CRC),
        (400, "IncompleteBody", ErrorClass.SHORT),
        (409, "ConditionalRequestConflict", ErrorClass.SERVER_ERRORS),
        (501, "NotImplemented", ErrorClass.REFUSED),
    ],
)
def test_error_responses_of_a_store(status: int, code: str, error_class: ErrorClass) -> None:
    fault = classify_error(response(status, code))
    assert fault is not None
    assert fault.error_class is error_class


class HttpError(Exception):
    """As gcsfs raises an error response; the name is what counts."""

    def __init__(self, code: int) -> None:
        super().__init__(f"message, {code}")
        self.code = code


class HttpResponseError(Exception):
    """As Azure's clients raise an error response."""

    def __init__(self, status: int) -> None:
        super().__init__("message")
        self.status_code = status


class HubError(Exception):
    """As huggingface_hub raises an error response."""

    def __init__(self, status: int) -> None:
        super().__init__("message")
        self.response = HttpResponseError(status)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "error_class"),
    [
        (OSError("Forbidden: http://x/b/o\nno access"), ErrorClass.DENIED),
        (ValueError("Bad Request: http://x/b/o\ninvalid"), ErrorClass.REFUSED),
        (HttpError(401), ErrorClass.DENIED),
        (HttpError(416), ErrorClass.SHORT),
        (HttpError(429), ErrorClass.THROTTLED),
        (HttpError(503), ErrorClass.THROTTLED),
        (HttpResponseError(403), ErrorClass.DENIED),
        (HttpResponseError(404), ErrorClass.MISSING),
        (HttpResponseError(416), ErrorClass.SHORT),
        (HttpResponseError(500), ErrorClass.SERVER_ERRORS),
        (HubError(403), ErrorClass.DENIED),
        (caused(FileNotFoundError("datasets/o/n"), HubError(401)), ErrorClass.DENIED),
        (caused(FileNotFoundError("a/b"), HttpResponseError(404)), ErrorClass.MISSING),
    ],
)
def test_error_responses_of_other_file_systems(error: Exception, error_class: ErrorClass) -> None:
    fault = classify_error(error)
    assert fault is not None
    assert fault.error_class is error_class


@pytest.mark.parametrize(
    ("error", "error_class"),
    [
        (botocore.exceptions.EndpointConnectionError(endpoint_url="http://127.0.0.1:1"), ErrorClass.RESETS),
        (botocore.exceptions.ConnectionClosedError(endpoint_url="http://127.0.0.1:1"), ErrorClass.RESETS),
        (botocore.exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2), ErrorClass.RESETS),
        (botocore.exceptions.ReadTimeoutError(endpoint_url="http://127.0.0.1:1"), ErrorClass.TIMEOUTS),
        (botocore.exceptions.ConnectTimeoutError(endpoint_url="http://127.0.0.1:1"), ErrorClass.TIMEOUTS),
        (botocore.exceptions.NoCredentialsError(), ErrorClass.DENIED),
        (ValueError("Invalid endpoint: 127.0.0.1:9000"), ErrorClass.REFUSED),
        (botocore.exceptions.ProfileNotFound(profile="p"), ErrorClass.DENIED),
        (botocore.exceptions.CredentialRetrievalError(provider="iam", error_msg="busy"), ErrorClass.RESETS),
        (botocore.exceptions.ParamValidationError(report="bucket"), ErrorClass.REFUSED),
        (aiohttp.ClientPayloadError("cut"), ErrorClass.RESETS),
        (aiohttp.ServerDisconnectedError(), ErrorClass.RESETS),
        (aiohttp.ServerTimeoutError(), ErrorClass.TIMEOUTS),
        (aiohttp.ClientOSError(errno.ECONNRESET, "reset"), ErrorClass.RESETS),
        (ConnectionResetError(), ErrorClass.RESETS),
        (BrokenPipeError(), ErrorClass.RESETS),
        (TimeoutError(), ErrorClass.TIMEOUTS),
        (OSError(errno.ENETUNREACH, "no route"), ErrorClass.RESETS),
        (FileNotFoundError("memory://a"), ErrorClass.MISSING),
        (PermissionError("no"), ErrorClass.DENIED),
    ],
)
def test_errors_of_clients(error: BaseException, error_class: ErrorClass) -> None:
    fault = classify_error(error)
    assert fault is not None
    assert fault.error_class is error_class


def test_what_no_store_can_cause_is_left_to_be_raised() -> None:
    assert classify_error(TypeError("a bug")) is None
    assert classify_error(MemoryError()) is None


@pytest.mark.parametrize(
    ("number", "error_class"),
    [
        (errno.EIO, ErrorClass.DEVICE),
        (errno.ESTALE, ErrorClass.DEVICE),
        (errno.ENOENT, ErrorClass.MISSING),
        (errno.ENOTDIR, ErrorClass.MISSING),
        (errno.EACCES, ErrorClass.DENIED),
        (errno.EISDIR, None),
        (errno.EMFILE, None),
    ],
)
def test_errors_of_a_disk(number: int, error_class: ErrorClass | None) -> None:
    fault = classify_local_error(OSError(number, "words", "path"))
    assert (fault and fault.error_class) == error_class


@pytest.mark.parametrize(
    ("cause", "error_class"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"), ErrorClass.RESETS),
        (TimeoutError("no answer"), ErrorClass.TIMEOUTS),
        (FileNotFoundError("http://host/a"), ErrorClass.MISSING),
        (KeyError("size"), ErrorClass.MISSING),
    ],
)
def test_what_fsspec_raises_as_a_missing_file_has_the_class_of_its_cause(
    cause: Exception, error_class: ErrorClass
) -> None:
    """fsspec's http file system raises FileNotFoundError also where the server does not answer."""
    error = FileNotFoundError("http://host/a")
    error.__cause__ = cause
    fault = classify_error(error)
    assert fault is not None
    assert fault.error_class is error_class
