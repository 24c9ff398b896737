"""Requests to the objects of a bucket, with timeouts, retries, verified bytes, and errors with advice."""

import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

from sa1b.storage.errors import DamageError, DeniedError, MissingError, StorageError
from sa1b.storage.loop import result_of
from sa1b.storage.objects import ConditionError, Objects, Stat
from sa1b.storage.processes import temporary_name
from sa1b.storage.protocols import READ_ONLY, S3, protocol_of
from sa1b.storage.reader import Reader
from sa1b.storage.retry import RetryPolicy
from sa1b.storage.s3_objects import S3Objects

T = TypeVar("T")
CLOCK = ".clock-"  # first part of the name of an object that shows the store's clock
_AGREEMENTS = 16  # reads of one object before giving up on two that agree
_TRIES = 4  # writes of an object whose stored bytes differ from the written bytes


class BucketRequests:
    """Requests to the objects below a URL, by their names.

    Args:
        root: URL without a "/" at the end.
        options: options of fsspec's file system.
        retry_policy: times of reads and writes.

    Attributes:
        reader: makes the requests.
        objects: the store's kind.
    """

    def __init__(
        self, root: str, options: Mapping[str, Any] | None, retry_policy: RetryPolicy | None
    ) -> None:
        self.root = root
        self.reader = Reader(root, options=options, retry_policy=retry_policy)
        self.objects = S3Objects() if protocol_of(root) in S3 else Objects()
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
        """A small object, verified by its entity tag where that is its md5, else by size and a second read.

        Two responses that a faulty connection shortened would agree.

        Raises FileNotFoundError if the object does not exist.
        """
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
        """Errors of a write, with the way out."""
        url, protocol = self.url(name), protocol_of(self.root)
        if protocol in READ_ONLY:
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
            message = f"{url}: cannot be written ({error}); create the bucket first"
            raise StorageError(message, url=url) from error
        except NotImplementedError as error:
            raise StorageError(
                f"{url}: fsspec cannot write to {protocol}://; write to a folder, or to s3://, gs:// or az://",
                url=url,
            ) from error

    def _is_stored(self, name: str, data: bytes, stat: Stat) -> bool:
        """Whether the store has the bytes of a write that it has confirmed."""
        if stat.is_of(data):
            return True
        with contextlib.suppress(FileNotFoundError):
            return self.get(name)[0] == data
        return False
