"""One pass over a source, in three threads: read, digest and inflate; pair up and check; write tar and index.

The first member of a pair waits in the spill for the second one. A separate thread reads finished shards
back and flushes them, one at a time, because this waits for the disk. An error in any thread ends the pass at
once.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from sa1b.errors import BadSample, NoPairError, RefusedError, SourceError
from sa1b.ingest.policy import Policy, SystematicCheck, check_pair
from sa1b.names import shard_name
from sa1b.shards.documents import Options, ShardInfo, Task
from sa1b.shards.manifest import QUARANTINE, versions
from sa1b.shards.quarantine import Quarantine
from sa1b.shards.shard import Largest, Pair, ShardWriter, seal
from sa1b.sources.mirror import is_parquet
from sa1b.sources.pairing import MemberPair, Refusal, Spill, pair_up
from sa1b.sources.source import Source, SourceReader
from sa1b.sources.tar_stream import Damage, Member

T = TypeVar("T")
_QUEUE_BYTES = 16 << 20  # limit of the queue between two stages


@dataclass(slots=True)
class Counts:
    """Counts of one source so far: a progress report, small when pickled."""

    stored_bytes: int = 0
    members: int = 0
    images: int = 0
    masks: int = 0
    refused: int = 0

    def __reduce__(self) -> tuple[type["Counts"], tuple[int, ...]]:
        return Counts, astuple(self)


class SourcePass:
    """The state of one pass over a source.

    `staged` is its temporary folder: shards, indexes and quarantine; `spill` that for members that wait for
    their partner. `report` is called with the current counts, from one thread at a time.
    """

    def __init__(
        self,
        source: Source,
        staged: Path,
        spill: Path,
        options: Options,
        policy: Policy,
        report: Callable[[Counts], None],
        sealer: ThreadPoolExecutor,
    ) -> None:
        self.source, self.staged, self.options = source, staged, options
        self.policy, self.report, self.sealer = policy, report, sealer
        self.counts = Counts()
        self.jpg_bytes = 0
        self.largest = Largest()
        self.quarantine = Quarantine(staged / QUARANTINE)
        self.spill = Spill(spill, policy.spill_memory)
        self.shard: ShardWriter | None = None
        self.shards = 0
        self.sealing: Future[ShardInfo] | None = None
        self.sealed: list[ShardInfo] = []
        self.systematic = SystematicCheck(source.label, source.size, policy.accept)
        self.report_lock = threading.Lock()

    def run(self) -> Task:
        """Write all shards into the temporary folder and return the task, which lists them. Raises the
        errors of `ingest`; ShardError: a shard differs from what was written when it is read back.
        """
        reader = SourceReader(self.source, md5=self.policy.md5 is not None, progress=self._read_bytes)
        try:
            with ThreadStages() as pipeline:
                read = pipeline.stage(
                    "read", self._read(reader), size=lambda read: len(read.item.data), max_bytes=_QUEUE_BYTES
                )
                steps = pipeline.stage("check", self._steps(read), size=_step_size, max_bytes=_QUEUE_BYTES)
                for step in steps:
                    self._take(step)
            digests = reader.digests()
            if self.shard is not None:
                self._close_shard()
            self._wait_for_seal()
            reader.check_unchanged()
        except BaseException:
            if self.shard is not None:
                self.shard.abandon()
            raise
        finally:
            reader.close()
        if self.policy.md5 is not None and digests.get("md5", self.policy.md5) != self.policy.md5:
            raise SourceError(
                f"{self.source.label}: md5 is {digests['md5']}, the checklist has {self.policy.md5}; "
                "download it again"
            )
        out = 2 * self.counts.images + self.quarantine.members
        if self.counts.members != out:
            raise AssertionError(
                f"{self.source.label}: {self.counts.members} members were read, {out} were stored; "
                "this is a bug: please report it"
            )
        self.systematic.check(self.quarantine, self.counts.images)
        if not self.sealed:
            raise NoPairError(f"{self.source.label}: no usable pair; {self._problems()}")
        self.quarantine.flush()  # the task file, written later, counts its contents
        return self._task(digests.get("sha256"), reader.found())

    def _task(self, sha256: str | None, facts: dict[str, Any]) -> Task:
        source, quarantine = self.source, self.quarantine
        reading = {**self.policy.reading(source), **facts}
        is_all = source.wanted is None
        return Task(
            source={
                "name": source.name,
                "kind": source.kind,
                "size": source.size if is_all else None,  # None: reshard does not skip the source
                "mtime_ns": source.mtime_ns if is_all else None,
                "sha256": sha256,
                "md5": self.policy.md5,
                **({"reading": reading} if reading else {}),
            },
            options=self.options,
            versions=versions(),
            shards=self.sealed,
            counts={
                "members": self.counts.members,
                "images": self.counts.images,
                "masks": self.counts.masks,
                "jpg_bytes": self.jpg_bytes,
                "refused_members": quarantine.members,
                "refused": dict(sorted(quarantine.refused.items())),
                "doubtful": dict(sorted(quarantine.warnings.items())),
            },
            damage=quarantine.damages,
            largest=self.largest.values,
            quarantine=quarantine.digests(),
        )

    def _read_bytes(self, count: int) -> None:
        self.counts.stored_bytes += count
        self._report()

    def _report(self) -> None:
        with self.report_lock:  # called by the reading and the writing thread
            self.report(self.counts)

    def _read(self, reader: SourceReader) -> Iterator["_Read"]:
        """First stage: read, digest and inflate."""
        for item in reader.items():
            if isinstance(item, Member) and item.kind != "folder":
                self.counts.members += 1
            yield _Read(item, self.counts.members, self.counts.stored_bytes)

    def _steps(self, read: Iterator["_Read"]) -> Iterator["_Step"]:
        """Second stage: pair up and check."""
        last = _Read(Damage("", "", 0), 0, 0)

        def items() -> Iterator[Member | Damage]:
            nonlocal last
            for last in read:
                yield last.item

        for item in pair_up(items(), self.spill):
            result: Pair | _Refused | Damage
            if isinstance(item, MemberPair):
                try:
                    result = check_pair(item, self.options, self.policy.max_pixels)
                except BadSample as error:
                    result = _refused(error.reason, str(error), item.image, item.text)
            elif isinstance(item, Refusal):
                result = _refused(item.reason, item.message, item.member)
            else:
                result = item
            yield _Step(result, last.members, last.stored_bytes)

    def _take(self, step: "_Step") -> None:
        """Third stage: write into shard, index or quarantine."""
        result = step.result
        if isinstance(result, Damage):
            if self.policy.stop:
                self._stop(f"at offset {result.offset:,}: {result.message}")
            self.quarantine.damage(result)
        elif isinstance(result, _Refused):
            self._refuse(result)
        else:
            image_id = result.annotations.image_id
            for reason, warning in result.warnings.items():
                self.quarantine.warn(image_id, reason, warning)
            self._store(result)
        if isinstance(result, _Refused) or (isinstance(result, Pair) and result.warnings):
            self.systematic.check_early(self.quarantine, self.counts.images, step.members, step.stored_bytes)
        if self.sealing is not None and self.sealing.done():
            self._wait_for_seal()
        self._report()

    def _store(self, pair: Pair) -> None:
        if self.shard is None:
            self.shard = ShardWriter(
                self.staged, shard_name(self.source.name, self.shards), with_runs=self.options.index_runs
            )
            self.shards += 1
        self.largest.see(self.shard.add(pair))
        self.jpg_bytes += len(pair.jpeg)
        self.counts.images += 1
        self.counts.masks += len(pair.annotations)
        if self.shard.images == self.options.images_per_shard:
            self._close_shard()

    def _close_shard(self) -> None:
        shard = self.shard
        assert shard is not None
        shard.close()
        self.shard = None
        # Reading back and flushing overlap with writing the next shard. One at a time bounds the dirty pages.
        self._wait_for_seal()
        self.sealing = self.sealer.submit(seal, shard.path)

    def _wait_for_seal(self) -> None:
        """Wait for the shard that is being sealed; an error of the sealing ends the pass."""
        if self.sealing is not None:
            sealing, self.sealing = self.sealing, None
            self.sealed.append(sealing.result())
            self._report()

    def _refuse(self, refused: "_Refused") -> None:
        if self.policy.stop:
            where = ", ".join(f"{member.name!r} at offset {member.offset:,}" for member in refused.members)
            self._stop(f"{where}: {refused.reason}: {refused.message}")
        self.quarantine.refuse(refused.reason, refused.message, list(refused.members))
        self.counts.refused += 1

    def _stop(self, why: str) -> None:
        raise RefusedError(f"{self.source.label}: {why}; fix the source, or use --on-error quarantine")

    def _problems(self) -> str:
        messages = [f"{reason}: {count}" for reason, count in self.quarantine.refused.items()]
        messages += [damage["message"] for damage in self.quarantine.damages]
        alone = [*{"jpg_unpaired", "unexpected_name"} & self.quarantine.refused.keys()]
        if self.source.format.kind == "tar" and is_parquet(self.source.path):  # no other took it
            if self.source.path.suffix != ".parquet":
                return "a Parquet file; rename it, so that its name ends with .parquet"
            messages = alone = ["a Parquet file without a column of image bytes or of annotations"]
        way = "; for images without annotations, pass --images-only" if alone else ""
        return f"{', '.join(messages) or 'it is empty; download it again, or leave it out'}{way}"


@dataclass(frozen=True, slots=True)
class _Read:
    """A member or damage, with the members and stored bytes read so far."""

    item: Member | Damage
    members: int
    stored_bytes: int


def _refused(reason: str, message: str, *members: Member) -> "_Refused":
    origin = members[0].origin  # the name by which the user can find the image
    return _Refused(reason, f"{origin}: {message}" if origin else message, members)


@dataclass(frozen=True, slots=True)
class _Refused:  # the members of a pair, or a single member
    reason: str
    message: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class _Step:
    """The result for a pair, member or damaged range, with the members and stored bytes read so far."""

    result: Pair | _Refused | Damage
    members: int
    stored_bytes: int


def _step_size(step: _Step) -> int:
    result = step.result
    if isinstance(result, Damage):
        return len(result.data)
    if isinstance(result, _Refused):
        return sum(len(member.data) for member in result.members)
    text = result.annotations.text or result.text or b""
    return len(result.jpeg) + len(text) + len(result.annotations.rle) + result.runs.runs.nbytes


class _StoppedError(Exception):
    """Ends the thread of a stage when the pipeline stops; raised in these threads only."""


class ThreadStages:
    """Stages that run in parallel, each in its own thread, with queues of a bounded number of bytes.

        with ThreadStages() as pipeline:
            members = pipeline.stage("read", read(), size=len, max_bytes=16 << 20)
            for item in pipeline.stage("check", map(check, members), size=len, max_bytes=16 << 20):
                write(item)

    The order of the items is kept. An error of a stage reaches the loop at once, before the queued items.
    Every thread has ended when the `with` block ends, also after an error or Ctrl-C.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()  # notified when a queue or `stopped` changes
        self.stopped = False
        self._threads: list[threading.Thread] = []

    def stage(
        self, name: str, items: Iterable[T], *, size: Callable[[T], int], max_bytes: int
    ) -> Iterator[T]:
        """The same items, produced in a thread of this name, at most `max_bytes` by `size`, or one, ahead.
        MemoryError: no thread can be started.
        """
        queue = _Queue(self, size, max_bytes)
        thread = threading.Thread(target=queue.fill, args=(items,), name=f"sa1b {name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # "can't start new thread"
            raise MemoryError(str(error)) from None
        self._threads.append(thread)
        return queue

    def __enter__(self) -> "ThreadStages":
        return self

    def __exit__(self, *_: object) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
        for thread in self._threads:
            thread.join()

    def wait(self) -> None:
        """Wait for a change, within `changed`; ends the thread of a stage if the pipeline has stopped."""
        if not self.stopped:
            self.changed.wait()
        if self.stopped:
            raise _StoppedError


class _Queue(Iterator[T], Generic[T]):
    """Items that one stage has produced and the next one has not received."""

    def __init__(self, pipeline: ThreadStages, size: Callable[[T], int], max_bytes: int) -> None:
        self._pipeline, self._size, self._max_bytes = pipeline, size, max_bytes
        self._items: deque[tuple[T, int]] = deque()
        self._held_bytes = 0
        self._ended = False
        self._error: BaseException | None = None

    def fill(self, items: Iterable[T]) -> None:
        error = None
        try:
            for item in items:
                self._put(item)
        except _StoppedError:
            pass
        except BaseException as raised:
            error = raised
        with self._pipeline.changed:
            self._ended, self._error = True, error
            self._pipeline.changed.notify_all()

    def __next__(self) -> T:
        with self._pipeline.changed:
            while not self._items and self._error is None and not self._ended:
                self._pipeline.wait()
            if self._error is not None:
                raise self._error
            if not self._items:
                raise StopIteration
            item, size = self._items.popleft()
            self._held_bytes -= size
            self._pipeline.changed.notify_all()
            return item

    def _put(self, item: T) -> None:
        size = self._size(item)
        with self._pipeline.changed:
            while self._items and self._held_bytes + size > self._max_bytes:
                self._pipeline.wait()
            if self._pipeline.stopped:
                raise _StoppedError
            self._items.append((item, size))
            self._held_bytes += size
            self._pipeline.changed.notify_all()
