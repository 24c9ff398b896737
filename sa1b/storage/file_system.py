"""File systems of fsspec without their retries and caches, and three requests to them.

A file system is created in the event loop that uses it. The functions of s3fs for complete objects are not
used, because they return short and corrupted responses without an error and fill gaps with zeros.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from sa1b.storage.errors import StorageError
from sa1b.storage.retry import RetryPolicy

S3 = ("s3", "s3a")
HTTP = ("http", "https")


def protocol_of(root: str) -> str:
    """The scheme of a URL."""
    return root.partition("://")[0]


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
        StorageError: no such scheme, or its package is not installed.
    """
    import fsspec

    protocol = protocol_of(root)
    options = {**options, "skip_instance_cache": True}
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise StorageError(
            f"{root}: fsspec has no protocol {protocol!r}; pass a folder, or a URL such as "
            "s3://BUCKET/FOLDER or https://HOST/FOLDER",
            url=root,
        ) from None
    except ImportError as error:
        advice = "run pip install 'sa1b[s3]'" if protocol in S3 else "install it"
        raise StorageError(f"{root}: {error}; {advice}", url=root) from None
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
    system = kind(**options)
    if hasattr(system, "retries"):
        system.retries = 1
    return system


async def disconnect(system: Any) -> None:
    """Close the connections of a file system."""
    if system.async_impl and hasattr(system, "set_session"):
        with contextlib.suppress(Exception):
            session = await system.set_session()
            await session.close()
    await asyncio.sleep(0)  # transports close in the next iteration of the loop


async def read_range(system: Any, url: str, start: int, end: int) -> bytes:
    """The bytes from `start` to `end` of an object, or what there is of them."""
    path = system._strip_protocol(url)
    if system.async_impl:
        return bytes(await system._cat_file(path, start=start, end=end))
    return bytes(await asyncio.to_thread(system.cat_file, path, start=start, end=end))


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
