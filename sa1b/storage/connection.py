"""The clients of a store: a file system of fsspec without retries and caches, and plain HTTP where possible.

A file system is created in the event loop that uses it. The functions of s3fs for complete objects are not
used, because they return short and corrupted responses without an error and fill gaps with zeros.
"""

import asyncio
import contextlib
import importlib
import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from sa1b.storage.errors import DeniedError, ErrorClass, FaultError, StorageError, classify_error
from sa1b.storage.http_range import HttpRanges, PlainUrls, SignedUrls
from sa1b.storage.protocols import AZURE, EXTRAS, GCS, HTTP, HUB, S3, advice, protocol_of
from sa1b.storage.retry import RetryPolicy


def can_presign(root: str, options: Mapping[str, Any]) -> bool:
    """Whether reads of an S3 store can be presigned.

    They cannot be presigned with keys for encryption (SSE-C), which are headers of every request, in
    directory buckets (S3 Express), whose credentials last five minutes, at multi-region access points, which
    need another signature, and through a proxy that has its own settings.

    Args:
        root: s3://BUCKET/FOLDER.
        options: options of s3fs.
    """
    bucket = root.partition("://")[2].partition("/")[0]
    return not (
        options.get("s3_additional_kwargs")
        or options.get("config_kwargs", {}).get("proxies_config")
        or bucket.startswith("arn:")
        or bucket.endswith("--x-s3")
    )


def connect(root: str, options: Mapping[str, Any], policy: RetryPolicy, in_flight: int) -> Any:
    """The file system of a URL.

    Args:
        root: URL of a scheme that fsspec supports.
        options: options of fsspec's file system.
        policy: its attempt_timeout limits connecting and reading.
        in_flight: connections to an S3 store.

    Raises:
        StorageError: no such scheme, its package is not installed, or there are no credentials.
        FaultError: a service that it asks for credentials cannot be reached.
    """
    protocol = protocol_of(root)
    kind = _kind(root)
    options = {**kind._get_kwargs_from_urls(root), **options, "skip_instance_cache": True}
    if kind.async_impl:
        options |= {"asynchronous": True, "use_listings_cache": False}
    if protocol in S3:
        options["config_kwargs"] = {
            "max_pool_connections": in_flight,
            "retries": {"total_max_attempts": 1},
            "connect_timeout": policy.attempt_timeout,
            "read_timeout": policy.attempt_timeout,
            "request_checksum_calculation": "when_required",  # writes send Content-MD5
            "response_checksum_validation": "when_required",  # ranges have none; our crc32c verifies them
            "user_agent": "sa1b",  # the default takes a tenth of a request's time
            **({"signature_version": "s3v4"} if can_presign(root, options) else {}),  # the default is old
            **options.get("config_kwargs", {}),
        }
    if protocol in HTTP:
        # For proxies; and the signature in the URL of a redirection must be sent unchanged.
        defaults = {"trust_env": True, "requote_redirect_url": False}
        options["client_kwargs"] = {**defaults, **options.get("client_kwargs", {})}
    try:
        system = kind(**options)
    except Exception as error:
        fault = classify_error(error)
        if protocol not in (*GCS, *AZURE, *HUB) or (fault is None and not isinstance(error, ValueError)):
            raise
        if fault is not None and fault.error_class.transient:
            raise FaultError(fault) from error
        message = f"{root}: no access ({fault.message if fault else error}); {advice(root)}"
        raise DeniedError(message, url=root) from error
    if hasattr(system, "retries"):
        system.retries = 1
    if protocol in AZURE:
        _adapt_adlfs(system)
    return system


def _kind(root: str) -> Any:
    """The class of the file system of a URL."""
    import fsspec

    protocol = protocol_of(root) or root  # "s3:" of "s3://", which names no bucket, is no protocol
    try:
        if protocol in GCS:
            # Not the class that gcsfs registers: before each request to a bucket whose type it may not look
            # up, it asks a second service, which waits up to a minute where only the endpoint is reachable.
            logging.getLogger("gcsfs").addHandler(logging.NullHandler())  # else it prints every failure
            return importlib.import_module("gcsfs.core").GCSFileSystem
        return fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise StorageError(
            f"{root}: fsspec has no protocol {protocol!r}; pass a folder, or a URL such as "
            "s3://BUCKET/FOLDER or https://HOST/FOLDER",
            url=root,
        ) from None
    except ImportError as error:
        extra = next((name for protocols, name in EXTRAS.items() if protocol in protocols), None)
        way = f"run pip install 'sa1b[{extra}]'" if extra else "install it"
        raise StorageError(f"{root}: {error}; {way}", url=root) from None


def protocol_is(system: Any, protocols: tuple[str, ...]) -> bool:
    """Whether a file system is that of one of the schemes."""
    own = system.protocol
    return bool({own} & set(protocols) if isinstance(own, str) else set(own) & set(protocols))


def _adapt_adlfs(system: Any) -> None:
    """Turn off retries and finalizers of an Azure file system.

    The first wait of Azure's client is as long as an attempt may take. The finalizers, which fail in
    asynchronous use, would print an error when the process ends; `disconnect` does their work.
    """
    with contextlib.suppress(AttributeError):
        system.service_client._config.retry_policy.total_retries = 0
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        found = finalizer.peek()
        if found is not None and found[0] is system:
            finalizer.detach()


async def disconnect(system: Any) -> None:
    """Close the connections of a file system."""
    with contextlib.suppress(Exception):
        if hasattr(system, "service_client"):  # adlfs
            await system.service_client.close()
        elif getattr(system, "_session", None) is not None and protocol_is(system, GCS):
            await system._session.close()
        elif system.async_impl and hasattr(system, "set_session"):
            session = await system.set_session()
            await session.close()
    await asyncio.sleep(0)  # transports close in the next iteration of the loop


async def read_range(system: Any, url: str, start: int, end: int) -> bytes:
    """The bytes from `start` to `end` of an object, or what there is of them."""
    path = system._strip_protocol(url)
    if system.async_impl:
        return bytes(await system._cat_file(path, start=start, end=end))
    exact = {"cache_type": "none"} if protocol_is(system, HUB) else {}  # the default reads 5 MiB more
    return bytes(await asyncio.to_thread(system.cat_file, path, start=start, end=end, **exact))


async def size(system: Any, url: str) -> int:
    """Size of an object in bytes."""
    path = system._strip_protocol(url)
    info = await (system._info(path) if system.async_impl else asyncio.to_thread(system.info, path))
    if info.get("type") == "directory":
        raise FileNotFoundError(f"{url} is a folder")
    if info.get("size") is None:
        raise StorageError(
            f"{url}: the server does not return its size; use one that answers HEAD requests", url=url
        )
    return int(info["size"])


async def names(system: Any, url: str) -> list[str]:
    """Names of the objects and folders directly below a folder, sorted."""
    path = system._strip_protocol(url)
    if system.async_impl:
        entries = await system._ls(path, detail=False)
    else:
        entries = await asyncio.to_thread(system.ls, path, detail=False)
    return sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in entries)


T = TypeVar("T")
_REFUSALS = {301, 302, 307, 308, 400, 401, 403, 405, 501}  # of a store that takes no presigned requests


class Connection:
    """Reads objects below a URL; created and used in one event loop.

    The objects of S3 stores and web servers are read by plain HTTP requests, all others by the file system.
    If an S3 store refuses the first presigned request, the file system reads its objects too: it follows
    redirections to other regions, and its error is the one to report.

    Args:
        root: URL of a scheme that fsspec supports.
        options: options of fsspec's file system.
        policy: times of the file system.
        in_flight: connections.
        etags: ETag of each object's first response, by URL. New objects are added.

    Attributes:
        system: the file system.
        is_proven: whether a presigned request has succeeded, so that a refusal means that the signature or
            its credentials have expired, or that this object is not accessible.
    """

    def __init__(
        self,
        root: str,
        options: Mapping[str, Any],
        policy: RetryPolicy,
        in_flight: int,
        etags: dict[str, str],
    ) -> None:
        self.system = connect(root, options, policy, in_flight)
        self.is_proven = False
        protocol = protocol_of(root)
        self._is_presigned = protocol in S3 and can_presign(root, options)
        self._http: HttpRanges | None = None
        if self._is_presigned:
            self._http = HttpRanges(SignedUrls(self.system, in_flight), etags)
        elif protocol in HTTP:
            self._http = HttpRanges(PlainUrls(self.system), etags)
        self._uses_http = True

    async def read_range(self, url: str, start: int, end: int, *, uncached: bool = False) -> bytes:
        """The bytes from `start` to `end` of an object, or what there is of them.

        Args:
            uncached: proxies of plain HTTP are to request them from the store.
        """
        return await self._either(
            lambda http: http.read_range(url, start, end, uncached=uncached),
            lambda: read_range(self.system, url, start, end),
        )

    async def size(self, url: str, *, uncached: bool = False) -> int:
        """Size of an object in bytes; `uncached` as in `read_range`."""
        return await self._either(
            lambda http: http.size(url, uncached=uncached), lambda: size(self.system, url)
        )

    async def names(self, url: str) -> list[str]:
        """Names of the objects and folders directly below a folder, sorted."""
        return await names(self.system, url)

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()
        await disconnect(self.system)

    async def _either(
        self, by_http: Callable[[HttpRanges], Awaitable[T]], by_system: Callable[[], Awaitable[T]]
    ) -> T:
        if self._http is None or not self._uses_http:
            return await by_system()
        try:
            response = await by_http(self._http)
        except FaultError as error:
            has_expired = error.fault.error_class is ErrorClass.EXPIRED
            if not self._is_presigned or self.is_proven or has_expired or error.status not in _REFUSALS:
                raise
        else:
            self.is_proven = self._is_presigned
            return response
        response = await by_system()
        self._uses_http = False
        return response
