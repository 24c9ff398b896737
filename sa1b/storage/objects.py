"""Requests on the objects of one of fsspec's file systems: what a bucket of any kind can do.

A function makes one attempt. Its caller (`Reader.request`) adds the timeout and the retries, so that every
function may run again after it changed the store and its response was lost.
"""

import asyncio
import base64
import contextlib
import hashlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsspec.callbacks import Callback  # slow; commands import this module for --help

_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")  # keys of `info`, by file system


class ConditionError(Exception):
    """The condition of a write does not hold: the object exists already, or was replaced."""


@dataclass(frozen=True, slots=True)
class Stat:
    """What a store returns about an object.

    Attributes:
        size: bytes.
        etag: entity tag without quotation marks; "": the store has none. On most stores it is the md5 of the
            object if the object was written by one request.
        age: seconds since the last write, by the clock of the store; None: unknown.
        written: seconds since 1970 of the last write; None: unknown.
    """

    size: int
    etag: str = ""
    age: float | None = None
    written: float | None = None

    def is_of(self, data: bytes) -> bool:
        """Whether the entity tag is the md5 of `data`."""
        return self.etag == md5(data)


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload in parts that was neither completed nor aborted.

    Attributes:
        name: name of the object, relative to the dataset directory.
        id: identifies the upload in the store.
        age: seconds since its start by the store's clock.
    """

    name: str
    id: str
    age: float


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
        """Write a small object.

        Args:
            system, url, data: the file system, the object and its content.
            absent: only if the object does not exist.
            match: only if the object has this entity tag. Not supported here.

        Raises:
            ConditionError: the condition does not hold.
        """
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
        found = {entry["name"]: entry["size"] for entry in entries if entry["type"] != "directory"}
        start = f"{folder}/"
        below = {name: size for name, size in found.items() if name.startswith(start)}
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
