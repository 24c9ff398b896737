"""The clients of one look-up of the credentials: a file system of fsspec and, where possible, plain HTTP."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from sa1b.storage import file_system
from sa1b.storage.classify import ErrorClass, FaultError
from sa1b.storage.http_range import HttpRanges, PlainUrls
from sa1b.storage.protocols import HTTP, S3, protocol_of
from sa1b.storage.retry import RetryPolicy

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
        self.system = file_system.connect(root, options, policy, in_flight)
        self.is_proven = False
        protocol = protocol_of(root)
        self._is_presigned = protocol in S3 and file_system.can_presign(root, options)
        self._http: HttpRanges | None = None
        if self._is_presigned:
            from sa1b.storage.presign import SignedUrls

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
            lambda: file_system.read_range(self.system, url, start, end),
        )

    async def size(self, url: str, *, uncached: bool = False) -> int:
        """Size of an object in bytes; `uncached` as in `read_range`."""
        return await self._either(
            lambda http: http.size(url, uncached=uncached), lambda: file_system.size(self.system, url)
        )

    async def names(self, url: str) -> list[str]:
        """Names of the objects and folders directly below a folder, sorted."""
        return await file_system.names(self.system, url)

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()
        await file_system.disconnect(self.system)

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
