"""What a conversion will take: bytes, disk space and hours, estimated before it starts. Writes no file."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sa1b.console import counted
from sa1b.ingest.ingest import is_partial, is_unchanged
from sa1b.ingest.start_checks import Space, admitted, by_name, check_options, needed_space
from sa1b.report import bar, duration_text, fact_lines, failed_lines, size_text
from sa1b.shards.documents import Options
from sa1b.shards.manifest import known_tasks
from sa1b.sources.discovery import Discovered
from sa1b.sources.remote_sources import remote_sources
from sa1b.sources.stored_file import Link
from sa1b.storage.open import open_store
from sa1b.storage.store import Root, Store
from sa1b.workers import available_cpus

# Bytes of source per second, from benchmarks/results/intel-xeon-2-cores-parts.json, "reshard": of one worker,
# which uses more than one processor, and of one processor.
WORKER_RATE = 197e6
PROCESSOR_RATE = 146e6
# Processor time with --image-size 1024 / time without it, both measured in one process on a tar of 192
# synthetic images of 2250 x 1500 pixels: 7.1 s and 1.45 s.
RESIZING = 4.9
EXAMPLE_SIZE = 1024  # of --image-size, if none is given
_HOUR = 3600.0


@dataclass(slots=True)
class IngestPlan:
    """The estimates. Sources are names."""

    out: str | None  # path or URL of the dataset directory
    workers: int
    cpus: int  # processors that this process may use
    rate: float | None  # bytes per second at which the sources can be read
    image_size: int  # longer side of re-encoded images, pixels, of --image-size or as an example
    resizes: bool  # the conversion re-encodes the images
    sources: list[str]
    finished: list[str]  # those that are finished in `out`
    failed: dict[str, str]  # source -> the error of its link
    not_taken: int  # number of files that are not sources
    bytes: int  # of the sources that are left
    original: Space  # space without re-encoding
    resized: Space  # space with re-encoding
    annotations_only: bool = False  # the conversion stores no images
    is_local: bool = True  # `out` is a folder
    scratch: str = ""  # folder whose free space counts
    free: int | None = None  # bytes free there; None if `out` is None

    @property
    def needed(self) -> int:
        """Bytes that the conversion needs on the disk of `scratch`."""
        space = self.resized if self.resizes else self.original
        return space.spill + (space.shards if self.is_local else space.staged)

    @property
    def processor_rate(self) -> float:
        """Bytes of source per second that the processors can convert."""
        rate = min(self.workers * WORKER_RATE, self.cpus * PROCESSOR_RATE)
        return rate / RESIZING if self.resizes else rate

    @property
    def hours(self) -> float:
        """Hours of the conversion, by the smaller one of the two rates."""
        return self.bytes / min(self.processor_rate, self.rate or self.processor_rate) / _HOUR

    def exit_code(self) -> int:
        """0; 1 if a link does not work or the disk is too small."""
        return 1 if self.failed or (self.free is not None and self.free < self.needed) else 0

    def document(self) -> dict[str, Any]:
        return {
            "exit_code": self.exit_code(),
            "sources": len(self.sources),
            "finished": self.finished,
            "failed": self.failed,
            "not_taken": self.not_taken,
            "bytes_to_read": self.bytes,
            "annotations_only": self.annotations_only,
            "shard_bytes": self.original.shards,
            "image_size": self.image_size,
            "shard_bytes_with_image_size": self.resized.shards,
            "spill_bytes": self.original.spill,
            "staged_bytes": 0 if self.is_local else (self.resized if self.resizes else self.original).staged,
            "needed_bytes": self.needed,
            "free_bytes": self.free,
            "workers": self.workers,
            "cpus": self.cpus,
            "bytes_per_second": {"processor": self.processor_rate, "reading": self.rate},
            "hours": self.hours,
        }

    def table(self) -> str:
        left = len(self.sources) - len(self.finished) - len(self.failed)
        state = [f"{left:,} to convert"]
        if self.out is not None:
            state.append(f"{len(self.finished):,} finished in {self.out}")
        if self.failed:
            state.append(f"{len(self.failed):,} whose link does not work")
        space = self.resized if self.resizes else self.original
        resized = f"; with --image-size {self.image_size} {size_text(self.resized.shards)}"
        if self.annotations_only:
            resized = " without images"
        rows = [
            ("sources", f"{len(self.sources):,}: {', '.join(state)}"),
            ("to read", size_text(self.bytes)),
            ("shards", f"{size_text(self.original.shards)}{resized}"),
            ("spill", f"{size_text(space.spill)} for {counted(self.workers, 'worker')}"),
        ]
        if not self.is_local:
            rows.append(("scratch", f"{size_text(space.staged)} until the shards are uploaded"))
        if self.free is not None:
            enough = "" if self.free >= self.needed else f", too little: {size_text(self.needed)} needed"
            rows.append(("free", f"{size_text(self.free)} in {self.scratch}{enough}"))
        rows.append(("time", self._time()))
        lines = fact_lines(rows)
        if self.not_taken:
            lines.append(f"not taken: {counted(self.not_taken, 'path')}; reshard lists them")
        return "\n".join([*lines, *failed_lines(self.failed)])

    def _time(self) -> str:
        time = duration_text(3600 * self.hours)
        processors = f"the processors: {self.processor_rate / 1e6:,.0f} MB/s"
        if self.rate is None:
            return f"{time}, limited by {processors}; pass --rate for the time of reading"
        reading = f"reading: {self.rate / 1e6:,.0f} MB/s"
        first, second = (reading, processors) if self.rate < self.processor_rate else (processors, reading)
        return f"{time}, limited by {first} ({second})"


def plan(
    paths: Sequence[Path],
    links: Sequence[Link],
    root: Root | None,
    *,
    image_size: int | None = None,
    annotations_only: bool = False,
    workers: int = 1,
    rate: float | None = None,
    ignore: Sequence[str] = (),
    quiet: bool = False,
) -> IngestPlan:
    """Estimate a conversion. The estimates of space are those that reshard compares with the free space.

    The sizes of links are requested. The dataset directory need not exist. `image_size`: longer side of
    re-encoded images in pixels; None: images keep their bytes. `rate`: bytes per second at which the sources
    can be read. SourceError or UsageError: a path, link or option is not valid.
    """
    store = None if root is None else open_store(root)
    scratch = [] if store is None else [store.scratch]
    discovered = admitted(paths, {}, scratch, ignore) if paths else Discovered()
    local, remote = by_name(discovered, links)
    tasks = {} if store is None else known_tasks(store)
    options = Options(
        image_size=image_size, quality=None if image_size is None else 95, annotations_only=annotations_only
    )
    if store is not None and tasks:
        used = next(iter(tasks.values())).options
        requested = replace(
            used, image_size=image_size, quality=used.quality, annotations_only=annotations_only
        )
        check_options(store, tasks, requested)
    known = {
        name: (int(task.source["size"]), int(task.source["mtime_ns"]))
        for name, task in tasks.items()
        if not is_partial(task)
    }
    with bar(len(remote), "sizes", " links", quiet or not remote) as progress:
        linked, failed = remote_sources(remote, known, progress=progress.update)
    sources = sorted([*local.values(), *linked], key=lambda source: source.name)
    sizes = None if store is None else store.listed_size()
    finished = [
        source.name
        for source in sources
        if store is not None
        and source.name in tasks
        and is_unchanged(tasks[source.name], source, store, sizes)
    ]
    left = [source for source in sources if source.name not in set(finished)]
    size = image_size or EXAMPLE_SIZE
    ingest_plan = IngestPlan(
        out=None if store is None else str(store),
        workers=workers,
        cpus=available_cpus(),
        rate=rate,
        image_size=size,
        resizes=image_size is not None,
        sources=sorted([*local, *remote]),
        finished=finished,
        failed=failed,
        not_taken=len(discovered.not_taken),
        bytes=sum(source.size for source in left),
        original=needed_space(left, replace(options, image_size=None, quality=None), workers),
        resized=needed_space(left, replace(options, image_size=size, quality=95), workers),
        annotations_only=annotations_only,
    )
    if store is not None:
        _add_disk(ingest_plan, store)
    return ingest_plan


def _add_disk(ingest_plan: IngestPlan, store: Store) -> None:
    ingest_plan.is_local = store.is_local
    folder = store.scratch.absolute()
    while not folder.exists():
        folder = folder.parent
    ingest_plan.scratch, ingest_plan.free = str(store.scratch), shutil.disk_usage(folder).free
