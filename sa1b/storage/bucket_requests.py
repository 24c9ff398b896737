"""Requests to the objects of a bucket, with timeouts, retries, verified bytes, and errors with advice.

By conditional writes, exactly one of several processes creates, replaces or removes an object. The first one
of a process checks that the store obeys conditions. An object is created by `If-None-Match: *`, and replaced
only if it is unchanged, by `If-Match`. In a store that has only the first condition, the holder of a lock
object may replace the object.

An object is removed in two requests: it is replaced by a tombstone and then removed. A process that is killed
in between leaves the tombstone. Readers treat it as a missing object, and the next writer replaces it.
"""

import contextlib
import dataclasses
import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

from sa1b.storage.atomic import is_of_dead_process, process_of, temporary_name
from sa1b.storage.errors import DamageError, DeniedError, MissingError, StorageError, UnavailableError
from sa1b.storage.objects import ConditionError, Objects, S3Objects, Stat, md5
from sa1b.storage.protocols import kind_of, protocol_of
from sa1b.storage.reader import Reader
from sa1b.storage.remote import result_of
from sa1b.storage.retry import RetryPolicy

T = TypeVar("T")
CLOCK = ".clock-"  # first part of the name of an object that shows the store's clock
_AGREEMENTS = 16  # reads of one object before giving up on two that agree
_TRIES = 4  # writes of an object whose stored bytes differ from the written bytes


class BucketRequests:
    """Requests to the objects below a URL without a "/" at the end. `objects` is the store's kind."""

    def __init__(
        self, root: str, options: Mapping[str, Any] | None, retry_policy: RetryPolicy | None
    ) -> None:
        self.root = root
        self.reader = Reader(root, options=options, retry_policy=retry_policy)
        self.objects = kind_of(root).objects()
        self._clock: float | None = None  # the store's clock minus the monotonic clock of this machine

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clock": None}  # another machine has another monotonic clock

    def url(self, name: str) -> str:
        """The URL of an object; of the directory if the name is empty."""
        return f"{self.root}/{name}" if name else self.root

    def do(
        self,
        name: str,
        request: Callable[[Any], Awaitable[T]],
        size: int = 0,
        policy: RetryPolicy | None = None,
    ) -> T:
        """The response to a request, see Reader.request."""
        return result_of(self.reader.request(name, request, size=size, policy=policy))

    def stat(self, name: str) -> Stat | None:
        """Size, age and entity tag of an object; None if it does not exist."""
        url = self.url(name)
        try:
            return self.do(name, lambda system: self.objects.stat(system, url))
        except MissingError:
            return None

    def get(self, name: str) -> tuple[bytes, Stat]:
        """A small object; FileNotFoundError if it does not exist."""
        # It is verified by its entity tag where that is its md5, else by size and a second read: two
        # responses that a faulty connection shortened would agree.
        url = self.url(name)
        seen: set[bytes] = set()
        for _ in range(_AGREEMENTS):
            try:
                data, stat = self.do(name, lambda system: self.objects.get(system, url))
            except MissingError as error:
                raise FileNotFoundError(str(error)) from error
            if stat.is_of(data):
                return data, stat
            if data in seen:
                current = self.stat(name)
                if current is not None and current.size == len(data):
                    return data, stat
            seen.add(data)
        raise DamageError(
            f"{url}: differs in every read; check the memory and network of this machine", url=url
        )

    def sizes(self, folder: str, *, deep: bool = False) -> dict[str, int]:
        """Name -> bytes of the objects in a folder; with `deep`, also of those in folders below it."""
        url = self.url(folder)
        try:
            return self.do(folder, lambda system: self.objects.sizes(system, url, deep=deep))
        except MissingError:
            return {}

    def has(self, name: str, data: bytes) -> bool:
        """Whether an object exists with this content."""
        with contextlib.suppress(FileNotFoundError):
            return self.get(name)[0] == data
        return False

    def put(self, name: str, data: bytes) -> None:
        """Write a small object, verified."""
        url = self.url(name)
        for _ in range(_TRIES):
            with self.writing(name):
                stat = self.do(name, lambda system: self.objects.put(system, url, data), size=len(data))
            if self._is_stored(name, data, stat):
                return
        raise DamageError(
            f"{url}: the store returns other bytes than were written, {_TRIES} times; check the memory and "
            "network of this machine, and whether another process writes this object",
            url=url,
            length=len(data),
        )

    def put_absent(self, name: str, data: bytes) -> bool:
        """Write a small object unless it exists. False too if only the response was lost."""
        url = self.url(name)
        try:
            with self.writing(name):
                self.do(name, lambda system: self.objects.put(system, url, data, absent=True), size=len(data))
        except ConditionError:
            return False
        return True

    def remove(self, *names: str) -> None:
        """Remove the objects that exist."""
        urls = map(self.url, names)
        pending = [
            self.reader.request(name, functools.partial(self.objects.delete, url=url))
            for name, url in zip(names, urls, strict=True)
        ]
        try:
            for name, future in zip(names, pending, strict=True):
                with self.writing(name):
                    future.result()
        finally:
            for future in pending:
                future.cancel()

    def age(self, stat: Stat) -> float:
        """Seconds since the last write of an object, by the store's clock."""
        if stat.age is not None:
            return stat.age
        if stat.written is None:
            return 0.0
        if self._clock is None:  # the time of a new object shows the store's clock
            name = temporary_name(CLOCK)
            self.put(name, b"clock")
            probe = self.stat(name)
            self.remove(name)
            if probe is None or probe.written is None:
                return 0.0
            self._clock = probe.written - time.monotonic()
        return self._clock + time.monotonic() - stat.written

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Errors of a write, with the remedy."""
        url, protocol = self.url(name), protocol_of(self.root)
        if kind_of(self.root).is_read_only:
            raise StorageError(
                f"{url}: {protocol} can only be read; write to a folder, or to s3://, gs:// or az://", url=url
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
            message = f"{url}: cannot be written, because it has no bucket; create the bucket first"
            raise StorageError(message, url=url) from error
        except NotImplementedError as error:
            raise StorageError(
                f"{url}: fsspec cannot write to {protocol}://; write to a folder, or to s3://, gs:// or az://",
                url=url,
            ) from error

    def _is_stored(self, name: str, data: bytes, stat: Stat) -> bool:
        """Whether the store has the bytes of a write that it has confirmed."""
        return stat.is_of(data) or self.has(name, data)


PROBE = ".probe-"  # first part of the name of the object of a check
_LOCK_ENDING = ".lock"  # of the name of a lock object
_LOCK = ".lock-"  # first part of the content of a lock object
_REMOVED = b"sa1b: removed "  # first part of a tombstone
_REMOVAL = 10.0  # seconds in which a process that replaced an object may remove it
_STALE = 60.0  # seconds after which another process may finish a removal, or remove a lock object
_LOCK_WAIT = 0.2  # longest wait in seconds before another attempt to create a lock object
_REFUSED = (StorageError, NotImplementedError, TypeError, ValueError)  # a condition that is not supported


def is_removed(data: bytes) -> bool:
    """Whether the content of an object is a tombstone."""
    return data.startswith(_REMOVED)


class Conditions:
    """Conditional writes of objects, by name."""

    def __init__(self, bucket: BucketRequests) -> None:
        self._bucket = bucket
        self._has_if_match: bool | None = None  # None: not checked yet

    def create(self, name: str, data: bytes) -> bool:
        self._check_conditions()
        if self._bucket.put_absent(name, data):
            return True
        try:
            stored, stat = self._bucket.get(name)
        except FileNotFoundError:
            return False  # removed again since
        if stored == data:
            return True  # an attempt was applied and its response was lost
        if is_removed(stored):
            remover = process_of(stored.removeprefix(_REMOVED).decode("latin-1"))
            if is_of_dead_process(remover) or self._age(name, stat) > _STALE:  # it ended during a removal
                return self._swap(name, data, stored, stat)
        return False

    def replace(self, name: str, data: bytes, matches: Callable[[bytes], bool]) -> bool:
        self._check_conditions()
        try:
            stored, stat = self._bucket.get(name)
        except FileNotFoundError:
            return False
        return not is_removed(stored) and matches(stored) and self._swap(name, data, stored, stat)

    def remove(self, name: str, matches: Callable[[bytes], bool]) -> bool:
        # The object is replaced first: of two processes that both found it, only one replaces it.
        tombstone = _REMOVED + temporary_name("by-").encode()
        began = time.monotonic()
        if not self.replace(name, tombstone, matches):
            return False
        # After a suspension of this machine, another process may have a new object of this name. Stores that
        # ignore If-Match here would remove that one.
        if time.monotonic() - began < _REMOVAL:
            policy = dataclasses.replace(self._bucket.reader.retry_policy, deadline=_REMOVAL / 2)
            url, tag = self._bucket.url(name), md5(tombstone)
            with contextlib.suppress(StorageError):  # the next process that needs the name removes it
                delete = functools.partial(self._bucket.objects.delete, url=url, match=tag)
                self._bucket.do(name, delete, policy=policy)
        return True

    def remove_stale_locks(self) -> None:
        """Remove the lock objects whose process has ended or was stopped; none where `If-Match` is obeyed."""
        has_if_match = self._has_if_match
        if has_if_match or (has_if_match is None and isinstance(self._bucket.objects, S3Objects)):
            return
        for name in self._bucket.sizes("", deep=True):
            if name.rpartition("/")[2].startswith(".") and name.endswith(_LOCK_ENDING):
                self._remove_stale(name)

    def _swap(self, name: str, data: bytes, stored: bytes, stat: Stat) -> bool:
        """Replace an object if it equals `stored`, an earlier read. Return whether it was replaced."""
        url = self._bucket.url(name)
        if self._has_if_match:
            try:
                with self._bucket.writing(name):
                    put = functools.partial(self._bucket.objects.put, url=url, data=data, match=stat.etag)
                    self._bucket.do(name, put)
            except ConditionError:
                return self._bucket.has(name, data)  # an attempt may have been applied, and its response lost
            return True
        return self._swap_locked(name, data, stored)

    def _swap_locked(self, name: str, data: bytes, stored: bytes) -> bool:
        """As `_swap`, for the holder of a lock object."""
        folder, _, last = name.rpartition("/")
        lock = f"{folder}/.{last}{_LOCK_ENDING}" if folder else f".{last}{_LOCK_ENDING}"
        token = temporary_name(_LOCK).encode()
        policy = self._bucket.reader.retry_policy
        end = time.monotonic() + _REMOVAL
        while not self._bucket.put_absent(lock, token) and not self._bucket.has(lock, token):
            self._remove_stale(lock)
            if time.monotonic() > end or not self._bucket.has(name, stored):
                return False
            policy.sleep(policy.random() * _LOCK_WAIT)
        began = time.monotonic()
        try:
            if not self._bucket.has(name, stored) or time.monotonic() - began > _REMOVAL:
                return False
            self._bucket.put(name, data)
            return True
        finally:
            if time.monotonic() - began < _STALE:
                self._bucket.remove(lock)

    def _remove_stale(self, lock: str) -> None:
        """Remove a lock object whose process has ended or was stopped."""
        with contextlib.suppress(FileNotFoundError):
            token, stat = self._bucket.get(lock)
            owner = process_of(token.decode("latin-1"))
            if is_of_dead_process(owner) or self._age(lock, stat) > _STALE:
                self._bucket.remove(lock)

    def _age(self, name: str, stat: Stat) -> float:
        """Seconds since the last write of an object that was read; 0 if it does not exist any more."""
        if stat.age is None and stat.written is None:  # most stores do not send it with the content
            again = self._bucket.stat(name)
            return 0.0 if again is None else self._bucket.age(again)
        return self._bucket.age(stat)

    def _check_conditions(self) -> None:
        """Check once that the store obeys conditions of writes; StorageError: no. DeniedError: no access."""
        if self._has_if_match is not None:
            return
        name = temporary_name(PROBE)
        try:
            self._bucket.put(name, b"first")  # without a condition, so that its errors have other causes
            try:
                obeyed = not self._bucket.put_absent(name, b"second")
            except _REFUSED as error:
                if isinstance(error, DeniedError | UnavailableError):
                    raise
                obeyed = False
            if not obeyed:
                root = self._bucket.root
                raise StorageError(
                    f"{root}: this store ignores the condition of a write (If-None-Match), so that two "
                    "processes could work on the same source; use a store that obeys it (Amazon S3, Google "
                    "Cloud Storage, Azure, Ceph, MinIO, Cloudflare R2), or write to a folder and copy it "
                    "with sa1b copy",
                    url=root,
                )
            objects, has_if_match = self._kind(name)
        except BaseException:
            with contextlib.suppress(StorageError):
                self._bucket.remove(name)
            raise
        with contextlib.suppress(UnavailableError):
            self._bucket.remove(name)  # without the permission, all that a run replaces would stay
        self._bucket.objects, self._has_if_match = objects, has_if_match

    def _kind(self, name: str) -> tuple[Objects, bool]:
        """The requests with the form of `If-Match` that the store obeys, if any; `name`: to try it."""
        for quoted in (True, False):
            objects, stat = S3Objects(quoted=quoted), self._bucket.stat(name)
            if not isinstance(self._bucket.objects, S3Objects) or stat is None or not stat.etag:
                break
            for tag in ("0" * 32, stat.etag):
                data = secrets.token_hex(8).encode()
                put = functools.partial(objects.put, url=self._bucket.url(name), data=data, match=tag)
                try:
                    self._bucket.do(name, put)
                except ConditionError:
                    if not self._bucket.has(name, data):  # else an attempt was applied, and its response lost
                        continue
                except _REFUSED as error:
                    if isinstance(error, DeniedError | UnavailableError):
                        raise
                    continue
                return objects, tag == stat.etag
        return self._bucket.objects, False
