"""Byte ranges of objects by plain HTTP requests. Every response is compared with its request.

A response is accepted if its Content-Range is the requested range and its ETag is that of the object's first
response, which is sent as If-Match. The size of an object comes from the Content-Range too, because a HEAD
request needs a signature of its own.
"""

import asyncio
import os
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sa1b.storage.errors import ErrorClass, Fault, FaultError, ReplacedError, StorageError, class_of_response

if TYPE_CHECKING:
    import aiohttp
    import yarl

_UNCACHED = {"Cache-Control": "no-cache", "Pragma": "no-cache"}
_PLAIN = {"Accept-Encoding": "identity"}  # a range of a compressed response is another range
# A tar that is stored as gzip may be sent with Content-Encoding: gzip. Its stored bytes are wanted.
_STORED: Mapping[str, Any] = {"auto_decompress": False}
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")
_DOCUMENT = 4096  # bytes of an error document that are read
_FIELD = re.compile(rb"<(Code|Message)>([^<]*)<")


@dataclass(frozen=True, slots=True)
class Target:
    """How an object is requested: URL, headers of every request, and other arguments of `session.get`."""

    session: "aiohttp.ClientSession"
    url: "yarl.URL"  # may contain a signature and must not appear in messages
    headers: Mapping[str, str]
    options: Mapping[str, Any]


class PlainUrls:
    """The objects of a web server. fsspec's file system for http owns the session and the user's options."""

    def __init__(self, system: Any) -> None:
        self._system = system
        self._options = dict(system.kwargs)
        self._headers = {**_PLAIN, **self._options.pop("headers", {})}

    async def target(self, url: str) -> Target:
        """How to request an object."""
        session = await self._system.set_session()
        return Target(session, self._system.encode_url(url), self._headers, self._options)

    async def close(self) -> None:
        """Nothing: the session is closed with the file system."""


class HttpRanges:
    """Ranges and sizes of objects. `etags` has the ETag of each object's first response, by URL."""

    def __init__(self, targets: "PlainUrls | SignedUrls", etags: dict[str, str]) -> None:
        self._targets, self._etags = targets, etags
        self._conditional = True

    async def read_range(self, url: str, start: int, end: int, *, uncached: bool = False) -> bytes:
        """The bytes from `start` to `end` of an object, or fewer if the object ends before.

        The URL has no signature. `uncached`: proxies are to request it from the store.

        Raises:
            FaultError: the response is an error or another range.
            ReplacedError: the object is not the one of the first response.
            StorageError: the server ignores byte ranges.
        """
        target = await self._targets.target(url)
        headers = {**target.headers, "Range": f"bytes={start}-{end - 1}", **(_UNCACHED if uncached else {})}
        etag = self._etags.get(url)
        if etag is not None and self._conditional and not etag.startswith("W/"):  # weak ones never match
            headers["If-Match"] = etag
        # Nothing is read before the response is complete, which takes less time than to read it in pieces.
        options = {**target.options, **_STORED, "read_bufsize": end - start}
        async with target.session.get(target.url, headers=headers, **options) as response:
            if response.status not in (200, 206):
                if response.status != 412 or "If-Match" not in headers:
                    raise await _refusal(response)
            else:
                self._check_etag(url, response, start, end - start)
                received = _content_range(response)
                if received is None:
                    _check_whole(url, response, start, end)
                elif received[0] != start or received[1] != (
                    end if received[2] is None else min(end, received[2])
                ):
                    got = f"bytes {received[0]:,} to {received[1]:,} received, {start:,} to {end:,} requested"
                    raise FaultError(Fault(ErrorClass.SHORT, got))
                if (response.content_length or 0) > end - start:
                    got = f"{response.content_length:,} bytes sent, {end - start:,} requested"
                    raise FaultError(Fault(ErrorClass.SHORT, got))
                await response.content.wait_eof()
                return response.content.read_nowait()
        await self.size(url)  # raises an error if the object was replaced or removed
        self._conditional = False  # the store does not accept the ETag that it sends
        return await self.read_range(url, start, end, uncached=uncached)

    async def size(self, url: str, *, uncached: bool = False) -> int:
        """Size of an object in bytes; as `read_range`, also StorageError: the server does not say."""
        target = await self._targets.target(url)
        headers = {**target.headers, "Range": "bytes=0-0", **(_UNCACHED if uncached else {})}
        async with target.session.get(target.url, headers=headers, **target.options, **_STORED) as response:
            if response.status == 416:  # an empty object has no first byte
                return 0
            if response.status not in (200, 206):
                raise await _refusal(response)
            self._check_etag(url, response, 0, 0)
            content_range = _content_range(response)
            size = response.content_length if content_range is None else content_range[2]
            if content_range is not None and (received := len(await response.read())) != 1:
                raise FaultError(Fault(ErrorClass.SHORT, f"{received:,} bytes received, 1 requested"))
            if size is None:
                raise StorageError(
                    f"{url}: the server does not return its size; use one that supports byte ranges", url=url
                )
            return size

    async def close(self) -> None:
        """Close the connections."""
        await self._targets.close()

    def _check_etag(self, url: str, response: "aiohttp.ClientResponse", start: int, length: int) -> None:
        etag = response.headers.get("ETag")
        if etag is None:
            return
        first = self._etags.setdefault(url, etag)
        if first.removeprefix("W/") != etag.removeprefix("W/"):
            raise ReplacedError(
                f"{url}: replaced since its first read (ETag {first}, now {etag}); open the dataset again, "
                "or run the command again",
                url=url,
                start=start,
                length=length,
            )


def _content_range(response: "aiohttp.ClientResponse") -> tuple[int, int, int | None] | None:
    """First byte, byte after the last one, and size of the object; None for a complete object."""
    text = response.headers.get("Content-Range")
    if text is None and response.status == 200:
        return None
    match = _CONTENT_RANGE.fullmatch(text or "")
    if match is None or match[1] is None:
        raise FaultError(Fault(ErrorClass.SHORT, f"the response has the Content-Range {text!r}"))
    return int(match[1]), int(match[2]) + 1, None if match[3] == "*" else int(match[3])


def _check_whole(url: str, response: "aiohttp.ClientResponse", start: int, end: int) -> None:
    """Accept a complete object in place of a range that begins at 0 and is not shorter."""
    size = response.content_length
    if start or size is None or size > end:
        sent = "the complete object" if size is None else f"{size:,} bytes"
        raise StorageError(
            f"{url}, bytes {start:,} to {end:,}: {sent} received, the server ignores byte ranges; "
            "use one that supports them",
            url=url,
            start=start,
            length=end - start,
        )


async def _refusal(response: "aiohttp.ClientResponse") -> FaultError:
    """The error of a response: the code and message of the store, without the signed URL."""
    fields = dict(_FIELD.findall(await response.content.read(_DOCUMENT)))
    code, message = (fields.get(name, b"").decode("utf-8", "replace") for name in (b"Code", b"Message"))
    status = f"{response.status} {response.reason or ''}".strip()
    text = ": ".join(part for part in (code or status, " ".join(message.split())) if part)
    return FaultError(Fault(class_of_response(response.status, code), text[:300]), response.status)


LIFETIME = 6 * 3600  # seconds that a signature is valid, unless its credentials expire earlier
_MARGIN = 0.1  # part of the lifetime in which an object is signed again
_CHECK = 60.0  # seconds between two looks at the credentials, which botocore renews before they expire
_PAYER = "x-amz-request-payer"
_READ_BUFFER = 1 << 20  # bytes of a response that are received before they are read


class SignedUrls:
    """The objects of an S3 store. s3fs resolves the credentials, the endpoint and the form of the URL."""

    # An object of an S3 store is signed once, for some hours, with the credentials that s3fs has found. A
    # range request to a presigned URL needs no signature of its own and no client of botocore: 0.30 ms of the
    # processor for 16 kB instead of 1.3 by s3fs (Ceph on a busy machine, benchmarks/test_range_reads.py).

    def __init__(self, system: Any, in_flight: int) -> None:
        self._system, self._in_flight = system, in_flight
        self._lock = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None
        self._signed: dict[str, tuple[yarl.URL, float]] = {}  # signed URL, time at which it is signed again
        self._headers = {"Accept-Encoding": "identity", **_payer(system)}
        self._options: dict[str, Any] = {"allow_redirects": False}
        self._credentials: tuple[Any, float] = (None, 0.0)  # used for all signatures, time of the next look

    async def target(self, url: str) -> Target:
        """How to request an object."""
        now = time.time()
        signed = self._signed.get(url)
        if self._session is None or signed is None or now >= signed[1] or now >= self._credentials[1]:
            async with self._lock:
                signed = await self._sign(url)
        assert self._session is not None
        return Target(self._session, signed[0], self._headers, self._options)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _sign(self, url: str) -> "tuple[yarl.URL, float]":
        """The presigned URL of an object, and the time at which it is signed again."""
        import yarl

        path = self._system._strip_protocol(url)
        await self._system.set_session()
        client = await self._system.get_s3(self._system.split_path(path)[0])
        if time.time() >= self._credentials[1]:
            current = await _current_credentials(client)
            if current != self._credentials[0]:
                self._signed.clear()
            self._credentials = current, time.time() + _CHECK
        signed = self._signed.get(url)
        if signed is None or time.time() >= signed[1]:
            now = time.time()
            text = await self._system._url(path, expires=LIFETIME, **self._system.req_kw)
            signed = self._signed[url] = yarl.URL(text, encoded=True), now + LIFETIME * (1 - _MARGIN)
            if self._session is None:
                self._session = await self._open(client, text)
        return signed

    async def _open(self, client: Any, url: str) -> "aiohttp.ClientSession":
        """A session with the TLS settings and the proxy of the client."""
        import aiohttp
        from botocore.utils import get_environ_proxies

        config = client.meta.config
        proxies = get_environ_proxies(url) if config.proxies is None else config.proxies
        self._options["proxy"] = proxies.get(urlsplit(url).scheme)
        context = None
        if url.startswith("https:"):
            verify = self._system.client_kwargs.get("verify")
            if verify is None:
                verify = self._system.session.get_config_variable("ca_bundle")
            context = await asyncio.to_thread(_tls_context, verify, config.client_cert)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._in_flight, ssl=True if context is None else context),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),  # every attempt has its own
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept"),
            read_bufsize=_READ_BUFFER,
        )


async def _current_credentials(client: Any) -> Any:
    """The credentials of a client, renewed by botocore if they expire soon; None for an anonymous one."""
    credentials = getattr(getattr(client, "_request_signer", None), "_credentials", None)
    return None if credentials is None else await credentials.get_frozen_credentials()


def _payer(system: Any) -> dict[str, str]:
    payer = system.req_kw.get("RequestPayer")
    return {} if payer is None else {_PAYER: payer}


def _tls_context(verify: bool | str | None, client_cert: str | tuple[str, str] | None) -> ssl.SSLContext:
    """As botocore makes it: its own bundle of certificates, unless another one is set."""
    from botocore.httpsession import get_cert_path

    if verify is None:
        verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context.load_verify_locations(get_cert_path(verify))
    if client_cert is not None:
        context.load_cert_chain(*([client_cert] if isinstance(client_cert, str) else client_cert))
    return context
