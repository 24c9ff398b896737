"""The one way by which bytes are read: a range of a file or object, checked, or an error that says why.

    with Reader("s3://bucket/sa1b") as reader:
        data = reader.read_range("sa1b-000020-0003.tar", 1_536, 330_000, crc=0x1C291CA3)

A reader holds settings only until it reads: it can be pickled, forked and shared by threads, and every
process that reads makes its own connections, one thread and one event loop, on its first read.
"""

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c

from sa1b.storage.checksum import Crc
from sa1b.storage.counters import Counters, Tally
from sa1b.storage.errors import DamageError, StorageError
from sa1b.storage.local import Ahead, LocalOrigin
from sa1b.storage.loop import generation
from sa1b.storage.remote import RemoteOrigin
from sa1b.storage.retry import Patience

PIECE = 8 << 20  # bytes of one request for a large object
_AGREEMENTS = 16  # reads of one range before giving up on two that agree


@dataclass(frozen=True, slots=True)
class Range:
    """A range of a file or object.

    Attributes:
        name: of the object, relative to the reader's root.
        start: first byte.
        length: bytes.
        crc: crc32c of the bytes, or of parts of them (sa1b.storage.checksum); None where it is not known.
    """

    name: str
    start: int
    length: int
    crc: Crc = None


class Reader:
    """Reads ranges below a root: a folder, or a URL that fsspec knows (s3://, http://, memory://, ...).

    What may pass is repeated until the deadline: resets, timeouts, 5xx and 429, bodies too short, wrong
    crc32c, input/output errors of a disk. What will not pass is raised at once, see sa1b.storage.errors.
    Without a crc a range is only as good as the wire: a flipped bit passes.

    Credentials come from the standard places, or from `options` as fsspec's file system takes them.

    Args:
        root: folder or URL.
        deadline: seconds of one read over all its attempts, counted from its first attempt.
        attempt: seconds of one attempt, plus one for every 256 KiB of the range.
        attempts_in_flight: requests to a URL at a time, per process; a range that waits to be repeated
            holds none. Of a folder, read_ranges has the disk read ahead instead.
        options: for fsspec's file system, e.g. {"anon": True} or {"endpoint_url": "http://127.0.0.1:9000"}.
        patience: all times at once, and the clock; overrides deadline and attempt.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        deadline: float = 300.0,
        attempt: float = 15.0,
        attempts_in_flight: int = 16,
        options: Mapping[str, Any] | None = None,
        patience: Patience | None = None,
    ) -> None:
        if attempts_in_flight < 1:
            raise ValueError(f"attempts_in_flight is {attempts_in_flight}; at least 1")
        text = str(root)
        if text.startswith("file://"):
            text = text.removeprefix("file://")
        self.is_local = "://" not in text
        self.root = text.rstrip("/") if not self.is_local else (text.rstrip("/") or "/")
        self.patience = patience or Patience(deadline=deadline, attempt=attempt)
        self.attempts_in_flight = attempts_in_flight
        self._options = dict(options or {})
        self._prepare()

    def read_range(self, name: str, start: int, length: int, crc: Crc = None) -> bytes:
        """The bytes of one range: exactly `length`, with this crc32c if one is given.

        Safe in threads. A range of length 0 is empty without a request.

        Args:
            name: relative to the root, with "/" between folders.
            start: first byte.
            length: bytes.
            crc: crc32c of the range, or of parts of it.

        Raises:
            MissingError: there is no such object.
            DeniedError: the store refuses; ExpiredError among them.
            DamageError: the stored bytes are not the promised ones, or end too early.
            UnavailableError: the deadline passed.
            StorageError: the store refuses the request itself.
            ValueError: a negative range, or a name that leads out of the root.
        """
        _check(name, start, length)
        return self._origin().read(name, start, length, crc) if length else b""

    def begin(self, item: Range) -> "Future[bytes] | Ahead":
        """Begin to read a range; its `result()` is what read_range gives or raises, `cancel()` drops it."""
        _check(item.name, item.start, item.length)
        return (
            self._origin().submit(item.name, item.start, item.length, item.crc) if item.length else _nothing()
        )

    def read_ranges(self, ranges: Iterable[Range], *, ahead: int | None = None) -> Iterator[bytes]:
        """The bytes of many ranges, in the order asked for, many requests in flight.

        `ranges` is taken as needed, at most `ahead` beyond the one yielded; at most that many ranges are in
        memory. The first range that fails raises its error in its turn. Closing the iterator early drops the
        reads that wait.

        Args:
            ranges: what to read.
            ahead: ranges begun at a time, 2 * attempts_in_flight if not given: a slow one at the head does
                not stop the others.

        Raises:
            as read_range does.
        """
        begun: deque[Future[bytes] | Ahead] = deque()
        try:
            for item in ranges:
                begun.append(self.begin(item))
                if len(begun) >= (ahead or 2 * self.attempts_in_flight):
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for future in begun:
                future.cancel()

    def read_agreed(self, name: str, start: int, length: int, first: bytes | None = None) -> bytes:
        """A range without a known crc, read until two reads agree: no flipped bit passes.

        Args:
            first: the bytes of an earlier read, which count.

        Raises:
            DamageError: no two of many reads agree.
            as read_range does.
        """
        seen = set() if first is None else {int(google_crc32c.value(first))}
        for _ in range(_AGREEMENTS):
            data = self.read_range(name, start, length)
            crc = int(google_crc32c.value(data))
            if crc in seen:
                return data
            seen.add(crc)
        raise DamageError(
            f"{self.url(name)}, bytes {start:,} to {start + length:,}: differs in every read",
            url=self.url(name),
            start=start,
            length=length,
        )

    def read_whole(self, name: str, cap: int) -> bytes:
        """A small object, such as dataset.json. Behind a URL it is read twice, see read_agreed.

        Args:
            cap: bytes that it may have.

        Raises:
            StorageError: it is larger than `cap`.
            as read_range does.
        """
        size = self.size(name)
        if size > cap:
            raise StorageError(
                f"{self.url(name)}: {size:,} bytes; at most {cap:,} expected", url=self.url(name)
            )
        if self.is_local or not size:
            return self.read_range(name, 0, size)
        pieces = self.read_ranges(pieces_of(name, size))
        starts = range(0, size, PIECE)
        return b"".join(
            self.read_agreed(name, at, len(piece), piece) for at, piece in zip(starts, pieces, strict=True)
        )

    def size(self, name: str) -> int:
        """Bytes of a file or object. Raises as read_range does."""
        _check(name, 0, 0)
        return self._origin().size(name)

    def names(self, folder: str) -> list[str]:
        """Names of the files or objects right in a folder, sorted; none where there is no such folder.

        Raises as read_range does.
        """
        _check(folder, 0, 0)
        return self._origin().names(folder)

    def url(self, name: str) -> str:
        """Path or URL of an object."""
        return f"{self.root.rstrip('/')}/{name}"

    def counters(self) -> Counters:
        """What happened so far to the reads of this process."""
        return self._origin().tally.snapshot()

    def close(self) -> None:
        """Close files and connections and end the threads of this process; the counters begin anew.

        Reads that run elsewhere in the process are cancelled. A later read opens again what it needs.
        """
        _close(self._origins)

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in self.__dict__.items() if name not in ("_origins", "_finalizer")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def _prepare(self) -> None:
        self._origins: dict[int, LocalOrigin | RemoteOrigin] = {}
        self._finalizer = weakref.finalize(self, _close, self._origins)

    def _origin(self) -> LocalOrigin | RemoteOrigin:
        """What reads in this process; a forked child leaves its parent's alone."""
        found = self._origins.get(generation())
        return found or self._origins.setdefault(generation(), self._make())  # atomic: no lock to be forked

    def _make(self) -> LocalOrigin | RemoteOrigin:
        tally = Tally()
        if self.is_local:
            return LocalOrigin(Path(self.root), self.patience, tally)
        return RemoteOrigin(self.root, self._options, self.patience, tally, self.attempts_in_flight)


def pieces_of(name: str, size: int) -> Iterator[Range]:
    """The ranges of PIECE bytes that make up an object of `size` bytes."""
    return (Range(name, start, min(PIECE, size - start)) for start in range(0, size, PIECE))


def _check(name: str, start: int, length: int) -> None:
    if start < 0 or length < 0:
        raise ValueError(f"{name}: no range of {length} bytes at {start}")
    if not name or name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name!r} is no name of an object below a root")


def _nothing() -> "Future[bytes]":
    future: Future[bytes] = Future()
    future.set_result(b"")
    return future


def _close(origins: dict[int, LocalOrigin | RemoteOrigin]) -> None:
    origin = origins.pop(generation(), None)
    if origin is not None:
        origin.close()
