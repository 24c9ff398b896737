"""Error classes of the exceptions that s3fs, aiohttp and the operating system raise."""

import contextlib
import errno
import http.client
import socket
import ssl
import threading
from dataclasses import replace
from typing import Any

import aiohttp
import botocore.exceptions
import pytest
from s3fs.errors import translate_boto_error

from sa1b.storage.errors import ErrorClass, UnavailableError, classify_error, classify_local_error
from sa1b.storage.reader import Reader
from tests.storage.conftest import WaitedTime


def response(status: int, code: str) -> BaseException:
    """As s3fs raises an error response of the store."""
    response: Any = {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": status}}
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
        (403, "QuotaExceeded", ErrorClass.REFUSED),
        (507, "XMinioStorageFull", ErrorClass.REFUSED),
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
        (UnicodeError("encoding with 'idna' codec failed (UnicodeError: label empty)"), ErrorClass.REFUSED),
        (type("HfUriError", (ValueError,), {})("Invalid HF URI 'hf://datasets/x'"), ErrorClass.REFUSED),
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


class TransportError(Exception):
    """As all versions of httpx and of google-auth name the base class of their connection errors."""


class ConnectError(TransportError):
    pass


class AzureError(Exception):
    pass


class ServiceRequestError(AzureError):
    pass


class ReadTimeout(TransportError):
    pass


class Unknown(Exception):
    """An exception of a client that nobody knows."""


@pytest.mark.parametrize(
    ("error", "error_class"),
    [
        (ConnectError("Server disconnected without sending a response."), ErrorClass.RESETS),
        (ReadTimeout("no words"), ErrorClass.TIMEOUTS),
        (ServiceRequestError("Cannot connect to host"), ErrorClass.RESETS),
        (caused(Unknown(), socket.gaierror(-2, "Name or service not known")), ErrorClass.RESETS),
        (caused(Unknown(), http.client.RemoteDisconnected("closed")), ErrorClass.RESETS),
        (caused(Unknown(), http.client.BadStatusLine("x")), ErrorClass.RESETS),
        (caused(Unknown(), ssl.SSLEOFError(8, "EOF occurred")), ErrorClass.RESETS),
        (caused(Unknown(), ssl.SSLCertVerificationError(1, "CERTIFICATE_VERIFY_FAILED")), ErrorClass.REFUSED),
        (caused(Unknown(), caused(Unknown(), TimeoutError())), ErrorClass.TIMEOUTS),
    ],
)
def test_errors_of_clients_are_known_by_base_classes_and_causes(
    error: Exception, error_class: ErrorClass
) -> None:
    fault = classify_error(error)
    assert fault is not None
    assert fault.error_class is error_class


URLS = {  # protocol -> package, URL, options; the endpoint is added
    "s3": ("s3fs", "s3://data", {"key": "KEY", "secret": "secret"}, "endpoint_url"),
    "http": ("aiohttp", "http://127.0.0.1:{port}/data", {}, None),
    "gs": ("gcsfs", "gs://data", {"token": "anon"}, "endpoint_url"),
    "az": ("adlfs", "az://data", {}, "connection_string"),
    "hf": ("huggingface_hub", "hf://datasets/org/name", {"token": False}, "endpoint"),
}
AZURE = "DefaultEndpointsProtocol=http;AccountName=a;AccountKey=a2V5;BlobEndpoint=http://127.0.0.1:{port}/a;"


@pytest.mark.parametrize(
    "answer", [None, b"", b"\x16\x03 no HTTP\r\n\r\n"], ids=["closed", "reset", "garbled"]
)
@pytest.mark.parametrize("protocol", URLS)
def test_a_server_that_is_none_is_retried_and_named_by_every_file_system(
    protocol: str, answer: bytes | None, waited: WaitedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = waited.policy(5)
    if protocol == "gs":  # gcsfs retries for longer than an attempt may take
        monkeypatch.setattr("sa1b.storage.retry._MIN_TIMEOUT", 0.5)
        policy = replace(policy, attempt_timeout=0.5)
    package, url, options, name = URLS[protocol]
    pytest.importorskip(package)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        if name is not None:
            endpoint = AZURE if name == "connection_string" else "http://127.0.0.1:{port}"
            options = {**options, name: endpoint.format(port=port)}
        if answer is None:
            listening.close()
        else:
            threading.Thread(target=answering, args=(listening, answer), daemon=True).start()
        with Reader(url.format(port=port), options=options, retry_policy=policy) as reader:
            calls = [
                lambda: reader.read_range("a.bin", 0, 10),
                lambda: reader.size("a.bin"),
                lambda: reader.names("deep"),
            ]
            for call in calls:
                with pytest.raises(UnavailableError, match="unavailable: [3-9][0-9]* attempts"):
                    call()


def answering(listening: socket.socket, answer: bytes) -> None:
    """Send the same bytes on every connection, and close it, until the socket is closed."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(answer)


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
