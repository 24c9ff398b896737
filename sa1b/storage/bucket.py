"""A dataset directory in an object store: s3://, gs://, az:// and every other file system of fsspec.

    store = BucketStore("s3://BUCKET/shards", scratch=Path("/nvme/scratch"))
    store.put("tasks/sa_000020.json", data)          one request, verified, retried until a deadline
    store.put_if_absent("tasks/sa_000020.claim", b)  a conditional write: True for exactly one of many callers
    store.commit([Path("/nvme/scratch/sa1b-000020-0000.tar")])

Every write has a timeout, is retried as a read is (sa1b.storage.retry), and is verified: the store compares
the bytes with their md5 and returns the md5 of what it stored. Where it does not, the object is read back.

A store has only settings until its first request. It can be pickled, forked and shared by threads; every
process opens its own connections.
"""

import contextlib
import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sa1b.console import counted
from sa1b.storage.atomic import check_free_bytes, process_of, temporary_path
from sa1b.storage.bucket_requests import CLOCK, PROBE, BucketRequests, Conditions, is_removed
from sa1b.storage.cache import download, upload
from sa1b.storage.errors import MissingError, StorageError, UnavailableError
from sa1b.storage.objects import S3Objects, Stat, Upload
from sa1b.storage.protocols import protocol_of
from sa1b.storage.reader import Reader
from sa1b.storage.retry import RetryPolicy
from sa1b.storage.store import Store, X, Y

_REQUESTS = 16  # of `map` at the same time
_LOG = logging.getLogger(__name__)


class BucketStore(Store):
    """The objects below a URL.

    `scratch` is a local folder for files before they are uploaded and after they are downloaded; by default
    `sa1b-<user id>` in the system's folder for temporary files. `options` are those of fsspec's file system,
    also for readers of the same directory; `protocol` is the scheme of the URL.
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
        self.options = dict(options or {})
        self._requests = BucketRequests(self.root, options, retry_policy)
        self._conditions = Conditions(self._requests)

    @property
    def reader(self) -> Reader:
        return self._requests.reader

    def close(self) -> None:
        """Close the connections of this process. A later request opens new ones."""
        self._requests.reader.close()

    def map(self, function: Callable[[X], Y], items: Iterable[X]) -> Iterator[Y]:
        with ThreadPoolExecutor(_REQUESTS) as threads:
            yield from threads.map(function, items)

    def listed_size(self) -> Callable[[str], int | None]:
        sizes = functools.cache(self.sizes)
        return lambda name: sizes().get(name)

    def create(self, flag: str) -> None:
        """A bucket has no folders."""

    def check_scratch(self, sizes: Sequence[int], workers: int) -> None:
        count = max(1, workers)
        need = sum(sorted(sizes, reverse=True)[:count])
        what = f" for {counted(count, 'shard')} at a time"
        check_free_bytes(
            self._scratch(), need, "name a larger disk with --scratch, or use fewer --workers", what
        )

    def size(self, name: str) -> int | None:
        stat = self._requests.stat(name)
        return None if stat is None else stat.size

    def read(self, name: str) -> bytes:
        data, _ = self._requests.get(name)
        if is_removed(data):
            raise FileNotFoundError(f"{self.url(name)}: no such object")
        return data

    def names(self, folder: str, ending: str = "") -> list[str]:
        sizes = self._requests.sizes(folder)
        return sorted(name for name in sizes if name.endswith(ending) and not name.startswith("."))

    def folders(self, folder: str) -> list[str]:
        inner = {name.partition("/")[0] for name in self._requests.sizes(folder, deep=True) if "/" in name}
        return sorted(name for name in inner if not name.startswith("."))

    def version(self, name: str) -> str | None:
        stat = self._requests.stat(name)
        return None if stat is None else f"{stat.size}-{stat.etag or stat.written}"

    def sizes(self, folder: str = "") -> dict[str, int]:
        return {name: size for name, size in self._requests.sizes(folder).items() if not name.startswith(".")}

    def is_folder(self, name: str) -> bool:
        url = self.url(name)
        try:
            return self._requests.do(name, lambda system: self._requests.objects.is_folder(system, url))
        except MissingError:
            return False

    @contextlib.contextmanager
    def files(self, *names: str) -> Iterator[list[Path]]:
        stats = [self._requests.stat(name) for name in names]
        self._check_space(sum(stat.size for stat in stats if stat), ", ".join(map(self.url, names)))
        folder = temporary_path(self._scratch() / "download")
        folder.mkdir()
        try:
            # Numbered, because objects of two folders may have the same name.
            paths = [folder / str(number) / Path(name).name for number, name in enumerate(names)]
            for name, path, stat in zip(names, paths, stats, strict=True):
                path.parent.mkdir()
                if stat is not None:
                    download(self._requests.reader, name, stat, path)
                    self._check_unchanged(name, stat)
            yield paths
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def put(self, name: str, data: bytes) -> None:
        self._requests.put(name, data)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self._conditions.create(name, data)

    def replace_if(self, name: str, data: bytes, matches: Callable[[bytes], bool]) -> bool:
        return self._conditions.replace(name, data, matches)

    def renew(self, name: str, data: bytes) -> bool:
        return self.replace_if(name, data, data.__eq__)

    def remove_if(self, name: str, matches: Callable[[bytes], bool]) -> bool:
        return self._conditions.remove(name, matches)

    def commit(
        self, staged: Iterable[Path], folder: str = "", progress: Callable[[int], None] | None = None
    ) -> None:
        for path in staged:
            self.commit_file(path, f"{folder}/{path.name}" if folder else path.name, progress)

    def commit_file(self, staged: Path, name: str, progress: Callable[[int], None] | None = None) -> None:
        with self._requests.writing(name):
            upload(self._requests.reader, self._requests.objects, name, staged, progress)
        staged.unlink()

    def commit_folder(self, staged: Path, name: str, is_own: Callable[[str], bool]) -> None:
        self.remove_folder(name, is_own)
        for path in sorted(path for path in staged.rglob("*") if path.is_file()):
            self.commit_file(path, f"{name}/{path.relative_to(staged).as_posix()}")
        shutil.rmtree(staged)

    def remove(self, *names: str) -> None:
        self._requests.remove(*names)

    def remove_folder(self, name: str, is_own: Callable[[str], bool]) -> None:
        self.remove(*(f"{name}/{inner}" for inner in self._requests.sizes(name, deep=True) if is_own(inner)))

    def age(self, name: str) -> float | None:
        stat = self._requests.stat(name)
        return None if stat is None else self._requests.age(stat)

    def remove_temporary(self, has_ended: Callable[[str, float], bool]) -> int:
        names = [name for name in self._requests.sizes("") if name.startswith((CLOCK, PROBE))]
        names = [name for name in names if has_ended(process_of(name), self.age(name) or 0.0)]
        self.remove(*names)
        self._conditions.remove_stale_locks()
        return len(names)

    def uploads(self) -> list[Upload]:
        if not isinstance(self._requests.objects, S3Objects):
            return []
        objects = self._requests.objects
        return self._requests.do("", lambda system: objects.uploads(system, self.root))

    def abort_uploads(self, matches: Callable[[str], bool]) -> int:
        if not isinstance(self._requests.objects, S3Objects):
            return 0
        objects = self._requests.objects
        try:
            left = [unfinished for unfinished in self.uploads() if matches(unfinished.name)]
        except UnavailableError:
            raise
        except StorageError as error:  # listing uploads is a permission of its own, and not in every store
            _LOG.warning("parts of uploads that killed processes left cannot be removed: %s", error)
            return 0
        for unfinished in left:
            with self._requests.writing(unfinished.name):
                abort = functools.partial(objects.abort, url=self.url(unfinished.name), upload=unfinished.id)
                self._requests.do(unfinished.name, abort)
        return len(left)

    def _scratch(self) -> Path:
        self.scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self.scratch

    def _check_unchanged(self, name: str, stat: Stat) -> None:
        """Raise StorageError if an object was replaced during a copy that did not compare its entity tag."""
        again = self._requests.stat(name) if stat.written is not None else stat
        if again != stat:
            raise StorageError(
                f"{self.url(name)}: replaced during the copy; run the command again", url=self.url(name)
            )

    def _check_space(self, size: int, names: str) -> None:
        free = shutil.disk_usage(self._scratch()).free
        if size > free:
            raise StorageError(
                f"{names}: {size:,} bytes, and {self.scratch} has {free:,} bytes free; pass another folder "
                "with --scratch",
                url=self.root,
            )
