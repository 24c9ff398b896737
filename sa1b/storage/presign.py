"""Presigned URLs of the objects of an S3 store, and the session that requests them.

Each object is signed once, for some hours, with the credentials that s3fs has found. A range request to a
presigned URL needs no signature of its own and no client of botocore: 0.30 ms of the processor for 16 kB
instead of 1.3 by s3fs (Ceph on a busy machine, benchmarks/test_range_reads.py).
"""

import asyncio
import os
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import yarl
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from sa1b.storage.http_range import Target

LIFETIME = 6 * 3600  # seconds that a signature is valid, unless its credentials expire earlier
_MARGIN = 0.1  # part of the lifetime in which an object is signed again
_CHECK = 60.0  # seconds between two looks at the credentials, which botocore renews before they expire
_PAYER = "x-amz-request-payer"
_READ_BUFFER = 1 << 20  # bytes of a response that are received before they are read


class SignedUrls:
    """The objects of an S3 store.

    Args:
        system: s3fs's file system; its client resolves the credentials, the endpoint and the form of the URL.
        in_flight: connections.
    """

    def __init__(self, system: Any, in_flight: int) -> None:
        self._system, self._in_flight = system, in_flight
        self._lock = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None
        self._signed: dict[str, tuple[str, float]] = {}  # signed URL, time at which it is signed again
        self._headers = {"Accept-Encoding": "identity", **_payer(system)}
        self._options: dict[str, Any] = {"allow_redirects": False}
        self._credentials: tuple[Any, float] = (None, 0.0)  # used for all signatures, time of the next look

    async def target(self, url: str) -> Target:
        """See Targets.target."""
        now = time.time()
        signed = self._signed.get(url)
        if self._session is None or signed is None or now >= signed[1] or now >= self._credentials[1]:
            async with self._lock:
                signed = await self._sign(url)
        assert self._session is not None
        return Target(self._session, yarl.URL(signed[0], encoded=True), self._headers, self._options)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _sign(self, url: str) -> tuple[str, float]:
        """The presigned URL of an object, and the time at which it is signed again."""
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
            signed = self._signed[url] = text, now + LIFETIME * (1 - _MARGIN)
            if self._session is None:
                self._session = await self._open(client, text)
        return signed

    async def _open(self, client: Any, url: str) -> aiohttp.ClientSession:
        """A session with the TLS settings and the proxy of the client."""
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
