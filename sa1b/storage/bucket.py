"""A dataset directory in an object store: s3://, gs://, az:// and every other file system of fsspec.

    store = BucketStore("s3://BUCKET/shards", scratch=Path("/nvme/scratch"))
    store.put("tasks/sa_000020.json", data)          one request, verified, retried until a deadline
    store.put_if_absent("tasks/sa_000020.claim", b)  a conditional write: True for exactly one of many callers
    store.commit([Path("/nvme/scratch/sa1b-000020-0000.tar")])

Every write has a timeout, is retried as a read is (sa1b.storage.retry), and is verified: the store compares
the bytes with their md5 and returns the md5 of what it stored. Where it does not, the object is read back.

A store has only settings until its first request. It can be pickled, forked and shared by threads; every
process opens its own connections.

Conditional writes are the only protection against two holders of one claim, so the first one in a process
checks that the store obeys conditions. An object is replaced only if it is unchanged (`If-Match`). A store
that has only `If-None-Match` gets a lock object instead, whose holder may change the object.
"""

import contextlib
import functools
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from sa1b.storage.errors import DamageError, DeniedError, MissingError, StorageError
from sa1b.storage.file_system import S3, protocol_of
from sa1b.storage.loop import result_of
from sa1b.storage.objects import ConditionError, Objects, Stat, Upload, md5
from sa1b.storage.processes import is_of_dead_process, process_of, temporary_name
from sa1b.storage.reader import Reader
from sa1b.storage.retry import RetryPolicy
from sa1b.storage.s3_objects import S3Objects
from sa1b.storage.store import Store, temporary_path
from sa1b.storage.upload import download, upload

T = TypeVar("T")
_REMOVED = b"sa1b: removed "  # begins the content that replaces an object before it is removed
_REMOVAL = 10.0  # seconds in which a process that replaced an object may remove it
_STALE = 60.0  # seconds after which another process may finish a removal, or remove a lock object
_CLOCK, _PROBE, _LOCK = ".clock-", ".probe-", ".lock-"  # first part of the names of temporary objects
_AGREEMENTS = 16  # reads of one object before giving up on two that agree
_TRIES = 4  # writes of an object whose stored bytes differ from the written bytes


class BucketStore(Store):
    """The objects below a URL.

    Args:
        root: URL of the dataset directory.
        scratch: local folder for files before they are uploaded and after they are downloaded; by default
            `sa1b-<user id>` in the system's folder for temporary files.
        options: options of fsspec's file system.
        retry_policy: times of reads and writes.

    Attributes:
        protocol: scheme of the URL.
        options: as above, for readers of the same directory.
    """

    is_local = False

    def __init__(
        self,
        root: str,
        *,
        scratch: Path | None = None,
        options: Mapping[str, Any] | None = None,
        retry_policy: RetryPolicy | None = None,
    ) -> None:
        self.root = root.rstrip("/")
        self.scratch = scratch or Path(tempfile.gettempdir()) / f"sa1b-{os.getuid()}"
        self.protocol = protocol_of(self.root)
        self._objects = S3Objects() if self.protocol in S3 else Objects()
        self.options = dict(options or {})
        self._reader = Reader(self.root, options=options, retry_policy=retry_policy)
        self._obeys: bool | None = None  # whether the store has If-Match; None: not checked yet
        self._clock: float | None = None  # the store's clock minus the monotonic clock of this machine

    def close(self) -> None:
        """Close the connections of this process. A later request opens new ones."""
        self._reader.close()

    def size(self, name: str) -> int | None:
        found = self._stat(name)
        return None if found is None else found.size

    def read(self, name: str) -> bytes:
        data, _ = self._get(name)
        if data.startswith(_REMOVED):
            raise FileNotFoundError(f"{self.url(name)}: no such object")
        return data

    def names(self, folder: str, ending: str = "") -> list[str]:
        found = self._list(folder)
        return sorted(name for name in found if name.endswith(ending) and not name.startswith("."))

    def folders(self, folder: str) -> list[str]:
        inner = {name.partition("/")[0] for name in self._list(folder, deep=True) if "/" in name}
        return sorted(name for name in inner if not name.startswith("."))

    def version(self, name: str) -> str | None:
        stat = self._stat(name)
        return None if stat is None else f"{stat.size}-{stat.etag or stat.written}"

    def sizes(self, folder: str = "") -> dict[str, int]:
        return {name: size for name, size in self._list(folder).items() if not name.startswith(".")}

    def is_folder(self, name: str) -> bool:
        url = self.url(name)
        try:
            return self._do(name, lambda system: self._objects.is_folder(system, url))
        except MissingError:
            return False

    @contextlib.contextmanager
    def files(self, *names: str) -> Iterator[list[Path]]:
        stats = [self._stat(name) for name in names]
        self._check_space(sum(stat.size for stat in stats if stat), ", ".join(map(self.url, names)))
        folder = temporary_path(self._scratch() / "download")
        folder.mkdir()
        try:
            # Numbered, because objects of two folders may have the same name.
            paths = [folder / str(number) / Path(name).name for number, name in enumerate(names)]
            for name, path, stat in zip(names, paths, stats, strict=True):
                path.parent.mkdir()
                if stat is not None:
                    download(self._reader, name, stat, path)
            yield paths
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def put(self, name: str, data: bytes) -> None:
        url = self.url(name)
        for _ in range(_TRIES):
            with self._writing(name):
                stat = self._do(name, lambda system: self._objects.put(system, url, data), size=len(data))
            if self._is_stored(name, data, stat):
                return
        raise DamageError(
            f"{url}: the store returns other bytes than were written, {_TRIES} times; check the memory and "
            "network of this machine, and whether another process writes this object",
            url=url,
            length=len(data),
        )

    def put_if_absent(self, name: str, data: bytes) -> bool:
        self._check_conditions()
        if self._put_absent(name, data):
            return True
        try:
            found, stat = self._get(name)
        except FileNotFoundError:
            return False  # removed again since
        if found == data:
            return True  # an attempt was applied and its response was lost
        if found.startswith(_REMOVED):
            remover = process_of(found.removeprefix(_REMOVED).decode("latin-1"))
            if is_of_dead_process(remover) or self._age(stat) > _STALE:  # it ended during a removal
                return self._swap(name, data, found, stat)
        return False

    def replace_if(self, name: str, data: bytes, matches: Callable[[bytes], bool]) -> bool:
        self._check_conditions()
        try:
            found, stat = self._get(name)
        except FileNotFoundError:
            return False
        return not found.startswith(_REMOVED) and matches(found) and self._swap(name, data, found, stat)

    def renew(self, name: str, data: bytes) -> bool:
        return self.replace_if(name, data, data.__eq__)

    def remove_if(self, name: str, matches: Callable[[bytes], bool]) -> bool:
        # The object is replaced first: of two processes that both found it, only one replaces it.
        tombstone = _REMOVED + temporary_name("by-").encode()
        began = time.monotonic()
        if not self.replace_if(name, tombstone, matches):
            return False
        # After a suspension of this machine, another process may have a new object of this name. Stores that
        # ignore If-Match here would remove that one.
        if time.monotonic() - began < _REMOVAL:
            policy = replace(self._reader.retry_policy, deadline=_REMOVAL / 2)
            url, tag = self.url(name), md5(tombstone)
            with contextlib.suppress(StorageError):  # then the next process that needs the name removes it
                self._do(name, lambda system: self._objects.delete(system, url, tag), policy=policy)
        return True

    def commit(
        self, staged: Iterable[Path], folder: str = "", progress: Callable[[int], None] | None = None
    ) -> None:
        for path in staged:
            self.commit_file(path, f"{folder}/{path.name}" if folder else path.name, progress)

    def commit_file(self, staged: Path, name: str, progress: Callable[[int], None] | None = None) -> None:
        with self._writing(name):
            upload(self._reader, self._objects, name, staged, progress)
        staged.unlink()

    def commit_folder(self, staged: Path, name: str) -> None:
        self.remove_folder(name)
        for path in sorted(path for path in staged.rglob("*") if path.is_file()):
            inner = f"{name}/{path.relative_to(staged).as_posix()}"
            with self._writing(inner):
                upload(self._reader, self._objects, inner, path)
        shutil.rmtree(staged)

    def remove(self, *names: str) -> None:
        urls = map(self.url, names)
        pending = [
            self._reader.request(name, functools.partial(self._objects.delete, url=url))
            for name, url in zip(names, urls, strict=True)
        ]
        try:
            for name, future in zip(names, pending, strict=True):
                with self._writing(name):
                    future.result()
        finally:
            for future in pending:
                future.cancel()

    def remove_folder(self, name: str) -> None:
        self.remove(*(f"{name}/{inner}" for inner in self._list(name, deep=True)))

    def age(self, name: str) -> float | None:
        stat = self._stat(name)
        return None if stat is None else self._age(stat)

    def remove_temporary(self, has_ended: Callable[[str, float], bool]) -> int:
        names = [name for name in self._list("") if name.startswith((_CLOCK, _PROBE))]
        names = [name for name in names if has_ended(process_of(name), self.age(name) or 0.0)]
        self.remove(*names)
        return len(names)

    def uploads(self) -> list[Upload]:
        if not isinstance(self._objects, S3Objects):
            return []
        objects = self._objects
        return self._do("", lambda system: objects.uploads(system, self.root))

    def abort_uploads(self, matches: Callable[[str], bool]) -> int:
        if not isinstance(self._objects, S3Objects):
            return 0
        objects = self._objects
        left = [one for one in self.uploads() if matches(one.name)]
        for one in left:
            with self._writing(one.name):
                self._do(one.name, functools.partial(objects.abort, url=self.url(one.name), upload=one.id))
        return len(left)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clock": None}  # another machine has another monotonic clock

    def _do(
        self,
        name: str,
        request: Callable[[Any], Awaitable[T]],
        size: int = 0,
        policy: RetryPolicy | None = None,
    ) -> T:
        return result_of(self._reader.request(name, request, size=size, policy=policy))

    def _stat(self, name: str) -> Stat | None:
        url = self.url(name)
        try:
            return self._do(name, lambda system: self._objects.stat(system, url))
        except MissingError:
            return None

    def _get(self, name: str) -> tuple[bytes, Stat]:
        """A small object, verified by its entity tag where that is its md5, else by a second read."""
        url = self.url(name)
        seen: set[bytes] = set()
        for _ in range(_AGREEMENTS):
            try:
                data, stat = self._do(name, lambda system: self._objects.get(system, url))
            except MissingError as error:
                raise FileNotFoundError(str(error)) from error
            if stat.is_of(data) or data in seen:
                return data, stat
            seen.add(data)
        raise DamageError(
            f"{url}: differs in every read; check the memory and network of this machine", url=url
        )

    def _list(self, folder: str, *, deep: bool = False) -> dict[str, int]:
        url = self.url(folder) if folder else self.root
        try:
            return self._do(folder, lambda system: self._objects.sizes(system, url, deep=deep))
        except MissingError:
            return {}

    def _is_stored(self, name: str, data: bytes, stat: Stat) -> bool:
        """Whether the store has the bytes of a write that it has confirmed."""
        if stat.is_of(data):
            return True
        with contextlib.suppress(FileNotFoundError):
            return self._get(name)[0] == data
        return False

    def _age(self, stat: Stat) -> float:
        """Seconds since the last write of an object, by the store's clock."""
        if stat.age is not None:
            return stat.age
        if stat.written is None:
            return 0.0
        if self._clock is None:  # the time of a new object shows the store's clock
            name = temporary_name(_CLOCK)
            self.put(name, b"clock")
            probe = self._stat(name)
            self.remove(name)
            if probe is None or probe.written is None:
                return 0.0
            self._clock = probe.written - time.monotonic()
        return self._clock + time.monotonic() - stat.written

    def _put_absent(self, name: str, data: bytes) -> bool:
        url = self.url(name)
        try:
            with self._writing(name):
                self._do(
                    name, lambda system: self._objects.put(system, url, data, absent=True), size=len(data)
                )
        except ConditionError:
            return False
        return True

    def _swap(self, name: str, data: bytes, found: bytes, stat: Stat) -> bool:
        """Replace an object unless it differs from `found`, an earlier read; whether it was replaced."""
        url = self.url(name)
        if self._obeys:
            try:
                with self._writing(name):
                    self._do(name, lambda system: self._objects.put(system, url, data, match=stat.etag))
            except ConditionError:
                return self._has(name, data)  # an attempt may have been applied, and its response lost
            return True
        folder, _, last = name.rpartition("/")
        lock = f"{folder}/.{last}.lock" if folder else f".{last}.lock"
        began = time.monotonic()
        token = temporary_name(_LOCK).encode()
        if not self._put_absent(lock, token) and not self._has(lock, token):
            with contextlib.suppress(FileNotFoundError):
                owner = process_of(self.read(lock).decode("latin-1"))
                if is_of_dead_process(owner) or (self.age(lock) or 0.0) > _STALE:
                    self.remove(lock)
            return False
        try:
            if not self._has(name, found) or time.monotonic() - began > _REMOVAL:
                return False
            self.put(name, data)
            return True
        finally:
            if time.monotonic() - began < _STALE:
                self.remove(lock)

    def _has(self, name: str, data: bytes) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self._get(name)[0] == data
        return False

    def _check_conditions(self) -> None:
        """Check once that the store obeys conditions of writes, with an object of an own name.

        Raises:
            StorageError: it ignores them.
        """
        if self._obeys is not None:
            return
        name = temporary_name(_PROBE)
        try:
            self.put(name, b"first")  # without a condition, so that its errors have other causes
            try:
                obeyed = not self._put_absent(name, b"second")
            except StorageError as error:
                if type(error) is not StorageError:
                    raise
                obeyed = False  # refused
            if not obeyed:
                raise StorageError(_no_conditions(self.root), url=self.root)
            self._objects, self._obeys = self._kind(name)
        finally:
            with contextlib.suppress(StorageError):
                self.remove(name)

    def _kind(self, name: str) -> tuple[Objects, bool]:
        """The form of `If-Match` that the store obeys, tested on an object, and whether there is one."""
        for quoted in (True, False):
            objects, stat = S3Objects(quoted=quoted), self._stat(name)
            if not isinstance(self._objects, S3Objects) or stat is None or not stat.etag:
                break
            for tag in ("0" * 32, stat.etag):
                data = secrets.token_hex(8).encode()
                put = functools.partial(objects.put, url=self.url(name), data=data, match=tag)
                try:
                    self._do(name, put)
                except ConditionError:
                    if not self._has(name, data):  # else an attempt was applied, and its response lost
                        continue
                except StorageError as error:
                    if type(error) is StorageError:  # refused
                        continue
                    raise
                return objects, tag == stat.etag
        return self._objects, False

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Errors of a write, with the way out."""
        url = self.url(name)
        if self.protocol in ("http", "https"):
            raise StorageError(
                f"{url}: http(s) can only be read; write to a folder, or to s3://, gs:// or az://", url=url
            )
        try:
            yield
        except DeniedError as error:
            advice = (
                f"Writing needs permission to get, put, list and delete objects below {self.root}, and to "
                "abort multipart uploads"
            )
            raise type(error)(f"{error}. {advice}", url=url) from error
        except MissingError as error:
            message = f"{url}: cannot be written ({error}); create the bucket first"
            raise StorageError(message, url=url) from error

    def _scratch(self) -> Path:
        self.scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self.scratch

    def _check_space(self, size: int, names: str) -> None:
        free = shutil.disk_usage(self._scratch()).free
        if size > free:
            raise StorageError(
                f"{names}: {size:,} bytes, and {self.scratch} has {free:,} bytes free; pass another folder "
                "with --scratch",
                url=self.root,
            )


def _no_conditions(root: str) -> str:
    return (
        f"{root}: this store ignores the condition of a write (If-None-Match), so that two processes could "
        "work on the same source; use a store that obeys it (Amazon S3, Google Cloud Storage, Azure, Ceph, "
        "MinIO, Cloudflare R2), or write to a folder and copy it with sa1b copy"
    )
