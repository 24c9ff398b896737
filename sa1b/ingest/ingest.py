"""One task of ingest: one source in, its shards, indexes, quarantine and task file out.

A pass over the source's members: whichever of a pair comes first waits in the spill; when its partner
arrives the pair is checked and stored. Everything is written into `.partial/<source>/`; only when the source
has ended and every shard has been read back do the files get their names, the task file last.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import cv2
import pyarrow as pa

from sa1b.errors import BadSample, OutOfMemoryError, RefusedError, SourceError, SystematicError
from sa1b.ingest.quarantine import Quarantine
from sa1b.names import shard_name
from sa1b.shards import annotation, jpeg
from sa1b.shards.commit import check_clash, publish_quarantine, publish_task
from sa1b.shards.largest import Largest
from sa1b.shards.manifest import PARTIAL, QUARANTINE, Options, ShardInfo, Task, task_path, versions
from sa1b.shards.shard import Pair, ShardWriter, seal
from sa1b.sources.pairing import MemberPair, Refusal, Spill, pair_up
from sa1b.sources.source import Source, SourceReader
from sa1b.sources.tar_stream import Damage, Member
from sa1b.storage.publish import naming

MIN_SYSTEMATIC = 20  # so many bad pairs for one reason, and
SYSTEMATIC_FRACTION = 0.01  # this part of a source, look like a misunderstanding rather than damage


@dataclass(frozen=True, slots=True)
class Policy:
    """What a run does about bad input; none of it changes the bytes of good pairs.

    Attributes:
        stop: end the run at the first refusal instead of quarantining.
        accept: reasons that may be frequent.
        md5: the expected md5 of the source as stored, or None.
        spill: folder for members that wait, None: inside the root.
        spill_memory: bytes of them kept in memory instead.
    """

    stop: bool = False
    accept: frozenset[str] = frozenset()
    md5: str | None = None
    spill: Path | None = None
    spill_memory: int = 128 << 20


@dataclass(slots=True)
class Counts:
    """What has been done so far; sent to whoever watches."""

    stored_bytes: int = 0
    members: int = 0
    images: int = 0
    masks: int = 0
    refused: int = 0
    doubtful: int = 0


def limit_threads() -> None:
    """One thread for OpenCV and for Arrow: a worker process has a core of its own, not all of them."""
    cv2.setNumThreads(1)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


def ingest(
    source: Source,
    root: Path,
    options: Options,
    policy: Policy,
    report: Callable[[Counts], None] = lambda counts: None,
) -> Task:
    """Turn one source into shards of `root` and return its task, already written.

    Running it again gives the same bytes. An interruption at any point leaves the root as it was, or with
    files that no task file claims; the next run replaces them.

    Raises:
        SourceError: the md5 differs from the checklist's, or nothing in the source can be used.
        SystematicError, RefusedError: see there.
        OutOfMemoryError: the process may not take the memory it needs, up to 600 MB.
        OSError: the disk is full or fails; the message names the path.
    """
    aside = root / PARTIAL / source.name
    spill = (policy.spill or root / PARTIAL) / f"{source.name}.spill"
    for folder in (aside, spill):
        shutil.rmtree(folder, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        with naming(root), ThreadPoolExecutor(1) as sealer:
            task = _Ingest(source, aside, spill, options, policy, report, sealer).run()
        check_clash(task, aside, root)
        with naming(root):
            publish_task(task, aside, root)
    except MemoryError:
        raise OutOfMemoryError(
            f"{source.path}: out of memory; ingest of a source takes up to 600 MB: use fewer --workers, or "
            "raise the limit (ulimit -v, the job's memory)"
        ) from None
    except (SourceError, SystematicError):
        # What was refused, with reasons and offsets, is what a person looks at now; but never in place of
        # what an earlier run refused of a source whose shards stay.
        if not task_path(root, source.name).exists():
            publish_quarantine(source.name, aside, root)
        raise
    finally:
        for folder in (aside, spill):
            shutil.rmtree(folder, ignore_errors=True)
    return task


class _Ingest:
    """The state of one pass over a source."""

    def __init__(
        self,
        source: Source,
        aside: Path,
        spill: Path,
        options: Options,
        policy: Policy,
        report: Callable[[Counts], None],
        sealer: ThreadPoolExecutor,
    ) -> None:
        self.source, self.aside, self.options, self.policy, self.report = (
            source,
            aside,
            options,
            policy,
            report,
        )
        self.counts = Counts()
        self.jpg_bytes = 0
        self.largest = Largest()
        self.quarantine = Quarantine(aside / QUARANTINE)
        self.spill = Spill(spill, policy.spill_memory)
        self.sealer = sealer
        self.shard: ShardWriter | None = None
        self.sealed: list[Future[ShardInfo]] = []

    def run(self) -> Task:
        reader = SourceReader(self.source, md5=self.policy.md5 is not None, progress=self._read_bytes)
        try:
            for item in pair_up(self._counted(reader.items()), self.spill):
                if isinstance(item, MemberPair):
                    self._pair(item)
                elif isinstance(item, Refusal):
                    self._refuse(item.reason, item.message, item.member)
                else:
                    self._damage(item)
            digests = reader.digests()
            if self.shard is not None:
                self._close_shard()
            reader.check_unchanged()
        except BaseException:
            if self.shard is not None:
                self.shard.abandon()
            raise
        finally:
            reader.close()
        shards = [future.result() for future in self.sealed]
        if self.policy.md5 is not None and digests["md5"] != self.policy.md5:
            raise SourceError(
                f"{self.source.path}: md5 is {digests['md5']}, the checklist says {self.policy.md5}; "
                "download it again"
            )
        self._check_sums()
        self._check_systematic()
        if not shards:
            raise SourceError(f"{self.source.path}: holds no usable pair; {self._problems()}")
        return self._task(shards, digests["sha256"])

    def _task(self, shards: list[ShardInfo], sha256: str) -> Task:
        source, quarantine = self.source, self.quarantine
        return Task(
            source={
                "name": source.name,
                "kind": source.kind,
                "size": source.size,
                "mtime_ns": source.mtime_ns,
                "sha256": sha256,
                "md5": self.policy.md5,
            },
            options=self.options,
            versions=versions(),
            shards=shards,
            counts={
                "members": self.counts.members,
                "images": self.counts.images,
                "masks": self.counts.masks,
                "jpg_bytes": self.jpg_bytes,
                "refused_members": quarantine.members,
                "refused": dict(sorted(quarantine.refused.items())),
                "doubtful": dict(sorted(quarantine.doubtful.items())),
            },
            damage=quarantine.damages,
            largest=self.largest.values,
        )

    def _read_bytes(self, count: int) -> None:
        self.counts.stored_bytes += count
        self.report(self.counts)

    def _counted(self, items: Iterable[Member | Damage]) -> Iterator[Member | Damage]:
        for item in items:
            if isinstance(item, Member) and item.kind != "folder":
                self.counts.members += 1
            yield item

    def _pair(self, pair: MemberPair) -> None:
        image_id, image, text = pair.image_id, pair.image, pair.text
        try:
            parsed = annotation.parse(text.data, image_id)
            frame = jpeg.frame(image.data)
            height, width = parsed.annotations.height, parsed.annotations.width
            if (frame.height, frame.width) != (height, width):
                raise BadSample(
                    "image_size", f"JPEG of {frame.width} x {frame.height}, annotated as {width} x {height}"
                )
            jpeg.check_length(frame)
            stored = image.data
            if self.options.decode_images:
                jpeg.decode(stored)
            if self.options.image_size is not None:
                quality = self.options.quality or 95
                stored, height, width = jpeg.scale_down(stored, frame, self.options.image_size, quality)
        except BadSample as error:
            self._refuse(error.reason, str(error), image, text)
            return
        if frame.trailing_bytes:
            parsed.doubts["jpeg_trailing_bytes"] = (
                f"{frame.trailing_bytes:,} bytes behind the end of the JPEG"
            )
        for reason, message in parsed.doubts.items():
            self.quarantine.doubt(image_id, reason, message)
            self.counts.doubtful += 1
        keep = text.data if self.options.keep_json else None
        self._store(Pair(stored, height, width, parsed.annotations, parsed.runs, keep))

    def _store(self, pair: Pair) -> None:
        if self.shard is None:
            name = shard_name(self.source.name, len(self.sealed))
            self.shard = ShardWriter(self.aside, name, with_runs=self.options.index_runs)
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
        # Reading back and flushing overlap with the next shard; one at a time bounds the dirty pages.
        self.sealed.append(self.sealer.submit(seal, shard.path))

    def _refuse(self, reason: str, message: str, *members: Member) -> None:
        if self.policy.stop:
            where = ", ".join(f"{member.name!r} at offset {member.offset:,}" for member in members)
            raise RefusedError(f"{self.source.path}: {where}: {reason}: {message}")
        self.quarantine.refuse(reason, message, list(members))
        self.counts.refused += 1

    def _damage(self, damage: Damage) -> None:
        if self.policy.stop:
            raise RefusedError(f"{self.source.path}: at offset {damage.offset:,}: {damage.message}")
        self.quarantine.damage(damage)

    def _check_sums(self) -> None:
        """What went in is what came out plus what is in quarantine."""
        out = 2 * self.counts.images + self.quarantine.members
        if self.counts.members != out:
            raise AssertionError(
                f"{self.source.path}: {self.counts.members} members went in, {out} are accounted for; "
                "this is a bug: please report it"
            )

    def _check_systematic(self) -> None:
        pairs = self.counts.images + sum(self.quarantine.refused.values())
        for reason, count in sorted((self.quarantine.refused + self.quarantine.doubtful).items()):
            frequent = count > MIN_SYSTEMATIC and count > SYSTEMATIC_FRACTION * pairs
            # A damaged archive has lost partners by the thousand; the damage itself is what is reported.
            if frequent and reason not in self.policy.accept and not reason.endswith("_partner_lost"):
                examples = "".join(f"\n  {example}" for example in self.quarantine.examples[reason])
                raise SystematicError(
                    f"{self.source.path}: {count:,} of {pairs:,} pairs have the problem {reason!r}, "
                    f"too many to be chance:{examples}\n"
                    f"If that is to be expected, run again with --accept {reason}"
                )

    def _problems(self) -> str:
        found = [f"{reason}: {count}" for reason, count in self.quarantine.refused.items()]
        return ", ".join(found + [damage["message"] for damage in self.quarantine.damages]) or "it is empty"
