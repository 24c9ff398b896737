"""Verified copies of files to objects and back, and a cache of large objects for all processes of a machine.

    FOLDER/<sha256>/samples.bin

A copy is stored under its digest, so that it is never outdated. The whole copy is hashed before it is
returned (0.3 s for the 400 MB of all of SA-1B), so that damage is detected. One process downloads under a
lock, which the operating system releases when the process ends; the other processes wait. No copy is evicted.
A table takes 36 bytes per sample, and its folder may be removed at any time.

A large file is uploaded in parts. At most PARTS_IN_FLIGHT parts are in memory. The store verifies the md5 of
every part, and the finished object is compared with the file by its size and entity tag. Where the store's
entity tags are not md5, the object is read back. Stores without the S3 protocol get the file from fsspec.
"""

import contextlib
import functools
import hashlib
import os
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from sa1b.arguments import BadValue
from sa1b.errors import LockedError
from sa1b.storage.atomic import commit, lock, naming_path, sha256_of
from sa1b.storage.errors import DamageError, MissingError, StorageError
from sa1b.storage.objects import Objects, S3Objects, Stat, composite_etag, md5
from sa1b.storage.reader import PIECE, Reader, pieces_of
from sa1b.storage.remote import result_of

_PARTIAL = ".partial"


def default_folder() -> Path:
    """The default cache: $XDG_CACHE_HOME/sa1b, else sa1b-<user id> in the temporary folder."""
    # Not the home folder, which machines often share: a memory-mapped copy must be local to be fast.
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home) / "sa1b" if home else Path(tempfile.gettempdir()) / f"sa1b-{os.getuid()}"


def cache_folder() -> Path:
    """The default cache, created if it is missing; StorageError if the folder belongs to another user."""
    cache = default_folder()
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    if cache.stat().st_uid != os.getuid():  # the temporary folder is open to everyone
        raise StorageError(f"{cache}: belongs to another user; set XDG_CACHE_HOME to another folder")
    return cache


def fetch_once(reader: Reader, name: str, digest: str, cache: Path | None = None) -> Path:
    """A local file with the bytes of an object. If the reader's root is local, the file itself, unverified.

    Any number of processes may call this at the same time; one of them downloads into `cache`, by default
    default_folder(). `digest` is the object's sha256, in hexadecimal; DamageError if it has another. OSError
    names the file of the cache that cannot be written.
    """
    if reader.is_local:
        return Path(reader.url(name))
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise BadValue(f"{digest!r} is not a sha256 in hexadecimal")
    if cache is None:
        cache = cache_folder()
    folder = cache / digest
    final = folder / Path(name).name
    if _digest(final) == digest:
        return final
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder, wait=True):
        if _digest(final) != digest:  # no other process has downloaded it meanwhile
            _sweep(cache)
            _fill(reader, name, digest, folder, final)
    return final


def _fill(reader: Reader, name: str, digest: str, folder: Path, final: Path) -> None:
    """Download, verify and commit, under the lock of the folder."""
    partial = folder / _PARTIAL
    final.unlink(missing_ok=True)  # damaged
    try:
        with naming_path(partial), partial.open("w+b") as file:
            fetch(reader, name, digest, file)
            file.flush()
            os.fsync(file.fileno())
        commit(partial, final)
    finally:
        partial.unlink(missing_ok=True)


def _digest(path: Path) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        return sha256_of(path)
    return None


def _sweep(cache: Path) -> None:
    """Remove the partial files of other downloads that were killed."""
    for partial in cache.glob(f"{'[0-9a-f]' * 64}/{_PARTIAL}"):
        with contextlib.suppress(LockedError, OSError), lock(partial.parent):
            partial.unlink()


_PREFETCH = 8  # pieces in memory: 64 MiB


def digest(
    reader: Reader, name: str, progress: Callable[[int], object] | None = None, file: BinaryIO | None = None
) -> str:
    """sha256 of an object in hexadecimal, from one read; `file` receives a copy. Memory: 64 MiB.

    `progress` is called with the number of bytes after each piece; its exception ends the read. Raises the
    errors of `Reader.read_range`.
    """
    sha256 = hashlib.sha256()
    for data in reader.read_ranges(pieces_of(name, reader.size(name)), prefetch=_PREFETCH):
        if file is not None:
            file.write(data)
        sha256.update(data)
        if progress is not None:
            progress(len(data))
    return sha256.hexdigest()


def fetch(
    reader: Reader, name: str, expected: str, file: BinaryIO, progress: Callable[[int], object] | None = None
) -> None:
    """Copy an object to an empty file, open for reading too, and verify its sha256. Memory: 64 MiB.

    `progress` is called with the number of bytes after each piece; its exception ends the copy. DamageError:
    the object has another digest. Else raises the errors of `Reader.read_range`.
    """
    actual = digest(reader, name, progress, file)
    size = file.tell()
    if actual != expected:
        # The damage is in the store or in transit: accept a piece once two reads of it agree.
        sha256 = hashlib.sha256()
        for start in range(0, size, PIECE):
            file.seek(start)
            data = file.read(PIECE)
            data = reader.read_agreed(name, start, len(data), data)
            file.seek(start)
            file.write(data)
            sha256.update(data)
        actual = sha256.hexdigest()
    if actual != expected:
        raise DamageError(
            f"{reader.url(name)}: sha256 {actual}, {expected} expected; restore the file "
            "from a copy, or open the dataset again if it was replaced",
            url=reader.url(name),
            length=size,
            expected=expected,
            found=actual,
        )


T = TypeVar("T")
PART = 16 << 20  # bytes of a part, a multiple of PIECE; more for objects of more than MOST_PARTS parts
MOST_PARTS = 10_000  # the limit of S3
PARTS_IN_FLIGHT = 4
_ABORT_DEADLINE = 20.0  # seconds of each request that removes an upload
_REPORT = 0.5  # seconds between two reports of an upload by fsspec
_TRIES = 3  # copies of an object that another process replaces meanwhile


def part_size(size: int) -> int:
    """Bytes of a part of an object of `size` bytes."""
    pieces = -(-size // (MOST_PARTS * PIECE))
    return max(PART, pieces * PIECE)


def upload(
    reader: Reader, objects: Objects, name: str, path: Path, progress: Callable[[int], None] | None = None
) -> None:
    """Write a file, which must not change meanwhile, to an object, verified.

    `progress` is called with the number of bytes whenever some are stored. DamageError: the stored bytes
    differ from the file. Else raises the errors of `Reader.request`, and nothing is left in the store.
    """
    size = path.stat().st_size
    url = reader.url(name)
    progress = progress or (lambda size: None)
    etag = None
    if isinstance(objects, S3Objects) and size > PART:
        etag = _upload_parts(reader, objects, name, path, progress)
    elif isinstance(objects, S3Objects):
        data = path.read_bytes()
        etag = md5(data)
        result_of(reader.request(name, lambda system: objects.put(system, url, data), size=size))
        progress(size)
    else:
        _upload_whole(reader, objects, name, path, progress)
    stat = result_of(reader.request(name, lambda system: objects.stat(system, url)))
    if etag is None and stat.etag:
        etag = _md5_of(path)
    if stat.size != size or (stat.etag != etag and not _is_same(reader, name, path)):
        raise DamageError(
            f"{url}: differs from {path} after the upload; check the memory and network of this machine, and "
            "whether another process writes this object",
            url=url,
            length=size,
            expected=size,
            found=stat.size,
        )


def _upload_whole(
    reader: Reader, objects: Objects, name: str, path: Path, progress: Callable[[int], None]
) -> None:
    """Upload a file by one call of fsspec, with progress while it runs."""
    # An attempt may take as long as a slow connection needs for the file, so the deadline grows with the
    # size.
    from fsspec.callbacks import Callback  # slow; commands import this module for --help

    size = path.stat().st_size
    url = reader.url(name)
    policy = reader.retry_policy
    policy = replace(policy, deadline=policy.deadline + size / policy.min_throughput)
    sent = Callback()
    future = reader.request(
        name, lambda system: objects.put_file(system, url, path, sent), size=size, policy=policy
    )
    reported = seen = 0
    try:
        while not wait([future], timeout=_REPORT).done:
            now = min(int(sent.value), size)
            if now != seen:  # a repeated attempt starts at 0: then 0 bytes are reported, as a sign of life
                progress(max(now - reported, 0))
                seen, reported = now, max(now, reported)
        future.result()
    finally:
        future.cancel()
    progress(size - reported)


def _upload_parts(
    reader: Reader, objects: S3Objects, name: str, path: Path, progress: Callable[[int], None]
) -> str:
    """Upload a file in parts; the entity tag that its object has on most stores."""
    url = reader.url(name)
    size = path.stat().st_size
    step = part_size(size)
    digests: list[str] = []
    etags: list[str] = []
    pending: deque[tuple[int, Future[str]]] = deque()

    def wait_for_part() -> None:
        length, future = pending.popleft()
        etags.append(result_of(future))
        progress(length)

    upload = result_of(reader.request(name, lambda system: objects.start(system, url)))
    try:
        with path.open("rb") as file:
            for number in range(1, -(-size // step) + 1):
                if len(pending) == PARTS_IN_FLIGHT:
                    wait_for_part()
                data = file.read(step)
                digest = md5(data)
                digests.append(digest)
                part = functools.partial(
                    objects.put_part, url=url, upload=upload, number=number, data=data, digest=digest
                )
                pending.append((len(data), reader.request(name, part, size=len(data))))
        while pending:
            wait_for_part()
        result_of(reader.request(name, lambda system: objects.complete(system, url, upload, etags)))
    except MissingError as error:
        # An attempt to complete was applied and its response was lost, or another process has removed the
        # upload because it uploaded the same file.
        with path.open("rb") as file:
            digests = [md5(data) for data in iter(lambda: file.read(step), b"")]
        stat = None
        with contextlib.suppress(MissingError):
            stat = result_of(reader.request(name, lambda system: objects.stat(system, url)))
        if stat is None or stat.size != size:
            raise StorageError(
                f"{url}: the store has removed this unfinished upload ({error}); another process may have "
                "taken over the work: run the command again",
                url=url,
            ) from error
        return composite_etag(digests)
    finally:
        for _, future in pending:
            future.cancel()
        _abort_uploads(reader, objects, name, upload)
    return composite_etag(digests)


def _abort_uploads(reader: Reader, objects: S3Objects, name: str, upload: str) -> None:
    """Remove every unfinished upload of an object."""
    # Other uploads than `upload` exist if the response to their start was lost or their process was killed.
    # An upload that cannot be removed now is removed by the next run, see BucketStore.abort_uploads.
    folder, _, last = reader.url(name).rpartition("/")
    policy = replace(reader.retry_policy, deadline=_ABORT_DEADLINE)

    def request(work: Callable[[Any], Awaitable[T]]) -> T:
        return result_of(reader.request(name, work, policy=policy))

    with contextlib.suppress(StorageError):
        left = {upload}
        for _ in range(_TRIES):  # again for a part that was in flight
            for upload_id in left:
                request(functools.partial(objects.abort, url=reader.url(name), upload=upload_id))
            uploads = request(lambda system: objects.uploads(system, folder))
            left = {other.id for other in uploads if other.name == last}
            if not left:
                return


def download(reader: Reader, name: str, stat: Stat, path: Path) -> None:
    """Copy an object to a file, verified by entity tag or a second read; else DamageError."""
    reader.forget(name)
    if _fetch(reader, name, stat, path):
        return
    with path.open("r+b") as file:
        for piece in pieces_of(name, stat.size):
            first = file.read(piece.length)
            agreed = reader.read_agreed(name, piece.start, piece.length, first)
            if agreed != first:  # it was damaged in transit
                file.seek(piece.start)
                file.write(agreed)


def _fetch(reader: Reader, name: str, stat: Stat, path: Path) -> bool:
    """Copy an object to a file. Return whether the bytes agree with the object's entity tag."""
    in_parts = "-" in stat.etag
    step = part_size(stat.size) if in_parts else stat.size
    parts: list[str] = []
    part = hashlib.md5(usedforsecurity=False)
    at = 0
    with path.open("wb") as file:
        for data in reader.read_ranges(pieces_of(name, stat.size), prefetch=PARTS_IN_FLIGHT):
            file.write(data)
            part.update(data)
            at += len(data)
            if at % step == 0 or at == stat.size:
                parts.append(part.hexdigest())
                part = hashlib.md5(usedforsecurity=False)
    return stat.etag == (composite_etag(parts) if in_parts else "".join(parts))


def _md5_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _is_same(reader: Reader, name: str, path: Path) -> bool:
    reader.forget(name)
    with path.open("rb") as file:
        for piece in pieces_of(name, path.stat().st_size):
            ours = file.read(piece.length)
            theirs = reader.read_range(name, piece.start, piece.length)
            # Once more: the difference may have arisen in transit.
            if theirs != ours and reader.read_agreed(name, piece.start, piece.length, theirs) != ours:
                return False
    return True
