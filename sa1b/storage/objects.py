"""Requests on the objects of one of fsspec's file systems: what a bucket of any kind can do.

A function makes one attempt. Its caller (`Reader.request`) adds the timeout and the retries, so that every
function may run again after it changed the store and its response was lost.

Every write to an S3 bucket sends the md5 of its bytes (`Content-MD5`), so that the store refuses bytes that
changed in transit. The entity tag that it returns is the md5 of what it stored, except for objects encrypted
with a key of the user's.
"""

import asyncio
import base64
import contextlib
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sa1b.storage.errors import response_of

if TYPE_CHECKING:
    from fsspec.callbacks import Callback  # slow; commands import this module for --help

_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")  # keys of `info`, by file system


class ConditionError(Exception):
    """The condition of a write does not hold: the object exists already, or was replaced."""


@dataclass(frozen=True, slots=True)
class Stat:
    """What a store returns about an object."""

    size: int  # bytes
    etag: str = ""  # without quotes; "": none; on most stores the md5, if one request wrote it
    age: float | None = None  # seconds since the last write, by the clock of the store; None: unknown
    written: float | None = None  # seconds since 1970 of the last write; None: unknown

    def is_of(self, data: bytes) -> bool:
        """Whether the entity tag is the md5 of `data`."""
        return self.etag == md5(data)


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload in parts that was neither completed nor aborted."""

    name: str  # of the object, relative to the dataset directory
    id: str
    age: float  # seconds since its start by the store's clock


class Objects:
    """Requests that every file system of fsspec has.

    Only `put` with `absent` is conditional. A store that ignores this condition overwrites the object.
    """

    async def stat(self, system: Any, url: str) -> Stat:
        """Size and time of an object. Raises FileNotFoundError if it does not exist."""
        info = await _call(system, "info", system._strip_protocol(url))
        if info.get("type") == "directory":
            raise FileNotFoundError(f"{url} is a folder")
        written = next((info[key] for key in _TIMES if info.get(key) is not None), None)
        if isinstance(written, str):
            written = datetime.fromisoformat(written)
        if isinstance(written, datetime):
            written = written.timestamp()
        return Stat(int(info["size"]), _md5_of(info), written=written)

    async def get(self, system: Any, url: str) -> tuple[bytes, Stat]:
        """A small object."""
        data = bytes(await _call(system, "cat_file", system._strip_protocol(url)))
        return data, Stat(len(data))

    async def put(
        self, system: Any, url: str, data: bytes, *, absent: bool = False, match: str | None = None
    ) -> Stat:
        """Write a small object. ConditionError: `absent`, and it exists. `match` is not supported here."""
        if match is not None:
            raise NotImplementedError
        try:
            mode = {"mode": "create"} if absent else {}
            await _call(system, "pipe_file", system._strip_protocol(url), data, **mode)
        except FileExistsError:
            if not absent:
                raise
            raise ConditionError from None  # not classified by its cause
        return Stat(len(data))

    async def put_file(self, system: Any, url: str, path: Path, sent: "Callback") -> bool:
        """Write a large object. `sent` has the number of bytes sent by this attempt, if known."""
        sent.absolute_update(0)
        await _call(system, "put_file", str(path), system._strip_protocol(url), callback=sent)
        return True

    async def delete(self, system: Any, url: str, match: str | None = None) -> bool:
        """Remove an object if it exists; only with this entity tag if the store supports the condition."""
        with contextlib.suppress(FileNotFoundError):
            await _call(system, "rm_file", system._strip_protocol(url))
        return True

    async def sizes(self, system: Any, url: str, *, deep: bool = False) -> dict[str, int]:
        """Name -> bytes of the objects in a folder; with `deep`, also of those in folders below it."""
        folder = system._strip_protocol(url).rstrip("/")
        if deep:
            entries = (await _call(system, "find", folder, detail=True)).values()
        else:
            entries = await _call(system, "ls", folder, detail=True)
        sizes = {entry["name"]: entry["size"] for entry in entries if entry.get("type") == "file"}
        start = f"{folder}/"
        below = {name: size for name, size in sizes.items() if name.startswith(start)}
        for name, size in below.items():
            if size is None:  # the listings of web servers have names only
                below[name] = (await self.stat(system, name)).size
        return {name.removeprefix(start): int(size) for name, size in below.items()}

    async def is_folder(self, system: Any, url: str) -> bool:
        """Whether there is an object below a folder."""
        return bool(await self.sizes(system, url, deep=True))


def md5(data: bytes) -> str:
    """The md5 of bytes in hexadecimal."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _md5_of(info: dict[str, Any]) -> str:
    """The md5 that Google Cloud Storage computes of an object; "" for other stores."""
    return base64.b64decode(info.get("md5Hash") or "").hex()


async def _call(system: Any, method: str, *arguments: Any, **more: Any) -> Any:
    """Call a method of a file system, in a thread if the file system has no coroutines."""
    if system.async_impl:
        return await getattr(system, f"_{method}")(*arguments, **more)
    return await asyncio.to_thread(getattr(system, method), *arguments, **more)


class S3Objects(Objects):
    """Requests of the S3 protocol (https://docs.aws.amazon.com/AmazonS3/latest/API/API_Operations.html).
    `quoted`: `If-Match` needs its entity tag in quotation marks; Ceph 16 accepts it only without.
    """

    def __init__(self, *, quoted: bool = True) -> None:
        self.quoted = quoted

    async def stat(self, system: Any, url: str) -> Stat:
        try:
            return _stat(await system._call_s3("head_object", **_key(url)))
        except OSError as error:
            if response_of(error)[0] != 400:
                raise
        # The response to HEAD has no document with the reason, such as an expired token.
        response = await system._call_s3("get_object", **_key(url))
        async with response["Body"]:
            return _stat(response)

    async def get(self, system: Any, url: str) -> tuple[bytes, Stat]:
        response = await system._call_s3("get_object", **_key(url))
        async with response["Body"] as body:
            data = await body.read()
        return data, _stat(response)

    async def put(
        self, system: Any, url: str, data: bytes, *, absent: bool = False, match: str | None = None
    ) -> Stat:
        condition = {"IfNoneMatch": "*"} if absent else {}
        if match is not None:
            condition = {"IfMatch": f'"{match}"' if self.quoted else match}
        try:
            response = await system._call_s3(
                "put_object", **_key(url), Body=data, ContentMD5=_content_md5(md5(data)), **condition
            )
        except OSError as error:
            status, code = response_of(error)
            if status == 412 or (match is not None and code == "NoSuchKey"):
                raise ConditionError from None  # not classified by its cause
            raise
        return Stat(len(data), _etag(response))

    async def delete(self, system: Any, url: str, match: str | None = None) -> bool:
        condition = {} if match is None else {"IfMatch": f'"{match}"' if self.quoted else match}
        try:
            await system._call_s3("delete_object", **_key(url), **condition)
        except OSError as error:
            status, code = response_of(error)
            if status == 412 or code == "NoSuchKey":
                return True
            raise
        return True

    async def sizes(self, system: Any, url: str, *, deep: bool = False) -> dict[str, int]:
        bucket, folder = _folder(url)
        sizes: dict[str, int] = {}
        more: dict[str, str] = {} if deep else {"Delimiter": "/"}
        while True:
            response = await system._call_s3("list_objects_v2", Bucket=bucket, Prefix=folder, **more)
            sizes |= {item["Key"][len(folder) :]: int(item["Size"]) for item in response.get("Contents", ())}
            if not response.get("IsTruncated"):
                sizes.pop("", None)  # the marker of a folder that a console made
                return sizes
            more["ContinuationToken"] = response["NextContinuationToken"]

    async def is_folder(self, system: Any, url: str) -> bool:
        bucket, folder = _folder(url)
        response = await system._call_s3("list_objects_v2", Bucket=bucket, Prefix=folder, MaxKeys=1)
        return bool(response.get("Contents"))

    async def start(self, system: Any, url: str) -> str:
        """Start an upload in parts; its id."""
        return str((await system._call_s3("create_multipart_upload", **_key(url)))["UploadId"])

    async def put_part(
        self, system: Any, url: str, upload: str, number: int, data: bytes, digest: str
    ) -> str:
        """Write one part of an upload, numbered from 1; its entity tag. `digest` is the md5 of `data`."""
        response = await system._call_s3(
            "upload_part",
            **_key(url),
            UploadId=upload,
            PartNumber=number,
            Body=data,
            ContentMD5=_content_md5(digest),
        )
        return _etag(response)

    async def complete(self, system: Any, url: str, upload: str, etags: Sequence[str]) -> bool:
        """Make an object of the parts of an upload; FileNotFoundError: no such upload, or a completed one."""
        parts = [{"PartNumber": number, "ETag": f'"{etag}"'} for number, etag in enumerate(etags, 1)]
        await system._call_s3(
            "complete_multipart_upload", **_key(url), UploadId=upload, MultipartUpload={"Parts": parts}
        )
        return True

    async def abort(self, system: Any, url: str, upload: str) -> bool:
        """Remove an upload and its parts. A part that arrives meanwhile may need a second call."""
        with contextlib.suppress(FileNotFoundError):
            await system._call_s3("abort_multipart_upload", **_key(url), UploadId=upload)
        return True

    async def uploads(self, system: Any, url: str) -> list[Upload]:
        """Uploads below a folder that were neither completed nor aborted."""
        bucket, folder = _folder(url)
        uploads: list[Upload] = []
        more: dict[str, str] = {}
        while True:
            response = await system._call_s3("list_multipart_uploads", Bucket=bucket, Prefix=folder, **more)
            now = _now(response)
            uploads += [
                Upload(item["Key"][len(folder) :], item["UploadId"], now - item["Initiated"].timestamp())
                for item in response.get("Uploads", ())
            ]
            if not response.get("IsTruncated"):
                return uploads
            more = {"KeyMarker": response["NextKeyMarker"], "UploadIdMarker": response["NextUploadIdMarker"]}


def composite_etag(etags: Sequence[str]) -> str:
    """The entity tag of an object that was uploaded in parts, from the md5 of its parts."""
    return f"{md5(b''.join(bytes.fromhex(etag) for etag in etags))}-{len(etags)}"


def _key(url: str) -> dict[str, str]:
    bucket, _, key = url.partition("://")[2].partition("/")
    return {"Bucket": bucket, "Key": key}


def _folder(url: str) -> tuple[str, str]:
    """The bucket and the prefix of all names in a folder."""
    bucket, _, key = url.partition("://")[2].partition("/")
    key = key.rstrip("/")
    return bucket, f"{key}/" if key else ""


def _content_md5(digest: str) -> str:
    return base64.b64encode(bytes.fromhex(digest)).decode()


def _etag(response: Any) -> str:
    return str(response.get("ETag", "")).strip('"')


def _stat(response: Any) -> Stat:
    size, etag, modified = int(response["ContentLength"]), _etag(response), response.get("LastModified")
    return Stat(size, etag, None if modified is None else _now(response) - modified.timestamp())


def _now(response: Any) -> float:
    """Time of a response by the store's clock, in seconds since 1970."""
    date = response["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(date).timestamp() if date else time.time()
