"""Export to source tars with the names of the sources: gzip, members `./sa_<id>.jpg` and `./sa_<id>.json`.

The JPEG has the bytes of the source. The annotation file has the same values, and the same bytes if the
source file has SA-1B's usual JSON format. The order in a tar is the order in the shards. The same shards give
the same bytes with any number of workers and the same version of isal, the compression library. To resume an
interrupted export, run the same command: complete tars are skipped, see sa1b.export.export_record.
"""

import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.console import command, counted
from sa1b.errors import ManifestError, ShardError, UsageError
from sa1b.export.export_record import ExportRecord, read_record
from sa1b.export.source_tar import Rows, Written, content_digest, remove_partial, write_source_tar
from sa1b.names import shard_order, source_stem
from sa1b.progress import Bar, bar
from sa1b.shards.dataset import Dataset, open_dataset
from sa1b.shards.image_ids import listing, missing_ids, read_image_ids
from sa1b.shards.manifest import DATASET
from sa1b.storage.atomic import lock
from sa1b.workers import Event, Failure, Supervise
from sa1b.workers import supervise as processes

_SHOWN = 5


@dataclass(slots=True)
class ExportSummary:
    """The result of an export.

    Attributes:
        out: folder of the export.
        seconds: duration of this run.
        tars: names of all complete tars.
        skipped: names of the tars that an earlier run had completed.
        failed: name of a tar that was not written -> the error.
        images, masks, bytes: totals over all complete tars; bytes are file sizes.
        bytes_written: bytes of the tars that this run wrote.
    """

    out: str
    seconds: float = 0.0
    tars: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    images: int = 0
    masks: int = 0
    bytes: int = 0
    bytes_written: int = 0

    def add(self, name: str, written: Written, *, skipped: bool) -> None:
        """Count one tar."""
        self.tars.append(name)
        self.images += written.images
        self.masks += written.masks
        self.bytes += written.bytes
        if skipped:
            self.skipped.append(name)
        else:
            self.bytes_written += written.bytes

    def document(self) -> dict[str, Any]:
        """The summary as a JSON document, for --json."""
        return asdict(self)

    def table(self) -> str:
        """The summary as a table of text."""
        rate = self.bytes_written / 1e6 / self.seconds if self.seconds else 0.0
        skipped = f" ({len(self.skipped):,} already complete)" if self.skipped else ""
        return "\n".join(
            [
                f"  tars    {len(self.tars):,}{skipped}",
                f"  images  {self.images:,}",
                f"  masks   {self.masks:,}",
                f"  bytes   {self.bytes:,} ({rate:,.1f} MB/s, {self.seconds:,.1f} s)",
                f"Complete: {self.out}",
            ]
        )


def export_sa1b(
    root: Path | str,
    out: Path,
    *,
    images_per_tar: int | None = None,
    ids: str | Path | None = None,
    images: npt.NDArray[np.uint64] | None = None,
    plain: bool = False,
    overwrite: bool = False,
    workers: int = 1,
    quiet: bool = False,
    supervise: Supervise = processes,
) -> ExportSummary:
    """Write the images of a dataset directory as source tars to the folder `out`.

    Memory: one image for each worker. A tar with a damaged sample is left out, and the others are written.

    Args:
        root: folder or URL of the dataset directory.
        out: folder for the tars; created if it is missing.
        images_per_tar: split a source into tars of this many images, `<source>-0000.tar`, ...; None: one tar
            for each source.
        ids: file of image ids to export, see sa1b.shards.image_ids. A source without such an image has no
            tar.
        images: image ids to export, uint64 [N], such as those of a view.
        plain: write plain tars instead of gzip.
        overwrite: replace existing tars, also the complete ones of an earlier export.
        workers: worker processes; each writes one tar at a time.
        quiet: show no progress bar.
        supervise: runs the workers.

    Raises:
        UsageError: the shards were made with an image size, `out` is a dataset directory, an id is unknown,
            or a tar exists that is not part of this export. Nothing was written.
        ShardError: a sample is damaged; the other tars are complete.
        ManifestError: `root` has no readable dataset.
        OSError: the disk is full or fails; complete tars are kept.
    """
    began = time.monotonic()
    if workers < 1:
        raise UsageError(f"--workers {workers}: must be at least 1")
    dataset = open_dataset(root)
    table = dataset.table
    _refuse_scaled(dataset)
    if (out / DATASET).exists():
        raise UsageError(f"--out {out}: a dataset directory; name another folder for source tars")
    chosen = _chosen(dataset, ids, images)
    tars = dict(_tars(dataset, chosen, images_per_tar))
    contents = {name: content_digest(table, rows, plain) for name, rows in tars.items()}
    record = read_record(out)
    _refuse_existing(record, contents, overwrite)
    out.mkdir(parents=True, exist_ok=True)
    summary = ExportSummary(str(out))
    with lock(out):
        left = [name for name in tars if overwrite or not record.complete(name, contents[name])]
        for name in tars.keys() - set(left):
            summary.add(name, record.written[name], skipped=True)
        if left:
            record.begin({name: contents[name] for name in left})
        total = sum(int(table.jpg_bytes[tars[name]].sum(dtype=np.int64)) for name in left)
        tasks = [(root, out / name, tars[name], plain) for name in left]
        with bar(total, "export", "B", quiet) as progress:
            _run(tasks, workers, record, summary, progress, supervise)
    summary.tars.sort()
    summary.skipped.sort()
    summary.seconds = time.monotonic() - began
    if summary.failed:
        name, why = min(summary.failed.items())
        others = f" ({len(summary.failed) - 1:,} other tars failed too)" if len(summary.failed) > 1 else ""
        raise ShardError(
            f"{out / name}: {why}{others}; {counted(len(summary.tars), 'tar')} complete; repair {root} and "
            "run the same command again"
        )
    return summary


def _run(
    tasks: list[tuple[Path | str, Path, Rows, bool]],
    workers: int,
    record: ExportRecord,
    summary: ExportSummary,
    progress: Bar,
    supervise: Supervise,
) -> None:
    here = workers == 1 and supervise is processes
    events = _here(tasks, progress) if here else supervise(write_source_tar, tasks, workers=workers)
    try:
        for event in events:
            name = tasks[event.task][1].name
            if event.kind == "progress":
                progress.update(event.value)
            elif event.kind == "done":
                record.finish(name, event.value)
                summary.add(name, event.value, skipped=False)
            elif event.kind == "failed":
                failure: Failure = event.value
                if failure.kind != ShardError.__name__:  # the next tar would fail too
                    raise OSError(failure.message) if failure.expected else RuntimeError(failure.trace)
                summary.failed[name] = failure.message
            elif event.kind == "lost":
                summary.failed[name] = f"the worker process died: {event.value}"
    finally:
        events.close()
        remove_partial(record.out, [path.name for _, path, _, _ in tasks])


def _here(tasks: list[tuple[Path | str, Path, Rows, bool]], progress: Bar) -> Generator[Event, None, None]:
    """The events of `supervise`, with the work done in this process."""
    for number, task in enumerate(tasks):
        try:
            yield Event(number, "done", write_source_tar(*task, progress.update))
        except ShardError as error:
            yield Event(number, "failed", Failure(ShardError.__name__, str(error), "", expected=True))


def _refuse_existing(record: ExportRecord, contents: dict[str, str], overwrite: bool) -> None:
    foreign = [name for name, content in contents.items() if not record.owns(name, content)]
    existing = [name for name in foreign if (record.out / name).exists()]
    if existing and not overwrite:
        more = f" and {len(existing) - _SHOWN} more" if len(existing) > _SHOWN else ""
        raise UsageError(
            f"--out {record.out}: already has {', '.join(existing[:_SHOWN])}{more}, not from an export of "
            "these images; use another --out, or replace the tars with --overwrite"
        )


def _refuse_scaled(dataset: Dataset) -> None:
    size = dataset.manifest["options"]["image_size"]
    if size is not None:
        raise UsageError(
            f"{dataset.root}: was made with --image-size {size}, so the sizes of its JPEGs differ from the "
            "sizes in the annotations; export from shards made without --image-size"
        )


def _chosen(dataset: Dataset, ids: str | Path | None, images: npt.NDArray[np.uint64] | None) -> Rows:
    """Rows of the sample table to export."""
    known = dataset.table.image_id
    wanted = np.ones(len(known), np.bool_)
    if ids is not None:
        listed = read_image_ids(ids)
        missing = missing_ids(listed, known)
        if len(missing):
            raise UsageError(
                f"{ids}: {listing(missing)}: not in {dataset.root}; remove the ids from the file, or make a "
                f"view with `{command('view')} --ids FILE --missing skip`"
            )
        wanted &= np.isin(known, listed, assume_unique=True)
    if images is not None:
        wanted &= np.isin(known, images, assume_unique=True)
    if not wanted.any():
        raise UsageError(
            f"{dataset.root}: no image to export, because no image is in both --view and --ids; change one"
        )
    return np.flatnonzero(wanted)


def _tars(dataset: Dataset, chosen: Rows, images_per_tar: int | None) -> Iterator[tuple[str, Rows]]:
    """Name and rows of each tar, in the order of the shards."""
    sources = {source_stem(name): name for name in dataset.manifest["sources"]}
    stems = [shard_order(shard).stem for shard in dataset.shards]
    strange = [stem for stem in stems if stem not in sources]
    if strange:
        raise ManifestError(
            f"{dataset.reader.url(DATASET)}: lists no source for the shards of {strange[0]!r}; "
            f"run `{command('index')}` to rebuild it"
        )
    names = sorted(sources.values())
    numbers = {name: number for number, name in enumerate(names)}
    table = dataset.table
    rows = chosen[np.lexsort((table.offset[chosen], table.shard[chosen]))]
    of_source = np.array([numbers[sources[stem]] for stem in stems])[table.shard[rows]]
    rows = rows[np.argsort(of_source, kind="stable")]
    ends = np.cumsum(np.bincount(of_source, minlength=len(names)))
    for name, own in zip(names, np.split(rows, ends[:-1]), strict=True):
        if images_per_tar is None:
            if len(own):
                yield f"{name}.tar", own
            continue
        for part, start in enumerate(range(0, len(own), images_per_tar)):
            yield f"{name}-{part:04d}.tar", own[start : start + images_per_tar]
