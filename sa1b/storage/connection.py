"""The clients of a store: a file system of fsspec without retries and caches, and plain HTTP where possible.

A file system is created in the event loop that uses it. The functions of s3fs for complete objects are not
used, because they return short and corrupted responses without an error and fill gaps with zeros.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from sa1b.storage.errors import DeniedError, ErrorClass, FaultError, StorageError, classify_error
from sa1b.storage.http_range import HttpRanges, SignedUrls
from sa1b.storage.protocols import StoreKind, kind_of, protocol_of
from sa1b.storage.retry import RetryPolicy

T = TypeVar("T")
_REFUSALS = {301, 302, 307, 308, 400, 401, 403, 405, 501}  # of a store that takes no presigned requests


def connect(root: str, options: Mapping[str, Any], policy: RetryPolicy, in_flight: int) -> Any:
    """The file system of a URL, with at most `in_flight` connections to an S3 store. attempt_timeout of the
    policy limits connecting and reading.

    Raises:
        StorageError: no such scheme, its package is not installed, or there are no credentials.
        FaultError: a service that it asks for credentials cannot be reached.
    """
    kind = kind_of(root)
    made = _class_of(root, kind)
    of_url = made._get_kwargs_from_urls(root)
    options = {**of_url, **options, "skip_instance_cache": True}
    if made.async_impl:
        options |= {"asynchronous": True, "use_listings_cache": False}
    options |= kind.options(root, options, policy.attempt_timeout, in_flight)
    try:
        system = made(**options)
    except Exception as error:
        fault = classify_error(error)
        if isinstance(error, TypeError) and not of_url:  # such as github://, without its owner and repository
            raise StorageError(f"{root}: {error}; write them into the URL, see fsspec", url=root) from None
        if not kind.asks_first or (fault is None and not isinstance(error, ValueError)):
            raise
        if fault is not None and fault.error_class.transient:
            raise FaultError(fault) from error
        message = f"{root}: no access ({fault.message if fault else error}); {kind.advice}"
        raise DeniedError(message, url=root) from error
    if hasattr(system, "retries"):
        system.retries = 1
    kind.adapt(system)
    return system


def _class_of(root: str, kind: StoreKind) -> Any:
    """The class of the file system of a URL."""
    scheme = protocol_of(root) or root  # "s3:" of "s3://", which names no bucket, is no scheme
    try:
        return kind.file_system(scheme)
    except ValueError:
        raise StorageError(
            f"{root}: fsspec has no protocol {scheme!r}; pass a folder, or a URL such as "
            "s3://BUCKET/FOLDER or https://HOST/FOLDER",
            url=root,
        ) from None
    except ImportError as error:
        way = f"run pip install 'sa1b[{kind.extra}]'" if kind.extra else "install it"
        raise StorageError(f"{root}: {error}; {way}", url=root) from None


class Connection:
    """Reads objects below a URL; created and used in one event loop.

    Objects of S3 stores and web servers are read by plain HTTP requests, all others by fsspec's file system.
    If an S3 store refuses the first presigned request, the file system reads its objects too: it follows
    redirections to other regions, and its error is the one to report.

    `etags` has the ETag of each object's first response, by URL. `is_proven`: a presigned request has
    succeeded, so a refusal means that signature or credentials have expired, or that this object is not
    accessible.
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
        self._kind = kind_of(root)
        urls = self._kind.urls(self.system, root, options, in_flight)
        self._is_presigned = isinstance(urls, SignedUrls)
        self._http = None if urls is None else HttpRanges(urls, etags)
        self._uses_http = True

    async def read_range(self, url: str, start: int, end: int, *, uncached: bool = False) -> bytes:
        """The bytes from `start` to `end`, or what there is; `uncached`: past proxies of plain HTTP."""
        return await self._either(
            lambda http: http.read_range(url, start, end, uncached=uncached),
            lambda: self._range_by_system(url, start, end),
        )

    async def size(self, url: str, *, uncached: bool = False) -> int:
        """Size of an object in bytes; `uncached` as in `read_range`."""
        return await self._either(
            lambda http: http.size(url, uncached=uncached), lambda: self._size_by_system(url)
        )

    async def names(self, url: str) -> list[str]:
        """Names of the objects and folders directly below a folder, sorted."""
        path = self.system._strip_protocol(url)
        if self.system.async_impl:
            entries = await self.system._ls(path, detail=False)
        else:
            entries = await asyncio.to_thread(self.system.ls, path, detail=False)
        return sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in entries)

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()
        with contextlib.suppress(Exception):
            await self._kind.disconnect(self.system)
        await asyncio.sleep(0)  # transports close in the next iteration of the loop

    async def _range_by_system(self, url: str, start: int, end: int) -> bytes:
        system, path = self.system, self.system._strip_protocol(url)
        if system.async_impl:
            return bytes(await system._cat_file(path, start=start, end=end))
        more = self._kind.range_options
        return bytes(await asyncio.to_thread(system.cat_file, path, start=start, end=end, **more))

    async def _size_by_system(self, url: str) -> int:
        system, path = self.system, self.system._strip_protocol(url)
        info = await (system._info(path) if system.async_impl else asyncio.to_thread(system.info, path))
        if info.get("type") == "directory":
            raise FileNotFoundError(f"{url} is a folder")
        if info.get("size") is None:
            raise StorageError(
                f"{url}: the server does not return its size; use one that answers HEAD requests", url=url
            )
        return int(info["size"])

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
