"""Export of a dataset directory in any format: choice of the images, workers, record, resuming.

To resume an interrupted export, run the same command: complete parts are skipped, see
sa1b.programs.export.export_part. The formats are described in sa1b.programs.export.export_format.
"""

import os
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sa1b.arguments import Range, was_url
from sa1b.console import counted
from sa1b.errors import ShardError, UsageError
from sa1b.programs.export.export_format import Format, Ids, Rows, remove_temporary
from sa1b.programs.export.export_part import (
    ExportRecord,
    Written,
    content_digest,
    read_record,
    sample_bytes,
    write_part,
)
from sa1b.report import Bar, bar, first_names, rate_text
from sa1b.shards.dataset import Dataset, annotations_only, check_images, open_dataset
from sa1b.shards.file_names import names_of
from sa1b.shards.image_ids import listing, missing_ids, read_image_ids
from sa1b.shards.manifest import dataset_around
from sa1b.storage.atomic import lock
from sa1b.views.predicate import Predicate
from sa1b.workers import Event, Failure, Supervise, failure_of
from sa1b.workers import supervise as processes

_Task = tuple[Path | str, Path, Format, str, Rows, Path | None, Predicate | None, Sequence[tuple[str, str]]]


@dataclass(slots=True)
class ExportSummary:
    """The result of an export: parts by name, totals over all complete parts."""

    out: str
    unit: str = "part"  # what a part is called, such as "tar"
    annotations_only: bool = False  # the dataset has no images, so that the export has none
    seconds: float = 0.0  # of this run
    parts: list[str] = field(default_factory=list)  # complete ones
    skipped: list[str] = field(default_factory=list)  # complete in an earlier run
    failed: dict[str, str] = field(default_factory=dict)  # part that was not written -> the error
    missing: list[int] = field(default_factory=list)  # ids of --ids that the dataset lacks
    images: int = 0
    masks: int = 0
    bytes: int = 0  # file sizes
    bytes_written: int = 0  # of the parts that this run wrote
    linked: int | None = None  # files that are hard links to those of `link_from`; None without it

    def add(self, name: str, written: Written, *, skipped: bool) -> None:
        self.parts.append(name)
        self.images += written.images
        self.masks += written.masks
        self.bytes += written.bytes
        if self.linked is not None:
            self.linked += written.linked
        if skipped:
            self.skipped.append(name)
        else:
            self.bytes_written += written.bytes

    def exit_code(self) -> int:
        """0: every image is exported; 3: an id of --ids is missing."""
        return 3 if self.missing else 0

    def document(self) -> dict[str, Any]:
        return {"exit_code": self.exit_code(), **asdict(self)}

    def table(self) -> str:
        skipped = f" ({len(self.skipped):,} already complete)" if self.skipped else ""
        lines = [
            f"  {f'{self.unit}s':<6}  {len(self.parts):,}{skipped}",
            f"  images  {self.images:,}{' (only their annotations)' if self.annotations_only else ''}",
            f"  masks   {self.masks:,}",
            f"  bytes   {self.bytes:,} ({rate_text(self.bytes_written, self.seconds)})",
        ]
        if self.linked is not None:
            lines.append(f"  linked  {counted(self.linked, 'file')}")
        if self.missing:
            missing = listing(np.array(self.missing, np.uint64))
            lines.append(f"missing: {missing}; --json prints all of them")
        return "\n".join([*lines, f"Complete: {self.out}"])


def export(
    root: Path | str,
    out: Path,
    form: Format,
    *,
    ids: str | Path | None = None,
    images: npt.NDArray[np.uint64] | None = None,
    masks_where: Predicate | None = None,
    layers: Sequence[str] = (),
    link_from: Path | None = None,
    overwrite: bool = False,
    workers: int = 1,
    quiet: bool = False,
    supervise: Supervise = processes,
) -> ExportSummary:
    """Write the images of a dataset directory in a format to the folder `out`.

    A part with a damaged sample is left out, and the others are written.

    Args:
        form: format of the export. If the dataset has no images, its `without_images` is written.
        ids: file of image ids to export, see sa1b.shards.image_ids. Ids that the dataset lacks are listed in
            the summary.
        images: image ids to export, uint64 [N], such as those of a view.
        masks_where: condition that an exported mask must pass, such as that of a view; None: all masks.
        layers: names of layers whose changes the masks have, see `sa1b.open`.
        link_from: folder of an earlier export in this format. Files that are equal there become hard links.
        overwrite: replace existing files, also the complete ones of an earlier export.
        workers: worker processes; each writes one part at a time.

    Raises:
        UsageError: the format refuses the dataset, `out` is in a dataset directory, no image is left, or
            `out` has another export or a file that is not part of this one. Nothing was written.
        ShardError: a sample is damaged, or cannot be written in this format; the other parts are complete.
        OSError: the disk is full or fails; complete parts are kept.
    """
    began = time.monotonic()
    Range(1).check("--workers", workers)
    dataset = open_dataset(root, layers=layers)
    dataset.check_table()
    digests = [(layer.info.name, layer.info.digest) for layer in dataset.layers]
    table = dataset.table
    if annotations_only(dataset):
        form = _without_images(form, dataset)
    form.check(dataset)
    _check_out(out)
    _check_link_from(link_from)
    chosen, missing = _chosen(dataset, ids, images)
    form = form.of(dataset, chosen)
    parts = dict(form.parts(dataset, chosen))
    identity = form.identity if masks_where is None else f"{form.identity} {masks_where.text}"
    identity = " ".join([identity, *(digest for _, digest in digests)])
    contents = {name: content_digest(table, rows, identity) for name, rows in parts.items()}
    record = read_record(out)
    others = _parts_of_another_export(record, form, contents)
    if not overwrite:
        _refuse_parts(record, others)
        _refuse_existing(record, form, contents, {name: table.image_id[rows] for name, rows in parts.items()})
    out.mkdir(parents=True, exist_ok=True)
    summary = ExportSummary(
        str(out),
        form.unit,
        annotations_only(dataset),
        missing=missing.tolist(),
        linked=None if link_from is None else 0,
    )
    with lock(out):
        left = [
            name
            for name, rows in parts.items()
            if overwrite or not record.complete(name, contents[name], form.paths(name, table.image_id[rows]))
        ]
        for name in parts.keys() - set(left):
            summary.add(name, record.written[name], skipped=True)
        if left or others:
            record.begin(form.kind, {name: contents[name] for name in left})
        for name in others:
            record.remove(name, form.paths(name, table.image_id[:0]))
        total = sum(int(sample_bytes(table, parts[name]).sum()) for name in left)
        tasks: list[_Task] = [
            (root, out, form, name, parts[name], link_from, masks_where, digests) for name in left
        ]
        with bar(total, "export", "B", quiet) as progress:
            _run(tasks, workers, record=record, summary=summary, progress=progress, supervise=supervise)
        if not summary.failed:
            form.finish(out, list(parts), _with_masks(table.image_id[chosen], record, parts))
    summary.parts.sort()
    summary.skipped.sort()
    summary.seconds = time.monotonic() - began
    if summary.failed:
        name, why = min(summary.failed.items())
        more, unit = len(summary.failed) - 1, form.unit
        failed = f" ({counted(more, f'other {unit}')} failed too)" if more else ""
        raise ShardError(
            f"{out / name}: {why}{failed}; {counted(len(summary.parts), unit)} complete; repair {root} and "
            "run the same command again"
        )
    return summary


def _run(
    tasks: list[_Task],
    workers: int,
    record: ExportRecord,
    summary: ExportSummary,
    progress: Bar,
    supervise: Supervise,
) -> None:
    here = workers == 1 and supervise is processes
    arguments: list[tuple[Any, ...]] = list(tasks)
    events = _here(tasks, progress) if here else supervise(write_part, arguments, workers=workers)
    try:
        for event in events:
            name = tasks[event.task][3]
            if event.kind == "progress":
                progress.update(event.value)
            elif event.kind == "done":
                record.finish(name, event.value)
                summary.add(name, event.value, skipped=False)
            elif event.kind == "failed":
                failure: Failure = event.value
                if failure.kind != ShardError.__name__:  # the next part would fail too
                    raise _error_of(failure)
                summary.failed[name] = failure.message
            elif event.kind == "lost":
                summary.failed[name] = f"the worker process died: {event.value}"
    finally:
        events.close()
        record.close()
        remove_temporary(record.out)


def _without_images(form: Format, dataset: Dataset) -> Format:
    masks_only = form.without_images()
    if masks_only is None:
        check_images(
            dataset, "an export in this format", "export the annotations with --to coco or --to folders, or "
        )
    return masks_only or form


def _error_of(failure: Failure) -> Exception:
    if failure.errno is not None:
        return OSError(failure.errno, os.strerror(failure.errno), failure.filename)
    return OSError(failure.message) if failure.expected else RuntimeError(failure.trace)


def _here(tasks: list[_Task], progress: Bar) -> Generator[Event, None, None]:
    """The events of `supervise`, with the work done in this process."""
    for number, task in enumerate(tasks):
        try:
            yield Event(number, "done", write_part(*task, progress.update))
        except ShardError as error:
            yield Event(number, "failed", failure_of(error))


def _with_masks(ids: Ids, record: ExportRecord, parts: dict[str, Rows]) -> Ids:
    """Ids of the exported images that have at least one mask, ascending."""
    empty = [image_id for name in parts for image_id in record.written[name].without_masks]
    with_masks: Ids = np.setdiff1d(ids, np.array(empty, np.uint64), assume_unique=True)
    return np.sort(with_masks)


def _check_out(out: Path) -> None:
    """Refuse a file, and a folder that is or is inside of a dataset directory."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: is a file; name a folder")
    if (folder := dataset_around(out)) is not None:
        what = "a dataset directory" if folder == out.resolve() else f"in the dataset directory {folder}"
        raise UsageError(f"--out {out}: {what}; name another folder for the export")


def _parts_of_another_export(record: ExportRecord, form: Format, contents: dict[str, str]) -> list[str]:
    """Parts in the folder that a reader would also read; UsageError: an export in another format."""
    if record.kind not in ("", form.kind):
        if record.written:
            raise UsageError(
                f"--out {record.out}: has an export with --to {record.kind}, not --to {form.kind}; name "
                "another folder"
            )
        record.contents.clear()
    return sorted(record.contents.keys() - contents.keys()) if form.takes_all_files else []


def _refuse_parts(record: ExportRecord, names: list[str]) -> None:
    if names:
        raise UsageError(
            f"--out {record.out}: has parts of an export of other images or with another number of images in "
            f"each ({first_names(names)}), which readers would take too; use another --out, or "
            "replace them with --overwrite"
        )


def _refuse_existing(
    record: ExportRecord, form: Format, contents: dict[str, str], ids: dict[str, Ids]
) -> None:
    if not record.out.exists():
        return
    foreign = [name for name, content in contents.items() if not record.owns(name, content)]
    lists = form.lists if len(foreign) == len(contents) else ()
    paths = chain(chain.from_iterable(form.paths(name, ids[name]) for name in foreign), lists)
    existing = [path for path in paths if (record.out / path).exists()]
    if existing:
        raise UsageError(
            f"--out {record.out}: already has {first_names(existing)}, not from an export of "
            "these images in this format; use another --out, or replace the files with --overwrite"
        )


def _check_link_from(link_from: Path | None) -> None:
    if link_from is not None and (was_url(link_from) or not link_from.is_dir()):
        raise UsageError(f"--link-from {link_from}: no such folder; pass the --out of an earlier export")


def _chosen(
    dataset: Dataset, ids: str | Path | None, images: npt.NDArray[np.uint64] | None
) -> tuple[Rows, Ids]:
    """Rows of the sample table to export, ascending, and the ids of the file that the dataset lacks."""
    known = dataset.table.image_id
    wanted = np.ones(len(known), np.bool_)
    missing = np.empty(0, np.uint64)
    if ids is not None:
        listed = read_image_ids(ids, names_of(dataset))
        missing = missing_ids(listed, known)
        if len(missing) == len(listed):
            raise UsageError(
                f"{ids}: {listing(missing)}: not in {dataset.root}, so no image is left to export; pass "
                "another list, or another dataset directory"
            )
        wanted &= np.isin(known, listed, assume_unique=True)
    if images is not None:
        wanted &= np.isin(known, images, assume_unique=True)
    if not wanted.any():
        raise UsageError(
            f"{dataset.root}: no image to export, because no image is in both --view and --ids; change one"
        )
    return np.flatnonzero(wanted), missing
