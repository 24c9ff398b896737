"""The kinds of stores, by the schemes of their URLs: how each is connected, read and written.

Every URL that fsspec supports works without an entry. A kind whose file system needs other settings, advice
or requests is one entry of `KINDS`.
"""

import contextlib
import importlib
import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from sa1b.errors import UsageError
from sa1b.storage.http_range import PlainUrls, SignedUrls
from sa1b.storage.objects import Objects, S3Objects


def _registered(scheme: str) -> Any:
    import fsspec

    return fsspec.get_filesystem_class(scheme)


async def _close_session(system: Any) -> None:
    if system.async_impl and hasattr(system, "set_session"):
        await (await system.set_session()).close()


@dataclass(frozen=True, slots=True)
class StoreKind:
    """What distinguishes a kind of store.

    Attributes:
        advice: where it looks for credentials, for the messages of denied access.
        endpoint: option of its file system for another server than the default one; None: it has no default
            server; "": it cannot be given one, and `endpoint_advice` is what to do instead.
        endpoint_variable: environment variable with the same effect.
        asks_first: whether its file system asks for credentials when it is created.
        options: URL, options of the user, seconds of an attempt and connections -> more options.
        urls: file system, URL, options of the user and connections -> how plain HTTP requests its objects;
            None: its file system reads them.
        range_options: of a range request of a file system without coroutines.
    """

    schemes: tuple[str, ...] = ()
    advice: str = "check the permissions and the credentials in the URL or the storage options"
    extra: str | None = None
    endpoint: str | None = ""
    endpoint_advice: str = "omit it"
    endpoint_variable: str = ""
    is_read_only: bool = False
    asks_first: bool = False
    file_system: Callable[[str], Any] = _registered
    options: Callable[[str, Mapping[str, Any], float, int], dict[str, Any]] = lambda *_: {}
    urls: Callable[[Any, str, Mapping[str, Any], int], SignedUrls | PlainUrls | None] = lambda *_: None
    objects: type[Objects] = Objects
    range_options: Mapping[str, Any] = field(default_factory=dict)
    adapt: Callable[[Any], None] = lambda _: None
    disconnect: Callable[[Any], Awaitable[None]] = _close_session


def can_presign(root: str, options: Mapping[str, Any]) -> bool:
    """Whether reads of an S3 store, s3://BUCKET/FOLDER, can be presigned."""
    # They cannot be presigned with keys for encryption (SSE-C), which are headers of every request, in
    # directory buckets (S3 Express), whose credentials last five minutes, at multi-region access points,
    # which need another signature, and through a proxy that has its own settings.
    bucket = root.partition("://")[2].partition("/")[0]
    return not (
        options.get("s3_additional_kwargs")
        or options.get("config_kwargs", {}).get("proxies_config")
        or bucket.startswith("arn:")
        or bucket.endswith("--x-s3")
    )


def _s3_options(root: str, options: Mapping[str, Any], timeout: float, in_flight: int) -> dict[str, Any]:
    settings = {
        "max_pool_connections": in_flight,
        "retries": {"total_max_attempts": 1},
        "connect_timeout": timeout,
        "read_timeout": timeout,
        "request_checksum_calculation": "when_required",  # writes send Content-MD5
        "response_checksum_validation": "when_required",  # ranges have none; our crc32c verifies them
        "user_agent": "sa1b",  # the default takes a tenth of a request's time
        **({"signature_version": "s3v4"} if can_presign(root, options) else {}),  # the default is old
    }
    return {"config_kwargs": settings | options.get("config_kwargs", {})}


@cache
def _service_models(folders: str | None) -> Any:
    """botocore's descriptions of services. Parsing them takes most of the time of a new connection."""
    return importlib.import_module("botocore.loaders").create_loader(folders)


def _adapt_s3(system: Any) -> None:
    """Share the descriptions of services between file systems, except with a session of the user."""
    if system.session is not None:
        return
    session = importlib.import_module("aiobotocore.session").AioSession(**system.kwargs)
    session.lazy_register_component(
        "data_loader", lambda: _service_models(session.get_config_variable("data_path"))
    )
    system.session = session


def _signed(system: Any, root: str, options: Mapping[str, Any], in_flight: int) -> SignedUrls | None:
    return SignedUrls(system, in_flight) if can_presign(root, options) else None


def _http_options(root: str, options: Mapping[str, Any], timeout: float, in_flight: int) -> dict[str, Any]:
    # `trust_env` uses the proxies of the environment. Without requoting, the signature in the URL of a
    # redirection is sent unchanged.
    defaults = {"trust_env": True, "requote_redirect_url": False}
    return {"client_kwargs": defaults | options.get("client_kwargs", {})}


def _google(scheme: str) -> Any:
    # Not the class that gcsfs registers: before each request to a bucket whose type it may not look up, it
    # asks a second service, which waits up to a minute where only the endpoint is reachable.
    logging.getLogger("gcsfs").addHandler(logging.NullHandler())  # else it prints every failure
    return importlib.import_module("gcsfs.core").GCSFileSystem


async def _close_google(system: Any) -> None:
    if system._session is not None:
        await system._session.close()


def _adapt_azure(system: Any) -> None:
    """Turn off retries and finalizers of an Azure file system."""
    # The first wait of Azure's client is as long as an attempt may take. The finalizers, which fail in
    # asynchronous use, would print an error when the process ends; `_close_azure` does their work.
    with contextlib.suppress(AttributeError):
        system.service_client._config.retry_policy.total_retries = 0
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        parts = finalizer.peek()
        if parts is not None and parts[0] is system:
            finalizer.detach()


async def _close_azure(system: Any) -> None:
    await system.service_client.close()


_LISTING = "A store that does not allow listing also returns this error for an object that does not exist"
KINDS = (
    StoreKind(
        ("s3", "s3a"),
        "credentials are looked up in this order: the options key, secret, token, profile or anon; "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN); the profile AWS_PROFILE in "
        "~/.aws/credentials and ~/.aws/config; the container's or the machine's role. "
        f"AWS_ENDPOINT_URL names a store other than Amazon's. {_LISTING}",
        endpoint="endpoint_url",
        endpoint_variable="AWS_ENDPOINT_URL",
        options=_s3_options,
        urls=_signed,
        objects=S3Objects,
        adapt=_adapt_s3,
    ),
    StoreKind(
        ("gs", "gcs"),
        "credentials are looked up in this order: the option token; the file of "
        "GOOGLE_APPLICATION_CREDENTIALS; those of `gcloud auth application-default login`; the machine's "
        f"service account. {_LISTING}",
        extra="gcs",
        endpoint="endpoint_url",
        endpoint_variable="STORAGE_EMULATOR_HOST",
        asks_first=True,
        file_system=_google,
        disconnect=_close_google,
    ),
    StoreKind(
        ("az", "abfs", "abfss", "adl"),
        "credentials are looked up in this order: the options connection_string, account_name with "
        "account_key, sas_token or client_id; AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME "
        "with AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CLIENT_ID; with an account "
        "name only, those of `az login` and the machine's identity",
        extra="azure",
        endpoint_advice="set AZURE_STORAGE_CONNECTION_STRING with BlobEndpoint instead",
        asks_first=True,
        adapt=_adapt_azure,
        disconnect=_close_azure,
    ),
    StoreKind(
        ("hf",),
        "a private or gated repository needs a token: the option token, HF_TOKEN, or `hf auth login`; a "
        "repository that does not exist gives the same error",
        endpoint="endpoint",
        endpoint_variable="HF_ENDPOINT",
        is_read_only=True,  # writes to the Hugging Face Hub are commits, and have no conditions
        asks_first=True,
        range_options={"cache_type": "none"},  # the default reads 5 MiB more
    ),
    StoreKind(
        ("http", "https"),
        endpoint=None,
        is_read_only=True,
        options=_http_options,
        urls=lambda system, *_: PlainUrls(system),
    ),
)
_OTHER = StoreKind()


def protocol_of(root: str) -> str:
    """The scheme of a URL; "" for a path, which may have the name of a scheme."""
    scheme, separator, _ = root.partition("://")
    return scheme if separator else ""


def kind_of(root: str) -> StoreKind:
    """The kind of the store of a URL."""
    scheme = protocol_of(root)
    return next((kind for kind in KINDS if scheme in kind.schemes), _OTHER)


def endpoint_options(url: str, endpoint: str | None) -> dict[str, Any]:
    """The options of fsspec's file system for another server than the default one of a URL. http(s) URLs name
    their server. UsageError: the file system cannot be given an endpoint in this way.
    """
    kind = kind_of(url)
    if endpoint is None or kind.endpoint is None:
        return {}
    if kind.endpoint:
        return {kind.endpoint: endpoint}
    way = kind.endpoint_advice
    raise UsageError(f"--endpoint {endpoint}: only for s3://, gs:// and hf://, not for {url}; {way}")
